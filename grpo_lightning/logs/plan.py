"""How the segments of a log make runs, and which step each row has.

A segment that starts where its run started is another run; one that starts in the middle is a restart, and its rows
replace those of the same steps. A row that prints no step gets one from its progress bar, or else from its order.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from grpo_lightning.errors import DataError
from grpo_lightning.logs.records import Tally
from grpo_lightning.logs.survey import Bars, Segment, Survey

__all__ = ["Plan", "make_plan"]

SHORT_RUN = 0.1  # a last run with a smaller share of the longest one's rows is a false start
DISORDER = 0.2  # more segments per row than this: the rows are shuffled, not restarted
LOOKED_BACK = 50  # segments of a run that a restart is placed in
EPOCH, TOKENS, RATE = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Where every row belongs."""

    segments: tuple[Segment, ...]
    runs: int
    chosen: int  # the run to read, from 0
    interval: float  # optimizer steps from a row to the next
    repeats: int
    groups: float | None  # per optimizer step
    std_of_groups: bool  # `reward_std` is the mean of the groups' std
    shuffled: bool  # the rows are to be sorted


def make_plan(
    survey: Survey,
    tally: Tally,
    *,
    logging_steps: int | None = None,
    run: int | None = None,
    old_names: bool | None = None,
) -> Plan:
    """Decides. `run` counts from 1; `old_names`: whether the names alone show what `reward_std` is (True: the groups')."""
    usable = [segment for segment in survey.segments if segment.judged] or survey.segments
    left_out = survey.rows - sum(segment.rows for segment in usable)
    if left_out:
        tally.note(f"{left_out} rows with losses but no reward (another phase, such as SFT) were left out")
    shuffled = len(usable) > max(3, DISORDER * survey.rows) and all(segment.steps is not None for segment in usable)
    per_row = _steps_per_row(survey, usable, logging_steps or tally.logging_steps)
    if shuffled:
        tally.note("the rows are not in the order of their steps: they were sorted")
        runs, chosen = 1, 0
    else:
        runs = _make_runs(survey, usable, per_row, forced=logging_steps is not None)
        chosen = _choose(usable, runs, run, tally)
        _replace([segment for segment in usable if segment.run == chosen], tally)
    last = next((segment for segment in reversed(usable) if shuffled or segment.run == chosen), None)
    interval = per_row if last is None or last.steps is None else _median(survey.differences)
    repeats, groups = survey.repeats(), survey.groups()
    if repeats > 1:
        tally.note(f"every value is repeated on {repeats} rows: it was measured once in {repeats}")
    return Plan(
        segments=tuple(survey.segments),
        runs=runs,
        chosen=chosen,
        interval=interval,
        repeats=repeats,
        groups=None if groups is None else groups / max(1.0, interval),
        std_of_groups=_of_groups(survey, old_names),
        shuffled=shuffled,
    )


def _of_groups(survey: Survey, old_names: bool | None) -> bool:
    compared = survey.std.total()
    return survey.std["other"] > 0.05 * compared if compared >= 3 else bool(old_names)


def _steps_per_row(survey: Survey, segments: list[Segment], given: int | None) -> float:
    """Optimizer steps per row, for rows that print no step: as given, by progress bars, by the summary's totals, or 1."""
    if given:
        return float(given)
    for segment in reversed(segments):
        if segment.steps is not None or segment.rows < 2 or not segment.before.rows:
            continue
        bars = segment.bars()
        if bars is not None:
            return float(max(1, bars.pace(segment.rows) or 1))
        done = segment.before.total if segment.finished else max(segment.before.last, segment.after.last)
        if done >= segment.rows and _whole(done / segment.rows, 0.1):
            return float(round(done / segment.rows))
    rows = segments[-1].rows if segments else 0
    per_row = survey.pace / rows if rows else 1.0
    return float(max(1, round(per_row))) if _whole(per_row, 0.15) else 1.0


def _whole(number: float, tolerance: float) -> bool:
    return abs(number - round(number)) < tolerance


def _make_runs(survey: Survey, segments: list[Segment], per_row: float, *, forced: bool) -> int:
    """Gives every segment its run and the step of its first row; returns the number of runs."""
    run: list[Segment] = []
    for segment in segments:
        segment.interval, segment.first = per_row, max(1, round(per_row))
        segment.by = _trusted_bars(segment, survey, per_row, forced=forced)
        start = _start_in(survey, run[-LOOKED_BACK:], segment) if run else None
        if start is None:
            segment.run = run[0].run + 1 if run else 0
            run = [segment]
            continue
        segment.run = run[0].run
        if segment.steps is None:
            segment.first = start
            segment.by = segment.by if segment.by is not None and segment.by.first == start else None
        run.append(segment)
    return run[0].run + 1 if run else 0


