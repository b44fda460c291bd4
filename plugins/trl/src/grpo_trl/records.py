"""From what was seen of an optimizer step to the records that signals are measured on.

What differs from a step of grpo-lightning's own trainer:

1. Rewards, advantages and responses are those of the whole generation batches that the step took rollouts from: groups stay
   whole. Log-probs and entropies are those of the step's own rollouts.
2. The totals of the rewards are TRL's: a function that gave None counts as 0, unless all of them did.
3. An infinite reward stays infinite in TRL, which then gives its whole group the advantage 0. Such a group counts in
   `rollouts_unrepaired`.
4. What TRL does not show is absent: the loss's parts, and without sampler log-probs the mismatch to the sampler.

Tensor letters: ``B`` rollouts of all ranks, ``L`` completion tokens, ``S`` prompt tokens, ``K`` reward functions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_lightning import signals
from grpo_lightning.errors import DataError
from grpo_lightning.objective import Rollouts, StepRecord
from grpo_lightning.signals import CATALOGUE, UpdateSize
from grpo_trl.hooks import Batch, Part, Seen

__all__ = ["Facts", "StepFacts", "absent_names", "build_record", "measured"]

Gather = Callable[[Tensor, float, bool], Tensor]  # a tensor [B of this rank, …], its padding's value, padded in front

_CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
_OF_TOKENS = frozenset(
    {name for name, entry in CATALOGUE.items() if entry.family == "policy"}
    | {f"nonfinite_count_{s}" for s in ("logprobs", "old_logprobs", "ref_logprobs", "entropies", "sampler_logprobs")}
)
_OF_SAMPLER = frozenset({"rollout_mismatch_kl", "rollout_mismatch_max", "nonfinite_count_sampler_logprobs"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What stays the same during a run."""

    group_size: int
    reward_names: list[str]
    reward_weights: list[float]
    beta: float  # 0: no reference
    clip_low: float
    clip_high: float
    importance_level: str
    loss_type: str
    loss_is_policy: bool  # nothing but the policy's loss in it
    max_completion_tokens: int
    max_grad_norm: float  # 0: no clipping
    end_tokens: frozenset[int]
    source_column: str | None

    @classmethod
    def of(cls, trainer: Any, *, source_column: str | None = None) -> Facts:
        """The facts of a `GRPOTrainer`."""
        plain = not (getattr(trainer, "_entropy_bonus_enabled", False) or getattr(trainer, "aux_loss_enabled", False))
        return cls(
            group_size=trainer.num_generations,
            reward_names=_different(trainer.reward_func_names),
            reward_weights=[float(w) for w in trainer.reward_weights],
            beta=float(trainer.beta),
            clip_low=float(trainer.epsilon_low),
            clip_high=float(trainer.epsilon_high),
            importance_level=trainer.importance_sampling_level,
            loss_type=trainer.loss_type,
            loss_is_policy=plain and trainer.beta == 0.0,
            max_completion_tokens=trainer.max_completion_length,
            max_grad_norm=float(trainer.args.max_grad_norm or 0.0),
            end_tokens=frozenset(trainer.eos_token_ids),
            source_column=source_column,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What one optimizer step adds to what was seen."""

    step: int
    loss: float
    lr: float
    update_skipped: bool
    seconds: float


def _different(names: Sequence[str]) -> list[str]:
    """Two functions of one name are told apart."""
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        out.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return out


# ---------------------------------------------------------------- the rollouts of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rollouts:
    """The rollouts of all ranks, groups together."""

    prompt_ids_BS: Tensor
    prompt_mask_BS: Tensor
    completion_ids_BL: Tensor
    completion_mask_BL: Tensor  # bool: up to and including the EOS, tool tokens too
    loss_mask_BL: Tensor  # bool
    ended_B: Tensor
    seen_B: Tensor  # bool: among this step's own
    advantages_B: Tensor
    row_ids_B: Tensor
    logprobs_BL: Tensor  # NaN where not seen
    entropies_BL: Tensor
    old_BL: Tensor | None
    ref_BL: Tensor | None
    sampler_BL: Tensor | None
    rewards_BK: Tensor


def build_record(seen: Seen, facts: Facts, own: StepFacts, gather: Gather) -> tuple[StepRecord, Tensor]:
    """The step's record, and which of its rollouts [P, G] the step itself saw; log-probs of the others are NaN."""
    batches = seen.batches()
    r = _joined([_gathered(b, [p for p in seen.parts if p.batch is b], facts, gather) for b in batches])
    size = facts.group_size
    count = len(r.completion_ids_BL)
    if count % size:
        raise DataError(f"{count} rollouts don't make groups of {size}.")
    fresh = [b for b in batches if not b.used]
    rewards_PG = _totals(r.rewards_BK, facts).view(-1, size)
    broken_P = torch.isinf(r.rewards_BK).any(-1).view(-1, size).any(-1)
    shape = (count // size, size, -1)
    record = StepRecord(
        step=own.step,
        rollouts=Rollouts(
            prompt_ids_PS=r.prompt_ids_BS[::size],
            prompt_mask_PS=r.prompt_mask_BS[::size].bool(),
            completion_ids_PGL=r.completion_ids_BL.view(shape),
            completion_mask_PGL=r.completion_mask_BL.view(shape),
            terminated_PG=r.ended_B.view(-1, size),
            sampler_logprobs_PGL=(torch.zeros_like(r.logprobs_BL) if r.sampler_BL is None else r.sampler_BL).view(
                shape
            ),
        ),
        row_ids_P=r.row_ids_B[::size],
        sources=_sources(batches, facts, count // size),
        reward_names=facts.reward_names,
        reward_weights=facts.reward_weights,
        rewards_PGK=r.rewards_BK.double().view(-1, size, r.rewards_BK.shape[-1]),
        rewards_PG=rewards_PG,
        advantages_PG=r.advantages_B.float().view(-1, size),
        loss_mask_PGL=r.loss_mask_BL.view(shape),
        logprobs_PGL=(logprobs := r.logprobs_BL.view(shape)),
        old_logprobs_PGL=logprobs if r.old_BL is None else r.old_BL.view(shape),
        ref_logprobs_PGL=None if r.ref_BL is None else r.ref_BL.view(shape),
        entropies_PGL=r.entropies_BL.view(shape),
        loss=own.loss,
        policy_loss=own.loss,
        kl_loss=None,
        kl_coef=facts.beta or None,
        clip_low=facts.clip_low,
        clip_high=facts.clip_high,
        importance_level=facts.importance_level,
        grad_norm=(norm := seen.grad_norm or 0.0),
        grad_norm_clipped=facts.max_grad_norm if 0.0 < facts.max_grad_norm < norm else norm,
        lr=own.lr,
        update_skipped=own.update_skipped,
        max_completion_tokens=facts.max_completion_tokens,
        reward_metrics={name: value for b in fresh for name, value in b.metrics.items()},
        reward_extras=_extras(batches, count),
        seconds=_seconds(fresh, own.seconds),
        unrepaired_groups=int(broken_P.sum()) if fresh else 0,
        new_rollouts=bool(fresh),
    )
    return record, r.seen_B.view(-1, size)


def _gathered(batch: Batch, parts: Sequence[Part], facts: Facts, gather: Gather) -> _Rollouts:
    t = batch.tensors
    ids = t["completion_ids"]
    device = ids.device
    places = torch.arange(ids.shape[1], device=device)
    completion_mask = places < torch.tensor(batch.lengths, device=device).unsqueeze(1)
    loss_mask = t["completion_mask"] * t["tool_mask"] if "tool_mask" in t else t["completion_mask"]
    ended = [token in facts.end_tokens for token in batch.last_tokens]
    advantages = t["advantages"] if t["advantages"].dim() == 1 else t["advantages"][:, 0]
    logprobs, entropies, seen = _scattered(parts, ids)
    sampler = t.get("sampling_per_token_logps")
    if sampler is not None:  # those that the engine could not score count as equal
        sampler = torch.where(torch.isnan(sampler), t.get("old_per_token_logps", logprobs), sampler)
    rows = [zlib.crc32(repr(row.get("prompt")).encode()) for row in batch.rows]
    nan = float("nan")
    optional = {
        "old_BL": t.get("old_per_token_logps"),
        "ref_BL": t.get("ref_per_token_logps"),
        "sampler_BL": sampler,
    }
    return _Rollouts(
        prompt_ids_BS=gather(t["prompt_ids"], 0, True),
        prompt_mask_BS=gather(t["prompt_mask"].bool(), 0, True),
        completion_ids_BL=gather(ids, 0, False),
        completion_mask_BL=gather(completion_mask, 0, False),
        loss_mask_BL=gather(loss_mask.bool() & completion_mask, 0, False),
        ended_B=gather(torch.tensor(ended, device=device), 0, False),
        seen_B=gather(seen, 0, False),
        advantages_B=gather(advantages, 0, False),
        row_ids_B=gather(torch.tensor(rows, device=device), 0, False),
        logprobs_BL=gather(logprobs, nan, False),
        entropies_BL=gather(entropies, nan, False),
        rewards_BK=batch.rewards,
        **{name: None if value is None else gather(value.float(), 0, False) for name, value in optional.items()},
    )


def _scattered(parts: Sequence[Part], ids_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies at their rollouts' places, and which rollouts have any."""
    logprobs = torch.full(ids_BL.shape, float("nan"), device=ids_BL.device)
    entropies, seen = logprobs.clone(), torch.zeros(len(ids_BL), dtype=torch.bool, device=ids_BL.device)
    for part in parts:
        logprobs[part.places] = part.logprobs.float()
        seen[part.places] = True
        if part.entropies is not None:
            entropies[part.places] = part.entropies.float()
    return logprobs, entropies, seen


def _joined(several: Sequence[_Rollouts]) -> _Rollouts:
    """Generation batches one after the other, padded to the longest."""
    if len(several) == 1:
        return several[0]
    joined: dict[str, Tensor | None] = {}
    for name in _Rollouts.__dataclass_fields__:
        values = [getattr(one, name) for one in several]
        joined[name] = None if values[0] is None else torch.cat(_equal(values, name))
    return _Rollouts(**joined)  # type: ignore[arg-type]


def _equal(values: Sequence[Tensor], name: str) -> list[Tensor]:
    if values[0].dim() < 2 or name == "rewards_BK":
        return list(values)
    widest = max(value.shape[1] for value in values)
    before = name.startswith("prompt")
    return [pad(v, (widest - v.shape[1], 0) if before else (0, widest - v.shape[1])) for v in values]


def _totals(rewards_BK: Tensor, facts: Facts) -> Tensor:
    weights_K = torch.tensor(facts.reward_weights, dtype=torch.float64, device=rewards_BK.device)
    totals_B = (rewards_BK.double() * weights_K).nansum(-1)
    return totals_B.masked_fill(torch.isnan(rewards_BK).all(-1), torch.nan)


def _sources(batches: Sequence[Batch], facts: Facts, groups: int) -> list[str]:
    """The sources of this rank's groups; none where a column is not named or the groups are spread over ranks."""
    rows = [row for batch in batches for row in batch.rows[:: facts.group_size]]
    if facts.source_column is None or len(rows) != groups:
        return [""] * groups
    return [str(row.get(facts.source_column, "")) for row in rows]


def _extras(batches: Sequence[Batch], count: int) -> dict[str, list[Any]]:
    names = set.intersection(*(set(batch.extras) for batch in batches)) if batches else set()
    joined = {name: [value for batch in batches for value in batch.extras[name]] for name in sorted(names)}
    return {name: values for name, values in joined.items() if len(values) == count}


def _seconds(fresh: Sequence[Batch], step: float) -> dict[str, float]:
    made = {name: sum(b.seconds[name] for b in fresh) for name in ("rollout", "reward", "score")} if fresh else {}
    return made | {"update": max(step - sum(made.values()), 0.0), "step": step}


# ---------------------------------------------------------------- signals


def measured(
    record: StepRecord, seen_PG: Tensor, *, update: UpdateSize | None, absent: Collection[str]
) -> signals.Joined:
    """The step's signals, without the `absent` ones."""
    whole = bool(seen_PG.all()) and bool((record.loss_mask_PGL == record.rollouts.completion_mask_PGL).all())
    joined = _joined_signals(record if whole else _without_tokens(record), update)
    if not whole:
        of_tokens = _joined_signals(_tokens_of(record, seen_PG), update).values
        for name in _OF_TOKENS:
            joined.values.pop(name, None)
        joined.values.update({name: value for name, value in of_tokens.items() if name in _OF_TOKENS})
    for name in absent:
        joined.values.pop(name, None)
    counts = [v for name, v in joined.values.items() if name.startswith("nonfinite_count_")]
    joined.values["nonfinite_count"] = sum(counts)
    return joined


def _joined_signals(record: StepRecord, update: UpdateSize | None) -> signals.Joined:
    own = signals.measure(record, update=update)
    return signals.join([own.pack()], own, record)


def _without_tokens(record: StepRecord) -> StepRecord:
    nothing = torch.zeros_like(record.logprobs_PGL)
    return replace(record, logprobs_PGL=nothing, old_logprobs_PGL=nothing, ref_logprobs_PGL=None, entropies_PGL=None)


def _tokens_of(record: StepRecord, seen_PG: Tensor) -> StepRecord:
    """The rollouts that the step saw, each a group of its own, with the tokens that its loss counts."""
    at = seen_PG.flatten().nonzero().squeeze(1)
    size = record.rewards_PG.shape[1]

    def pick(values: Tensor) -> Tensor:
        return values.flatten(0, 1)[at].unsqueeze(1)

    mask = pick(record.loss_mask_PGL)
    rollouts = record.rollouts
    logprobs = pick(record.logprobs_PGL)
    same = record.old_logprobs_PGL is record.logprobs_PGL
    return replace(
        record,
        rollouts=Rollouts(
            prompt_ids_PS=rollouts.prompt_ids_PS[at // size],
            prompt_mask_PS=rollouts.prompt_mask_PS[at // size],
            completion_ids_PGL=pick(rollouts.completion_ids_PGL),
            completion_mask_PGL=mask,
            terminated_PG=pick(rollouts.terminated_PG),
            sampler_logprobs_PGL=pick(rollouts.sampler_logprobs_PGL),
        ),
        row_ids_P=record.row_ids_P[at // size],
        sources=[""] * len(at),
        rewards_PGK=pick(record.rewards_PGK),
        rewards_PG=pick(record.rewards_PG),
        advantages_PG=pick(record.advantages_PG),
        loss_mask_PGL=mask,
        logprobs_PGL=logprobs,
        old_logprobs_PGL=logprobs if same else pick(record.old_logprobs_PGL),
        ref_logprobs_PGL=None if record.ref_logprobs_PGL is None else pick(record.ref_logprobs_PGL),
        entropies_PGL=None if record.entropies_PGL is None else pick(record.entropies_PGL),
    )


def absent_names(seen: Seen, facts: Facts) -> set[str]:
    """The signals that this step of TRL does not show."""
    names = {"rollouts_resampled"}  # it never does
    if not all("sampling_per_token_logps" in batch.tensors for batch in seen.batches()):
        names |= _OF_SAMPLER
    if not facts.loss_is_policy:
        names.add("policy_loss")
    if facts.loss_type not in _CLIPPED_LOSSES:
        names |= {"clip_low_fraction", "clip_high_fraction"}
    if seen.grad_norm is None:
        names |= {"grad_norm", "grad_norm_clipped"}
    return names
