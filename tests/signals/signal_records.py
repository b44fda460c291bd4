"""Step records of a few tokens, built from lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.objective import Rollouts, StepRecord, combine_rewards, group_advantages
from grpo_lightning.signals import finish, measure

NAN, INF = float("nan"), float("inf")


def make_record(
    rewards: Any,
    *,
    weights: Sequence[float] | None = None,
    ids: Any = None,
    terminated: Any = None,
    prompts: Any = None,
    tokens: dict[str, Any] | None = None,
    advantages: Any = None,
    rollouts: dict[str, Any] | None = None,
    **fields: Any,
) -> StepRecord:
    """`rewards` [P, G] or [P, G, K]; `ids` a list of tokens for each rollout; `tokens` the [P, G, L] values by name."""
    given_PGK = torch.as_tensor(rewards, dtype=torch.float64)
    given_PGK = given_PGK.unsqueeze(-1) if given_PGK.dim() == 2 else given_PGK
    groups, size, functions = given_PGK.shape
    ids = ids or [[[100 * p + 10 * g + n for n in range(1, 5)] for g in range(size)] for p in range(groups)]
    prompts = prompts or [[p + 1, 7] for p in range(groups)]
    ids_PGL, mask_PGL = pad_right(ids)
    prompt_ids_PS, prompt_mask_PS = pad_left(prompts)
    weights = list(weights or [1.0] * functions)
    total_PG = combine_rewards(given_PGK, torch.tensor(weights, dtype=torch.float64))
    given = {"logprobs": -1.0, "old": -1.0, "ref": None, "entropies": 0.5, "sampler": -1.0} | (tokens or {})
    values = {name: value if value is None else spread(value, mask_PGL) for name, value in given.items()}
    made = Rollouts(
        prompt_ids_PS=prompt_ids_PS,
        prompt_mask_PS=prompt_mask_PS,
        completion_ids_PGL=ids_PGL,
        completion_mask_PGL=mask_PGL,
        terminated_PG=torch.ones(groups, size, dtype=torch.bool) if terminated is None else torch.tensor(terminated),
        sampler_logprobs_PGL=values["sampler"],
    )
    defaults: dict[str, Any] = {
        "step": 1,
        "rollouts": replace(made, **(rollouts or {})),
        "row_ids_P": torch.arange(groups),
        "sources": [""] * groups,
        "reward_names": [f"f{k}" for k in range(functions)],
        "reward_weights": weights,
        "rewards_PGK": given_PGK,
        "rewards_PG": total_PG,
        "advantages_PG": group_advantages(total_PG).advantages_PG if advantages is None else torch.tensor(advantages),
        "loss_mask_PGL": mask_PGL,
        "logprobs_PGL": values["logprobs"],
        "old_logprobs_PGL": values["old"],
        "ref_logprobs_PGL": values["ref"],
        "entropies_PGL": values["entropies"],
        "loss": 0.0,
        "policy_loss": 0.0,
        "kl_loss": None,
        "kl_coef": None,
        "clip_low": 0.2,
        "clip_high": 0.2,
        "importance_level": "token",
        "grad_norm": 2.0,
        "grad_norm_clipped": 1.0,
        "lr": 1e-3,
        "update_skipped": False,
        "max_completion_tokens": 8,
    }
    return StepRecord(**(defaults | fields))


def spread(value: Any, mask_PGL: Tensor) -> Tensor:
    """A number for every token, or nested lists shorter than L filled up with 99, which nothing may read."""
    if isinstance(value, int | float):
        return torch.full(mask_PGL.shape, float(value))
    if isinstance(value, Tensor):
        return value
    out = torch.full(mask_PGL.shape, 99.0)
    for p, group in enumerate(value):
        for g, row in enumerate(group):
            out[p, g, : len(row)] = torch.tensor(row)
    return out


def pad_right(ids: Any) -> tuple[Tensor, Tensor]:
    """Ids, 0 after the end, and their mask [P, G, L]."""
    length = max((len(row) for group in ids for row in group), default=0)
    rows = [[row + [0] * (length - len(row)) for row in group] for group in ids]
    mask = [[[n < len(row) for n in range(length)] for row in group] for group in ids]
    shape = (len(ids), len(ids[0]), length)
    return torch.tensor(rows, dtype=torch.int64).view(shape), torch.tensor(mask, dtype=torch.bool).view(shape)


def pad_left(rows: Any) -> tuple[Tensor, Tensor]:
    """Ids, 0 before the start, and their mask [P, S]."""
    length = max(len(row) for row in rows)
    ids = [[0] * (length - len(row)) + row for row in rows]
    mask = [[n >= length - len(row) for n in range(length)] for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def of_groups(record: StepRecord, groups: Sequence[int]) -> StepRecord:
    """The record of a rank that holds some of the groups."""
    at = torch.tensor(list(groups), dtype=torch.int64)
    names = ("row_ids_P", "rewards_PGK", "rewards_PG", "advantages_PG", "loss_mask_PGL")
    names += ("logprobs_PGL", "old_logprobs_PGL", "ref_logprobs_PGL", "entropies_PGL")
    tensors = {n: None if getattr(record, n) is None else getattr(record, n)[at] for n in names}
    return replace(record, rollouts=record.rollouts.select(at), sources=[record.sources[i] for i in groups], **tensors)


def signals_of(*records: StepRecord) -> dict[str, float]:
    """The signals of a step whose ranks hold `records`."""
    parts = [measure(record) for record in records]
    return finish([part.pack() for part in parts], parts[0], records[0])
