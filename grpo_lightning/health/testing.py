"""Unit tests of rules, written as data: a series per signal, and the alerts that it must give.

.. code-block:: yaml

    - name: fires at the 20th step
      rules: [reward_variance_too_low]      # only these are held; all where not given
      series:
        group_reward_std: 0.5x20 0.01x30    # 20 times 0.5, 30 times 0.01; 0.5-0.01x30 falls by 0.01 a step; _x5 is missing
      expect:
        - {rule: reward_variance_too_low, step: 40}

The form of a series is that of promtool's unit tests.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lightning.errors import ConfigError
from grpo_lightning.health.judge import Judge
from grpo_lightning.health.loading import read_records
from grpo_lightning.health.records import Rule, Step

__all__ = ["RuleTest", "load_tests", "parse_series", "rules_of_test", "run_test", "tests_path"]

_ITEM = re.compile(
    r"(_|[-+]?(?:nan|inf|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+))(?:([-+](?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?))?(?:x(\d{1,9}))?",
    re.I,
)
_MOST_STEPS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleTest:
    """One test."""

    name: str
    series: Mapping[str, tuple[float | None, ...]]
    expect: tuple[tuple[str, int], ...]  # (rule, step)
    rules: tuple[str, ...] = ()
    span: float = 1.0  # optimizer steps that a row stands for
    groups: float | None = None  # prompts in a row


def tests_path(rules: str | Path) -> Path:
    """Where the tests of a file of rules lie: `rules.yaml` has `rules.test.yaml` beside it."""
    path = Path(rules)
    return path.with_name(f"{path.stem}.test{path.suffix}")


def load_tests(path: str | Path) -> list[RuleTest]:
    """The tests in a YAML file.

    Raises:
        ConfigError: one sentence, with the file and the test.
    """
    tests = [_test(record, f"{path}, test {position}") for position, record in enumerate(read_records(path), 1)]
    for place, test in enumerate(tests, 1):
        if any(test.name == other.name for other in tests[: place - 1]):
            raise ConfigError(
                f"{path}, test {place}: two tests are called {ascii(test.name)[:80]}: names must be unique."
            )
    return tests


def _test(record: Any, where: str) -> RuleTest:
    if not isinstance(record, Mapping) or not isinstance(record.get("series"), Mapping) or not record["series"]:
        raise ConfigError(f"{where} needs a name, series (signal: values) and expect (a list of rule and step).")
    unknown = set(record) - {"name", "series", "expect", "rules", "span", "groups"}
    if unknown:
        raise ConfigError(f"{where} has the unknown key {min(map(str, unknown))!r}.")
    series = {str(name): parse_series(values, f"{where}, {name}") for name, values in record["series"].items()}
    try:
        expect = tuple((str(item["rule"]), int(item["step"])) for item in record.get("expect") or [])
        span = float(record.get("span", 1.0))
        groups = None if record.get("groups") is None else float(record["groups"])
        rules = tuple(map(str, record.get("rules") or ()))
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{where}: expect is a list of {{rule: NAME, step: N}}, span and groups are numbers."
        ) from error
    if not 0 < span <= _MOST_STEPS or not (groups is None or 0 < groups <= _MOST_STEPS):
        raise ConfigError(f"{where}: span and groups are above 0 and at most {_MOST_STEPS}.")
    return RuleTest(
        name=str(record.get("name", where)), series=series, expect=expect, rules=rules, span=span, groups=groups
    )


def parse_series(values: Any, where: str = "the series") -> tuple[float | None, ...]:
    """A list of numbers (null is missing), or text as above.

    Example:
        >>> parse_series("1x2 0.5-0.25x3 _ nan")
        (1.0, 1.0, 0.5, 0.25, 0.0, None, nan)
    """
    if isinstance(values, int | float) and not isinstance(values, bool):
        values = [values]
    made: list[float | None]
    if isinstance(values, str):
        made = []
        for word in values.split():
            made += _expand(word, where)
            if len(made) > _MOST_STEPS:
                break
    elif isinstance(values, list) and all(v is None or isinstance(v, int | float) for v in values):
        made = [None if v is None else _number(v, where) for v in values]
    else:
        raise ConfigError(f"{where}: give a list of numbers, or text such as '0.5x20 0.01x30'.")
    if not 0 < len(made) <= _MOST_STEPS:
        raise ConfigError(f"{where} has {len(made)} values: give 1 to {_MOST_STEPS}.")
    return tuple(made)


def _expand(word: str, where: str) -> list[float | None]:
    match = _ITEM.fullmatch(word)
    if match is None:
        raise ConfigError(
            f"{where} has {ascii(word)[:80]}: give a number, and after it `x` and how often, e.g. 0.5x20."
        )
    first, change, times = match.group(1), float(match.group(2) or 0.0), int(match.group(3) or 1)
    if times > _MOST_STEPS:
        raise ConfigError(f"{where} has {word!r}: at most {_MOST_STEPS} values.")
    return [None if first == "_" else float(first) + i * change for i in range(times)]


def run_test(test: RuleTest, rules: Sequence[Rule]) -> list[str]:
    """What differs from the test's expectation, a sentence each; none when it passes."""
    known = {rule.name for rule in rules}
    strange = [name for name in (*test.rules, *(rule for rule, _ in test.expect)) if name not in known]
    if strange:
        return [f"there is no rule {strange[0]!r}"]
    held = rules_of_test(test, rules)
    read = {signal for rule in held for signal in rule.signals} | {"step_seconds"}
    unread = sorted(set(test.series) - read)
    if unread:
        return [f"no rule reads the series {unread[0]!r}"]
    judge = Judge(held)
    for row in range(max(map(len, test.series.values()))):
        given = {name: values[row] for name, values in test.series.items() if row < len(values)}
        step = round((row + 1) * test.span)
        values = {name: value for name, value in given.items() if value is not None}
        judge.observe(Step(step=step, values=values, span=test.span, groups=test.groups))
    fired = [(alert.rule, alert.step) for alert in judge.alerts]
    return [f"{rule} did not fire at step {step}" for rule, step in test.expect if (rule, step) not in fired] + [
        f"{rule} fired at step {step}" for rule, step in fired if (rule, step) not in test.expect
    ]


def rules_of_test(test: RuleTest, rules: Sequence[Rule]) -> list[Rule]:
    """The rules that a test holds: those that it names and what they join, or all."""
    if not test.rules:
        return list(rules)
    names = _with_parts(test.rules, rules)
    return [rule for rule in rules if rule.name in names]


def _number(value: float, where: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(f"{where} has a number that is too large.") from error


def _with_parts(names: Collection[str], rules: Sequence[Rule]) -> set[str]:
    """The rules of these names, and those that they join."""
    parts = {part for rule in rules if rule.name in names for part in rule.together}
    return _with_parts(parts | set(names), rules) if parts - set(names) else set(names)
