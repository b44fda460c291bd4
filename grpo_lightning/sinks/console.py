"""The terminal: a progress bar with the step's main numbers, or plain lines where nobody watches a terminal."""

from __future__ import annotations

from time import monotonic

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["ConsoleSink"]

_SHOWN = (("reward_mean", "reward"), ("group_reward_std", "group std"), ("kl", "kl"), ("entropy", "entropy"))
_PLAIN_EVERY_SECONDS = 5.0


class ConsoleSink:
    """Shows steps and evaluations as they come.

    Args:
        total_steps: the run's last step, or None when it is not known.
        first_step: the step that a resumed run continues from.
    """

    def __init__(self, *, total_steps: int | None, first_step: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._total = total_steps
        self._last_plain = float("-inf")
        self._evaluation: float | None = None
        self._progress: Progress | None = None
        if self.console.is_terminal:
            self._progress = self._make_progress()
            self._task = self._progress.add_task("", total=total_steps, completed=first_step)
            self._progress.start()

    def _make_progress(self) -> Progress:
        columns = (
            "step",
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        return Progress(*columns, console=self.console, transient=True)

    def step(self, step: int, values: dict[str, float]) -> None:
        """One optimizer step's signals."""
        text = self._line(values)
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=text)
            return
        now = monotonic()
        if step == self._total or now - self._last_plain >= _PLAIN_EVERY_SECONDS:
            self._last_plain = now
            of = f"/{self._total}" if self._total else ""
            self.console.print(f"step {step}{of}  {text}", soft_wrap=True, markup=False)

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """One evaluation's values."""
        self._evaluation = values.get("eval_accuracy")
        shown = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        self.console.print(f"[bold]evaluation[/bold] at step {step}: {escape(shown)}", soft_wrap=True)

    def say(self, text: str) -> None:
        """A line of its own, above the bar; text from models or files is never markup."""
        self.console.print(escape(text), soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _line(self, values: dict[str, float]) -> str:
        parts = [f"{label} {values[name]:.3f}" for name, label in _SHOWN if name in values]
        if self._evaluation is not None:
            parts.append(f"eval {self._evaluation:.3f}")
        if "tokens_per_second" in values:
            parts.append(f"{values['tokens_per_second']:.0f} tok/s")
        return "  ".join(parts)
