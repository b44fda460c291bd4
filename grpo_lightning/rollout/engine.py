"""What samples completions: the protocol that engines implement, and the sampling settings they obey."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective.batch import PromptBatch, Rollouts

__all__ = ["RolloutEngine", "SamplingConfig", "make_engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How tokens are drawn. Filters apply after the temperature, in the order top-k, top-p, min-p."""

    max_new_tokens: int  # at least 1; EOS included
    eos_ids: tuple[int, ...]  # any of them ends a completion; empty: only the limit does
    pad_id: int  # fills completions after their end
    temperature: float = 1.0  # above 0; for argmax use greedy
    top_p: float = 1.0  # (0, 1]; 1 keeps everything
    top_k: int = 0  # 0 keeps everything
    min_p: float = 0.0  # [0, 1]; share of the likeliest token's probability; 0 keeps everything
    greedy: bool = False  # argmax; the filters and the seeds are not used

    def __post_init__(self) -> None:
        _require(
            self.max_new_tokens >= 1,
            f"sampling.max_new_tokens is {self.max_new_tokens}: a completion has at least one token, so give 1 or more.",
        )
        _require(
            math.isfinite(self.temperature) and self.temperature > 0,
            f"sampling.temperature is {self.temperature}: it divides the logits, so give a finite value above 0 "
            f"(evaluation is greedy whatever it is).",
        )
        _require(
            0 < self.top_p <= 1,
            f"sampling.top_p is {self.top_p}: it is a share of probability, so give a value in (0, 1]; 1 switches it off.",
        )
        _require(
            self.top_k >= 0, f"sampling.top_k is {self.top_k}: it counts tokens, so give 1 or more; 0 switches it off."
        )
        _require(
            0 <= self.min_p <= 1,
            f"sampling.min_p is {self.min_p}: it is a share of the largest probability, so give a value in [0, 1]; "
            f"0 switches it off.",
        )
        _require(
            self.pad_id >= 0, f"sampling.pad_id is {self.pad_id}: token ids start at 0; give the tokenizer's pad id."
        )
        _require(
            all(i >= 0 for i in self.eos_ids),
            f"sampling.eos_ids is {self.eos_ids}: token ids start at 0; give the tokenizer's EOS ids.",
        )

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p can remove a token."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples G completions for each of P prompts.

    A completion depends on its prompt and its seed alone, never on the batch around it. The model is left in the training or
    evaluation mode in which it was found.
    """

    def generate(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        group_size: int,
        sampling: SamplingConfig,
        seeds_PG: Tensor,
    ) -> Rollouts:
        """G completions per prompt, drawn from `model` as `sampling` says; `seeds_PG` is int64 [P, G]."""
        ...

    def sync_weights(self, model: nn.Module) -> None:
        """Make the next `generate` use the weights that `model` has now."""
        ...


def make_engine(name: str, policy: nn.Module, *, model: str) -> RolloutEngine:
    """The engine `transformers` (samples from `policy` itself) or `vllm` (loads `model`, a folder or hub name, beside it)."""
    if name == "transformers":
        from grpo_lightning.rollout.transformers_engine import TransformersEngine

        return TransformersEngine()
    if name == "vllm":
        from grpo_lightning.rollout.vllm_engine import VLLMEngine

        return VLLMEngine(model, **_vllm_defaults(policy))
    raise ConfigError(f"engine is {name!r}: give 'transformers' or 'vllm'.")


def _vllm_defaults(policy: nn.Module) -> dict[str, Any]:
    first = next(policy.parameters())
    return {"dtype": str(first.dtype).removeprefix("torch.")}
