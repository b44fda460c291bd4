"""The shipped rules, their own tests and their runbooks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_lightning.cli.main import COMMANDS
from grpo_lightning.health import load_tests, run_test, runbook_path, shipped_path, shipped_rules
from grpo_lightning.health import tests_path as path_of_tests
from grpo_lightning.signals import CATALOGUE
from grpo_lightning.signals.entries import PATTERNS

RULES = shipped_rules()
TESTS = load_tests(path_of_tests(shipped_path()))
BOOKS = sorted({rule.runbook for rule in RULES})
FOLDER = shipped_path().parent / "runbooks"


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.name)
def test_the_rules_own_tests(test) -> None:  # type: ignore[no-untyped-def]
    assert run_test(test, RULES) == []


def test_every_rule_has_a_series_on_which_it_fires_and_a_near_miss() -> None:
    fires = {rule for test in TESTS for rule, _ in test.expect}
    silent = {rule for test in TESTS if not test.expect for rule in test.rules}
    assert fires == silent == {rule.name for rule in RULES if not rule.quiet}


def test_a_near_miss_has_the_signals_of_the_rule() -> None:
    """It is silent because of its numbers, not because nothing is measured."""
    for test in TESTS:
        for rule in (r for r in RULES if r.name in test.rules):
            assert rule.condition is not None
            assert rule.condition.signal in test.series or rule.condition.else_signal in test.series, test.name


def test_every_runbook_is_linked() -> None:
    assert {path.name for path in FOLDER.glob("*")} == {Path(name).name for name in BOOKS}


@pytest.mark.parametrize("book", BOOKS)
def test_a_runbook_says_what_to_do(book: str) -> None:
    mine = [rule for rule in RULES if rule.runbook == book]
    path = runbook_path(mine[0])
    assert path is not None
    text = path.read_text(encoding="utf-8")
    assert all(f"`{rule.name}`" in text for rule in mine), "it names its rules"
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings == ["What it means", "Where to look, in this order", "What to do", "A common mistake"]
    order = re.findall(r"^\d\. \*\*(.+?)\*\*", text, re.MULTILINE)
    assert order == ["Environment", "Data", "Reward and sampling", "Algorithm"]
    assert 20 <= len(text.splitlines()) <= 50
    for command in ("snapshot verify RUN", "acknowledge RUN ALERT --cause"):
        assert f"python -m grpo_lightning {command}" in text


@pytest.mark.parametrize("book", BOOKS)
def test_a_runbooks_commands_settings_and_links_exist(book: str) -> None:
    text = (FOLDER / Path(book).name).read_text(encoding="utf-8")
    commands = set(re.findall(r"python -m grpo_lightning (\w+)", text))
    assert commands <= {*COMMANDS, "snapshot", "compare"}
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (FOLDER / link).is_file(), link
    flat = " ".join(text.split())
    for setting in re.findall(r"`model\.(\w+(?:\.\w+)?)[:` ]", flat):
        assert is_setting(setting), setting
    signals = {*CATALOGUE, *(pattern[0] for pattern in PATTERNS)}
    looks_like_one = re.compile(r"(?:reward|advantage|kl|entropy|response|grad|update|prompt|dead_group|nonfinite)_\w+")
    rules = {rule.name for rule in RULES}
    for word in re.findall(r"`([\w/<>]+)`", flat):
        if looks_like_one.fullmatch(word) and word not in rules:
            assert word in signals, word


def is_setting(dotted: str) -> bool:
    """Whether GRPOModule's constructor has it."""
    import inspect

    from grpo_lightning.training.module import GRPOModule

    first, _, rest = dotted.partition(".")
    parameters = inspect.signature(GRPOModule.__init__).parameters
    return first in parameters and (not rest or hasattr(parameters[first].default, rest))
