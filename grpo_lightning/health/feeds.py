"""One feed per signal: its windows and rulers, made once for all rules that read it and pushed once a step.

What a rule's main condition reads is kept up to date at every step; what only its other conditions read is made when they are
asked, which is rare.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from grpo_lightning.health.records import Condition
from grpo_lightning.health.rulers import Extreme, LateRecent, Recent, Stairs, Start, recent_rows
from grpo_lightning.health.windows import Latest, LateWindow, Row, Window, most_rows

__all__ = ["Band", "Feed", "Feeds"]

_HISTORY = 256  # rows that the onset of an alert is looked for in
_LARGEST = 1e150  # beyond it a value counts as not finite: its square would not be

_Key = tuple[int, int, str]


class Band(Protocol):
    """What a signal is expected to be, step by step: a baseline."""

    def band(self, signal: str, step: float) -> tuple[float, float] | None:
        """(level, spread) at a step, None where the baseline doesn't hold the signal."""


def _key(condition: Condition) -> _Key:
    return (condition.over_steps, condition.over_groups, condition.statistic)


class Feed:
    """A signal's windows, rulers and last rows."""

    def __init__(self, signal: str, *, start_steps: float, baseline: Band | None) -> None:
        self.signal = signal
        self.start = Start(steps=start_steps)
        self._baseline = baseline
        self.ruler = self.start if baseline is None else _Expected(self)
        self._windows: dict[_Key, Window] = {}
        self._late: dict[_Key, LateWindow] = {}
        self._latest = Latest(self)
        self._recents: dict[tuple[_Key, int], Recent] = {}
        self._late_recents: dict[tuple[_Key, int], LateRecent] = {}
        self._extremes: dict[tuple[_Key, bool], Extreme] = {}
        self._stairs: dict[int, Stairs] = {}
        self._pushed: list[tuple[Window, list[Extreme]]] = []
        self._on_value: list[Extreme] = []  # over single steps
        self._before: list[Recent] = []
        self.rows: deque[Row] = deque(maxlen=_HISTORY)
        self.count = 0  # rows so far
        self.fresh = False  # measured at this step
        self.finite = True  # and finite
        self.last: float | None = None
        self.seen = False
        self.step = 0

    # ---- set-up

    def window(self, condition: Condition, *, late: bool = False) -> Window | LateWindow | Latest:
        """The window that a condition judges; `late` for one that is asked for rarely."""
        key = _key(condition)
        if key == (1, 0, "mean"):
            return self._latest
        if key in self._windows:
            return self._windows[key]
        if late:
            return self._late_window(key)
        self._windows[key] = Window(steps=key[0], groups=key[1], statistic=key[2])
        self._rebuild()
        return self._windows[key]

    def _late_window(self, key: _Key) -> LateWindow:
        if key not in self._late:
            self._late[key] = LateWindow(self, steps=key[0], groups=key[1], statistic=key[2])
            self._keep(most_rows(*key[:2]))
        return self._late[key]

    def _keep(self, rows: int) -> None:
        if rows > (self.rows.maxlen or 0):
            self.rows = deque(self.rows, maxlen=rows)

    def recent(self, condition: Condition, *, late: bool = False) -> Recent | LateRecent:
        """The steps before a condition's window."""
        key = (_key(condition), condition.recent_steps)
        if key in self._recents:
            return self._recents[key]
        if late:
            return self._late_recent(*key)
        self.window(condition)
        self._recents[key] = Recent(steps=condition.recent_steps)
        self._rebuild()
        return self._recents[key]

    def _late_recent(self, key: _Key, steps: int) -> LateRecent:
        if (key, steps) not in self._late_recents:
            window = self._latest if key == (1, 0, "mean") else self._late_window(key)
            self._late_recents[(key, steps)] = LateRecent(self, window, steps=steps)
            self._keep(most_rows(*key[:2]) + recent_rows(steps))
        return self._late_recents[(key, steps)]

    def extreme(self, condition: Condition) -> Extreme:
        """The highest or lowest of a condition's windows."""
        self.window(condition)
        key = (_key(condition), condition.ruler == "highest")
        if key not in self._extremes:
            self._extremes[key] = Extreme(high=key[1])
            self._rebuild()
        return self._extremes[key]

    def stairs(self, steps: int) -> Stairs:
        """The counter of step-like rises."""
        return self._stairs.setdefault(steps, Stairs(steps=steps))

    def _rebuild(self) -> None:
        def of(key: _Key) -> tuple[list[Recent], list[Extreme]]:
            recents = [recent for (window, _), recent in self._recents.items() if window == key]
            return recents, [extreme for (window, _), extreme in self._extremes.items() if window == key]

        self._pushed = []
        for key, window in self._windows.items():
            window.recents[:], extremes = of(key)
            self._pushed.append((window, extremes))
        self._before, self._on_value = of((1, 0, "mean"))

    # ---- steps

    def push(self, value: float, span: float, groups: float, step: int) -> None:
        """Take a step's value."""
        self.last, self.step = value, step
        self.fresh = self.seen = True
        self.finite = finite = -_LARGEST < value < _LARGEST  # NaN is not
        if not finite:
            return
        row = (step, value, span, groups)
        if self._on_value or self._before or self._stairs:
            self._single(row)
        self.rows.append(row)
        self.count += 1
        if self.start.level is None:
            self.start.push(value, span, groups)
        for window, extremes in self._pushed:
            window.push(row)
            if extremes and window.value is not None:
                for extreme in extremes:
                    extreme.push(window.value)

    def _single(self, row: Row) -> None:
        """What is made of single steps."""
        if self._before and self.rows:
            _, old, width, _ = self.rows[-1]
            for recent in self._before:
                recent.push(old, width)
        for extreme in self._on_value:
            extreme.push(row[1])
        for stairs in self._stairs.values():
            stairs.push(row)

    def expected(self) -> tuple[float, float] | None:
        """Level and spread of the `start` ruler at this step: the baseline's where it holds the signal."""
        if self._baseline is not None:
            band = self._baseline.band(self.signal, self.step)
            if band is not None:
                return band
        if self.start.level is None or self.start.spread is None:
            return None
        return self.start.level, self.start.spread

    def usual(self) -> float | None:
        """The mean over the first steps, or the baseline's level: a unit to measure other signals in."""
        if self._baseline is not None:
            band = self._baseline.band(self.signal, self.step)
            if band is not None:
                return band[0]
        return self.start.mean

    # ---- checkpoints

    def _parts(self) -> Iterator[tuple[str, Window | Start | Recent | Extreme | Stairs]]:
        yield "start", self.start
        for key, window in self._windows.items():
            yield f"window {key}", window
        for recent_key, recent in self._recents.items():
            yield f"recent {recent_key}", recent
        for extreme_key, extreme in self._extremes.items():
            yield f"extreme {extreme_key}", extreme
        for steps, stairs in self._stairs.items():
            yield f"stairs {steps}", stairs

    def state(self) -> dict[str, Any]:
        """Plain types."""
        own = {name: getattr(self, name) for name in ("fresh", "finite", "last", "seen", "step", "count")}
        return own | {"rows": [list(row) for row in self.rows], "parts": {n: p.state() for n, p in self._parts()}}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; parts that the state does not hold (a rule was added) start anew."""
        for name in ("fresh", "finite", "last", "seen", "step", "count"):
            setattr(self, name, state[name])
        self.rows = deque(((t, v, s, g) for t, v, s, g in state["rows"]), maxlen=self.rows.maxlen)
        for name, part in self._parts():
            if name in state["parts"]:
                part.load(state["parts"][name])


class _Expected:
    """The `start` ruler where there is a baseline."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    @property
    def level(self) -> float | None:
        """At this step."""
        band = self._feed.expected()
        return band[0] if band else None

    @property
    def spread(self) -> float | None:
        """At this step."""
        band = self._feed.expected()
        return band[1] if band else None


class Feeds(dict[str, Feed]):
    """The feeds of all signals that rules read."""

    def __init__(self, *, start_steps: float, baseline: Band | None) -> None:
        super().__init__()
        self._start_steps = start_steps
        self._baseline = baseline

    def of(self, signal: str) -> Feed:
        """The feed of a signal, made when first asked for."""
        if signal not in self:
            self[signal] = Feed(signal, start_steps=self._start_steps, baseline=self._baseline)
        return self[signal]

    def push(self, values: Mapping[str, float], span: float, groups: float, step: int) -> None:
        """Take a step."""
        get = values.get
        for signal, feed in self.items():
            value = get(signal)
            if value is None:
                feed.fresh = False
            else:
                feed.push(value, span, groups, step)
