"""The losses: equal to TRL's on the same tensors, and the same however a batch is split."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import (
    DEAD,
    LIVE,
    LossConfig,
    LossParts,
    LossTotals,
    clip_binds,
    group_advantages,
    importance_ratio,
    kl_k1,
    kl_k2,
    kl_k3,
    loss_mask,
    policy_loss,
)

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
        status[1] = DEAD
    return {
        "new": new,
        "old": new + 0.5 * torch.randn(P, G, L, generator=generator),
        "ref": new + 0.5 * torch.randn(P, G, L, generator=generator),
        "sampler": new + 0.7 * torch.randn(P, G, L, generator=generator),
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
        sampler_logprobs_PGL=t["sampler"],
        ref_logprobs_PGL=t["ref"] if kl_coef else None,
        kl_coef=kl_coef,
        entropies_PGL=t["entropies"],
    )
    parts.loss.backward()
    return parts.loss.detach(), new.grad


def trl(t: dict[str, Tensor], config: LossConfig, kl_coef: float) -> Any:
    """TRL's own `_compute_loss` on the same tensors; its sampler weights are made outside, by `token_truncate`."""
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
        use_vllm=config.sampler_is_cap is not None,
        vllm_importance_sampling_correction=True,
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
        "importance_sampling_ratio": (t["old"] - t["sampler"])
        .exp()
        .clamp(max=config.sampler_is_cap or 0)
        .view(P * G, L),
        "num_items_in_batch": t["mask"].sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.detach(), new.grad


LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
EXTRAS = {
    "plain": {},
    "two-sided": {"delta": 1.5},
    "asymmetric": {"clip_low": 0.1, "clip_high": 0.28},
    "kl with the ratio": {"kl_importance": True},
    "entropy": {"entropy_coef": 0.1},
    "no sampler weights": {"sampler_is_cap": None},
    "tight caps": {"sampler_is_cap": 0.9, "cispo_max": 1.1},
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kl", [0.0, 0.04], ids=["no kl", "kl"])
@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS.keys())
def test_each_loss_and_its_gradient_are_trls(loss: str, level: str, kl: float, extra: dict[str, Any]) -> None:
    config = LossConfig(loss=loss, importance_level=level, **extra)  # type: ignore[arg-type]
    got, want = ours(tensors(), config, kl), trl(tensors(), config, kl)
    torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_completions_masked_out_are_treated_as_trls(loss: str, level: str) -> None:
    t = tensors()
    t["mask"] = loss_mask(t["mask"], torch.arange(P * G).view(P, G) % 3 != 0, mask_truncated=True)
    config = LossConfig(loss=loss, importance_level=level)  # type: ignore[arg-type]
    got, want = ours(t, config, 0.04), trl(t, config, 0.04)
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


@pytest.mark.parametrize("value", [0.0, 0.3, 0.7, 0.9, 1 / 3, math.nan], ids=str)
@pytest.mark.parametrize("group_size", range(2, 17, 2))
@pytest.mark.parametrize("loss", ["dapo", "bnpo", "cispo"])
def test_groups_without_signal_change_nothing_for_the_others(loss: str, group_size: int, value: float) -> None:
    """From rewards: one group with signal and three of equal or missing rewards, against the one alone."""
    generator = torch.Generator().manual_seed(group_size)
    rewards = torch.full((4, group_size), value)
    rewards[0] = torch.arange(group_size) % 2
    advantages = group_advantages(rewards)
    new = -torch.rand(4, group_size, L, generator=generator)
    t = {
        "new": new,
        "old": new + 0.3 * torch.randn(4, group_size, L, generator=generator),
        "sampler": new,
        "entropies": -new,
        "mask": torch.ones(4, group_size, L, dtype=torch.bool),
        "advantages": advantages.advantages_PG,
        "status": advantages.status_P,
    }
    config = LossConfig(loss=loss)  # type: ignore[arg-type]
    (whole, gradient), (alone, alone_gradient) = (
        ours(t, config, 0.0),
        ours({k: v[:1] for k, v in t.items()}, config, 0.0),
    )
    torch.testing.assert_close(whole, alone)
    torch.testing.assert_close(gradient[:1], alone_gradient)
    assert gradient[1:].abs().max().item() == 0.0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dead", [[1], [0, 1, 2]], ids=["one dead group", "all dead"])
