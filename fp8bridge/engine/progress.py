"""A progress bar of bytes, where somebody looks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(text: str, nbytes: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """Gives a function that takes the bytes done since its last call; nothing is drawn unless `shown`."""
    if not shown:
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(text, total=nbytes)
        yield lambda done: progress.advance(task, done)