def _trusted_bars(segment: Segment, survey: Survey, per_row: float, *, forced: bool) -> Bars | None:
    """The bars that count a segment's optimizer steps."""
    bars = segment.bars()
    if bars is None or segment.steps is not None or (survey.bars_count_rows and per_row == 1.0):
        return None
    return bars if not forced or segment.rows < 2 or bars.pace(segment.rows) == per_row else None


def _start_in(survey: Survey, run: list[Segment], segment: Segment) -> int | None:
    """The step at which a segment takes up a run; None where it starts another."""
    if segment.steps is not None:
        first = min((other.steps[0] for other in run if other.steps is not None), default=0)
        return segment.steps[0] if segment.resumed or segment.steps[0] > first else None
    if any(other.steps is not None for other in run):
        return None
    by_bar = _start_by_bar(run[0], segment)
    if by_bar is not None:
        return by_bar
    return _start_resumed(survey, run, segment) if segment.resumed else _start_by_epoch(survey, run, segment)


def _start_by_bar(first: Segment, segment: Segment) -> int | None:
    old, now = first.by, segment.by
    return now.first if now is not None and old is not None and now.first > old.first else None


def _start_by_epoch(survey: Survey, run: list[Segment], segment: Segment) -> int | None:
    """Without words of a restart, only an epoch clearly beyond the run's first one shows one."""
    epoch, old = survey.place(EPOCH, segment.start), survey.place(EPOCH, run[0].start)
    if not (epoch > 0 and old >= 0 and epoch > 1.5 * old):
        return None
    return _match(survey, run, segment, TOKENS, EPOCH, RATE)


def _start_resumed(survey: Survey, run: list[Segment], segment: Segment) -> int:
    """Where a segment that says it resumes takes up its run: at the row with the same epoch; or, where both went to the
    end, so that it ends there; or at the row nearest in tokens, epoch or learning rate; or else after the last."""
    same = _match(survey, run, segment, EPOCH, exact=True)
    if same is not None:
        return same
    end = run[-1].span()[1]
    if run[-1].finished and segment.finished:
        return max(1, end - round((segment.rows - 1) * segment.interval))
    near = _match(survey, run, segment, TOKENS, EPOCH, RATE)
    return round(end + segment.interval) if near is None else near


def _match(survey: Survey, run: list[Segment], segment: Segment, *by: int, exact: bool = False) -> int | None:
    """The step of the earlier row that stands where the segment's first row stands, or the step behind the last one."""
    for which in by:
        wanted = survey.place(which, segment.start)
        if not math.isfinite(wanted) or (exact and wanted <= 0):
            continue
        for other in reversed(run):
            values = survey.places(which, other)
            index = _nearest(values, wanted, falling=which == RATE)
            if index is None or (exact and (index >= len(values) or values[index] != wanted)):
                continue
            return other.step_near(index) if index < len(values) else round(other.span()[1] + segment.interval)
    return None


def _nearest(values: array[float], wanted: float, *, falling: bool) -> int | None:
    """The index of the nearest value of a rising (or falling) series; its length where the wanted one lies beyond."""
    if not values or math.isnan(values[0]) or math.isnan(values[-1]):
        return None
    series = [-value for value in values] if falling else values
    target = -wanted if falling else wanted
    place = bisect_left(series, target)
    if place >= len(series):
        pace = (series[-1] - series[0]) / max(1, len(series) - 1)
        return len(series) if target - series[-1] > 0.5 * pace else len(series) - 1
    return place - 1 if place and target - series[place - 1] < series[place] - target else place


def _choose(segments: list[Segment], runs: int, run: int | None, tally: Tally) -> int:
    """The run asked for, or the last one that is no false start."""
    if run is not None and not 1 <= run <= max(1, runs):
        raise DataError(f"run {run} is not in this log: it holds {runs}, counted from 1.")
    rows = Counter[int]()
    for segment in segments:
        rows[segment.run] += segment.judged or segment.rows
    longest = max(rows.values(), default=0)
    last = max((number for number in rows if rows[number] >= SHORT_RUN * longest), default=0)
    chosen = last if run is None else run - 1
    if runs > 1:
        tally.note(
            f"{runs} runs in this log: reading run {chosen + 1} ({rows[chosen]} rows), choose another with run=1 to {runs}"
        )
    return chosen


def _replace(segments: list[Segment], tally: Tally) -> None:
    """Of the rows of one step the later ones count."""
    repeated, until = False, math.inf
    for segment in reversed(segments):
        first, last = segment.span()
        segment.until = until
        repeated = repeated or last >= until
        until = min(until, first)
    times = "once" if len(segments) == 2 else f"{len(segments) - 1} times"
    if repeated:
        tally.note(f"training restarted {times}: of steps that are there twice, the later rows count")
    elif len(segments) > 1:
        tally.note(f"training was taken up again {times}")


def _median(counts: Counter[int]) -> float:
    """The lower median of counted numbers; 1 without any."""
    half, seen = (counts.total() + 1) // 2, 0
    for number in sorted(counts):
        seen += counts[number]
        if seen and seen >= half:
            return float(number)
    return 1.0
