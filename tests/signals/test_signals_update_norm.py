"""The size of an update, exact and sampled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from grpo_lightning.errors import UsageError
from grpo_lightning.signals import UpdateNorm


def _weights(*tensors: torch.Tensor) -> list[nn.Parameter]:
    return [nn.Parameter(t) for t in tensors]


def test_exact_norms_by_hand() -> None:
    weights = _weights(torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]))
    norm = UpdateNorm()
    norm.before(weights)
    with torch.no_grad():
        weights[0].add_(torch.tensor([1.0, 2.0]))
        weights[1].sub_(2.0)
    size = norm.after(weights)
    assert size.update_norm == pytest.approx(3.0)
    assert size.values() == pytest.approx({"update_norm": 3.0, "update_to_weight": 0.6})


def test_every_step_compares_with_its_own_before() -> None:
    weights = _weights(torch.zeros(4))
    norm = UpdateNorm()
    for change in (1.0, 3.0, 0.0):
        norm.before(weights)
        with torch.no_grad():
            weights[0].add_(change)
        assert norm.after(weights).update_norm == pytest.approx(2 * change)


def test_frozen_weights_do_not_count() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    weights = [*_weights(torch.ones(1)), frozen]
    norm = UpdateNorm()
    norm.before(weights)
    with torch.no_grad():
        frozen.add_(5.0)
        weights[0].add_(2.0)
    assert norm.after(weights).values() == pytest.approx({"update_norm": 2.0, "update_to_weight": 2.0})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    weights = _weights(torch.ones(256, dtype=dtype))
    norm = UpdateNorm()
    norm.before(weights)
    with torch.no_grad():
        weights[0].add_(0.5)
    assert norm.after(weights).update_norm == pytest.approx(8.0)


def test_a_sample_is_unbiased_in_the_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    change = [torch.randn(4_000, generator=generator), torch.randn(40, 10, generator=generator) * 5, torch.ones(3)]
    exact = sum(float(c.double().square().sum()) for c in change)
    found = []
    for seed in range(60):
        weights = _weights(*(torch.zeros_like(c) for c in change))
        norm = UpdateNorm(exact_up_to=0, sample_size=400, seed=seed)
        norm.before(weights)
        with torch.no_grad():
            for w, c in zip(weights, change, strict=True):
                w.add_(c)
        found.append(norm.after(weights).update_squares)
    spread = torch.tensor(found).std().item() / math.sqrt(len(found))
    assert torch.tensor(found).mean().item() == pytest.approx(exact, abs=4 * spread)
    assert spread < 0.05 * exact


def test_a_sample_is_smaller_than_the_weights_and_stays_the_same() -> None:
    weights = _weights(torch.zeros(100_000))
    norm = UpdateNorm(exact_up_to=1_000, sample_size=500)
    sizes = []
    for _ in range(2):
        norm.before(weights)
        with torch.no_grad():
            weights[0].copy_(weights[0] + torch.arange(100_000.0))
        sizes.append(norm.after(weights).update_squares)
    assert sum(kept.numel() for kept in norm._before) == 500
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-4)


def test_weights_of_zero_have_no_ratio() -> None:
    weights = _weights(torch.zeros(2), torch.zeros(0))
    norm = UpdateNorm()
    norm.before(weights)
    assert norm.after(weights).values() == {"update_norm": 0.0}


def test_nothing_trained() -> None:
    norm = UpdateNorm()
    norm.before([])
    assert norm.after([]).values() == {"update_norm": 0.0}


def test_after_needs_before() -> None:
    with pytest.raises(UsageError, match="before"):
        UpdateNorm().after(_weights(torch.ones(2)))
