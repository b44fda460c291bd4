"""No signal of the catalogue without numbers derived by hand, an edge, and a property over any split of the data."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from test_signals_edges import EXPECTED as AT_THE_EDGES
from test_signals_edges import RANK_EDGES
from test_signals_families import CASES, RANKS, UPDATES
from test_signals_gloo import ELSEWHERE as NOT_OF_A_STEP
from test_signals_temporal import MIXES, SERIES

from grpo_lightning.signals import CATALOGUE
from grpo_lightning.signals.entries import PATTERNS

TESTS = Path(__file__).resolve().parents[1]
# measured by callbacks; the test that derives the number, and the one at the edge
ELSEWHERE = {
    "monitor_seconds": ("test_monitor_seconds_are_those_spent_since_the_step_before",) * 2,
    "probe_seconds": ("test_probe_seconds_hold_the_rewards_of_the_frozen_prompts",) * 2,
    "eval_accuracy": ("test_accuracy_is_the_share_of_full_marks", "test_no_held_out_prompts_have_no_accuracy"),
    "environment_drift": ("test_each_level_counts_what_changed_once", "test_what_is_unknown_is_no_change"),
    "data_drift": ("test_each_level_counts_what_changed_once", "test_what_is_unknown_is_no_change"),
    "reward_drift": ("test_each_level_counts_what_changed_once", "test_what_is_unknown_is_no_change"),
}
BY_HAND = {
    *(name for _, _, expected in CASES for name in expected),
    *(name for _, expected in (*UPDATES.values(), *RANKS.values(), *MIXES.values()) for name in expected),
    *(name for *_, expected in SERIES.values() for name in expected),
}
OVER_STEPS = {name for *_, expected in SERIES.values() for name in expected} | {
    "source_shift"
}  # broken values, no values
EDGES = {*AT_THE_EDGES, *OVER_STEPS, *(name for *_, expected in RANK_EDGES.values() for name in expected)}


@pytest.fixture(scope="module")
def tests_of_callbacks() -> dict[str, str]:
    """Each test's source by its name."""
    source = (TESTS / "callbacks" / "test_beyond_steps.py").read_text()
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return {node.name: ast.get_source_segment(source, node) or "" for node in functions}


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_a_signal_has_numbers_by_hand_and_an_edge(name: str, tests_of_callbacks: dict[str, str]) -> None:
    if name in ELSEWHERE:
        assert all(name in tests_of_callbacks[test] for test in ELSEWHERE[name])
    else:
        assert name in BY_HAND, f"derive a number for {name} in the tables of tests/signals"
        assert name in EDGES, f"say what {name} is at the edges, in test_signals_edges.py"


@pytest.mark.parametrize("pattern", [row[0] for row in PATTERNS])
def test_the_signals_of_a_reward_function_have_them_too(pattern: str) -> None:
    name = pattern.replace("<name>", "f0")
    assert {name, name.replace("f0", "f1")} & BY_HAND
    assert name in AT_THE_EDGES


def test_what_the_split_of_a_step_leaves_out_is_derived_elsewhere() -> None:
    """Signals over the steps before are those of numbers already joined; the others are in the test over gloo ranks."""
    over_steps = {name for name, signal in CATALOGUE.items() if signal.merge == "run"}
    assert over_steps <= OVER_STEPS | set(ELSEWHERE)
    assert set(ELSEWHERE) >= NOT_OF_A_STEP
