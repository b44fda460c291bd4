"""What is seen inside a `GRPOTrainer`: its own methods, wrapped; nothing that they compute is changed.

TRL shuffles the rollouts of a generation batch and deals them out to micro-batches, so a group is never seen as such by its
loss. Each rollout carries its place (`PLACE`) through that, which brings the groups back together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.errors import ConfigError

__all__ = ["PLACE", "Batch", "Hooks", "Part", "Seen"]

PLACE = "grpo_trl_place"
_WRAPPED = (
    "_generate",
    "_calculate_rewards",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
    "training_step",
    "_get_grad_norm",
)


@dataclass(kw_only=True, slots=True, eq=False)
class Batch:
    """The rollouts of one generation, on this rank; B of them, in groups as they were generated."""

    tensors: dict[str, Tensor]  # as TRL hands them to its loss
    lengths: list[int]  # tokens of each completion, EOS included
    last_tokens: list[int | None]
    rewards: Tensor  # [B of all ranks, K], float32, unweighted; NaN where a function gave None
    rows: list[dict[str, Any]]  # dataset rows, one a rollout
    seconds: dict[str, float]  # rollout, reward, score
    metrics: dict[str, float]  # what reward functions gave `log_metric`
    extras: dict[str, list[Any]]  # and `log_extra`
    used: bool = False  # by an optimizer step before


@dataclass(kw_only=True, slots=True, eq=False)
class Part:
    """What the loss of one micro-batch saw."""

    batch: Batch
    places: Tensor  # which rollouts of the batch
    logprobs: Tensor  # [b, L]
    entropies: Tensor | None


@dataclass(kw_only=True, slots=True)
class Seen:
    """All that one optimizer step was made of."""

    parts: list[Part] = field(default_factory=list)
    loss: Tensor | None = None  # summed over the micro-batches, as it was backpropagated
    grad_norm: float | None = None  # before clipping

    def batches(self) -> list[Batch]:
        """The generation batches that the parts come from, in order."""
        return list(dict.fromkeys(part.batch for part in self.parts))


class Hooks:
    """Wraps a trainer's methods and keeps what the running optimizer step is made of."""

    def __init__(self, trainer: Any) -> None:
        missing = [name for name in _WRAPPED if not callable(getattr(trainer, name, None))]
        if missing:
            raise ConfigError(
                f"A {type(trainer).__name__} can't be watched: it has no {missing[0]}. "
                "Give a GRPOTrainer of TRL 1.16, or a subclass that keeps its methods."
            )
        self._trainer = trainer
        self.seen = Seen()
        self._batch: Batch | None = None
        self._draft: dict[str, Any] = {}  # of the batch that is being made
        self._scores: tuple[Tensor, Tensor | None] | None = None
        self._in_loss = False
        for name in _WRAPPED:
            self._wrap(name, getattr(self, f"_around{name if name.startswith('_') else '_' + name}"))

    def take(self) -> Seen:
        """What the optimizer step was made of; begins the next one."""
        seen, self.seen = self.seen, Seen()
        for batch in seen.batches():
            batch.used = True
        return seen

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        original = getattr(self._trainer, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(self._trainer, name, call)

    @property
    def _trains(self) -> bool:
        return bool(self._trainer.model.training)

    # ---- a generation batch

    def _around_generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = perf_counter()
        result = original(*args, **kwargs)
        self._draft |= {"completions": result[1], "rollout": perf_counter() - started}
        return result

    def _around_calculate_rewards(
        self, original: Callable[..., Any], inputs: Sequence[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        started = perf_counter()
        rewards = original(inputs, *args, **kwargs)
        pending = getattr(self._trainer, "_pending_metrics", {})
        self._draft |= {
            "rewards": rewards.detach().clone(),
            "rows": list(inputs),
            "reward": perf_counter() - started,
            "metrics": {name: fmean(values) for name, values in pending.items() if values},
            "extras": {
                name: list(values) for name, values in getattr(self._trainer, "_pending_extra_logs", {}).items()
            },
        }
        return rewards

    def _around_generate_and_score_completions(
        self, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        self._draft = {}
        started = perf_counter()
        output: dict[str, Any] = original(*args, **kwargs)
        if self._trains and {"completions", "rewards"} <= self._draft.keys():
            self._batch = self._made(output, perf_counter() - started)
            output[PLACE] = torch.arange(len(output["completion_ids"]), device=output["completion_ids"].device)
        self._draft = {}
        return output

    def _made(self, output: dict[str, Any], seconds: float) -> Batch:
        draft, completions = self._draft, self._draft["completions"]
        rest = seconds - draft["rollout"] - draft["reward"]
        return Batch(
            tensors={name: value for name, value in output.items() if isinstance(value, Tensor)},
            lengths=[len(ids) for ids in completions],
            last_tokens=[int(ids[-1]) if len(ids) else None for ids in completions],
            rewards=draft["rewards"],
            rows=draft["rows"],
            seconds={"rollout": draft["rollout"], "reward": draft["reward"], "score": max(rest, 0.0)},
            metrics=draft["metrics"],
            extras=draft["extras"],
        )

    # ---- a micro-batch

    def _around_get_per_token_logps_and_entropies(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._in_loss:
            entropies = result[1]
            self._scores = result[0].detach(), None if entropies is None else entropies.detach()
        return result

    def _around_compute_loss(
        self, original: Callable[..., Any], model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._in_loss, self._scores = self._trains and PLACE in inputs, None
        try:
            loss = original(model, inputs, *args, **kwargs)
        finally:
            self._in_loss = False
        if self._scores is not None and self._batch is not None:
            logprobs, entropies = self._scores
            part = Part(batch=self._batch, places=inputs[PLACE], logprobs=logprobs, entropies=entropies)
            self.seen.parts.append(part)
        return loss

    def _around_training_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        own = loss.detach().float()
        self.seen.loss = own if self.seen.loss is None else self.seen.loss + own
        return loss

    def _around_get_grad_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        self.seen.grad_norm = None if norm is None else float(norm)
        return norm
