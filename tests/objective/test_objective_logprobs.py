"""Log-probs and entropies: against float64 and autograd, on masked vocabulary, at any piece size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import logprobs as module
from grpo_lightning.objective import score_tokens, selected_logprobs, token_entropy

SHAPE, V = (3, 5), 33


def drawn(dtype: torch.dtype = torch.float32, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(*SHAPE, V, generator=generator)).to(dtype).requires_grad_()
    return logits, torch.randint(V, SHAPE, generator=generator)


def expected(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """By torch.distributions in float64, gradient through autograd."""
    distribution = torch.distributions.Categorical(logits=logits.double() / temperature)
    return distribution.log_prob(ids), distribution.entropy()


WEIGHTS = {"log-probs": (1.0, 0.0), "entropies": (0.0, 1.0), "both": (0.7, -1.3)}


@pytest.mark.parametrize("elements", [1, 4 * V, 1 << 20], ids=["row by row", "four rows", "at once"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_values_and_gradients_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch,
    elements: int,
    temperature: float,
    weights: tuple[float, float],
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(module, "_CPU_ELEMENTS", elements)
    logits, ids = drawn(dtype)
    scores = score_tokens(logits, ids, temperature=temperature)
    want = expected(logits, ids, temperature)
    got: tuple[Any, Any] = (scores.logprobs, scores.entropies)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
    per_token = torch.linspace(-1, 1, math.prod(SHAPE)).view(SHAPE)
    gradients = [
        torch.autograd.grad(sum((w * per_token * v).sum() for w, v in zip(weights, pair, strict=True) if w), logits)[0]
        for pair in (got, want)
    ]
    loose = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=loose)


def test_entropy_is_exact_after_temperature() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    assert token_entropy(logits).item() == pytest.approx(1.5 * math.log(2))
    cold = torch.tensor([0.5, 0.25, 0.25]) ** 2
    cold = cold / cold.sum()
    assert token_entropy(logits, temperature=0.5).item() == pytest.approx(-(cold * cold.log()).sum().item())


def test_masked_vocabulary_counts_as_if_it_were_not_there() -> None:
    kept = torch.tensor([[0.3, -1.2, 2.0]], requires_grad=True)
    masked = torch.tensor([[0.3, -math.inf, -1.2, 2.0, -math.inf]], requires_grad=True)
    small, wide = score_tokens(kept, torch.tensor([2])), score_tokens(masked, torch.tensor([3]))
    assert small.entropies is not None
    assert wide.entropies is not None
    torch.testing.assert_close(wide.logprobs, small.logprobs)
    torch.testing.assert_close(wide.entropies, small.entropies)
    (small.logprobs + small.entropies).sum().backward()
    (wide.logprobs + wide.entropies).sum().backward()
    assert kept.grad is not None
    assert masked.grad is not None
    torch.testing.assert_close(masked.grad[:, [0, 2, 3]], kept.grad)
    assert masked.grad[0, [1, 4]].tolist() == [0.0, 0.0]


def test_a_masked_token_has_no_probability_and_finite_gradients() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    scores = score_tokens(logits, torch.tensor([2]))
    assert scores.logprobs.tolist() == [-math.inf]
    scores.logprobs.sum().backward()
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


@pytest.mark.parametrize("offset", [-1e5, 1e5], ids=["low", "high"])
def test_an_offset_of_all_logits_changes_nothing(offset: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    got, want = score_tokens(logits + offset, torch.tensor([1])), score_tokens(logits, torch.tensor([1]))
    torch.testing.assert_close(got.logprobs, want.logprobs)
    torch.testing.assert_close(got.entropies, want.entropies)


def test_a_certain_distribution_has_an_entropy_of_0_and_a_uniform_one_of_log_v() -> None:
    assert token_entropy(torch.tensor([[1e4, 0.0, 0.0]])).item() == 0.0
    assert token_entropy(torch.zeros(1, V)).item() == pytest.approx(math.log(V))


def test_nan_stays_in_its_own_row() -> None:
    logits = torch.zeros(2, 4)
    logits[0, 1] = math.nan
    scores = score_tokens(logits, torch.tensor([0, 0]))
    assert torch.isnan(scores.logprobs).tolist() == [True, False]
    assert scores.entropies is not None
    assert torch.isnan(scores.entropies).tolist() == [True, False]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_autograd_keeps_the_logits_and_no_copies_of_them(with_entropy: bool) -> None:
    kept: list[Tensor] = []
    logits, ids = drawn(torch.bfloat16)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = score_tokens(logits, ids, with_entropy=with_entropy)
    large = [t for t in kept if t.numel() >= logits.numel()]
    assert {t.untyped_storage().data_ptr() for t in large} == {logits.untyped_storage().data_ptr()}
    assert (scores.entropies is not None) == with_entropy


def test_log_probs_alone_are_the_same_log_probs() -> None:
    logits, ids = drawn()
    alone = selected_logprobs(logits, ids, temperature=0.7)
    assert torch.equal(alone, score_tokens(logits, ids, temperature=0.7).logprobs)


def test_no_tokens_give_no_scores() -> None:
    scores = score_tokens(torch.zeros(2, 0, V), torch.zeros(2, 0, dtype=torch.int64))
    assert scores.logprobs.shape == (2, 0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_cannot_divide_is_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"temperature is .* above 0"):
        score_tokens(torch.zeros(1, 4), torch.tensor([0]), temperature=temperature)
