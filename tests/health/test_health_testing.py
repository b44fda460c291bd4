"""Unit tests of rules as data: the form of a series, what a test says when it fails, what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from grpo_lightning.errors import ConfigError
from grpo_lightning.health import load_tests, parse_rules, run_test
from grpo_lightning.health import tests_path as path_of_tests
from grpo_lightning.health.testing import parse_series

RULES = parse_rules("""
- {name: high, signal: kl, above: 1, for_steps: 2, summary: s}
- {name: loud, signal: loss, above: 1, summary: s, quiet: true}
- {name: both, together: [high, loud], within_steps: 2, summary: s}
- {name: more, together: [both, loud], within_steps: 2, summary: s}
""")

SERIES: dict[str, tuple[object, list[float | None]]] = {
    "times": ("0.5x3", [0.5, 0.5, 0.5]),
    "falls": ("1-0.25x4", [1.0, 0.75, 0.5, 0.25]),
    "climbs": ("0+2x3 7", [0.0, 2.0, 4.0, 7.0]),
    "negative": ("-1-1x2", [-1.0, -2.0]),
    "gaps": ("1 _ _x2", [1.0, None, None, None]),
    "powers": ("1e-3x2 1e-3+1e-3x2", [0.001, 0.001, 0.001, 0.002]),
    "infinities": ("inf -inf", [math.inf, -math.inf]),
    "a list": ([1, None, 2.5], [1.0, None, 2.5]),
    "a number": (5, [5.0]),
    "zero times": ("0x30", [0.0] * 30),
}


@pytest.mark.parametrize(("given", "expected"), SERIES.values(), ids=SERIES)
def test_a_series(given: object, expected: list[float | None]) -> None:
    assert parse_series(given) == pytest.approx(expected)


BAD_SERIES: dict[str, object] = {
    "empty": "",
    "a word": "high",
    "too long": "1x100001",
    "too long in parts": "1x60000 1x60000",
    "absurdly long": "1x" + "9" * 5000,
    "nothing times": "1x0",
    "a record": {"a": 1},
    "true": True,
    "a list of words": ["a"],
    "a number beyond doubles": [10**400],
    "a lot of parts": "1x100000 " * 100_000,
}


@pytest.mark.parametrize("given", BAD_SERIES.values(), ids=BAD_SERIES)
def test_a_series_that_is_none(given: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_series(given, "test 1, kl")
    assert "test 1, kl" in str(caught.value)
    assert len(str(caught.value)) < 300


def results(tmp_path: Path, text: str) -> list[list[str]]:
    path = tmp_path / "rules.test.yaml"
    path.write_text(text)
    return [run_test(test, RULES) for test in load_tests(path)]


def test_what_a_test_says(tmp_path: Path) -> None:
    said = results(
        tmp_path,
        """
- {name: right, series: {kl: 0x3 2x3}, expect: [{rule: high, step: 5}]}
- {name: wrong step, series: {kl: 0x3 2x3}, expect: [{rule: high, step: 4}]}
- {name: forgotten, series: {kl: 0x3 2x3}}
- {name: only some rules, rules: [loud], series: {loss: 2x3}, expect: []}
- name: a rule and its parts
  rules: [more]
  series: {kl: 2x3, loss: 2x3}
  expect: [{rule: both, step: 2}, {rule: more, step: 2}, {rule: high, step: 2}]
- {name: no such rule, rules: [low], series: {kl: 1}, expect: []}
- {name: no such rule to expect, series: {kl: 1}, expect: [{rule: low, step: 1}]}
- {name: a series that nothing reads, rules: [high], series: {kll: 2x9}, expect: []}
- {name: rows of five, series: {kl: 2x3}, span: 5, expect: [{rule: high, step: 5}]}
""",
    )
    assert said == [
        [],
        ["high did not fire at step 4", "high fired at step 5"],
        ["high fired at step 5"],
        [],
        [],
        ["there is no rule 'low'"],
        ["there is no rule 'low'"],
        ["no rule reads the series 'kll'"],
        [],
    ]


BAD: dict[str, tuple[str, str]] = {
    "not a list": ("name: x", "list of records"),
    "no series": ("[{name: x, expect: []}]", "test 1 needs"),
    "an unknown key": ("[{name: x, series: {kl: 1}, expects: []}]", "unknown key 'expects'"),
    "expect without a step": ("[{name: x, series: {kl: 1}, expect: [{rule: a}]}]", "expect is a list"),
    "expect is a number": ("[{name: x, series: {kl: 1}, expect: 5}]", "expect is a list"),
    "an infinite step": ("[{name: x, series: {kl: 1}, expect: [{rule: a, step: .inf}]}]", "expect is a list"),
    "span 0": ("[{name: x, series: {kl: 1}, span: 0}]", "above 0"),
    "span NaN": ("[{name: x, series: {kl: 1}, span: .nan}]", "above 0"),
    "groups below 0": ("[{name: x, series: {kl: 1}, groups: -1}]", "above 0"),
    "two of a name": ("[{name: x, series: {kl: 1}}, {name: x, series: {kl: 1}}]", "two tests are called"),
    "an alias": ("- &a {name: x, series: {kl: 1}}\n- *a", "alias"),
    "no YAML": ("[", "not YAML"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_tests_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        results(tmp_path, text)
    assert "rules.test.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_tests_lie_beside_the_rules() -> None:
    assert path_of_tests("a/b.rules.yml") == Path("a/b.rules.test.yml")
