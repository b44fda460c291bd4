"""What the first reading of a log collects: where its rows break into segments, and what its numbers show.

Rows are fed in the file's order. A *segment* ends where the step, the progress bar, the epoch or the token count goes
back, and where training ends, resumes or changes its phase.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field

from grpo_lightning.errors import DataError
from grpo_lightning.logs.records import Parsed

__all__ = ["Bars", "Segment", "Survey"]

GROUPS_AT_MOST = 64
LOOKED_AT = 2000  # rows that tell what reward_std is and how many groups a row holds
DIFFERENCES = 1000
REGULAR = 0.9  # of the rows, at the least, have the bar that the one before and the interval say
SEGMENTS_AT_MOST = 100_000


@dataclass(kw_only=True, slots=True)
class Bars:
    """The progress bars before, or behind, a segment's rows."""

    first: int = 0
    last: int = 0
    total: int = 0
    rows: int = 0
    odd: int = 0  # rows whose bar stood still, went back or changed its total
    paces: Counter[int] = field(default_factory=Counter)

    def see(self, done: int | None, total: int | None) -> None:
        """Takes the bar of the next row."""
        if done is None or total is None:
            return
        if self.rows == 0:
            self.first, self.total = done, total
        elif self.rows > 1 and len(self.paces) < DIFFERENCES:  # the first step may be logged out of turn
            self.paces[done - self.last] += 1
        self.odd += self.rows > 0 and (done <= self.last or total != self.total)
        self.last = done
        self.rows += 1

    def pace(self, rows: int) -> int | None:
        """Steps from row to row, where the bars of `rows` rows are regular: 0 where a row or two do not show it."""
        if self.rows < rows - 1 or not self.rows or self.odd or self.first < 1:
            return None
        if rows < 3:
            return self.last - self.first
        pace, count = max(self.paces.items(), key=lambda item: item[1], default=(0, 0))
        return pace if count >= REGULAR * self.paces.total() else None


@dataclass(kw_only=True, slots=True)
class Segment:
    """Rows between two (re)starts."""

    start: int  # its first row, counted over the log's training rows
    rows: int = 0
    judged: int = 0  # rows with more than losses
    steps: tuple[int, int] | None = None  # first and last step as printed
    resumed: bool = False  # the log says so before it
    finished: bool = False  # a summary stands behind it
    before: Bars = field(default_factory=Bars)
    after: Bars = field(default_factory=Bars)
    by: Bars | None = None  # the bars that tell its rows' steps
    run: int = -1
    first: int = 1  # the step of its first row, where rows print none
    interval: float = 1.0
    until: float = math.inf  # rows from this step on are replaced by a later segment's

    def bars(self) -> Bars | None:
        """Its regular bars, if any: those before its rows, or else those behind."""
        return next((bars for bars in (self.before, self.after) if bars.pace(self.rows) is not None), None)

    def step_at(self, index: int, before: int | None, after: int | None) -> int:
        """The step of its row `index` (from 0), for rows that print none."""
        bar = None if self.by is None else before if self.by is self.before else after
        return round(self.first + index * self.interval) if bar is None else bar

    def step_near(self, index: int) -> int:
        """As `step_at`, evenly between its first and last bar."""
        if self.by is None or self.by.rows < 2:
            return round(self.first + index * self.interval)
        return round(self.by.first + index * (self.by.last - self.by.first) / (self.by.rows - 1))

    def span(self) -> tuple[int, int]:
        """Its first and last step."""
        return self.steps or (self.step_near(0), self.step_near(self.rows - 1))


