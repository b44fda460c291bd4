"""The panel of a run's first steps: its main signals as sparklines, with the last value and the time left."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grpo_lightning.sinks.terminal import plain, sparkline

__all__ = ["MAIN_SIGNALS", "StepPanel", "TimeLeft", "duration"]

MAIN_SIGNALS = (
    "reward_mean",
    "group_reward_std",
    "dead_group_fraction",
    "kl",
    "entropy",
    "response_length_mean",
    "truncated_fraction",
    "advantage_std",
    "grad_norm",
)
_RECENT = 20  # step times that the time left is estimated from


class TimeLeft:
    """Estimates what is left of a run from the median of the last steps' times, pauses between them included."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._last: tuple[int, float] | None = None

    def step(self, step: int, now: float) -> None:
        """A step was done at `now`, seconds of a clock that never goes back."""
        if self._last is not None and step > self._last[0]:
            self._seconds.append((now - self._last[1]) / (step - self._last[0]))
        self._last = (step, now)

    @property
    def left(self) -> float | None:
        """Seconds, None while unknown."""
        if self.total is None or self._last is None or not self._seconds:
            return None
        return max(self.total - self._last[0], 0) * median(self._seconds)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(3671)
    '1:01:11'
    """
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class StepPanel:
    """What the live display draws; give it every step."""

    def __init__(self, *, title: str, clock: TimeLeft, steps: int) -> None:
        self.title = title
        self._clock, self._steps = clock, steps
        self._history: dict[str, deque[float | None]] = {name: deque(maxlen=steps) for name in MAIN_SIGNALS}
        self._last: Mapping[str, float] = {}
        self._evaluation: Mapping[str, float] = {}
        self._step = 0

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """One optimizer step's signals; what was not measured is a gap."""
        self._step, self._last = step, values
        for name, history in self._history.items():
            history.append(values.get(name))

    def evaluation(self, values: Mapping[str, float]) -> None:
        """The last evaluation's values."""
        self._evaluation = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The panel as rich draws it."""
        width = max(min(self._steps, options.max_width - 42), 8)
        table = Table.grid(padding=(0, 1), pad_edge=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, width=width)
        table.add_column(justify="right", no_wrap=True, min_width=9)
        for name, history in self._history.items():
            if any(value is not None for value in history):
                line = sparkline(list(history), width, ascii_only=options.ascii_only)
                table.add_row(Text(name), Text(line, style="cyan"), _value(self._last.get(name)))
        for name, value in self._evaluation.items():
            table.add_row(Text(plain(name)), Text(""), _value(value))
        yield Panel(
            table,
            title=Text(plain(self.title)),
            title_align="left",
            subtitle=self._foot(),
            subtitle_align="left",
            expand=False,
        )

    def _foot(self) -> Text:
        of = f"/{self._clock.total}" if self._clock.total else ""
        left = self._clock.left
        speed = self._last.get("tokens_per_second")
        parts = [f"step {self._step}{of}"]
        parts += [f"{speed:.0f} tok/s"] if speed is not None and math.isfinite(speed) else []
        parts += [f"{duration(left)} left"] if left is not None else []
        return Text("  ".join(parts))


def _value(value: float | None) -> Text:
    if value is None:
        return Text("-", style="dim")
    return Text(f"{value:.4g}", style="" if math.isfinite(value) else "bold red")
