"""The losses: equal to TRL's on the same tensors, and the same however a batch is split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import LIVE, LossConfig, LossTotals, clip_binds, group_status, loss_mask, policy_loss

P, G, L, LIMIT = 3, 4, 5, 8


def tensors(seed: int = 0, *, dead: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *s: torch.rand(*s, generator=generator)  # noqa: E731
    new = -2 * rand(P, G, L)
    lengths = torch.randint(1, L + 1, (P, G), generator=generator)
    advantages = torch.randn(P, G, generator=generator)
    status = torch.full((P,), LIVE)
    if dead:
        advantages[1] = 0.0
        status[1] = 1
    return {
        "new": new,
        "old": new + 0.5 * torch.randn(P, G, L, generator=generator),
        "ref": new + 0.5 * torch.randn(P, G, L, generator=generator),
        "entropies": rand(P, G, L),
        "advantages": advantages,
        "mask": torch.arange(L) < lengths.unsqueeze(-1),
        "status": status,
    }


def ours(t: dict[str, Tensor], config: LossConfig, kl_coef: float, totals: LossTotals | None = None) -> Any:
    new = t["new"].clone().requires_grad_()
    parts = policy_loss(
        new,
        old_logprobs_PGL=t["old"],
        advantages_PG=t["advantages"],
        mask_PGL=t["mask"],
        status_P=t["status"],
        totals=totals or LossTotals.of(t["mask"], t["status"], max_completion_tokens=LIMIT),
        config=config,
        ref_logprobs_PGL=t["ref"] if kl_coef else None,
        kl_coef=kl_coef,
        entropies_PGL=t["entropies"],
    )
    parts.loss.backward()
    return parts.loss.detach(), new.grad


def trl(t: dict[str, Tensor], config: LossConfig, kl_coef: float) -> Any:
    """TRL's own `_compute_loss` on the same tensors."""
    from collections import defaultdict

    from trl import GRPOTrainer

    new = t["new"].clone().requires_grad_()
    flat = new.view(P * G, L)
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, device="cpu", sync_gradients=True, reduce=lambda x, **_: x
    )
    args = SimpleNamespace(
        delta=config.delta, use_bias_correction_kl=config.kl_importance, steps_per_generation=1, entropy_target=0.0
    )
    trainer: Any = SimpleNamespace(
        args=args,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        loss_type=config.loss,
        importance_sampling_level=config.importance_level,
        epsilon_low=config.clip_low,
        epsilon_high=config.cispo_max if config.loss == "cispo" else config.clip_high,
        beta=kl_coef,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        entropy_coef=config.entropy_coef,
        _entropy_bonus_enabled=config.entropy_coef != 0,
        max_completion_length=LIMIT,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (flat, t["entropies"].view(P * G, L), None),
    )
    ids = torch.zeros(P * G, L, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": t["mask"].view(P * G, L).long(),
        "advantages": t["advantages"].view(-1),
        "old_per_token_logps": t["old"].view(P * G, L),
        "ref_per_token_logps": t["ref"].view(P * G, L),
        "num_items_in_batch": t["mask"].sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.detach(), new.grad


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kl", [0.0, 0.04], ids=["no kl", "kl"])
@pytest.mark.parametrize(
    "extra",
    [{}, {"delta": 1.5}, {"clip_low": 0.1, "clip_high": 0.28, "kl_importance": True}, {"entropy_coef": 0.1}],
    ids=["plain", "two-sided", "asymmetric", "entropy"],
)
def test_each_loss_and_its_gradient_are_trls(loss: str, level: str, kl: float, extra: dict[str, Any]) -> None:
    config = LossConfig(loss=loss, importance_level=level, **extra)  # type: ignore[arg-type]
    got, want = ours(tensors(), config, kl), trl(tensors(), config, kl)
    torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss", ["dapo", "bnpo", "cispo"])
def test_dead_groups_dilute_others_only_when_kept(loss: str) -> None:
    t = tensors(dead=True)
    alive = {k: v[[0, 2]] for k, v in t.items()}
    excluded, kept = (LossConfig(loss=loss, dead_groups=d) for d in ("exclude", "keep"))  # type: ignore[arg-type]
    torch.testing.assert_close(ours(t, excluded, 0.0)[0], ours(alive, excluded, 0.0)[0])
    torch.testing.assert_close(ours(t, kept, 0.0)[0], trl(t, kept, 0.0)[0], atol=1e-5, rtol=1e-5)
    assert ours(t, kept, 0.0)[0].abs() < ours(t, excluded, 0.0)[0].abs()


def test_dead_groups_still_pull_towards_the_reference() -> None:
    gradient = ours(tensors(dead=True), LossConfig(loss="dapo"), 0.04)[1]
    assert gradient[1].abs().max() > 0
    assert ours(tensors(dead=True), LossConfig(loss="dapo"), 0.0)[1][1].abs().max() == 0


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_a_batch_without_signal_has_a_loss_of_exactly_0(loss: str) -> None:
    t = tensors()
    t["advantages"] = torch.zeros(P, G)
    t["status"] = torch.ones(P, dtype=torch.int64)
    value, gradient = ours(t, LossConfig(loss=loss), 0.0)  # type: ignore[arg-type]
    assert value.item() == 0.0
    assert gradient.abs().max().item() == 0.0
    t["mask"] = torch.zeros(P, G, L, dtype=torch.bool)
    assert ours(t, LossConfig(loss=loss), 0.04)[0].item() == 0.0  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]),
    st.sampled_from(["token", "sequence"]),
    st.permutations(range(P)),
    st.integers(1, P - 1),
    st.integers(0, 99),
)
def test_any_split_gives_the_same_loss_and_gradient(
    loss: str, level: str, order: list[int], cut: int, seed: int
) -> None:
    config = LossConfig(loss=loss, importance_level=level, entropy_coef=0.01)  # type: ignore[arg-type]
    t = tensors(seed, dead=True)
    whole_loss, whole_grad = ours(t, config, 0.04)
    parts = [{k: v[ids] for k, v in t.items()} for ids in (order[:cut], order[cut:])]
    totals = sum(
        (LossTotals.of(p["mask"], p["status"], max_completion_tokens=LIMIT) for p in parts[1:]),
        start=LossTotals.of(parts[0]["mask"], parts[0]["status"], max_completion_tokens=LIMIT),
    )
    shares = [ours(p, config, 0.04, totals) for p in parts]
    torch.testing.assert_close(shares[0][0] + shares[1][0], whole_loss, atol=1e-5, rtol=1e-4)
    joined = torch.empty_like(whole_grad)
    joined[order[:cut]], joined[order[cut:]] = shares[0][1], shares[1][1]
    torch.testing.assert_close(joined, whole_grad, atol=1e-6, rtol=1e-4)


