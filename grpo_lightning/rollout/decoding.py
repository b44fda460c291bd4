"""Sampling step by step from prompts that are read once: what a step does, in two layouts.

`PackedDecoder` keeps one row a group: a step's G queries read the group's prompt once. `RepeatedDecoder` keeps one row a
completion, with the prompt's keys copied G times; it is better where completions are much longer than prompts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.rollout.cache import PreallocatedCache
from grpo_lightning.rollout.layout import additive, decode_mask, position_ids
from grpo_lightning.rollout.scoring import accepts, cache_argument, model_dtype

__all__ = ["Decoder", "PackedDecoder", "RepeatedDecoder", "choose_decoder"]


class Decoder:
    """Reads prompts, then one token for each rollout at a time.

    Args:
        model: a causal LM in evaluation mode.
        prompt_ids_PS: left-padded prompts.
        prompt_mask_PS: True on their tokens.
        group_size: completions for each prompt.
        length: the generation limit.
    """

    def __init__(
        self, model: nn.Module, prompt_ids_PS: Tensor, prompt_mask_PS: Tensor, group_size: int, length: int
    ) -> None:
        self.model, self.group_size, self.length = model, group_size, length
        self.prompt_ids_PS, self.prompt_mask_PS = prompt_ids_PS, prompt_mask_PS
        self.prompts, self.prompt_length = prompt_ids_PS.shape
        self._extra: dict[str, Any] = {"logits_to_keep": 1} if accepts(model, "logits_to_keep") else {}
        self._positions_PS = position_ids(prompt_mask_PS)

    def _layers(self) -> int:
        config: Any = self.model.config
        return int(config.get_text_config().num_hidden_layers)

    def _prefill(self, room: int) -> Tensor:
        self.cache = PreallocatedCache(self._layers(), room)
        self._extra[cache_argument(self.model)] = self.cache
        logits: Tensor = self.model(
            input_ids=self.prompt_ids_PS,
            attention_mask=self.prompt_mask_PS.long(),
            position_ids=self._positions_PS,
            use_cache=True,
            **self._extra,
        ).logits
        return logits[:, -1]

    def start(self) -> Tensor:
        """Read the prompts; logits of the first tokens, [P, G, V]."""
        raise NotImplementedError

    def step(self, ids_PG: Tensor, t: int) -> Tensor:
        """Append token `t` of each completion; logits of the next, [P, G, V]."""
        raise NotImplementedError


class PackedDecoder(Decoder):
    """One row a group."""

    def start(self) -> Tensor:
        """Read the prompts; logits of the first tokens, [P, G, V]."""
        first_PV = self._prefill(self.prompt_length + self.group_size * self.length)
        seen = decode_mask(self.prompt_mask_PS, self.group_size, self.length)
        self._mask = additive(seen, model_dtype(self.model))
        self._next_P1 = self._positions_PS[:, -1:] + 1
        self._extra.pop("logits_to_keep", None)
        return first_PV.unsqueeze(1).expand(-1, self.group_size, -1)

    def step(self, ids_PG: Tensor, t: int) -> Tensor:
        """Append token `t` of each completion; logits of the next, [P, G, V]."""
        seen = self.prompt_length + self.group_size * (t + 1)
        logits: Tensor = self.model(
            input_ids=ids_PG,
            attention_mask=self._mask[..., :seen],
            position_ids=(self._next_P1 + t).expand(-1, self.group_size),
            use_cache=True,
            **self._extra,
        ).logits
        return logits


class RepeatedDecoder(Decoder):
    """One row a completion."""

    def start(self) -> Tensor:
        """Read the prompts; logits of the first tokens, [P, G, V]."""
        first_PV = self._prefill(self.prompt_length)
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
            use_cache=True,
            **self._extra,
        ).logits
        return logits[:, -1].view(self.prompts, self.group_size, -1)


def choose_decoder(prompt_length: int, group_size: int, length: int) -> type[Decoder]:
    """Packed rows compute G scores for each own key: worth it while the shared prompt outweighs them."""
    own = group_size * length / 2  # keys of completions in a packed row, on average over the steps
    return PackedDecoder if own <= 4 * prompt_length or group_size * length <= 512 else RepeatedDecoder