def test_dead_groups_still_pull_towards_the_reference(loss: str, dead: list[int]) -> None:
    """With KL in the loss only, and as much as live ones: the KL's own gradient, over all loss tokens."""
    t, config = tensors(), LossConfig(loss=loss)  # type: ignore[arg-type]
    t["advantages"][dead], t["status"][dead] = 0.0, DEAD
    assert ours(t, config, 0.0)[1][dead].abs().max() == 0
    live = t | {"status": torch.full((P,), LIVE), "advantages": torch.zeros(P, G)}
    torch.testing.assert_close(ours(t, config, 0.04)[1][dead], ours(live, config, 0.04)[1][dead])
    assert ours(t, config, 0.04)[1][dead].abs().max() > 0
    with_dead, without = (parts_of(x, config, ref_logprobs_PGL=t["ref"]).kl_loss for x in (t, live))
    torch.testing.assert_close(with_dead, without)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_without_signal_has_a_loss_of_exactly_0(loss: str) -> None:
    t = tensors()
    t["advantages"] = torch.zeros(P, G)
    t["status"] = torch.full((P,), DEAD)
    value, gradient = ours(t, LossConfig(loss=loss), 0.0)  # type: ignore[arg-type]
    assert value.item() == 0.0
    assert gradient.abs().max().item() == 0.0
    t["mask"] = torch.zeros(P, G, L, dtype=torch.bool)
    assert ours(t, LossConfig(loss=loss), 0.04)[0].item() == 0.0  # type: ignore[arg-type]


def trimmed(t: dict[str, Tensor]) -> dict[str, Tensor]:
    """A micro-batch is as long as its own longest completion."""
    longest = int(t["mask"].sum(-1).max())
    return {k: v[..., :longest] if v.dim() == 3 else v for k, v in t.items()}


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(LOSSES),
    st.sampled_from(["token", "sequence"]),
    st.permutations(range(P)),
    st.integers(1, P - 1),
    st.integers(0, 99),
    st.booleans(),
    st.sampled_from(["exclude", "keep"]),
)
def test_any_split_gives_the_same_loss_and_gradient(
    loss: str, level: str, order: list[int], cut: int, seed: int, kl_importance: bool, dead_groups: str
) -> None:
    config = LossConfig(
        loss=loss,  # type: ignore[arg-type]
        importance_level=level,  # type: ignore[arg-type]
        entropy_coef=0.01,
        kl_importance=kl_importance,
        dead_groups=dead_groups,  # type: ignore[arg-type]
    )
    t = tensors(seed, dead=True)
    whole_loss, whole_grad = ours(t, config, 0.04)
    parts = [trimmed({k: v[ids] for k, v in t.items()}) for ids in (order[:cut], order[cut:])]
    totals = sum(
        (LossTotals.of(p["mask"], p["status"], max_completion_tokens=LIMIT) for p in parts[1:]),
        start=LossTotals.of(parts[0]["mask"], parts[0]["status"], max_completion_tokens=LIMIT),
    )
    shares = [ours(p, config, 0.04, totals) for p in parts]
    torch.testing.assert_close(shares[0][0] + shares[1][0], whole_loss, atol=1e-5, rtol=1e-4)
    joined = torch.zeros_like(whole_grad)
    for ids, (_, gradient) in zip((order[:cut], order[cut:]), shares, strict=True):
        joined[ids, :, : gradient.shape[-1]] = gradient
    torch.testing.assert_close(joined, whole_grad, atol=1e-6, rtol=1e-4)


