"""From a batch of prompts to everything that its optimizer updates need: rollouts, rewards, advantages, log-probs.

A window lasts for all the updates made on one batch of rollouts (`num_iterations` x `num_minibatches`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import (
    combine_rewards,
    group_advantages,
    loss_mask,
    penalised_rewards,
    reward_moments,
    soft_overlong_penalty,
)
from grpo_lightning.objective.batch import PromptBatch, Rollouts
from grpo_lightning.rewards import RewardResult, RewardRunner
from grpo_lightning.rollout import RolloutEngine, SamplingConfig, rollout_seeds, score_completions
from grpo_lightning.training import ranks
from grpo_lightning.training.models import Reference
from grpo_lightning.training.resampling import (
    CutMemory,
    DroppedGroup,
    broken_groups,
    replace_groups,
    replace_rewards,
    select_prompts,
)
from grpo_lightning.training.settings import AdvantageSettings, KLSettings, RecoverySettings

_ATTEMPT = 1_000_003  # between the seeds of two samplings of one group

__all__ = ["Collector", "RolloutWindow", "decode_completions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutWindow:
    """One rank's rollouts of one prompt batch and what was computed from them once."""

    epoch: int
    index: int
    rollouts: Rollouts
    row_ids_P: Tensor
    sources: list[str]
    rewards_PGK: Tensor  # float64, NaN where missing
    rewards_PG: Tensor  # float64, weighted total less penalties
    advantages_PG: Tensor  # float32
    status_P: Tensor  # live, dead or unscorable: codes of objective.advantages
    loss_mask_PGL: Tensor
    old_logprobs_PGL: Tensor | None  # None: one update only, where the update's own log-probs are the old ones
    ref_logprobs_PGL: Tensor | None
    kl_coef: float
    reward_errors: dict[str, int]
    seconds: dict[str, float]  # rollout, reward, score
    reward_seconds: dict[str, float] = field(default_factory=dict)
    resampled_groups: int = 0
    unrepaired_groups: int = 0
    reward_metrics: dict[str, float] = field(default_factory=dict)  # what functions gave `log_metric`
    reward_extras: dict[str, list[Any]] = field(default_factory=dict)  # and `log_extra`: P·G plain values each

    def is_of(self, batch: PromptBatch) -> bool:
        """Whether this window was made from `batch`."""
        return (self.epoch, self.index) == (batch.epoch, batch.index)

    def state(self) -> dict[str, Any]:
        """Plain types and CPU tensors only."""
        out = {f.name: _to_cpu(getattr(self, f.name)) for f in fields(self) if f.name != "rollouts"}
        out["rollouts"] = {f.name: _to_cpu(getattr(self.rollouts, f.name)) for f in fields(self.rollouts)}
        return out

    def extras_of(self, groups: list[int]) -> dict[str, list[Any]]:
        """The values given to `log_extra` for some of the groups."""
        size = self.rollouts.completion_ids_PGL.shape[1]
        return {
            name: [v for g in groups for v in values[g * size : (g + 1) * size]]
            for name, values in self.reward_extras.items()
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> RolloutWindow:
        """The window behind `state()`, its tensors on `device`."""
        moved: dict[str, Any] = {
            k: v.to(device) if isinstance(v, Tensor) else v for k, v in state.items() if k != "rollouts"
        }
        rollouts = Rollouts(**{k: v.to(device) for k, v in state["rollouts"].items()})
        return cls(rollouts=rollouts, **moved)


def _to_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _plain_columns(extras: dict[str, list[Any]], count: int) -> dict[str, list[Any]]:
    """Columns of `count` values, as types that a checkpoint and JSON can hold; those of another length are left out."""
    return {str(name): [_plain(v) for v in values] for name, values in extras.items() if len(values) == count}


def _plain(value: Any) -> Any:
    try:
        value = value.item() if hasattr(value, "item") else value  # of one tensor element, a numpy scalar
        return value if value is None or type(value) in (bool, int, float, str) else str(value)
    except Exception:  # noqa: BLE001 - a user's object
        return type(value).__name__


def _cut_share(rollouts: Rollouts) -> float:
    """The share of completions that hit the length limit, over all ranks."""
    cut = torch.stack(
        [
            (~rollouts.terminated_PG).sum(),
            torch.tensor(rollouts.terminated_PG.numel()).to(rollouts.terminated_PG.device),
        ]
    )
    total = ranks.all_reduce_sum(cut.double())
    return float(total[0] / total[1].clamp(min=1))


def decode_completions(tokenizer: Any, rollouts: Rollouts, prompts: list[Any]) -> list[Any]:
    """P·G responses, prompt by prompt, in TRL's convention: strings, or one-message chats for chat prompts."""
    lengths = rollouts.lengths_PG.flatten().tolist()
    ids = rollouts.completion_ids_PGL.flatten(0, 1).tolist()
    cut = [row[:length] for row, length in zip(ids, lengths, strict=True)]
    texts: list[str] = tokenizer.batch_decode(cut, skip_special_tokens=True)
    group_size = rollouts.completion_ids_PGL.shape[1]
    chat = [isinstance(prompt, list) for prompt in prompts for _ in range(group_size)]
    return [
        [{"role": "assistant", "content": text}] if is_chat else text for text, is_chat in zip(texts, chat, strict=True)
    ]


@dataclass(kw_only=True)
class Collector:
    """Samples, rewards and scores one prompt batch at a time."""

    engine: RolloutEngine
    sampling: SamplingConfig
    tokenizer: Any
    rewards: RewardRunner
    group_size: int
    advantages: AdvantageSettings
    kl: KLSettings
    seed: int
    scoring_groups: int | None  # groups scored at once without gradient; None: all
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    usually_cut: CutMemory = field(default_factory=CutMemory)
    dropped: list[DroppedGroup] = field(default_factory=list)  # of the last batch

    def collect(
        self,
        policy: nn.Module,
        reference: Reference | None,
        batch: PromptBatch,
        *,
        kl_coef: float,
        keep_old: bool,
        step: int,
    ) -> RolloutWindow:
        """Everything that the updates on `batch` need. `keep_old`: several updates follow."""
        started = perf_counter()
        rollouts = self.sample(policy, batch)
        sampled = perf_counter()
        result = self._score_rewards(rollouts, batch, step)
        rollouts, result, unrepaired = self._repaired(policy, batch, rollouts, result, step)
        rewarded = perf_counter()
        old, ref = self._logprobs(policy, reference, rollouts, keep_old=keep_old)
        rewards_PGK = result.rewards_NK.view(len(batch), self.group_size, -1).to(rollouts.completion_ids_PGL.device)
        rewards_PG = self._total(rewards_PGK, rollouts, old, ref, kl_coef)
        advantages = self._advantages(rewards_PG)
        return RolloutWindow(
            epoch=batch.epoch,
            index=batch.index,
            rollouts=rollouts,
            row_ids_P=batch.row_ids_P,
            sources=batch.sources,
            rewards_PGK=rewards_PGK,
            rewards_PG=rewards_PG,
            advantages_PG=advantages.advantages_PG,
            status_P=advantages.status_P,
            loss_mask_PGL=loss_mask(
                rollouts.completion_mask_PGL, rollouts.terminated_PG, mask_truncated=self.advantages.mask_truncated
            ),
            old_logprobs_PGL=old,
            ref_logprobs_PGL=ref,
            kl_coef=kl_coef,
            reward_errors=dict(result.errors),
            reward_seconds=dict(result.seconds),
            reward_metrics=dict(result.metrics),
            reward_extras=_plain_columns(result.extras, len(batch) * self.group_size),
            resampled_groups=len(self.dropped),
            unrepaired_groups=unrepaired,
            seconds={
                "rollout": sampled - started,
                "reward": rewarded - sampled,
                "score": perf_counter() - rewarded,
            },
        )

    def sample(self, policy: nn.Module, batch: PromptBatch, *, attempt: int = 0) -> Rollouts:
        """G completions for each prompt; each rollout's seed depends on run seed, row, epoch and its place in the group,
        and on how often the group was sampled before."""
        seeds_PG = rollout_seeds(self.seed + _ATTEMPT * attempt, batch.row_ids_P, batch.epoch, self.group_size)
        return self.engine.generate(
            policy, batch, group_size=self.group_size, sampling=self.sampling, seeds_PG=seeds_PG
        )

    def _repaired(
        self, policy: nn.Module, batch: PromptBatch, rollouts: Rollouts, result: RewardResult, step: int
    ) -> tuple[Rollouts, RewardResult, int]:
        """Drop broken groups and sample others for their prompts; at last, how many are broken still.

        All ranks sample again when one has to: a sharded model samples on all of them or none.
        """
        self.dropped = []
        broken = self._broken(rollouts, result)
        for attempt in range(1, self.recovery.resample_tries + 1):
            if not ranks.any_rank(bool(broken), rollouts.completion_ids_PGL.device):
                break
            groups = sorted(broken) or [0]
            others_batch = select_prompts(batch, groups)
            others = self.sample(policy, others_batch, attempt=attempt)
            if broken:
                self._keep_dropped(broken, batch, rollouts, result, attempt - 1)
                rewarded = self._score_rewards(others, others_batch, step)
                rollouts = replace_groups(rollouts, groups, others, pad_id=self.sampling.pad_id)
                result = replace_rewards(result, groups, rewarded, group_size=self.group_size)
            still = self._broken(rollouts, result)  # on every rank: the share of cut completions is of all of them
            broken = {p: why for p, why in still.items() if p in broken}
        self.usually_cut.push(_cut_share(rollouts))
        return rollouts, result, len(broken)

    def _broken(self, rollouts: Rollouts, result: RewardResult) -> dict[int, str]:
        all_cut = self.usually_cut.unusual(_cut_share(rollouts))
        return broken_groups(rollouts, result.rewards_NK, all_cut=all_cut)

    def _keep_dropped(
        self, broken: dict[int, str], batch: PromptBatch, rollouts: Rollouts, result: RewardResult, attempt: int
    ) -> None:
        rewards_PGK = result.rewards_NK.view(len(batch), self.group_size, -1)
        for p, why in broken.items():
            lengths = rollouts.lengths_PG[p].tolist()
            ids = rollouts.completion_ids_PGL[p].tolist()
            self.dropped.append(
                DroppedGroup(
                    why=why,
                    row_id=int(batch.row_ids_P[p]),
                    attempt=attempt,
                    completion_ids=[row[:n] for row, n in zip(ids, lengths, strict=True)],
                    rewards_GK=rewards_PGK[p].tolist(),
                )
            )

    def _score_rewards(self, rollouts: Rollouts, batch: PromptBatch, step: int) -> RewardResult:
        repeat = self.group_size
        lengths = rollouts.lengths_PG.flatten().tolist()
        ids = rollouts.completion_ids_PGL.flatten(0, 1).tolist()
        return self.rewards.score(
            prompts=[p for p in batch.prompts for _ in range(repeat)],
            completions=decode_completions(self.tokenizer, rollouts, batch.prompts),
            columns={k: [v for v in values for _ in range(repeat)] for k, values in batch.columns.items()},
            completion_ids=[row[:n] for row, n in zip(ids, lengths, strict=True)],
            trainer_state={"global_step": step, "epoch": batch.epoch},
        )

    @torch.no_grad()
    def _logprobs(
        self, policy: nn.Module, reference: Reference | None, rollouts: Rollouts, *, keep_old: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        in_reward = reference is not None and self.kl.use == "reward"
        old = self._in_chunks(policy, rollouts) if keep_old or in_reward else None
        if reference is None:
            return old, None
        with reference.active() as model:
            return old, self._in_chunks(model, rollouts)

    def _in_chunks(self, model: nn.Module, rollouts: Rollouts) -> Tensor:
        groups = torch.arange(len(rollouts.prompt_ids_PS), device=rollouts.prompt_ids_PS.device)
        chunks: tuple[Tensor, ...] = groups.split(self.scoring_groups or len(groups))

        def score(part: Rollouts) -> Tensor:
            return score_completions(model, part, temperature=self.sampling.temperature, with_entropy=False).logprobs

        return torch.cat([score(rollouts.select(chunk)) for chunk in chunks])

    def _total(
        self, rewards_PGK: Tensor, rollouts: Rollouts, old: Tensor | None, ref: Tensor | None, kl_coef: float
    ) -> Tensor:
        weights_K = torch.tensor(self.rewards.weights, dtype=torch.float64, device=rewards_PGK.device)
        total_PG = combine_rewards(rewards_PGK, weights_K)
        if self.advantages.overlong_cache_tokens:
            total_PG = total_PG + soft_overlong_penalty(
                rollouts.lengths_PG, self.sampling.max_new_tokens, self.advantages.overlong_cache_tokens
            ).to(total_PG)
        if self.kl.use == "reward":
            if old is None or ref is None:
                raise ConfigError("kl.use is 'reward' but no reference was scored: keep a reference, or use: loss.")
            total_PG = penalised_rewards(total_PG, old, ref, rollouts.completion_mask_PGL, coef=kl_coef)
        return total_PG

    def _advantages(self, rewards_PG: Tensor) -> Any:
        moments = None
        if self.advantages.scale == "batch":
            moments = ranks.all_gather_tensor(reward_moments(rewards_PG))
        return group_advantages(
            rewards_PG, scale=self.advantages.scale, baseline=self.advantages.baseline, moments=moments
        )
