"""`check --selftest`: the shipped faults and healthy series, dressed as every format, read back and judged.

What a format has no name for can't be shown in it; that is counted as not measured, and is no failure. A failure is an alert that
the judgement gives on the numbers themselves, and not on what was read back, or the other way round.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_lightning.cli.sources import open_source
from grpo_lightning.health import Judge, Rule, Step, shipped_rules
from grpo_lightning.health.loading import shipped_path
from grpo_lightning.health.testing import RuleTest, load_tests, rules_of_test, tests_path
from grpo_lightning.logs.dressing import DRESSES, Dress

__all__ = ["FormatResult", "run_selftest"]

_LONGEST = 400  # rows: longer series show nothing more of a reader
_FILLERS = ("loss", "policy_loss")  # every row of a trainer has its loss


@dataclass(kw_only=True)
class FormatResult:
    """What came of one format."""

    format: str
    faults: int = 0  # found as on the numbers themselves
    healthy: int = 0  # silent, as on the numbers themselves
    not_measured: int = 0  # series that need signals which the format has no name for
    failures: list[str] | None = None

    def fail(self, text: str) -> None:
        """One more failure."""
        self.failures = [*(self.failures or []), text]


def run_selftest(console: Console) -> int:
    """Print the table; 0 when every reader gives what the numbers give."""
    rules = shipped_rules()
    tests = [t for t in load_tests(tests_path(shipped_path())) if t.span == 1 and _length(t) <= _LONGEST]
    with tempfile.TemporaryDirectory() as folder:
        results = [_try(name, dress, tests, rules, Path(folder)) for name, dress in DRESSES.items()]
    table = Table(title=f"{len(tests)} shipped series through every reader")
    for column in ("format", "written as", "faults found", "healthy silent", "not measured", "wrong"):
        table.add_column(column, justify="left" if column in ("format", "written as") else "right")
    for result in results:
        counts = (result.faults, result.healthy, result.not_measured, len(result.failures or []))
        table.add_row(result.format, DRESSES[result.format].trainer, *map(str, counts))
    console.print(table)
    for result in results:
        for text in (result.failures or [])[:5]:
            console.print(f"wrong: {result.format}: {text}", soft_wrap=True, markup=False)
    return int(any(result.failures for result in results))


def _length(test: RuleTest) -> int:
    return max(map(len, test.series.values()))


def _try(name: str, dress: Dress, tests: Iterable[RuleTest], rules: Sequence[Rule], folder: Path) -> FormatResult:
    result = FormatResult(format=name)
    for test in tests:
        shown = {s: values for s, values in test.series.items() if s in dress.keys}
        if not shown:
            result.not_measured += 1
            continue
        held = rules_of_test(test, rules)
        rows = [_row(shown, i) for i in range(_length(test))]
        wanted = _alerts((Step(step=i, values=values) for i, values in enumerate(rows, 1)), held)
        found = _alerts(_read_back(name, dress, rows, folder), held)
        if found != wanted:
            result.fail(f"{test.name}: {_said(found)} instead of {_said(wanted)}")
        elif test.expect and not wanted:
            result.not_measured += 1
        elif wanted:
            result.faults += 1
        else:
            result.healthy += 1
    return result


def _row(series: dict[str, tuple[float | None, ...]], place: int) -> dict[str, float]:
    given = {name: values[place] for name, values in series.items() if place < len(values)}
    return {name: value for name, value in given.items() if value is not None}


def _read_back(name: str, dress: Dress, rows: Sequence[dict[str, float]], folder: Path) -> Iterable[Step]:
    filler = {dress.keys[name]: 0.0 for name in _FILLERS if name in dress.keys}
    named = [(i, filler | {dress.keys[s]: v for s, v in row.items()}) for i, row in enumerate(rows, 1)]
    path = folder / f"log{dress.suffix}"
    path.write_text(dress.write(named), encoding="utf-8")
    steps = open_source(str(path), format=name).steps
    return (Step(step=s.step, values=s.values, span=s.span) for s in steps)


def _alerts(steps: Iterable[Step], rules: Sequence[Rule]) -> list[tuple[str, int]]:
    judge = Judge(list(rules))
    for step in steps:
        judge.observe(step)
    return [(alert.rule, alert.step) for alert in judge.alerts]


def _said(alerts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{rule} at step {step}" for rule, step in alerts) or "silence"
