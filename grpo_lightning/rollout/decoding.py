"""Sampling step by step from prompts that are read once: what a step does, in two layouts.

`PlanDecoder` keeps one row a group, and a `DecodePlan` in place of a cache: a step's G queries read the group's prompt
once. `CacheDecoder` keeps one row a completion, with the prompt's keys copied G times; for models that do not call a
registered attention.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo_lightning.rollout.attention import DecodePlan, plan_active
from grpo_lightning.rollout.cache import PreallocatedCache
from grpo_lightning.rollout.causal_lm import accepts, cache_argument, model_dtype, text_config
from grpo_lightning.rollout.layout import additive, position_ids

__all__ = ["DECODERS", "CacheDecoder", "Decoder", "DecoderName", "PlanDecoder"]


class Decoder(ABC):
    """Reads prompts, then one token for each rollout at a time.

    Args:
        model: a causal LM in evaluation mode.
        prompt_ids_PS: left-padded prompts.
        prompt_mask_PS: True on their tokens.
        group_size: completions for each prompt.
        length: the generation limit.
        split: keep completions' keys apart from the prompt's, where a decoder can; None: as the shape suggests.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt_ids_PS: Tensor,
        prompt_mask_PS: Tensor,
        group_size: int,
        length: int,
        *,
        split: bool | None = None,
    ) -> None:
        self.model, self.group_size, self.length, self.split = model, group_size, length, split
        self.prompt_ids_PS, self.prompt_mask_PS = prompt_ids_PS, prompt_mask_PS
        self.prompts, self.prompt_length = prompt_ids_PS.shape
        self._positions_PS = position_ids(prompt_mask_PS)
        self._keep_last: dict[str, Any] = {"logits_to_keep": 1} if accepts(model, "logits_to_keep") else {}

    def active(self) -> AbstractContextManager[None]:
        """What `start` and `step` are called inside of."""
        return nullcontext()

    @abstractmethod
    def start(self) -> Tensor:
        """Read the prompts; logits of the first tokens, [P, G, V]."""

    @abstractmethod
    def step(self, ids_PG: Tensor, t: int) -> Tensor:
        """Append token `t` of each completion; logits of the next, [P, G, V]."""

    @abstractmethod
    def keep(self, groups_M: Tensor, members_MG: Tensor) -> None:
        """Go on with some groups, and in each with as many of its completions, after a step."""


class PlanDecoder(Decoder):
    """One row a group, attention by a plan."""

    def active(self) -> AbstractContextManager[None]:
        """With the plan in place of the model's attention."""
        self._plan = DecodePlan(
            mask_PS=self.prompt_mask_PS, group_size=self.group_size, length=self.length, split=self.split
        )
        return plan_active(self.model, self._plan)

    def start(self) -> Tensor:
        """Read the prompts; logits of the first tokens, [P, G, V]."""
        self._next_PG = (self._positions_PS[:, -1:] + 1).expand(-1, self.group_size)
        logits: Tensor = self.model(
            input_ids=self.prompt_ids_PS, position_ids=self._positions_PS, use_cache=False, **self._keep_last
        ).logits
        return logits[:, -1:].expand(-1, self.group_size, -1)

    def step(self, ids_PG: Tensor, t: int) -> Tensor:
        """Append token `t` of each completion; logits of the next, [P, G, V]."""
        self._plan.step = t
        logits: Tensor = self.model(input_ids=ids_PG, position_ids=self._next_PG + t, use_cache=False).logits
        return logits

    def keep(self, groups_M: Tensor, members_MG: Tensor) -> None:
        """Go on with some groups, and in each with as many of its completions, after a step."""
        self._plan.keep(groups_M, members_MG)
        self._next_PG = self._next_PG[groups_M, : members_MG.shape[1]]


class CacheDecoder(Decoder):
    """One row a completion, the prompt's keys repeated."""

    def start(self) -> Tensor:
        """Read the prompts; logits of the first tokens, [P, G, V]."""
        self._extra = {"use_cache": True, **self._keep_last}
        self.cache = PreallocatedCache(int(text_config(self.model).num_hidden_layers), self.prompt_length)
        self._extra[cache_argument(self.model)] = self.cache
        prompt_mask = self.prompt_mask_PS.long()
        logits: Tensor = self.model(
            input_ids=self.prompt_ids_PS, attention_mask=prompt_mask, position_ids=self._positions_PS, **self._extra
        ).logits
        first_PV = logits[:, -1]
        self.cache.repeat(self.group_size, self.prompt_length + self.length)
        wide_NS = self.prompt_mask_PS.repeat_interleave(self.group_size, dim=0)
        seen = torch.cat([wide_NS, wide_NS.new_ones(len(wide_NS), self.length)], dim=1)
        self._mask = additive(seen[:, None, None, :], model_dtype(self.model))
        self._next_N1 = (self._positions_PS[:, -1:] + 1).repeat_interleave(self.group_size, dim=0)
        return first_PV.unsqueeze(1).expand(-1, self.group_size, -1)

    def step(self, ids_PG: Tensor, t: int) -> Tensor:
        """Append token `t` of each completion; logits of the next, [P, G, V]."""
        logits: Tensor = self.model(
            input_ids=ids_PG.reshape(-1, 1),
            attention_mask=self._mask[..., : self.prompt_length + t + 1],
            position_ids=self._next_N1 + t,
            **self._extra,
        ).logits
        return logits[:, -1].view(*ids_PG.shape, -1)

    def keep(self, groups_M: Tensor, members_MG: Tensor) -> None:
        """Go on with some groups, and in each with as many of its completions, after a step."""
        rows_N = (groups_M[:, None] * self.group_size + members_MG).flatten()
        self.cache.batch_select_indices(rows_N)
        self._mask, self._next_N1 = self._mask[rows_N], self._next_N1[rows_N]
        self.group_size = members_MG.shape[1]


DecoderName = Literal["plan_decoding", "cache_decoding"]
DECODERS: dict[DecoderName, type[Decoder]] = {"plan_decoding": PlanDecoder, "cache_decoding": CacheDecoder}
