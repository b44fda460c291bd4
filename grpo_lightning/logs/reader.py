"""A log, opened: its format, its trainer, its runs, its steps.

The file is read twice. The first time, when it is opened, finds the runs, the restarts and the steps of rows that print none; the second
time, when it is iterated, yields the steps of one run. Both hold a bounded part of it in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_lightning.errors import DataError
from grpo_lightning.logs.names import Translator, clean_key, trainer_of
from grpo_lightning.logs.numbers import number
from grpo_lightning.logs.plan import Plan, Segment
from grpo_lightning.logs.records import LogStep, Parsed, Row, Tally
from grpo_lightning.logs.sniff import rows_of, sniff
from grpo_lightning.logs.source import Source
from grpo_lightning.logs.tape import Tape

__all__ = ["LogReader", "from_rows", "open_log"]

SAMPLE_ROWS = 200  # what the trainer is told by
TRAINER_OF_FORMAT = {
    "verl-console": "verl",
    "verl-jsonl": "verl",
    "openrlhf": "openrlhf",
    "nemo-rl": "nemo-rl",
    "swift-jsonl": "ms-swift",
}
Rows = Callable[[Tally], Iterator[Row]]


class LogReader:
    """The steps of one run of a log, as often as it is iterated.

    Attributes:
        format: how the log is written, one of `FORMATS`, or what `from_rows` was told.
        trainer: whose names it uses, a key of `NAMES`.
        unknown_keys: keys that no table knows, with the signal that each might be.
        unread: lines, rows and values that could not be read.
        notes: sentences about what was found and decided.
        interval: optimizer steps from one row to the next.
        repeats: rows in a row that hold the same values; 1 where each was measured.
        runs: how many runs the log holds.
    """

    def __init__(
        self, rows: Rows, *, format: str, logging_steps: int | None = None, run: int | None = None, keep: bool = True
    ) -> None:
        """Reads the rows once; `open_log` and `from_rows` are the ways here."""
        self.format = format
        self._rows = rows
        keys: dict[str, None] = {}
        for row in islice(rows(Tally()), SAMPLE_ROWS):
            keys.update(dict.fromkeys(islice(row.values, 1000)))
        self.trainer = trainer_of(keys, TRAINER_OF_FORMAT.get(format, "trl"))
        self._tape = Tape() if keep else Tape(0)
        self._plan = Plan()
        tally = Tally()
        translator = Translator(self.trainer)
        self._read(tally, translator)
        self._plan.finish(tally, logging_steps=logging_steps, run=run, std_hint=_std_hint(keys))
        self.unknown_keys = translator.unknown
        self.unread = tally.unread
        self.interval = self._plan.interval
        self.repeats = self._plan.repeats
        self.runs = self._plan.runs
        self.notes = tally.notes
        if self._plan.std_of_groups and self.trainer in ("trl", "ms-swift"):
            tally.note("reward_std is the mean of the groups' std here and read as group_reward_std")

    def __iter__(self) -> Iterator[LogStep]:
        """The steps in order, one per logged step; evaluation is merged into the step that it stands at."""
        steps = self._merged()
        return iter(sorted(self._sorted(steps), key=lambda step: step.step)) if self._plan.shuffled else steps

    def _read(self, tally: Tally, translator: Translator) -> None:
        """The first reading: what the plan is made from."""
        for row in self._rows(tally):
            if row.mark:
                self._plan.mark(row.mark)
                continue
            parsed = translator.parse(row, tally)
            if parsed is None:
                continue
            if parsed.kind == "summary":
                self._plan.mark("summary")
                self._pace(row.values)
                continue
            if parsed.kind != "eval":
                self._plan.feed(parsed)
            self._tape.append(parsed)

    def _pace(self, values: Mapping[str, Any]) -> None:
        seconds, rate = number(values.get("train_runtime")), number(values.get("train_steps_per_second"))
        if seconds and rate and seconds * rate < 1e9:
            self._plan.pace(seconds * rate)

    def _parsed(self) -> Iterator[Parsed]:
        if not self._tape.full:
            yield from self._tape
            return
        tally, translator = Tally(), Translator(self.trainer)
        for row in self._rows(tally):
            parsed = None if row.mark else translator.parse(row, tally)
            if parsed is not None and parsed.kind != "summary":
                yield parsed

    def _merged(self) -> Iterator[LogStep]:
        """Rows of the chosen run with their steps, those of one step merged."""
        step: int | None = None
        values: dict[str, float] = {}
        for at, row in self._placed():
            if step is not None and at is not None and at < step and not self._plan.shuffled:
                continue
            if at is not None and at != step:
                if step is not None and values:
                    yield self._step(step, values)
                step, values = at, {}
            values.update(row.values)
        if step is not None and values:
            yield self._step(step, values)

    def _placed(self) -> Iterator[tuple[int | None, Parsed]]:
        """Rows of the chosen run, each with its step; None where it belongs to the row before."""
        segments = iter(self._plan.segments)
        segment: Segment | None = None
        following = next(segments, None)
        rows = 0
        for row in self._parsed():
            if row.kind == "eval":
                if segment is None or self._wanted(segment, row.step):
                    yield (row.step if row.step is not None or segment is not None else 0), row
                continue
            if following is not None and rows == following.start:
                segment, following = following, next(segments, None)
            assert segment is not None  # noqa: S101 - the first row starts the first segment
            at = row.step if row.step is not None else segment.step_at(rows - segment.start, row.bar)
            rows += 1
            if self._wanted(segment, at):
                yield at, row

    def _wanted(self, segment: Segment, step: int | None) -> bool:
        if self._plan.shuffled:
            return True
        return segment.run == self._plan.chosen and (step is None or step < segment.until)

    def _sorted(self, steps: Iterator[LogStep]) -> Iterable[LogStep]:
        """The last row of each step."""
        return {step.step: step for step in steps}.values()

    def _step(self, step: int, values: dict[str, float]) -> LogStep:
        if self._plan.std_of_groups and self.trainer in ("trl", "ms-swift") and "reward_std" in values:
            values = {("group_reward_std" if name == "reward_std" else name): value for name, value in values.items()}
        groups = None if self._plan.groups is None else self._plan.groups / max(1.0, self.interval)
        return LogStep(step=step, values=values, groups=groups)

    def _starts(self) -> int:
        """How often the run was taken up, and the step from which its rows are the latest: for `follow`."""
        return len(self._plan.segments)


def open_log(
    path: str | Path, *, format: str | None = None, logging_steps: int | None = None, run: int | None = None
) -> LogReader:
    """Opens a log of any of `FORMATS`; raises DataError where it is none.

    Args:
        path: the file.
        format: overrides what the content shows.
        logging_steps: optimizer steps per row, for console output that prints no step and no progress bar.
        run: which run, from 1, of a log that holds several; the last that is no false start otherwise.
    """
    return open_source(Source(path), format=format, logging_steps=logging_steps, run=run)


def open_source(
    source: Source, *, format: str | None = None, logging_steps: int | None = None, run: int | None = None
) -> LogReader:
    """As `open_log`, of a file that was opened."""
    if logging_steps is not None and logging_steps < 1:
        raise DataError(f"logging_steps is {logging_steps}: it counts optimizer steps per row, from 1.")
    found = format or sniff(source)
    columns_run = run if found in ("csv", "wandb-csv") and " - " in source.head.partition("\n")[0] else None
    reader = LogReader(
        lambda tally: rows_of(source, found, tally, columns_run),
        format=found,
        logging_steps=logging_steps,
        run=None if columns_run is not None else run,
    )
    if not reader._plan.segments:
        raise DataError(
            f"{source.path} holds no training step that can be read as {found}: name another format, or see its names."
        )
    if source.encoding not in ("utf-8", "utf-8-sig"):
        reader.notes.append(f"the file is encoded as {source.encoding}")
    return reader


def from_rows(
    rows: Iterable[tuple[int, Mapping[str, float]]], *, format: str = "journal", trainer: str | None = None
) -> LogReader:
    """A reader of rows that something else has read: a journal, a tracker's run. Rows are (step, values), in their order."""
    kept = [Row(dict(values), int(step)) for step, values in rows]
    if not kept:
        raise DataError(f"the {format} holds no step.")
    reader = LogReader(lambda tally: iter(kept), format=format)
    if trainer is not None:
        reader.trainer = trainer
    return reader


def _std_hint(keys: Iterable[str]) -> bool | None:
    """Whether names alone show that `reward_std` is of the groups: those of TRL before 0.17 do."""
    cleaned = {clean_key(key) for key in keys}
    if "frac_reward_zero_std" in cleaned:
        return False
    old = "completion_length" in cleaned or any(key.startswith("rewards/") and key.count("/") == 1 for key in cleaned)
    return True if old else None
