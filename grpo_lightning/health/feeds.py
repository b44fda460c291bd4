"""One feed per signal: its windows and rulers, made once for all rules that read it and pushed once a step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from grpo_lightning.health.records import Condition
from grpo_lightning.health.windows import Extreme, Latest, Recent, Stairs, Start, Window

__all__ = ["Band", "Feed", "Feeds", "Ruler"]

_HISTORY = 256  # rows that the onset of an alert is looked for in


class Band(Protocol):
    """What a signal is expected to be, step by step: a baseline."""

    def band(self, signal: str, step: float) -> tuple[float, float] | None:
        """(level, spread) at a step, None where the baseline doesn't hold the signal."""


class Ruler(Protocol):
    """Something with a level, once there is one."""

    level: float | None


class Feed:
    """A signal's windows, rulers and last rows."""

    def __init__(self, signal: str, *, start_steps: float, baseline: Band | None) -> None:
        self.signal = signal
        self.start = Start(steps=start_steps)
        self._baseline = baseline
        self.windows: dict[tuple[int, int, str], Window | Latest] = {}
        self._recents: dict[tuple[tuple[int, int, str], int], Recent] = {}
        self._extremes: dict[tuple[tuple[int, int, str], bool], Extreme] = {}
        self._stairs: dict[int, Stairs] = {}
        self._followers: list[tuple[Window | Latest, list[Recent], list[Extreme]]] = []
        self.history: deque[tuple[int, float]] = deque(maxlen=_HISTORY)
        self.keeps_history = False
        self.fresh = False  # measured at this step
        self.finite = True  # and finite
        self.last: float | None = None
        self.seen = False
        self.rises = 0.0
        self.step = 0

    # ---- set-up

    def window(self, condition: Condition) -> Window | Latest:
        """The window that a condition judges."""
        key = (condition.over_steps, condition.over_groups, condition.statistic)
        if key not in self.windows:
            single = key == (1, 0, "mean")
            self.windows[key] = Latest() if single else Window(steps=key[0], groups=key[1], statistic=key[2])
            self._rebuild()
        return self.windows[key]

    def recent(self, condition: Condition) -> Recent:
        """The steps before a condition's window."""
        self.window(condition)
        key = ((condition.over_steps, condition.over_groups, condition.statistic), condition.recent_steps)
        if key not in self._recents:
            self._recents[key] = Recent(steps=condition.recent_steps)
            self._rebuild()
        return self._recents[key]

    def extreme(self, condition: Condition) -> Extreme:
        """The highest or lowest of a condition's windows."""
        self.window(condition)
        high = condition.ruler == "highest"
        key = ((condition.over_steps, condition.over_groups, condition.statistic), high)
        if key not in self._extremes:
            self._extremes[key] = Extreme(high=high)
            self._rebuild()
        return self._extremes[key]

    def stairs(self, steps: int) -> Stairs:
        """The counter of step-like rises."""
        return self._stairs.setdefault(steps, Stairs(steps=steps))

    def _rebuild(self) -> None:
        self._followers = [
            (
                window,
                [r for (of, _), r in self._recents.items() if of == key],
                [e for (of, _), e in self._extremes.items() if of == key],
            )
            for key, window in self.windows.items()
        ]

    # ---- steps

    def push(self, value: float | None, span: float, groups: float, step: int) -> None:
        """Take a step's value."""
        if value is None:
            self.fresh = False
            return
        self.fresh = self.seen = True
        self.last = value
        self.step = step
        self.finite = math.isfinite(value)
        if not self.finite:
            return
        if self.keeps_history:
            self.history.append((step, value))
        if self.start.level is None:
            self.start.push(value, span, groups)
        for window, recents, extremes in self._followers:
            left = window.push(value, span, groups)
            if recents and left:
                for recent in recents:
                    for old in left:
                        recent.push(old, span)
            for extreme in extremes:
                extreme.push(window.value)
        for stairs in self._stairs.values():
            self.rises = stairs.push(value, step)

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

    def _parts(self) -> Iterator[tuple[str, Window | Latest | Start | Recent | Extreme | Stairs]]:
        yield "start", self.start
        for key, window in self.windows.items():
            yield f"window {key}", window
        for recent_key, recent in self._recents.items():
            yield f"recent {recent_key}", recent
        for extreme_key, extreme in self._extremes.items():
            yield f"extreme {extreme_key}", extreme
        for steps, stairs in self._stairs.items():
            yield f"stairs {steps}", stairs

    def state(self) -> dict[str, Any]:
        """Plain types."""
        own = {name: getattr(self, name) for name in ("fresh", "finite", "last", "seen", "rises", "step")}
        return own | {"history": [list(row) for row in self.history], "parts": {n: p.state() for n, p in self._parts()}}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; parts that the state does not hold (a rule was added) start anew."""
        for name in ("fresh", "finite", "last", "seen", "rises", "step"):
            setattr(self, name, state[name])
        self.history = deque(((s, v) for s, v in state["history"]), maxlen=_HISTORY)
        for name, part in self._parts():
            if name in state["parts"]:
                part.load(state["parts"][name])


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
            feed.push(get(signal), span, groups, step)
