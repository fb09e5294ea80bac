"""Coverage-guided fuzzing of everything that reads what a peer sends (`make fuzz`).

    python scripts/fuzz.py --frames 1000000 --json fuzz.json

libFuzzer (through atheris) changes inputs to reach new branches of fp8bridge; each is a stream of frames for a
server's receiver, for a sender, or a control body. A crash, a broken promise or more memory than the bound ends it
with an error and a file that has the input. Frames are counted as the code under test sees them.
"""

import argparse
import importlib.metadata
import json
import platform
import resource
import sys
import time
import tracemalloc
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["fp8bridge"]):
    from tests import fuzzing

BOUND_NBYTES = 8 << 20
"""Of Python's memory for one input, the frames included: the longest header may become 80 times its bytes."""
SAMPLE = 50
"""Every so many inputs are run with tracemalloc on, which is slow."""


class Tally:
    def __init__(self, frames):
        self.target, self.frames, self.inputs, self.whole = frames, 0, 0, 0
        self.peak_nbytes = 0
        self.rss_nbytes = []
        self.start = time.monotonic()

    def add(self, frames):
        self.inputs += 1
        if self.frames * 10 // self.target != (self.frames + frames) * 10 // self.target or self.inputs == 2000:
            self.rss_nbytes.append((self.frames, rss_nbytes()))
        self.frames += frames


def rss_nbytes():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def changed(provider, stream):
    """An honest stream with a few changes, or frames from nothing."""
    stream = [list(message) for message in stream]
    for _ in range(provider.ConsumeIntInRange(0, 6)):
        at = provider.ConsumeIntInRange(0, len(stream) - 1)
        which = provider.ConsumeIntInRange(0, len(stream[at]) - 1)
        frame = stream[at][which]
        match provider.ConsumeIntInRange(0, 6):
            case 0 if frame:
                place = provider.ConsumeIntInRange(0, len(frame) - 1)
                stream[at][which] = frame[:place] + provider.ConsumeBytes(1) + frame[place + 1 :]
            case 1:
                stream[at][which] = frame[: provider.ConsumeIntInRange(0, len(frame))]
            case 2:
                place = provider.ConsumeIntInRange(0, len(frame))
                stream[at][which] = frame[:place] + provider.ConsumeBytes(12) + frame[place:]
            case 3:
                stream.insert(at, stream[provider.ConsumeIntInRange(0, len(stream) - 1)])
            case 4:
                other = provider.ConsumeIntInRange(0, len(stream) - 1)
                stream[at], stream[other] = stream[other], stream[at]
            case 5:
                stream[at] = [*stream[at], provider.ConsumeBytes(8)]
            case 6:
                stream[at][which] = provider.ConsumeBytes(200)
    return stream


def one_input(data, tally):
    provider = atheris.FuzzedDataProvider(data)
    match provider.ConsumeIntInRange(0, 3):
        case 0:
            stream = changed(provider, fuzzing.GOOD)
            tally.whole += fuzzing.feed_receiver(stream)
            return sum(map(len, stream))
        case 1:
            said = changed(provider, fuzzing.SERVER_SAYS)
            fuzzing.feed_sender(said, fuzzing.PACKED)
            return sum(len(message) - 1 for message in said)
        case 2:
            frame = provider.ConsumeBytes(fuzzing.LIMIT)
            fuzzing.feed_frame(frame)
            return 1
        case _:
            fuzzing.feed_body(fuzzing.parsed(provider.ConsumeBytes(4096)))
            return 1


def figures(tally):
    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "atheris": importlib.metadata.version("atheris"),
        "frames": tally.frames,
        "inputs": tally.inputs,
        "updates that came whole": tally.whole,
        "seconds": round(time.monotonic() - tally.start, 1),
        "bound_nbytes": BOUND_NBYTES,
        "largest_peak_nbytes": tally.peak_nbytes,
        "rss_nbytes": tally.rss_nbytes,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--corpus", default="", help="a folder that libFuzzer reads and writes")
    asked = parser.parse_args()
    tally = Tally(asked.frames)

    def test(data):
        sampled = tally.inputs % SAMPLE == 0
        if sampled:
            tracemalloc.start()
        frames = one_input(data, tally)
        if sampled:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            tally.peak_nbytes = max(tally.peak_nbytes, peak)
            assert peak < BOUND_NBYTES, f"{peak} bytes for one input of {len(data)}"
        tally.add(frames)
        if tally.frames >= asked.frames:
            finish(tally, asked.json)

    limits = ["-max_len=8192", "-len_control=0", "-timeout=20", "-rss_limit_mb=4096", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *limits, *([asked.corpus] if asked.corpus else [])], test)
    atheris.Fuzz()


def finish(tally, path):
    found = figures(tally)
    print(json.dumps(found, indent=1))
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.flush()
    import os

    os._exit(0)  # libFuzzer has no other way to stop after so many frames


if __name__ == "__main__":
    main()
