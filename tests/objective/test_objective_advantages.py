"""Advantages: dead groups, missing rewards, scales and baselines."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import (
    DEAD,
    LIVE,
    UNSCORABLE,
    combine_rewards,
    group_advantages,
    group_status,
    merge_moments,
    reward_moments,
)
from grpo_lightning.objective.advantages import Scale

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


@pytest.mark.parametrize("value", [0.3, 0.7, 0.9, 1 / 3, 1e6 / 3, -0.1])
@pytest.mark.parametrize("group_size", range(2, 17))
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_rounding_of_float32_is_no_signal(value: float, group_size: int, scale: Scale) -> None:
    """Every other reward is the next float32: the same number, added up in another order."""
    rewards = torch.full((1, group_size), value)
    rewards[:, ::2] = torch.nextafter(rewards[:, ::2], torch.tensor(math.inf))
    assert rewards.min() < rewards.max()
    got = group_advantages(rewards, scale=scale)
    assert got.status_P.tolist() == [DEAD]
    assert got.advantages_PG.abs().max().item() == 0.0


ALIVE = {"small": [0.5, 0.501], "large": [1e6, 1e6 + 10], "negative": [-3.0, -3.01], "one point": [0.0, 1e-5]}


@pytest.mark.parametrize("rewards", ALIVE.values(), ids=ALIVE.keys())
def test_small_differences_are_signal(rewards: list[float]) -> None:
    got = group_advantages(torch.tensor([rewards], dtype=torch.float64))
    assert got.status_P.tolist() == [LIVE]
    assert got.advantages_PG.abs().min() > 0


def test_the_tolerance_is_relative_to_the_rewards() -> None:
    rewards = torch.tensor([[1000.0, 1000.9], [1.0, 1.9]], dtype=torch.float64)
    assert group_advantages(rewards, dead_tolerance=1e-3).status_P.tolist() == [DEAD, LIVE]
    assert group_status(rewards, tolerance=1.0).tolist() == [DEAD, DEAD]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_two_dead_groups_are_two_dead_groups_under_every_scale(scale: Scale) -> None:
    """All right and all wrong: the batch has a spread, the groups have none."""
    got = group_advantages(torch.tensor([[1.0] * 4, [0.0] * 4]), scale=scale)
    assert got.status_P.tolist() == [DEAD, DEAD]
    assert got.advantages_PG.abs().max().item() == 0.0


def test_by_hand() -> None:
    """[1, 0, 0, 0]: mean 1/4, sample std sqrt((9/16 + 3/16) / 3) = 1/2; eps 0 gives 3/2 and -1/2."""
    got = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), eps=0.0)
    torch.testing.assert_close(got.advantages_PG, torch.tensor([[1.5, -0.5, -0.5, -0.5]]))
    assert got.group_std_P.item() == pytest.approx(0.5)
    unscaled = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), scale="none")
    torch.testing.assert_close(unscaled.advantages_PG, torch.tensor([[0.75, -0.25, -0.25, -0.25]]))


@pytest.mark.parametrize("group_size", range(2, 17))
def test_leave_one_out_keeps_the_only_success_and_stays_finite(group_size: int) -> None:
    """Sibling means of [1, 0, ...] are 0 and 1 / (G - 1); over the std 1 / sqrt(G), the success stands at sqrt(G)."""
    rewards = torch.tensor([[1.0] + [0.0] * (group_size - 1)])
    got = group_advantages(rewards, scale="none", baseline="leave_one_out")
    want = torch.tensor([[1.0] + [-1 / (group_size - 1)] * (group_size - 1)])
    torch.testing.assert_close(got.advantages_PG, want)
    scaled = group_advantages(rewards, baseline="leave_one_out", eps=0.0).advantages_PG
    torch.testing.assert_close(scaled, want * math.sqrt(group_size))


@pytest.mark.parametrize("group_size", range(2, 17))
def test_the_bound_is_reached_by_an_only_success(group_size: int) -> None:
    got = group_advantages(torch.tensor([[1.0] + [0.0] * (group_size - 1)]), eps=0.0).advantages_PG
    assert got[0, 0].item() == pytest.approx((group_size - 1) / math.sqrt(group_size), rel=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_live_groups_get_trls_advantages(scale: Scale) -> None:
    """TRL's formula, with its own nanstd, missing rewards included."""
    from trl.trainer.utils import nanstd

    rewards = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))
    rewards[1, 2] = rewards[3, 0] = NAN
    std = nanstd(rewards, dim=1).unsqueeze(1) if scale == "group" else nanstd(rewards)
    want = torch.nan_to_num((rewards - rewards.nanmean(1, keepdim=True)) / (std + 1e-4), nan=0.0)
    torch.testing.assert_close(group_advantages(rewards, scale=scale).advantages_PG, want, atol=1e-5, rtol=1e-5)


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
    "minus infinite": ([[-INF, 1.0], [0.0, 1.0]], [1.0, 1.0], [NAN, 1.0]),
    "only watched": ([[1.0, NAN], [0.0, 5.0]], [1.0, 0.0], [1.0, 0.0]),
    "nothing but watched": ([[1.0], [0.0]], [0.0], [NAN, NAN]),
    "negative weight": ([[1.0, 2.0], [0.0, 1.0]], [1.0, -0.5], [0.0, -0.5]),
}


@pytest.mark.parametrize(("rewards", "weights", "total"), COMBINED.values(), ids=COMBINED.keys())
def test_combined_rewards(rewards: list[list[float]], weights: list[float], total: list[float]) -> None:
    got = combine_rewards(torch.tensor([rewards]), torch.tensor(weights))
    torch.testing.assert_close(got, torch.tensor([total], dtype=torch.float64), equal_nan=True)


def test_a_missing_function_in_one_group_leaves_the_others_alone() -> None:
    """The second function applies to the second group only."""
    rewards = torch.tensor([[[1.0, NAN], [0.0, NAN]], [[1.0, 2.0], [0.0, 4.0]]])
    assert combine_rewards(rewards, torch.tensor([1.0, 10.0])).tolist() == [[1.0, 0.0], [21.0, 40.0]]


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "a group of one": (1, {}, "group size is 1: .* at least 2"),
    "an unknown scale": (4, {"scale": "std"}, "'std': use 'group', 'batch' or 'none'"),
    "an unknown baseline": (4, {"baseline": "median"}, "'median': use 'group_mean' or 'leave_one_out'"),
}


@pytest.mark.parametrize(("group_size", "settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(group_size: int, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        group_advantages(torch.zeros(3, group_size), **settings)


numbers = st.floats(-1e6, 1e6, width=32)


@given(st.integers(2, 16).flatmap(lambda g: st.lists(numbers, min_size=g, max_size=g)))
def test_advantages_are_bounded_and_centred(rewards: list[float]) -> None:
    """Samuelson's inequality: |A| <= (G - 1) / sqrt(G) with the sample std."""
    got = group_advantages(torch.tensor([rewards], dtype=torch.float64)).advantages_PG.double()
    group_size = len(rewards)
    assert got.abs().max() <= (group_size - 1) / math.sqrt(group_size) + 1e-6
    assert abs(got.sum()) <= 1e-5 * group_size


def test_moments_of_parts_merge_to_those_of_the_whole() -> None:
    """[1, 2], [6, NaN] and nothing at all: 3 rewards, mean 3, squares 4 + 1 + 9."""
    parts = [torch.tensor(v) for v in ([[1.0, 2.0]], [[6.0, NAN]], [[NAN, INF]])]
    assert merge_moments([reward_moments(p) for p in parts]).tolist() == pytest.approx([3.0, 3.0, 14.0])


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
