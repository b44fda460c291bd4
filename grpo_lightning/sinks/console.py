"""The terminal: a live panel for a run's first fifty steps, then a line a step; lines only where nobody watches.

A terminal that is gone, or a pipe's reader, ends no training: it is said once, in the log, and tried again.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.live import Live
from rich.text import Text

from grpo_lightning.sinks.panel import StepPanel, TimeLeft, duration
from grpo_lightning.sinks.terminal import plain

__all__ = ["ConsoleSink"]

_log = logging.getLogger(__name__)

PANEL_STEPS = 50
_FAULTS = (OSError, ValueError, SystemExit)  # a closed file is a ValueError; rich makes a SystemExit of a broken pipe
_LINE = (
    ("reward_mean", "reward"),
    ("group_reward_std", "group std"),
    ("dead_group_fraction", "dead"),
    ("kl", "kl"),
    ("entropy", "entropy"),
    ("response_length_mean", "length"),
    ("truncated_fraction", "cut"),
    ("advantage_std", "adv std"),
    ("grad_norm", "grad"),
)


class ConsoleSink:
    """Shows steps and evaluations as they come.

    Args:
        total_steps: the run's last step, or None when it is not known.
        first_step: the step that a resumed run continues from.
        title: what the panel is called: the run's name.
        console: where to; stdout when not given.
        live: whether to draw the panel; by default where a person watches a terminal that can move its cursor.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        *,
        total_steps: int | None,
        first_step: int = 0,
        title: str = "",
        console: Console | None = None,
        live: bool | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.console = console or Console(highlight=False)
        self._clock = clock
        self._left = TimeLeft(total_steps)
        self._left.step(first_step, clock())
        self._panel = StepPanel(title=self._shown(title or "first steps"), clock=self._left, steps=PANEL_STEPS)
        self._draws = _watched(self.console) if live is None else live
        self._live: Live | None = None
        self._evaluation: float | None = None
        self._lost = False  # the last thing to show could not be

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """One optimizer step's signals."""
        self._left.step(step, self._clock())
        if step > PANEL_STEPS or not self._draws:
            self._end_panel()
            self._print(self._line(step, values))
            return
        self._panel.step(step, values)
        self._try(self._draw)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """One evaluation's values."""
        self._evaluation = values.get("eval_accuracy")
        self._panel.evaluation(values)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        self._print(f"evaluation at step {step}: {shown}")

    def say(self, text: str) -> None:
        """A line of its own, above the panel; text from models or files can't draw, colour or move the cursor."""
        self._print(text)

    def close(self) -> None:
        """Leave the panel as it is and give the terminal back."""
        self._end_panel()

    def _try(self, show: Callable[[], object]) -> None:
        try:
            show()
        except _FAULTS as error:
            self._lose(error)
        else:
            self._lost = False

    def _lose(self, error: BaseException) -> None:
        """Say so once; lines from now on. Where nobody can read any more, Python's last flush must not fail."""
        self._draws, live, self._live = False, self._live, None
        if live is not None:
            with suppress(*_FAULTS):
                live.stop()
        if getattr(error, "errno", None) in (errno.EPIPE, errno.EIO):
            with suppress(*_FAULTS), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self.console.file.fileno())
        if not self._lost:
            _log.warning("Can't write to the terminal: %s. Training goes on; the journal has every step.", error)
        self._lost = True

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(self._panel, console=self.console, auto_refresh=False)
            self._live.start()
        self._live.refresh()

    def _end_panel(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            self._try(live.stop)

    def _print(self, text: str) -> None:
        shown = self._shown(text)
        if self._draws:
            self._try(lambda: self.console.print(Text(shown), soft_wrap=True))
        else:
            self._try(
                lambda: self._write(f"{shown}\n")
            )  # what rich would write, at a tenth of the cost of a step's line

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()

    def _shown(self, text: str) -> str:
        """Safe text that the terminal can write; an ASCII one gets the rest written out."""
        safe, encoding = plain(text), self.console.encoding
        return safe if safe.isascii() else safe.encode(encoding, "backslashreplace").decode(encoding)

    def _line(self, step: int, values: Mapping[str, float]) -> str:
        of = f"/{self._left.total}" if self._left.total else ""
        parts = [f"step {step}{of}", *(f"{label} {values[name]:.3f}" for name, label in _LINE if name in values)]
        if self._evaluation is not None:
            parts.append(f"eval {self._evaluation:.3f}")
        if "tokens_per_second" in values:
            parts.append(f"{values['tokens_per_second']:.0f} tok/s")
        if self._left.left is not None:
            parts.append(f"{duration(self._left.left)} left")
        return "  ".join(parts)


def _watched(console: Console) -> bool:
    """A person's terminal: rich takes FORCE_COLOR, which many CI services set, for one."""
    own = console.file
    return console.is_interactive and not console.is_jupyter and (own is not sys.stdout or sys.stdout.isatty())
