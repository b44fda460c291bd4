"""Short ways to hold rules against series."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_lightning.health import Judge, Rule, Step, parse_rules

Values = Sequence[float | None]


def one_rule(text: str) -> list[Rule]:
    """A rule of the keys in `text`, called r."""
    return parse_rules(f"[{{name: r, summary: '{{value}}', {text}}}]")


def steps(
    series: Mapping[str, Values], *, span: float = 1.0, groups: float | None = None, seconds: float | None = None
) -> Iterator[Step]:
    """Rows of the series; None is not measured."""
    for row in range(max(map(len, series.values()))):
        given = {name: values[row] for name, values in series.items() if row < len(values)}
        values = {name: float(value) for name, value in given.items() if value is not None}
        yield Step(step=round((row + 1) * span), values=values, span=span, groups=groups, seconds=seconds)


def changes(rules: Sequence[Rule], series: Mapping[str, Values], **facts: Any) -> list[tuple[str, str, int]]:
    """(firing|escalated|resolved, rule, step), in order."""
    judge = Judge(rules)
    return [(c.change, c.alert.rule, c.step) for row in steps(series, **facts) for c in judge.observe(row)]


def fired(rules: Sequence[Rule], series: Mapping[str, Values], **facts: Any) -> list[int]:
    """The steps at which an alert fired."""
    return [step for change, _, step in changes(rules, series, **facts) if change == "firing"]


def rows_of(values: Mapping[str, Any], groups: float | None) -> list[Step]:
    """Steps of a generated series; NaN of an evaluation is not measured."""
    count = len(next(iter(values.values())))
    plain = {name: [float(v) for v in column] for name, column in values.items()}
    out = []
    for i in range(count):
        row = {n: c[i] for n, c in plain.items() if not (n.startswith("eval_") and math.isnan(c[i]))}
        out.append(Step(step=i + 1, values=row, groups=groups))
    return out
