"""Judging a source and showing the judgement, for `check` and `rules replay`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.cli.sources import Source
from grpo_lightning.health import Alert, Replay, Rule, Step, replay
from grpo_lightning.health.feeds import Band
from grpo_lightning.sinks.terminal import plain, sparkline

__all__ = ["Judged", "judge_source", "show"]

_CHARTED = ("reward_mean", "reward_std", "group_reward_std", "dead_group_fraction", "kl", "entropy")
_CHARTED_TOO = ("response_length_mean", "truncated_fraction", "advantage_std", "grad_norm", "eval_accuracy")
_COLOURS = {"healthy": "green", "warning": "yellow", "unhealthy": "red"}
_WIDTH = 60
_KEPT = 4096


@dataclass(kw_only=True)
class Judged:
    """A judgement with its source."""

    source: Source
    replay: Replay
    first: int | None  # the first step
    last: int | None
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The contract of `--json`, and what else is known."""
        facts = self.replay.to_dict() | {"unknown_keys": self.source.unknown_keys, "unread": self.source.unread}
        log = self.source.log
        told = {"source": self.source.name, "notes": list(self.source.notes)}
        return facts | told | ({"format": log.format, "trainer": log.trainer} if log is not None else {})


def judge_source(source: Source, rules: Sequence[Rule], *, baseline: Band | None = None) -> Judged:
    """Hold the rules against every step of a source, once, in bounded memory."""
    record = _Record()
    made = replay(record.watch(source.steps), rules, baseline=baseline)
    return Judged(source=source, replay=made, first=record.first, last=record.last, series=record.series)


class _Record:
    """What the chart needs of the steps that pass by: every n-th value."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.last: int | None = None
        self.series: dict[str, deque[float]] = {}
        self._every, self._count = 1, 0

    def watch(self, steps: Any) -> Iterator[Step]:
        """The steps, unchanged."""
        for step in steps:
            self.first = step.step if self.first is None else self.first
            self.last = step.step
            if self._count % self._every == 0:
                self._keep(step.values)
            self._count += 1
            yield step

    def _keep(self, values: Mapping[str, float]) -> None:
        for name in (*_CHARTED, *_CHARTED_TOO):
            if name in values:
                self.series.setdefault(name, deque()).append(values[name])
        if any(len(kept) >= _KEPT for kept in self.series.values()):
            self._every *= 2
            self.series = {name: deque(list(kept)[::2]) for name, kept in self.series.items()}


# ---- the terminal


def show(judged: Judged, console: Console) -> None:
    """Verdict, findings, chart, and what could not be judged."""
    made = judged.replay
    colour = _COLOURS[made.verdict]
    where = f"steps {judged.first} to {judged.last}" if made.steps else "no steps"
    log = judged.source.log
    kind = f", {log.format} of {log.trainer}" if log is not None else ""
    console.print(Text(f"{plain(judged.source.name)}: {made.verdict}", style=f"bold {colour}"))
    console.print(Text(f"  {made.steps} rows, {where}{kind}"))
    for note in judged.source.notes:
        console.print(Text(f"  note: {plain(note)}"))
    for alert in made.alerts:
        _finding(alert, console)
    if judged.series:
        console.print(_chart(judged))
    _say_gaps(judged, console)


def _finding(alert: Alert, console: Console) -> None:
    style = "red" if alert.severity == "critical" else "yellow"
    head = (
        f"  {alert.severity}: {alert.rule}, began about step {alert.onset_step}, fired at {alert.step} ({alert.cause})"
    )
    console.print(Text(head, style=style))
    console.print(Text(f"    {plain(alert.summary)}"))
    if alert.first:
        console.print(Text(f"    first: {plain(alert.first)}"))


def _chart(judged: Judged) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    concerned = {alert.signal for alert in judged.replay.alerts}
    for name, values in judged.series.items():
        line = sparkline(_thinned(list(values)), _WIDTH)
        table.add_row(Text(name, style="bold" if name in concerned else ""), Text(line), Text(f"{values[-1]:.4g}"))
    return table


def _thinned(values: Sequence[float]) -> list[float]:
    """At most `_WIDTH` values: the mean of each part, which shows what isn't finite."""
    if len(values) <= _WIDTH:
        return list(values)
    parts = [values[i * len(values) // _WIDTH : (i + 1) * len(values) // _WIDTH] for i in range(_WIDTH)]
    return [sum(part) / len(part) for part in parts]


def _say_gaps(judged: Judged, console: Console) -> None:
    missing: dict[str, list[str]] = {}
    for rule, signal in judged.replay.not_judged:
        missing.setdefault(signal, []).append(rule)
    if missing:
        console.print(Text("  not judged, for want of the signal:"))
        for signal, rules in missing.items():
            console.print(Text(f"    {signal}: {', '.join(rules)}"))
    for entry in judged.source.unknown_keys[:20]:
        perhaps = f" (perhaps {entry['perhaps']})" if entry["perhaps"] else ""
        console.print(Text(f"  unknown key: {plain(str(entry['key']))}{perhaps}"))
    if judged.source.unread:
        console.print(Text(f"  {judged.source.unread} lines or values could not be read"))
