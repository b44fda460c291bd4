"""When an update is skipped, and how many repairs a run may make."""

from __future__ import annotations

import math

import pytest

from grpo_lightning.health.recovery import Budget, GradientLimit


@pytest.mark.parametrize(
    ("norm", "skipped"), [(99.9, False), (100.1, True), (math.nan, True), (math.inf, True)], ids=str
)
def test_a_hard_limit_and_numbers_that_are_none(norm: float, skipped: bool) -> None:
    assert GradientLimit(norm=100.0, ratio=None).exceeded(norm) is skipped


def test_the_ratio_waits_for_20_norms_and_follows_their_median() -> None:
    limit = GradientLimit(norm=None, ratio=10.0)
    for _ in range(19):
        limit.push(2.0)
    assert not limit.exceeded(1e6)
    limit.push(2.0)
    assert limit.exceeded(20.1)
    assert not limit.exceeded(19.9)
    for _ in range(30):  # the median of the last 50 is 8 now
        limit.push(8.0)
    assert not limit.exceeded(79.0)


def test_without_limits_only_what_is_not_finite_is_skipped() -> None:
    limit = GradientLimit(norm=None, ratio=None)
    for _ in range(30):
        limit.push(1.0)
    assert not limit.exceeded(1e30)
    assert limit.exceeded(math.nan)


def test_a_limit_survives_a_checkpoint() -> None:
    limit, again = GradientLimit(norm=None, ratio=10.0), GradientLimit(norm=None, ratio=10.0)
    for i in range(25):
        limit.push(float(i))
    again.load_state_dict(limit.state_dict())
    assert [again.exceeded(n) for n in (119.0, 121.0)] == [False, True]  # the median of 0..24 is 12


def test_a_budget_counts_within_its_window() -> None:
    budget = Budget(limit=3, window_steps=100)
    assert [budget.spend(step) for step in (1, 2, 3)] == [True, True, True]
    assert not budget.spend(100)
    assert budget.spend(103)  # 1, 2 and 3 have left; 100 and 103 are two
    assert budget.spent == 2


def test_a_budget_counts_groups_and_forgives_what_was_acknowledged() -> None:
    budget = Budget(limit=16, window_steps=100)
    assert budget.spend(10, 12)
    assert not budget.spend(20, 5)
    budget.forgive({10})
    assert budget.spent == 5


def test_a_budget_survives_a_checkpoint() -> None:
    budget, again = Budget(limit=2, window_steps=100), Budget(limit=2, window_steps=100)
    assert [budget.spend(10), budget.spend(20)] == [True, True]
    again.load_state_dict(budget.state_dict())
    assert not again.spend(21)
