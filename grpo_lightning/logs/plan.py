"""How the rows of a log lie in runs: restarts, repeated steps, the steps between rows that print none.

Rows are fed in the file's order; a *segment* ends where the step, the progress bar, the epoch or the token count goes back, or where
training ends or resumes. Segments make runs: one that starts where its run started is another run; one that starts in the middle is a
restart, and its rows replace those of the same steps. A row that prints no step gets one from its progress bar, or else from its
order: number in the run times `interval`.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from statistics import median

from grpo_lightning.errors import DataError
from grpo_lightning.logs.records import Parsed, Tally

__all__ = ["Plan", "Segment"]

SHORT_RUN = 0.1  # a last run with a smaller share of the longest one's rows is a false start
GROUPS_AT_MOST = 64
DISORDER = 0.2  # more segments per row than this: the rows are shuffled, not restarted


@dataclass(kw_only=True, slots=True)
class Segment:
    """Rows between two (re)starts."""

    start: int  # its first row, counted over the log's training rows
    rows: int = 0
    judged: int = 0  # rows with more than losses
    steps: tuple[int, int] | None = None  # first and last step as printed
    resumed: bool = False  # the log says so before it
    finished: bool = False  # a summary stands behind it
    bars: tuple[int, int, int] | None = None  # first, last, total
    bars_rise: bool = True  # every row has a bar, each beyond the last
    run: int = -1
    first: int = 0  # the step of its first row, where rows print none
    interval: float = 1.0
    until: float = math.inf  # rows from this step on are replaced by a later segment's

    def step_at(self, index: int, bar: int | None) -> int:
        """The step of its row `index` (from 0), for rows that print none."""
        if self.bars_rise and bar is not None and self.bars is not None:
            return bar
        return round(self.first + index * self.interval)


@dataclass(kw_only=True, slots=True)
class Plan:
    """Fed with every row, then asked where each belongs."""

    segments: list[Segment] = field(default_factory=list)
    runs: int = 0
    chosen: int = 0
    interval: float = 1.0
    repeats: int = 1  # rows in a row that hold the same values
    std_of_groups: bool = False  # `reward_std` is the mean of the groups' std
    groups: int | None = None  # groups per row
    shuffled: bool = False
    _rows: int = 0
    _pending: str = ""
    _last: Parsed | None = None
    _places: tuple[array[float], array[float], array[float]] = field(
        default_factory=lambda: (array("d"), array("d"), array("d"))
    )
    _differences: Counter[int] = field(default_factory=Counter)
    _blocks: Counter[int] = field(default_factory=Counter)
    _block: int = 0
    _std_same: int = 0
    _std_other: int = 0
    _names: set[str] = field(default_factory=set)
    _group_counts: list[int] = field(default_factory=lambda: list(range(1, GROUPS_AT_MOST + 1)))
    _mixed: Counter[float] = field(default_factory=Counter)
    _pace: float | None = None  # steps of the whole training, from its summary

    def mark(self, what: str) -> None:
        """Words between rows: "resume", "end" of a table, "summary"."""
        self._pending = "resume" if "resume" in (what, self._pending) else what
        if self.segments and what == "summary":
            self.segments[-1].finished = True

    def feed(self, row: Parsed) -> int:
        """Takes a training row; returns its segment."""
        if not self.segments or self._breaks(row):
            self.segments.append(Segment(start=self._rows, resumed=self._pending == "resume"))
            self._last = None
        self._pending = ""
        segment = self.segments[-1]
        self._measure(row, segment)
        segment.rows += 1
        segment.judged += row.kind == "train"
        self._rows += 1
        self._last = row
        return len(self.segments) - 1

    def _breaks(self, row: Parsed) -> bool:
        last = self._last
        if last is None or self._pending:
            return True
        if row.step is not None and last.step is not None:
            return row.step < last.step
        if last.kind == "other" and row.kind == "train" and row.step is None:
            return True
        if row.bar is not None and last.bar is not None and row.total == last.total and row.bar < last.bar:
            return True
        return any(now < before for now, before in zip(row.place[:2], last.place[:2], strict=True))

    def _measure(self, row: Parsed, segment: Segment) -> None:
        if row.step is None:
            for place, value in zip(self._places, row.place, strict=True):
                place.extend([math.nan] * (self._rows - len(place)))
                place.append(value)
        else:
            segment.steps = (segment.steps[0] if segment.steps else row.step, row.step)
        self._see_bar(row, segment)
        last = self._last
        if last is not None and row.step is not None and last.step is not None and row.step > last.step:
            if len(self._differences) < 1000:
                self._differences[row.step - last.step] += 1
        if last is not None and _same(row.values, last.values):
            self._block += 1
        else:
            if self._block:
                self._blocks[self._block] += 1
            self._block = 1
        if row.kind == "train":
            self._see_rewards(row.values)

    def _see_bar(self, row: Parsed, segment: Segment) -> None:
        if row.bar is None or row.total is None:
            segment.bars_rise = False
        elif segment.bars is None:
            segment.bars = (row.bar, row.bar, row.total)
        else:
            first, last, total = segment.bars
            segment.bars_rise &= row.bar > last and row.total == total
            segment.bars = (first, row.bar, row.total)

    def _see_rewards(self, values: dict[str, float]) -> None:
        if "reward_std" in values and self._rows < 2000:
            self._compare_std(values)
        if "dead_group_fraction" in values and self._rows < 2000:
            dead = values["dead_group_fraction"]
            if 0.0 <= dead <= 1.0:
                self._group_counts = [n for n in self._group_counts if abs(dead - round(dead * n) / n) < 6e-5]
                self._mixed[round(dead, 4)] += 1

    def _compare_std(self, values: dict[str, float]) -> None:
        """With one reward function the batch's std is the function's, times its weight."""
        self._names.update(values)
        functions = [name for name in values if name.startswith("reward/") and name.endswith("_std")]
        if len(functions) != 1:
            return
        std, mean = values[functions[0]], values.get(functions[0].removesuffix("_std") + "_mean", math.nan)
        weight = abs(values.get("reward_mean", math.nan) / mean) if mean else 1.0
        found = values["reward_std"]
        if not std > 0 or not math.isfinite(found):
            return
        same = any(math.isclose(found, std * factor, rel_tol=1e-3, abs_tol=1e-5) for factor in (1.0, weight))
        self._std_same += same
        self._std_other += not same

    def finish(self, tally: Tally, *, logging_steps: int | None, run: int | None, std_hint: bool | None) -> None:
        """Decides: runs, restarts, steps, intervals. `run` counts from 1; `std_hint` is what the names say of `reward_std`."""
        if self._block:
            self._blocks[self._block] += 1
        self._settle_std(std_hint)
        self._settle_repeats(tally)
        usable = [segment for segment in self.segments if segment.judged] or self.segments
        left_out = sum(segment.rows for segment in self.segments) - sum(segment.rows for segment in usable)
        if left_out:
            tally.note(f"{left_out} rows with losses but no reward (another phase, such as SFT) were left out")
        explicit = sum(segment.steps is not None for segment in usable)
        self.shuffled = len(usable) > max(3, DISORDER * self._rows) and explicit == len(usable)
        interval = self._row_interval(usable, logging_steps or tally.logging_steps)
        for segment in usable:
            self._place_segment(segment, usable, interval, forced=logging_steps is not None)
        self.runs = 1 if self.shuffled else max((segment.run for segment in usable), default=-1) + 1
        self._choose(usable, tally, run)
        self._cut(usable, tally)
        self.interval = self._found_interval(usable, interval)
        self._settle_groups()

    def _settle_std(self, hint: bool | None) -> None:
        compared = self._std_same + self._std_other
        if compared >= 3:
            self.std_of_groups = self._std_other > 0.05 * compared
        elif hint is not None:
            self.std_of_groups = hint

    def _settle_repeats(self, tally: Tally) -> None:
        blocks = sum(self._blocks.values())
        length, count = max(self._blocks.items(), key=lambda item: item[1], default=(1, 0))
        if length > 1 and blocks >= 5 and count >= 0.8 * blocks:
            self.repeats = length
            tally.note(f"values are repeated {length} rows long: the trainer measured once in {length} rows")

    def _row_interval(self, segments: list[Segment], given: int | None) -> float:
        """Optimizer steps per row where rows print no step."""
        if given:
            return float(given)
        for segment in reversed(segments):
            if segment.bars is None or segment.steps is not None:
                continue
            first, last, total = segment.bars
            if segment.bars_rise and segment.rows > 1:
                return max(1.0, float(round((last - first) / (segment.rows - 1))))
            steps = last if last > 1 else total
            if steps >= segment.rows and abs(steps / segment.rows - round(steps / segment.rows)) < 0.1 and last > 1:
                return float(round(steps / segment.rows))
        rows = segments[-1].rows if segments else 0
        if (
            self._pace
            and rows
            and 1.5 <= self._pace / rows
            and abs(self._pace / rows - round(self._pace / rows)) < 0.15
        ):
            return float(round(self._pace / rows))
        return 1.0

    def pace(self, steps: float) -> None:
        """The number of steps that a summary tells."""
        self._pace = steps

    def _place_segment(self, segment: Segment, segments: list[Segment], interval: float, *, forced: bool) -> None:
        segment.interval = interval
        segment.first = max(1, round(interval))
        if forced and segment.bars_rise and segment.bars is not None and segment.rows > 1:
            segment.bars_rise = round((segment.bars[1] - segment.bars[0]) / (segment.rows - 1)) == interval
        before = [other for other in segments if other.run >= 0]
        if not before:
            segment.run = 0
            return
        run = [other for other in before if other.run == before[-1].run]
        start = self._start_in(run, segment)
        if start is None:
            segment.run = run[0].run + 1
            return
        segment.run = run[0].run
        if segment.steps is None:
            moved = start != segment.first
            segment.first = start
            segment.bars_rise = segment.bars_rise and not (
                moved and segment.bars is not None and segment.bars[0] != start
            )

    def _start_in(self, run: list[Segment], segment: Segment) -> int | None:
        """The step at which a segment takes up a run; None where it starts another."""
        if segment.steps is not None:
            first = min((other.steps[0] for other in run if other.steps is not None), default=0)
            return segment.steps[0] if segment.resumed or segment.steps[0] > first else None
        if any(other.steps is not None for other in run):
            return None
        last = run[-1]
        bars, old = segment.bars, run[0].bars
        if (
            bars is not None
            and old is not None
            and bars[2] == old[2]
            and segment.bars_rise
            and run[0].bars_rise
            and bars[0] > old[0]
        ):
            return bars[0]
        if not segment.resumed:
            return self._start_by_epoch(run, segment)
        exact = self._match(run, segment, exact=True)
        if exact is not None:
            return exact
        if last.finished and segment.finished:  # both went to the same end
            return max(
                1,
                last.step_at(last.rows - 1, last.bars[1] if last.bars else None)
                - round((segment.rows - 1) * segment.interval),
            )
        near = self._match(run, segment, exact=False)
        return (
            near
            if near is not None
            else round(last.step_at(last.rows - 1, last.bars[1] if last.bars else None) + segment.interval)
        )

    def _start_by_epoch(self, run: list[Segment], segment: Segment) -> int | None:
        """Without words of a restart: only an epoch clearly beyond the run's first one is one."""
        epoch, old = self._place(0, segment.start), self._place(0, run[0].start)
        if not (epoch > 0 and old >= 0 and epoch > 1.5 * old):
            return None
        return self._match(run, segment, exact=False)

    def _match(self, run: list[Segment], segment: Segment, *, exact: bool) -> int | None:
        """The step of the earlier row that stands where the segment's first row stands: same epoch, or nearest tokens so far."""
        for which in (0,) if exact else (1, 0, 2):
            wanted = self._place(which, segment.start)
            if not math.isfinite(wanted) or (exact and wanted <= 0):
                continue
            for other in reversed(run):
                values = self._places[which][other.start : other.start + other.rows]
                index = _nearest(values, wanted, falling=which == 2)
                if index is None or (exact and values[index] != wanted):
                    continue
                return other.step_at(index, None if other.bars is None else self._bar_at(other, index))
        return None

    @staticmethod
    def _bar_at(segment: Segment, index: int) -> int | None:
        """The bar of a row, evenly between the segment's first and last."""
        if segment.bars is None or segment.rows < 2:
            return None
        first, last, _ = segment.bars
        return round(first + index * (last - first) / (segment.rows - 1))

    def _place(self, which: int, row: int) -> float:
        places = self._places[which]
        return places[row] if row < len(places) else math.nan

    def _choose(self, segments: list[Segment], tally: Tally, run: int | None) -> None:
        if self.shuffled:
            tally.note("rows are not in the order of their steps: they were sorted")
            return
        rows = Counter[int]()
        for segment in segments:
            rows[segment.run] += segment.judged
        if run is not None and not 1 <= run <= max(1, self.runs):
            raise DataError(f"run {run} is not in this log: it holds {self.runs}, counted from 1.")
        longest = max(rows.values(), default=0)
        real = [number for number in sorted(rows) if rows[number] >= SHORT_RUN * longest]
        self.chosen = run - 1 if run is not None else (real[-1] if real else 0)
        if self.runs > 1:
            tally.note(
                f"{self.runs} runs in this log: reading run {self.chosen + 1} ({rows[self.chosen]} rows), choose another with run=1 to {self.runs}"
            )

    def _cut(self, segments: list[Segment], tally: Tally) -> None:
        """The later rows of a step win."""
        if self.shuffled:
            return
        lost = 0
        until = math.inf
        restarts = [segment for segment in segments if segment.run == self.chosen]
        for segment in reversed(restarts):
            segment.until = until
            first, last = segment.steps or (
                segment.first,
                segment.step_at(segment.rows - 1, segment.bars[1] if segment.bars else None),
            )
            if last >= until:
                lost += 1
            until = min(until, first)
        if lost:
            tally.note(
                f"training restarted {len(restarts) - 1} times: of steps that are there twice, the later ones count"
            )
        elif len(restarts) > 1:
            tally.note(f"training was taken up again {len(restarts) - 1} times")

    def _found_interval(self, segments: list[Segment], interval: float) -> float:
        chosen = [segment for segment in segments if self.shuffled or segment.run == self.chosen]
        if chosen and chosen[-1].steps is None:
            return interval
        return float(median(self._differences.elements())) if self._differences else 1.0

    def _settle_groups(self) -> None:
        """The least number of groups that explains every fraction of dead groups, once enough different ones were seen."""
        if not self._group_counts or len(self._mixed) < 2:
            return
        least = self._group_counts[0]
        common = [count for count in self._mixed.values() if count >= 10]
        if (least > 1 and len(self._mixed) >= 3) or len(common) >= 2:
            self.groups = least


def _same(values: dict[str, float], before: dict[str, float]) -> bool:
    return values == before


def _nearest(values: array[float], wanted: float, *, falling: bool) -> int | None:
    """The index of the nearest value of a rising (or falling) series; None where it has none."""
    if not values or any(value != value for value in (values[0], values[-1])):
        return None
    series = [-value for value in values] if falling else values
    target = -wanted if falling else wanted
    place = bisect_left(series, target)
    if place >= len(series):
        step = (series[-1] - series[0]) / max(1, len(series) - 1)
        return None if step > 0 and target - series[-1] > 1.5 * step else len(series) - 1
    if place and target - series[place - 1] < series[place] - target:
        return place - 1
    return place
