"""KL estimators against the exact KL on a small vocabulary, the controller, log-probs and entropy."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_lightning.objective import (
    AdaptiveKLController,
    clamped,
    kl_k1,
    kl_k2,
    kl_k3,
    score_tokens,
    selected_logprobs,
    sequence_kl,
    soft_overlong_penalty,
    token_entropy,
)

V = 7


def pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, V, generator=generator, dtype=torch.float64)
    return logits[0].requires_grad_(), logits[1]


def exact_kl(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    p, q = policy.log_softmax(-1), reference.log_softmax(-1)
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("estimator", [kl_k1, kl_k3], ids=["k1", "k3"])
def test_k1_and_k3_are_unbiased(seed: int, estimator: object) -> None:
    policy, reference = pair(seed)
    p, q = policy.log_softmax(-1), reference.log_softmax(-1)
    expected = (p.exp() * estimator(p, q)).sum()  # type: ignore[operator]
    torch.testing.assert_close(expected, exact_kl(policy, reference))


@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_of_k2_is_that_of_the_exact_kl_in_expectation(seed: int) -> None:
    """Sampled tokens are constants: the expectation weighs per-token gradients by detached probabilities."""
    policy, reference = pair(seed)
    (want,) = torch.autograd.grad(exact_kl(policy, reference), policy)
    p, q = policy.log_softmax(-1), reference.log_softmax(-1)
    (got,) = torch.autograd.grad((p.exp().detach() * kl_k2(p, q)).sum(), policy)
    torch.testing.assert_close(got, want)


def test_signs_and_overflow() -> None:
    new, ref = torch.tensor([0.0, 0.0, -100.0]), torch.tensor([-1.0, 1.0, 0.0])
    assert kl_k1(new, ref).tolist() == [1.0, -1.0, -100.0]
    assert bool((kl_k3(new, ref) >= 0).all())
    assert bool(torch.isfinite(kl_k3(new, ref)).all())
    assert clamped(new, ref).tolist() == [False, False, True]


def test_kl_in_the_reward_sums_over_completion_tokens() -> None:
    new, ref = torch.tensor([[[-1.0, -2.0, -3.0]]]), torch.tensor([[[-2.0, -2.5, 9.0]]])
    mask = torch.tensor([[[True, True, False]]])
    assert sequence_kl(new, ref, mask).item() == pytest.approx(1.5)


def test_the_controller_grows_above_the_bound_and_falls_back_below() -> None:
    controller = AdaptiveKLController(0.1, bound=1.0)
    assert [controller.update(5.0) for _ in range(2)] == pytest.approx([0.11, 0.121])
    for _ in range(10):
        controller.update(0.0)
    assert controller.coef == 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_controller_refuses_what_is_not_finite_and_is_saved(value: float) -> None:
    controller = AdaptiveKLController(0.1, bound=1.0)
    controller.update(2.0)
    before = controller.coef
    assert controller.update(value) == before
    other = AdaptiveKLController(0.1, bound=1.0)
    other.load_state_dict(controller.state_dict())
    assert (other.coef, other.refused) == (before, 1)
    assert {type(v) for v in controller.state_dict().values()} == {float, int}


def test_entropy_is_exact_after_temperature() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    assert token_entropy(logits).item() == pytest.approx(1.5 * math.log(2))
    cold = torch.tensor([0.5, 0.25, 0.25]) ** 2
    cold = cold / cold.sum()
    assert token_entropy(logits, temperature=0.5).item() == pytest.approx(-(cold * cold.log()).sum().item())


def test_masked_vocabulary_adds_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    scores = score_tokens(logits, torch.tensor([0]))
    assert scores.entropies is not None
    assert scores.entropies.item() == pytest.approx(math.log(2))
    scores.entropies.sum().backward()
    assert bool(torch.isfinite(logits.grad).all())


def test_log_probs_are_those_of_the_tempered_distribution() -> None:
    logits = torch.randn(2, 3, V, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1, 2], [3, 4, 5]])
    want = torch.distributions.Categorical(logits=logits / 0.7).log_prob(ids)
    torch.testing.assert_close(selected_logprobs(logits, ids, temperature=0.7), want)


def test_overlong_punishment() -> None:
    got = soft_overlong_penalty(torch.tensor([[5, 6, 8, 10]]), 10, 4)
    assert got.tolist() == [[0.0, 0.0, -0.5, -1.0]]
