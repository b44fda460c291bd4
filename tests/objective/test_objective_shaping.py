"""The soft overlong punishment, and counting where a clip binds."""

from __future__ import annotations

import pytest
import torch

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import LossConfig, clip_binds, soft_overlong_penalty

LENGTHS = {  # limit 10, cache 4: free up to 6
    "well inside": (1, 0.0),
    "at the edge": (6, 0.0),
    "a quarter in": (7, -0.25),
    "half": (8, -0.5),
    "at the limit": (10, -1.0),
    "beyond": (12, -1.0),
}


@pytest.mark.parametrize(("length", "penalty"), LENGTHS.values(), ids=LENGTHS.keys())
def test_overlong_punishment(length: int, penalty: float) -> None:
    assert soft_overlong_penalty(torch.tensor([[length]]), 10, 4).tolist() == [[penalty]]


@pytest.mark.parametrize("cache", [0, -1, 11])
def test_a_cache_outside_the_limit_is_refused(cache: int) -> None:
    with pytest.raises(ConfigError, match="generation limit"):
        soft_overlong_penalty(torch.tensor([[5]]), 10, cache)


def test_clipping_is_counted_where_it_binds_only() -> None:
    """Ratio 0.5 binds for a negative advantage, 2.0 for a positive one; the other two pass gradient."""
    ratio = torch.tensor([[[0.5, 2.0, 1.0], [0.5, 2.0, 1.0]]])
    low, high = clip_binds(ratio, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, 3, dtype=torch.bool), 0.2, 0.2)
    assert low.tolist() == [[[False, False, False], [True, False, False]]]
    assert high.tolist() == [[[False, True, False], [False, False, False]]]


def test_no_advantage_and_no_loss_token_bind_nothing() -> None:
    ratio = torch.tensor([[[0.5, 2.0], [0.5, 2.0], [0.5, 2.0]]])
    mask = torch.tensor([[[True, True], [False, False], [False, False]]])
    low, high = clip_binds(ratio, torch.tensor([[0.0, -1.0, 1.0]]), mask, 0.2, 0.2)
    assert (low.sum().item(), high.sum().item()) == (0, 0)


def test_a_sequence_ratio_counts_for_each_of_its_tokens() -> None:
    mask = torch.tensor([[[True, True, False]]])
    _, high = clip_binds(torch.full((1, 1, 1), 2.0), torch.ones(1, 1), mask, 0.2, 0.2)
    assert high.tolist() == [[[True, True, False]]]


def test_cispo_binds_at_its_own_cap_and_never_below() -> None:
    margins = LossConfig(loss="cispo", cispo_max=3.0).clip_margins
    ratio = torch.tensor([[[0.01, 2.0, 4.0], [0.01, 2.0, 4.0]]])
    low, high = clip_binds(ratio, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, 3, dtype=torch.bool), *margins)
    assert low.sum().item() == 0
    assert high.tolist() == [[[False, False, True], [False, False, False]]]
    assert LossConfig(loss="dapo", clip_low=0.1, clip_high=0.3).clip_margins == (0.1, 0.3)
