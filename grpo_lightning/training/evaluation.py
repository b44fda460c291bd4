"""Greedy evaluation on held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.objective.batch import PromptBatch
from grpo_lightning.rewards import RewardRunner
from grpo_lightning.rollout import RolloutEngine, SamplingConfig
from grpo_lightning.training import ranks
from grpo_lightning.training.window import decode_completions

__all__ = ["Evaluation", "GreedyEvaluator"]

_FULL_MARK = 1.0 - 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The scores of one pass over the held-out prompts, over all ranks."""

    prompts: int
    values: dict[str, float]  # eval_accuracy, eval_reward/<name>_mean, eval_response_length_mean, ...


@dataclass(kw_only=True)
class GreedyEvaluator:
    """Adds up greedy scores batch by batch.

    `eval_accuracy` is the share of prompts whose greedy answer gets at least 1.0 from the first function.
    """

    engine: RolloutEngine
    sampling: SamplingConfig
    tokenizer: Any
    rewards: RewardRunner
    _sums: Tensor | None = field(default=None, init=False)

    def reset(self) -> None:
        """Begin a fresh count."""
        self._sums = None

    @torch.no_grad()
    def add(self, policy: nn.Module, batch: PromptBatch, *, step: int = 0) -> None:
        """Answer one batch greedily and add its scores."""
        rollouts = self.engine.generate(
            policy,
            batch,
            group_size=1,
            sampling=replace(self.sampling, greedy=True),
            seeds_PG=torch.zeros(len(batch), 1, dtype=torch.int64, device=batch.ids_PS.device),
        )
        lengths = rollouts.lengths_PG.flatten().tolist()
        ids = rollouts.completion_ids_PGL.flatten(0, 1).tolist()
        result = self.rewards.score(
            prompts=batch.prompts,
            completions=decode_completions(self.tokenizer, rollouts, batch.prompts),
            columns=batch.columns,
            completion_ids=[row[:n] for row, n in zip(ids, lengths, strict=True)],
            trainer_state={"global_step": step, "epoch": batch.epoch},
        )
        own = _sums_of(result.rewards_NK, rollouts.lengths_PG, rollouts.terminated_PG)
        self._sums = own if self._sums is None else self._sums + own

    def finish(self, device: torch.device) -> Evaluation:
        """The means over every rank's prompts. A function that scored nothing is absent."""
        count = 4 + 2 * len(self.rewards.names)
        own = self._sums if self._sums is not None else torch.zeros(count, dtype=torch.float64)
        prompts, correct, tokens, truncated, *rest = ranks.all_reduce_sum(own.to(device)).tolist()
        if not prompts:
            return Evaluation(prompts=0, values={})
        values = {
            "eval_accuracy": correct / prompts,
            "eval_response_length_mean": tokens / prompts,
            "eval_truncated_fraction": truncated / prompts,
        }
        for i, name in enumerate(self.rewards.names):
            total, scored = rest[2 * i], rest[2 * i + 1]
            if scored:
                values[f"eval_reward/{name}_mean"] = total / scored
        return Evaluation(prompts=int(prompts), values=values)


def _sums_of(rewards_NK: Tensor, lengths_P1: Tensor, terminated_P1: Tensor) -> Tensor:
    rewards_NK = rewards_NK.detach().double().cpu()
    scored_NK = torch.isfinite(rewards_NK)
    heads = [
        float(len(rewards_NK)),
        float((rewards_NK[:, 0] >= _FULL_MARK).sum()),
        float(lengths_P1.sum()),
        float((~terminated_P1).sum()),
    ]
    per_function = [
        v for k in range(rewards_NK.shape[1]) for v in (rewards_NK[scored_NK[:, k], k].sum(), scored_NK[:, k].sum())
    ]
    return torch.tensor([*heads, *(float(v) for v in per_function)], dtype=torch.float64)
