"""`python -m fp8bridge` and the `fp8bridge` command."""

from __future__ import annotations

from fp8bridge.cli.app import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