def test_truncated_completions_can_leave_the_loss() -> None:
    mask = torch.ones(1, 2, 3, dtype=torch.bool)
    terminated = torch.tensor([[True, False]])
    assert loss_mask(mask, terminated, mask_truncated=True).sum((0, 2)).tolist() == [3, 0]
    assert loss_mask(mask, terminated, mask_truncated=False).sum((0, 2)).tolist() == [3, 3]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30], ids=str)
def test_what_stands_in_padding_reaches_neither_loss_nor_gradient(loss: str, level: str, junk: float) -> None:
    config = LossConfig(loss=loss, importance_level=level, kl_importance=True, entropy_coef=0.1)  # type: ignore[arg-type]
    clean, dirty = tensors(), tensors()
    for name in ("new", "old", "ref", "sampler", "entropies"):
        dirty[name] = torch.where(dirty["mask"], dirty[name], junk)
    got, want = ours(dirty, config, 0.04), ours(clean, config, 0.04)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    assert got[1][~clean["mask"]].abs().max().item() == 0.0


@pytest.mark.parametrize("loss", LOSSES)
def test_a_nan_among_the_loss_tokens_is_seen_in_the_loss(loss: str) -> None:
    t = tensors()
    t["new"][0, 0, 0] = math.nan
    assert torch.isnan(ours(t, LossConfig(loss=loss), 0.0)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_stops_exactly_where_the_clip_binds(loss: str, seed: int) -> None:
    t = tensors(seed)
    config = LossConfig(loss=loss, sampler_is_cap=None)  # type: ignore[arg-type]
    ratio = importance_ratio(t["new"], t["old"], t["mask"], "token")
    low, high = clip_binds(ratio, t["advantages"], t["mask"], *config.clip_margins)
    assert low.any()
    assert high.any()
    gradient = ours(t, config, 0.0)[1]
    assert torch.equal(gradient == 0, low | high | ~t["mask"])


def parts_of(t: dict[str, Tensor], config: LossConfig, **more: Any) -> LossParts:
    return policy_loss(
        t["new"].clone().requires_grad_(),
        old_logprobs_PGL=t["old"],
        advantages_PG=t["advantages"],
        mask_PGL=t["mask"],
        status_P=t["status"],
        totals=LossTotals.of(t["mask"], t["status"], max_completion_tokens=LIMIT),
        config=config,
        **more,
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_the_parts_make_up_the_loss(loss: str) -> None:
    t, config = tensors(), LossConfig(loss=loss, entropy_coef=0.1)  # type: ignore[arg-type]
    parts = parts_of(t, config, ref_logprobs_PGL=t["ref"], kl_coef=0.04, entropies_PGL=t["entropies"])
    torch.testing.assert_close(parts.loss.detach(), parts.policy_loss + 0.04 * parts.kl_loss - 0.1 * parts.entropy)
    torch.testing.assert_close(parts.entropy, t["entropies"][t["mask"]].mean())
    assert not any(p.requires_grad for p in (parts.policy_loss, parts.kl_loss, parts.entropy))


def test_a_kl_without_coefficient_is_measured_and_pulls_nothing() -> None:
    t, config = tensors(), LossConfig()
    without = parts_of(t, config)
    measured = parts_of(t, config, ref_logprobs_PGL=t["ref"], kl_coef=0.0, entropies_PGL=t["entropies"])
    torch.testing.assert_close(measured.kl_loss, kl_k3(t["new"], t["ref"])[t["mask"]].mean())
    assert torch.equal(measured.loss, without.loss)
    assert (without.kl_loss.item(), without.entropy.item()) == (0.0, 0.0)


@pytest.mark.parametrize(("estimator", "function"), [("k1", kl_k1), ("k2", kl_k2), ("k3", kl_k3)])
def test_the_kl_estimator_is_the_chosen_one(estimator: str, function: Any) -> None:
    t = tensors()
    parts = parts_of(t, LossConfig(kl_estimator=estimator), ref_logprobs_PGL=t["ref"], kl_coef=1.0)  # type: ignore[arg-type]
    torch.testing.assert_close(parts.kl_loss, function(t["new"], t["ref"])[t["mask"]].mean())


ONE_TOKEN = {  # log policy, log old, log sampler, advantage, settings, loss
    "on policy": (-1.0, -1.0, -1.0, 1.0, {}, -1.0),
    "clipped above": (0.0, -1.0, -1.0, 1.0, {}, -1.2),
    "not clipped above against it": (0.0, -1.0, -1.0, -1.0, {}, math.e),
    "two-sided": (0.0, -1.0, -1.0, -1.0, {"delta": 2.0}, 2.0),
    "clipped below": (-2.0, -1.0, -1.0, -1.0, {}, 0.8),
    "cispo at its cap": (-0.5, -9.0, -9.0, 1.0, {"loss": "cispo", "cispo_max": 5.0}, 2.5),
    "sampler weight": (-1.0, -1.0, -1.5, 1.0, {}, -math.exp(0.5)),
    "sampler weight at its cap": (-1.0, -1.0, -9.0, 1.0, {}, -2.0),
    "sampler weight off": (-1.0, -1.0, -9.0, 1.0, {"sampler_is_cap": None}, -1.0),
    "sampler unknown": (-1.0, -1.0, math.nan, 1.0, {}, -1.0),
    "ratio beyond e^20": (0.0, -90.0, -90.0, -1.0, {}, math.exp(20)),
}


@pytest.mark.parametrize(
    ("new", "old", "sampler", "advantage", "settings", "loss"), ONE_TOKEN.values(), ids=ONE_TOKEN.keys()
)
def test_one_token_by_hand(
    new: float, old: float, sampler: float, advantage: float, settings: dict[str, Any], loss: float
) -> None:
    t = {name: torch.full((1, 1, 1), value) for name, value in (("new", new), ("old", old))}
    t |= {"mask": torch.ones(1, 1, 1, dtype=torch.bool), "status": torch.tensor([LIVE])}
    t["advantages"] = torch.full((1, 1), advantage)
    parts = parts_of(t, LossConfig(**settings), sampler_logprobs_PGL=torch.full((1, 1, 1), sampler))
    assert parts.loss.item() == pytest.approx(loss, rel=1e-5)


def test_totals_travel_as_one_tensor() -> None:
    t = tensors(dead=True)
    own = LossTotals.of(t["mask"], t["status"], max_completion_tokens=LIMIT)
    tokens = t["mask"].sum((1, 2)).tolist()
    assert own.to_tensor().tolist() == [P * G, sum(tokens), tokens[0] + tokens[2]]
    assert LossTotals.from_tensor(own.to_tensor(), like=own) == own
    with pytest.raises(ConfigError, match="8 here and 9 there"):
        own + LossTotals.of(t["mask"], t["status"], max_completion_tokens=9)


BAD = {
    "a typo": ({"loss": "grop"}, "'grop': did you mean 'grpo'.* grpo, bnpo, dr_grpo, dapo, cispo"),
    "unknown loss": ({"loss": "ppo9"}, "grpo, bnpo, dr_grpo, dapo, cispo"),
    "unknown level": ({"importance_level": "word"}, "token, sequence"),
    "unknown estimator": ({"kl_estimator": "k4"}, "k1, k2, k3"),
    "unknown handling of dead groups": ({"dead_groups": "drop"}, "exclude, keep"),
    "delta inside the clip": ({"delta": 1.1}, "above 1"),
    "delta not a number": ({"delta": math.nan}, "above 1"),
    "negative clip": ({"clip_low": -0.1}, "clip_low"),
    "clip below 0": ({"clip_low": 1.1}, "clip_low"),
    "clip not a number": ({"clip_high": math.nan}, "clip_high"),
    "no weight": ({"cispo_max": 0.0}, "cispo_max"),
    "no sampler weight": ({"sampler_is_cap": 0.0}, "null for off"),
    "entropy not a number": ({"entropy_coef": math.nan}, "entropy_coef"),
}


@pytest.mark.parametrize(("changes", "named"), BAD.values(), ids=BAD.keys())
def test_a_config_that_cannot_hold_says_so(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LossConfig(**changes)
