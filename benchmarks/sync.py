"""A whole sync, measured: python benchmarks/sync.py --model Qwen3-30B-A3B --layers 8 --transport loopback

The same as `fp8bridge bench sync` (`--help` has the options), from a checkout.
"""

import sys

from fp8bridge.cli.app import main

if __name__ == "__main__":  # its child processes import this file
    main(["bench", "sync", *sys.argv[1:]])
