"""The shared memory of SGLang's loader: nobody's is taken, nobody's is left behind."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from fp8bridge.sglang import loader

HOLD = """
import sys, time
from pathlib import Path
from fp8bridge.sglang import loader
loader.SHARED = Path(sys.argv[1])
held = loader._shared_folder()
print(held[0].name, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def shared(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "SHARED", tmp_path)
    return tmp_path


def test_the_folder_of_a_process_that_was_killed_is_removed_and_a_living_one_s_is_not(shared):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(shared)], stdout=subprocess.PIPE, text=True) as other:
        try:
            name = other.stdout.readline().strip()
            mine, lock = loader._shared_folder()
            assert {path.name for path in shared.iterdir()} == {name, mine.name}
        finally:
            other.send_signal(signal.SIGKILL)
    again, second = loader._shared_folder()
    assert {path.name for path in shared.iterdir()} == {mine.name, again.name}
    lock.close()
    second.close()


def test_a_bucket_for_which_there_is_no_room_is_an_error_and_not_the_death_of_the_server(shared, monkeypatch):
    """/dev/shm of a container is often small; a mapping of it that does not fit kills whoever writes to it."""
    monkeypatch.setattr(loader, "SHARED", loader.Path("/dev/shm"))
    folder, lock = loader._shared_folder()
    try:
        room = os.statvfs(folder)
        with pytest.raises(OSError, match="No space left"):
            loader._in_files(folder)(0, room.f_blocks * room.f_frsize + 4096)
    finally:
        lock.close()
        shutil.rmtree(folder)
