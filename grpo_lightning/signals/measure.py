"""From a step's tensors to its signals.

`measure` gives one rank's partials; `finish` joins the ranks' packed vectors into numbers. The same data split
over ranks in any way gives the same signals. Not measured is absent, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_lightning.objective import (
    DEAD,
    UNSCORABLE,
    StepRecord,
    clip_binds,
    group_status,
    importance_ratio,
    kl_k1,
    kl_k2,
    kl_k3,
)
from grpo_lightning.signals.partials import Partials, merge

__all__ = ["finish", "measure"]

TAIL, FLAT = 1.0, 0.02


def finish(packs: Sequence[Tensor], own: Partials, record: StepRecord) -> dict[str, float]:
    """The step's signals from every rank's packed partials; `own` and `record` are any rank's: layout and shared values."""
    values = merge(packs, own.names())
    out = _means(values) | _spreads(values) | _extremes(values)
    out |= _fractions(values) | _shared(record)
    out["nonfinite_count"] = values["nonfinite"] + sum(
        not math.isfinite(v) for v in (record.loss, record.grad_norm)
    )
    seconds = out.get("step_seconds", 0.0)
    if seconds > 0:
        out["tokens_per_second"] = values["tokens"] / seconds
    return out


@torch.no_grad()
def measure(record: StepRecord) -> Partials:
    """This rank's partials; their layout depends on the configuration alone."""
    p = Partials()
    _rewards(p, record)
    _advantages(p, record)
    _policy(p, record)
    _responses(p, record)
    for name in ("rollout", "reward", "score", "update", "step"):
        p.greatest(f"{name}_seconds", torch.tensor([record.seconds.get(name, -math.inf)], dtype=torch.float64))
    for name in record.reward_names:
        seconds = record.reward_seconds.get(name, -math.inf)
        p.greatest(f"reward/{name}_seconds", torch.tensor([seconds], dtype=torch.float64))
    return p


def _rewards(p: Partials, record: StepRecord) -> None:
    rewards_PG = record.rewards_PG.double()
    present_PG = torch.isfinite(rewards_PG)
    status_P = group_status(rewards_PG)
    scorable_P = status_P != UNSCORABLE
    p.moments("reward", rewards_PG)
    p.greatest("reward_max", rewards_PG)
    p.least("reward_min", rewards_PG)
    std_P, range_P = _group_spread(rewards_PG, present_PG)
    p.mean("group_reward_std", std_P, scorable_P)
    p.greatest("group_reward_std_max", std_P, scorable_P)
    p.mean("group_reward_range", range_P, scorable_P)
    p.mean("dead_group_fraction", (status_P == DEAD).double())
    p.mean("dead_group_fraction_unscorable", (~scorable_P).double())
    for k, name in enumerate(record.reward_names):
        own_PG = record.rewards_PGK[..., k]
        p.moments(f"reward/{name}", own_PG)
        p.add(f"reward/{name}_missing", (~torch.isfinite(own_PG)).sum())
        p.add(f"reward/{name}_errors", torch.tensor(record.reward_errors.get(name, 0)))
    infinite = torch.isinf(record.rewards_PGK).sum()
    p.add("nonfinite", infinite + _broken(record.logprobs_PGL, record) + _broken(record.entropies_PGL, record))


def _broken(values_PGL: Tensor | None, record: StepRecord) -> Tensor:
    mask = record.rollouts.completion_mask_PGL
    if values_PGL is None:
        return mask.new_zeros((), dtype=torch.int64)
    return (~torch.isfinite(values_PGL) & mask).sum()


def _group_spread(rewards_PG: Tensor, present_PG: Tensor) -> tuple[Tensor, Tensor]:
    count_P1 = present_PG.sum(1, keepdim=True).double()
    filled_PG = torch.where(present_PG, rewards_PG, 0.0)
    mean_P1 = filled_PG.sum(1, keepdim=True) / count_P1.clamp(min=1)
    squares_P = torch.where(present_PG, rewards_PG - mean_P1, 0.0).square().sum(1)
    std_P = (squares_P / (count_P1.squeeze(1) - 1).clamp(min=1)).sqrt()
    highest_P = torch.where(present_PG, rewards_PG, -torch.inf).amax(1)
    lowest_P = torch.where(present_PG, rewards_PG, torch.inf).amin(1)
    return std_P, highest_P - lowest_P


