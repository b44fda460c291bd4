"""Following a log that grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from grpo_lightning.errors import DataError
from grpo_lightning.logs.reader import LogReader, open_source
from grpo_lightning.logs.records import LogStep
from grpo_lightning.logs.source import Source

__all__ = ["follow"]

PARSING_SHARE = 0.1  # of the time: a longer log is looked at less often


def follow(
    path: str | Path,
    *,
    format: str | None = None,
    logging_steps: int | None = None,
    poll_seconds: float = 1.0,
    until: Callable[[], bool] | None = None,
    seen: Callable[[LogReader], None] | None = None,
) -> Iterator[LogStep]:
    """The steps of a growing log, those already there first; ends when `until` says so, asked between two looks.

    The newest step is held back while the file grows, since its evaluation may follow. After a restart the steps from
    there on come again: the later ones count. A file that does not exist yet is waited for. `seen` gets each reader, for
    its notes.
    """
    signature: tuple[int, int] | None = None
    told: int | None = None
    segments = 0
    steps: list[LogStep] = []
    while True:
        ending = until is not None and until()  # asked first: what was written before is still read
        began, now = time.monotonic(), _signature(Path(path))
        grows = now != signature
        reader = _open(path, format, logging_steps) if grows and now is not None else None
        if reader is not None:
            steps, segments = _new(reader, told, segments), len(reader.segments)
            if seen is not None:
                seen(reader)
        signature, pause = now, max(poll_seconds, (time.monotonic() - began) / PARSING_SHARE)
        ready, steps = (steps[:-1], steps[-1:]) if grows and not ending else (steps, [])
        for step in ready:
            told = step.step
            yield step
        if ending:
            return
        time.sleep(pause)


def _signature(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _open(path: str | Path, format: str | None, logging_steps: int | None) -> LogReader | None:
    """None while there is nothing to read yet."""
    try:
        return open_source(Source(path, whole_lines=True), format=format, logging_steps=logging_steps)
    except DataError:
        return None


def _new(reader: LogReader, told: int | None, segments: int) -> list[LogStep]:
    """Steps that were not told yet, and after a restart those that are told again."""
    if told is None:
        return list(reader)
    again = reader.segments[-1].span()[0] if 0 < segments < len(reader.segments) else told + 1
    return [step for step in reader if step.step >= min(told + 1, again)]
