"""KL estimators against the exact KL on a small vocabulary, KL in the reward, the controller."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import (
    AdaptiveKLController,
    clamped,
    kl_k1,
    kl_k2,
    kl_k3,
    penalised_rewards,
    per_token_kl,
    sequence_kl,
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
def test_k2_is_biased_by_the_next_order_only(seed: int) -> None:
    """Close policies: E[d^2] / 2 is the KL to second order in their distance."""
    policy, reference = pair(seed)
    near = (policy.detach() + 1e-3 * reference).requires_grad_()
    p, q = policy.log_softmax(-1), near.log_softmax(-1)
    torch.testing.assert_close((p.exp() * kl_k2(p, q)).sum(), exact_kl(policy, near), rtol=5e-3, atol=0.0)


Estimator = Callable[[Tensor, Tensor], Tensor]


def ratio_times(estimator: Estimator) -> Estimator:
    """On policy: the ratio is 1 and differentiable."""
    return lambda p, q: (p - p.detach()).exp() * estimator(p, q)


GRADIENTS: dict[str, tuple[Estimator, Estimator]] = {
    "k1 is nothing but noise": (kl_k1, lambda p, _: 0.0 * p.sum()),
    "k2 is the exact KL": (kl_k2, exact_kl),
    "k3 is the KL the other way round": (kl_k3, lambda p, q: exact_kl(q, p)),
    "k1 with the ratio is the exact KL": (ratio_times(kl_k1), exact_kl),
    "k3 with the ratio is the exact KL": (ratio_times(kl_k3), exact_kl),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("estimator", "target"), GRADIENTS.values(), ids=GRADIENTS.keys())
def test_the_gradient_in_expectation(estimator: Estimator, target: Estimator, seed: int) -> None:
    """Sampled tokens are constants: the expectation weighs per-token gradients by detached probabilities."""
    policy, reference = pair(seed)
    (want,) = torch.autograd.grad(target(policy, reference), policy)
    p, q = policy.log_softmax(-1), reference.log_softmax(-1)
    (got,) = torch.autograd.grad((p.exp().detach() * estimator(p, q)).sum(), policy)
    torch.testing.assert_close(got, want)


DRIFTED = {  # d = log ref - log policy: k3's value, its gradient by log policy, whether it is clamped
    "equal": (0.0, 0.0, 0.0, False),
    "by hand": (1.0, math.e - 2, 1 - math.e, False),
    "policy far above the reference": (-30.0, 29.0, 1.0, False),
    "policy infinitely far above": (-1e30, 1e30, 1.0, False),
    "policy far below the reference": (30.0, math.expm1(20.0) - 20.0, 0.0, True),
    "where float32 overflows": (100.0, math.expm1(20.0) - 20.0, 0.0, True),
}


@pytest.mark.parametrize(("d", "value", "gradient", "is_clamped"), DRIFTED.values(), ids=DRIFTED.keys())
def test_k3_of_drifted_policies(d: float, value: float, gradient: float, is_clamped: bool) -> None:
    own, ref = torch.zeros(1, requires_grad=True), torch.tensor([d])
    got = kl_k3(own, ref)
    got.sum().backward()
    assert own.grad is not None
    assert got.item() == pytest.approx(value, rel=1e-5)
    assert own.grad.item() == pytest.approx(gradient, rel=1e-5)
    assert clamped(own, ref).item() is is_clamped


def test_signs() -> None:
    new, ref = torch.tensor([0.0, 0.0, -100.0]), torch.tensor([-1.0, 1.0, 0.0])
    assert kl_k1(new, ref).tolist() == [1.0, -1.0, -100.0]
    assert kl_k2(new, ref).tolist() == [0.5, 0.5, 5000.0]
    assert kl_k3(new, ref)[:2].tolist() == pytest.approx([math.exp(-1), math.e - 2])


def test_an_unknown_estimator_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="'k1', 'k2' or 'k3'"):
        per_token_kl(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def test_kl_in_the_reward_sums_over_completion_tokens() -> None:
    new, ref = torch.tensor([[[-1.0, -2.0, -3.0]]]), torch.tensor([[[-2.0, -2.5, 9.0]]])
    mask = torch.tensor([[[True, True, False]]])
    assert sequence_kl(new, ref, mask).item() == pytest.approx(1.5)


def test_penalised_rewards() -> None:
    """Log-ratios 1 and 0.5 over two tokens, then padding: sum 1.5, mean 0.75; a missing reward stays missing."""
    new = torch.tensor([[[-1.0, -2.0, math.nan]] * 2], requires_grad=True)
    ref = torch.tensor([[[-2.0, -2.5, 9.0]] * 2])
    mask, rewards = torch.tensor([[[True, True, False]] * 2]), torch.tensor([[1.0, math.nan]])
    for reduction, want in (("sum", 0.85), ("mean", 0.925)):
        got = penalised_rewards(rewards, new, ref, mask, coef=0.1, reduction=reduction)  # type: ignore[arg-type]
        assert got.tolist() == [pytest.approx([want, math.nan], nan_ok=True)]
        assert (got.dtype, got.requires_grad) == (torch.float64, False)
    with pytest.raises(ConfigError, match="'sum' or 'mean'"):
        penalised_rewards(rewards, new, ref, mask, coef=0.1, reduction="max")  # type: ignore[arg-type]


def test_the_controller_grows_above_the_bound_and_falls_back_below() -> None:
    controller = AdaptiveKLController(0.1, bound=1.0)
    assert [controller.update(5.0) for _ in range(2)] == pytest.approx([0.11, 0.121])
    for _ in range(10):
        controller.update(0.0)
    assert controller.coef == 0.1


def test_the_controller_stops_at_its_maximum_and_rests_without_a_bound() -> None:
    bounded, free = AdaptiveKLController(0.1, bound=1.0, maximum=0.2), AdaptiveKLController(0.1)
    for _ in range(20):
        bounded.update(5.0)
        free.update(5.0)
    assert (bounded.coef, free.coef) == (0.2, 0.1)


CONTROLLERS = {
    "never grows from 0": ({"coef": 0.0, "bound": 1.0}, "above 0"),
    "above its maximum": ({"coef": 11.0, "bound": 1.0}, "up to 10"),
    "bound of 0": ({"coef": 0.1, "bound": 0.0}, "above 0 nats"),
    "bound not a number": ({"coef": 0.1, "bound": math.nan}, "above 0 nats"),
    "negative": ({"coef": -0.1}, "0 or more"),
    "not a number": ({"coef": math.nan}, "0 or more"),
}


@pytest.mark.parametrize(("arguments", "rule"), CONTROLLERS.values(), ids=CONTROLLERS.keys())
def test_a_controller_that_cannot_work_is_refused(arguments: dict[str, float], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        AdaptiveKLController(**arguments)


def test_a_saved_coefficient_that_is_not_finite_is_refused() -> None:
    controller = AdaptiveKLController(0.1, bound=1.0)
    with pytest.raises(ConfigError, match="nan"):
        controller.load_state_dict({"coef": math.nan, "refused": 0})
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
