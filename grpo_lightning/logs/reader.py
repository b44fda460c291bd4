"""A log, opened: its format, its trainer, its runs, its steps.

The file is read twice. The first time, when it is opened, finds the runs, the restarts and the steps of rows that
print none; the second time, when it is iterated, yields the steps of one run. Both hold a bounded part of it in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_lightning.errors import DataError
from grpo_lightning.logs.names import Translator, clean_key, trainer_of
from grpo_lightning.logs.numbers import number
from grpo_lightning.logs.plan import Plan, make_plan
from grpo_lightning.logs.records import LogStep, Parsed, Row, Tally
from grpo_lightning.logs.sniff import rows_of, sniff
from grpo_lightning.logs.source import Source
from grpo_lightning.logs.survey import Segment, Survey
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
        segments: its rows between two (re)starts.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        format: str,
        trainer: str | None = None,
        logging_steps: int | None = None,
        run: int | None = None,
    ) -> None:
        """Reads the rows once; `open_log` and `from_rows` are the ways here."""
        self.format = format
        self._rows = rows
        keys: dict[str, None] = {}
        for row in islice(rows(Tally()), SAMPLE_ROWS):
            keys.update(dict.fromkeys(islice(row.values, 1000)))
        self.trainer = trainer or trainer_of(keys, TRAINER_OF_FORMAT.get(format, "trl"))
        self._tape = Tape()
        tally = Tally()
        translator = Translator(self.trainer)
        survey = self._survey(tally, translator)
        self._plan: Plan = make_plan(survey, tally, logging_steps=logging_steps, run=run, old_names=_old_names(keys))
        self._renamed = self._plan.std_of_groups and self.trainer in ("trl", "ms-swift")
        if self._renamed:
            tally.note("reward_std is the mean of the groups' std in this log: read as group_reward_std")
        self.unknown_keys = translator.unknown
        self.unread = tally.unread
        self.notes = tally.notes
        self.interval = self._plan.interval
        self.repeats = self._plan.repeats
        self.runs = self._plan.runs
        self.segments = self._plan.segments

    def __iter__(self) -> Iterator[LogStep]:
        """The steps in order, one per logged step; evaluation is merged into the step that it stands at."""
        steps = self._merged()
        return iter(sorted(self._sorted(steps), key=lambda step: step.step)) if self._plan.shuffled else steps

    def _survey(self, tally: Tally, translator: Translator) -> Survey:
        """The first reading."""
        survey = Survey()
        for row in self._rows(tally):
            parsed = None if row.mark else translator.parse(row, tally)
            if row.mark:
                survey.mark(row.mark)
            elif parsed is None:
                continue
            elif parsed.kind == "summary":
                survey.mark("summary")
                survey.pace = _steps_told(row.values) or survey.pace
            else:
                (survey.evaluation if parsed.kind == "eval" else survey.feed)(parsed)
                self._tape.append(parsed)
        return survey

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
                if self._wanted(segment or self._plan.segments[0], row.step):
                    yield (row.step if row.step is not None or segment is not None else 0), row
                continue
            if segment is None or (following is not None and rows == following.start):
                segment, following = following or self._plan.segments[-1], next(segments, None)
            at = row.step if row.step is not None else segment.step_at(rows - segment.start, row.bar, row.after)
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
        if self._renamed and "reward_std" in values:
            values = {("group_reward_std" if name == "reward_std" else name): value for name, value in values.items()}
        return LogStep(step=step, values=values, groups=self._plan.groups)


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
    """A reader of rows that something else has read: a journal, a tracker's run. Rows are (step, values), in their order.

    `trainer` is a key of `NAMES`; by default our own for a journal, and what the names show for anything else.
    """
    kept = [Row(dict(values), int(step)) for step, values in rows]
    if not kept:
        raise DataError(f"the {format} holds no step.")
    own = "grpo-lightning" if format == "journal" else None
    return LogReader(lambda tally: iter(kept), format=format, trainer=trainer or own)


def _steps_told(values: Mapping[str, Any]) -> float:
    """The steps of the whole training by its summary: seconds times steps per second."""
    told = {clean_key(key): number(value) for key, value in values.items()}
    seconds, rate = told.get("train_runtime"), told.get("train_steps_per_second")
    return seconds * rate if seconds and rate and 0 < seconds * rate < 1e9 else 0.0


def _old_names(keys: Iterable[str]) -> bool | None:
    """Whether the names alone show that `reward_std` is of the groups: those of TRL before 0.17 do."""
    cleaned = {clean_key(key) for key in keys}
    if "frac_reward_zero_std" in cleaned:
        return False
    old = "completion_length" in cleaned or any(key.startswith("rewards/") and key.count("/") == 1 for key in cleaned)
    return True if old else None