def _advantages(p: Partials, record: StepRecord) -> None:
    advantages_PG = record.advantages_PG.double()
    p.moments("advantage", advantages_PG)
    p.mean("advantage_tail_fraction", (advantages_PG.abs() > TAIL).double())
    p.mean("advantage_flat_fraction", (advantages_PG.abs() < FLAT).double())
    with_signal_PGL = (advantages_PG != 0).unsqueeze(-1).expand_as(record.loss_mask_PGL)
    p.mean("signal_token_fraction", with_signal_PGL.double(), record.loss_mask_PGL)


def _policy(p: Partials, record: StepRecord) -> None:
    mask = record.loss_mask_PGL
    new, old, ref = record.logprobs_PGL, record.old_logprobs_PGL, record.ref_logprobs_PGL
    if ref is not None:
        kl_PGL = kl_k3(new, ref)
        p.mean("kl", kl_PGL, mask)
        p.greatest("kl_max", kl_PGL, mask)
        p.mean("kl_k1", kl_k1(new, ref), mask)
        p.mean("kl_k2", kl_k2(new, ref), mask)
    if record.entropies_PGL is not None:
        p.mean("entropy", record.entropies_PGL, record.rollouts.completion_mask_PGL)
    level = "sequence" if record.importance_level == "sequence" else "token"
    ratio = importance_ratio(new, old, mask, level).expand_as(new)
    p.mean("ratio_mean", ratio, mask)
    p.greatest("ratio_max", ratio, mask)
    low, high = clip_binds(ratio, record.advantages_PG, mask, record.clip_low, record.clip_high)
    p.mean("clip_low_fraction", low.double(), mask)
    p.mean("clip_high_fraction", high.double(), mask)
    sampler = record.rollouts.sampler_logprobs_PGL
    p.mean("rollout_mismatch_kl", sampler - old, record.rollouts.completion_mask_PGL)


def _responses(p: Partials, record: StepRecord) -> None:
    lengths_PG = record.rollouts.lengths_PG.double()
    terminated_PG = record.rollouts.terminated_PG
    p.mean("response_length_mean", lengths_PG)
    p.greatest("response_length_max", lengths_PG)
    p.mean("truncated_fraction", (~terminated_PG).double())
    p.mean("empty_fraction", ((lengths_PG <= 1) & terminated_PG).double())
    p.add("tokens", lengths_PG.sum())
    prompt_P = record.rollouts.prompt_mask_PS.sum(-1).double()
    p.mean("prompt_length_mean", prompt_P)
    p.greatest("prompt_length_max", prompt_P)


def _means(values: dict[str, float]) -> dict[str, float]:
    names = [n.removesuffix("/count") for n in values if n.endswith("/count")]
    means = {n: values[f"{n}/total"] / values[f"{n}/count"] for n in names if values[f"{n}/count"]}
    with_spread = [n for n in means if f"{n}/squares" in values]
    return {f"{n}_mean" if n in with_spread else n: v for n, v in means.items()}


def _spreads(values: dict[str, float]) -> dict[str, float]:
    out = {}
    for name in (n.removesuffix("/squares") for n in values if n.endswith("/squares")):
        count, total = values[f"{name}/count"], values[f"{name}/total"]
        if count > 1:
            deviation = max(values[f"{name}/squares"] - total * total / count, 0.0)
            out[f"{name}_std"] = math.sqrt(deviation / (count - 1))
    return out


def _extremes(values: dict[str, float]) -> dict[str, float]:
    found = {n: v for n, v in values.items() if n.endswith(("_max", "_min", "_seconds")) and math.isfinite(v)}
    return {n.removeprefix("-"): -v if n.startswith("-") else v for n, v in found.items()}


def _fractions(values: dict[str, float]) -> dict[str, float]:
    return {n: v for n, v in values.items() if n.endswith(("_missing", "_errors"))}


def _shared(record: StepRecord) -> dict[str, float]:
    """What is one number for all ranks."""
    out = {
        "loss": record.loss,
        "policy_loss": record.policy_loss,
        "lr": record.lr,
        "grad_norm": record.grad_norm,
        "grad_norm_clipped": record.grad_norm_clipped,
        "updates_skipped": float(record.update_skipped),
    }
    if record.kl_loss is not None:
        out["kl_loss"] = record.kl_loss
    if record.kl_coef is not None:
        out["kl_coef"] = record.kl_coef
    return out