def test_clipping_is_counted_where_it_binds_only() -> None:
    """Ratio 0.5 binds for a negative advantage, 2.0 for a positive one; the other two pass gradient."""
    ratio = torch.tensor([[[0.5, 2.0, 1.0], [0.5, 2.0, 1.0]]])
    low, high = clip_binds(ratio, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, 3, dtype=torch.bool), 0.2, 0.2)
    assert low.tolist() == [[[False, False, False], [True, False, False]]]
    assert high.tolist() == [[[False, True, False], [False, False, False]]]


def test_truncated_completions_can_leave_the_loss() -> None:
    mask = torch.ones(1, 2, 3, dtype=torch.bool)
    terminated = torch.tensor([[True, False]])
    assert loss_mask(mask, terminated, mask_truncated=True).sum((0, 2)).tolist() == [3, 0]
    assert loss_mask(mask, terminated, mask_truncated=False).sum((0, 2)).tolist() == [3, 3]


def test_the_sampler_weight_is_truncated() -> None:
    """One token, A = 1, on-policy ratio 1: loss -w with w = min(exp(old - sampler), cap)."""
    one = torch.zeros(1, 2, 1)
    for sampler, want in ((torch.tensor([[[-0.5], [-9.0]]]), [1.6487, 2.0]),):
        parts = [
            policy_loss(
                one,
                old_logprobs_PGL=one,
                advantages_PG=torch.tensor([[float(i == 0), float(i == 1)]]),
                mask_PGL=torch.ones(1, 2, 1, dtype=torch.bool),
                status_P=torch.tensor([LIVE]),
                totals=LossTotals.of(
                    torch.ones(1, 1, 1, dtype=torch.bool), torch.tensor([LIVE]), max_completion_tokens=1
                ),
                config=LossConfig(sampler_is_cap=2.0),
                sampler_logprobs_PGL=sampler,
            ).loss.item()
            for i in range(2)
        ]
        assert parts == pytest.approx([-w for w in want], abs=1e-4)


BAD = {
    "unknown loss": ({"loss": "grop"}, "grpo"),
    "delta inside the clip": ({"delta": 1.1}, "above 1"),
    "negative clip": ({"clip_low": -0.1}, "clip_low"),
    "unknown estimator": ({"kl_estimator": "k4"}, "k3"),
}


@pytest.mark.parametrize(("changes", "named"), BAD.values(), ids=BAD.keys())
def test_a_config_that_cannot_hold_says_so(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LossConfig(**changes)


def test_group_status_needs_two_rewards() -> None:
    assert group_status(torch.tensor([[float("nan"), 1.0]])).tolist() == [2]