@dataclass(kw_only=True, slots=True)
class Survey:
    """Fed with every row of a log."""

    segments: list[Segment] = field(default_factory=list)
    rows: int = 0
    pace: float = 0.0  # steps of the whole training, told by its summary
    differences: Counter[int] = field(default_factory=Counter)  # from a printed step to the next
    blocks: Counter[int] = field(default_factory=Counter)  # lengths of rows in a row with the same values
    std: Counter[str] = field(default_factory=Counter)  # "same" as the batch's, or "other"
    bars_count_rows: bool = False
    _places: tuple[array[float], array[float], array[float]] = field(
        default_factory=lambda: (array("d"), array("d"), array("d"))
    )
    _pending: str = ""
    _last: Parsed | None = None
    _block: int = 0
    _group_counts: list[int] = field(default_factory=lambda: list(range(1, GROUPS_AT_MOST + 1)))
    _dead: Counter[float] = field(default_factory=Counter)

    def mark(self, what: str) -> None:
        """Words between rows: "resume", "end" of a table, "summary" of a training."""
        self._pending = "resume" if "resume" in (what, self._pending) else what
        if self.segments and what == "summary":
            self.segments[-1].finished = True

    def evaluation(self, row: Parsed) -> None:
        """Takes an evaluation row. A bar of its own, one beyond the row before, shows that bars count rows, not steps."""
        last = self._last
        if last is not None and last.bar is not None and row.bar == last.bar + 1 and row.total == last.total:
            self.bars_count_rows = True

    def feed(self, row: Parsed) -> None:
        """Takes a training row."""
        if not self.segments or self._breaks(row):
            if len(self.segments) >= SEGMENTS_AT_MOST:
                raise DataError(
                    f"the log's rows are in no order ({SEGMENTS_AT_MOST} times a step goes back): sort them by step."
                )
            self.segments.append(Segment(start=self.rows, resumed=self._pending == "resume"))
            self._last = None
        self._pending = ""
        segment = self.segments[-1]
        self._see_place(row, segment)
        segment.before.see(row.bar, row.total)
        segment.after.see(row.after, row.total)
        self._see_change(row)
        if row.kind == "train" and self.rows < LOOKED_AT:
            self._see_std(row.values)
            self._see_dead(row.values)
        segment.rows += 1
        segment.judged += row.kind == "train"
        self.rows += 1
        self._last = row

    def place(self, which: int, row: int) -> float:
        """The epoch (0), the tokens so far (1) or the learning rate (2) of a row that prints no step; NaN where unknown."""
        places = self._places[which]
        return places[row] if row < len(places) else math.nan

    def places(self, which: int, segment: Segment) -> array[float]:
        """Those of all rows of a segment."""
        return self._places[which][segment.start : segment.start + segment.rows]

    def repeats(self) -> int:
        """How many rows in a row hold the same values, where that is regular; else 1."""
        blocks = self.blocks.copy()
        blocks[self._block] += self._block > 0
        length, count = max(blocks.items(), key=lambda item: item[1], default=(1, 0))
        return length if length > 1 and blocks.total() >= 5 and count >= 0.8 * blocks.total() else 1

    def groups(self) -> int | None:
        """The least number of groups per row that explains every fraction of dead groups, once enough of them were seen."""
        if not self._group_counts:
            return None
        least = self._group_counts[0]
        often = [count for count in self._dead.values() if count >= 10]
        return least if (least > 1 and len(self._dead) >= 3) or len(often) >= 2 else None

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

    def _see_place(self, row: Parsed, segment: Segment) -> None:
        if row.step is not None:
            segment.steps = (segment.steps[0] if segment.steps else row.step, row.step)
            return
        missing = self.rows - len(self._places[0])
        for place, value in zip(self._places, row.place, strict=True):
            if missing:
                place.extend([math.nan] * missing)
            place.append(value)

    def _see_change(self, row: Parsed) -> None:
        last = self._last
        if last is not None and last.step is not None and row.step is not None and len(self.differences) < DIFFERENCES:
            self.differences[row.step - last.step] += row.step > last.step
        if last is not None and row.values == last.values:
            self._block += 1
            return
        if self._block:
            self.blocks[self._block] += 1
        self._block = 1

    def _see_std(self, values: dict[str, float]) -> None:
        """With one reward function the batch's std is the function's, times its weight."""
        functions = [name for name in values if name.startswith("reward/") and name.endswith("_std")]
        if len(functions) != 1 or "reward_std" not in values:
            return
        found, std = values["reward_std"], values[functions[0]]
        mean = values.get(functions[0].removesuffix("_std") + "_mean", 0.0)
        weight = abs(values.get("reward_mean", mean) / mean) if mean else 1.0
        if std > 0 and math.isfinite(found):
            same = any(math.isclose(found, std * by, rel_tol=1e-3, abs_tol=1e-5) for by in (1.0, weight))
            self.std["same" if same else "other"] += 1

    def _see_dead(self, values: dict[str, float]) -> None:
        dead = values.get("dead_group_fraction", math.nan)
        if 0.0 <= dead <= 1.0:
            self._group_counts = [n for n in self._group_counts if abs(dead - round(dead * n) / n) < 6e-5]
            self._dead[round(dead, 4)] += 1
