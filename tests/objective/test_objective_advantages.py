"""Advantages: dead groups, missing rewards, scales and baselines."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import DEAD, LIVE, UNSCORABLE, combine_rewards, group_advantages, reward_moments

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("value", [0.0, 0.3, 0.7, 0.9, 1 / 3, 1e6 / 3, -0.1])
@pytest.mark.parametrize("group_size", range(2, 17))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_are_a_dead_group_whose_advantages_are_exactly_0(
    value: float, group_size: int, dtype: torch.dtype
) -> None:
    got = group_advantages(torch.full((1, group_size), value, dtype=dtype))
    assert got.status_P.tolist() == [DEAD]
    assert got.advantages_PG.abs().max().item() == 0.0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_two_dead_groups_are_two_dead_groups_under_every_scale(scale: str) -> None:
    """All right and all wrong: the batch has a spread, the groups have none."""
    got = group_advantages(torch.tensor([[1.0] * 4, [0.0] * 4]), scale=scale)  # type: ignore[arg-type]
    assert got.status_P.tolist() == [DEAD, DEAD]
    assert got.advantages_PG.abs().max().item() == 0.0


def test_by_hand() -> None:
    """[1, 0, 0, 0]: mean 1/4, sample std sqrt((9/16 + 3/16) / 3) = 1/2; eps 0 gives 3/2 and -1/2."""
    got = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), eps=0.0)
    torch.testing.assert_close(got.advantages_PG, torch.tensor([[1.5, -0.5, -0.5, -0.5]]))
    assert got.group_std_P.item() == pytest.approx(0.5)
    unscaled = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), scale="none")
    torch.testing.assert_close(unscaled.advantages_PG, torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


def test_leave_one_out_keeps_the_only_success_and_stays_finite() -> None:
    """Sibling means of [1, 0 x 7] are 0 and 1/7: 1 - 0 = 1 and 0 - 1/7."""
    rewards = torch.tensor([[1.0] + [0.0] * 7])
    got = group_advantages(rewards, scale="none", baseline="leave_one_out")
    torch.testing.assert_close(got.advantages_PG, torch.tensor([[1.0] + [-1 / 7] * 7]))
    scaled = group_advantages(rewards, baseline="leave_one_out").advantages_PG
    assert scaled[0, 0] > 0
    assert scaled.abs().max() < 8


MISSING = {
    "all missing": ([NAN] * 4, UNSCORABLE, [0, 0, 0, 0]),
    "one left": ([NAN, NAN, NAN, 1.0], UNSCORABLE, [0, 0, 0, 0]),
    "one missing": ([1.0, 0.0, NAN], LIVE, [0.5, -0.5, 0]),
    "one infinite": ([1.0, 0.0, INF], LIVE, [0.5, -0.5, 0]),
    "one minus infinite": ([1.0, 0.0, -INF], LIVE, [0.5, -0.5, 0]),
    "equal and one missing": ([0.3, NAN, 0.3], DEAD, [0, 0, 0]),
}


@pytest.mark.parametrize(("rewards", "status", "advantages"), MISSING.values(), ids=MISSING.keys())
def test_a_missing_reward_is_neither_0_nor_shifts_its_siblings(
    rewards: list[float], status: int, advantages: list[float]
) -> None:
    got = group_advantages(torch.tensor([rewards]), scale="none")
    assert got.status_P.tolist() == [status]
    torch.testing.assert_close(got.advantages_PG, torch.tensor([advantages], dtype=torch.float32))


COMBINED = {
    "weights": ([[1.0, 2.0]], [2.0, 0.5], [3.0]),
    "does not apply to the group": ([[1.0, NAN], [0.0, NAN]], [1.0, 1.0], [1.0, 0.0]),
    "missing for one rollout": ([[1.0, NAN], [0.0, 1.0]], [1.0, 1.0], [NAN, 1.0]),
    "all missing": ([[NAN, NAN], [NAN, NAN]], [1.0, 1.0], [NAN, NAN]),
    "infinite": ([[INF, 1.0], [0.0, 1.0]], [1.0, 1.0], [NAN, 1.0]),
}


@pytest.mark.parametrize(("rewards", "weights", "total"), COMBINED.values(), ids=COMBINED.keys())
def test_combined_rewards(rewards: list[list[float]], weights: list[float], total: list[float]) -> None:
    got = combine_rewards(torch.tensor([rewards]), torch.tensor(weights))
    torch.testing.assert_close(got, torch.tensor([total], dtype=torch.float64), equal_nan=True)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        group_advantages(torch.zeros(3, 1))


numbers = st.floats(-1e6, 1e6, width=32)


@given(st.integers(2, 16).flatmap(lambda g: st.lists(numbers, min_size=g, max_size=g)))
def test_advantages_are_bounded_and_centred(rewards: list[float]) -> None:
    """Samuelson's inequality: |A| <= (G - 1) / sqrt(G) with the sample std."""
    got = group_advantages(torch.tensor([rewards], dtype=torch.float64)).advantages_PG.double()
    group_size = len(rewards)
    assert got.abs().max() <= (group_size - 1) / math.sqrt(group_size) + 1e-6
    assert abs(got.sum()) <= 1e-5 * group_size


@given(st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=2, max_size=8), st.integers(1, 7))
def test_batch_scaling_does_not_depend_on_the_ranks(rewards: list[list[float]], cut: int) -> None:
    whole = torch.tensor(rewards, dtype=torch.float64)
    cut = min(cut, len(rewards) - 1)
    parts = [whole[:cut], whole[cut:]]
    moments = [reward_moments(p) for p in parts]
    split = [group_advantages(p, scale="batch", moments=moments).advantages_PG for p in parts]
    torch.testing.assert_close(
        torch.cat(split), group_advantages(whole, scale="batch").advantages_PG, atol=1e-4, rtol=1e-4
    )
