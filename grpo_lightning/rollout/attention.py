"""Attention that reads a prompt's keys and values once for its whole group.

A transformers model calls the attention function that its configuration names. The one registered here hands each layer's
queries, keys and values to the plan that is active: `PackedPlan` for scoring, `DecodePlan` for sampling. Neither needs a
cache object or a mask from the model, both know sliding windows, and neither copies the keys that grouped heads share.

Letters: P prompts, G completions each, L tokens each, S prefix tokens, H query heads, J key heads (H = J·R), D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from grpo_lightning.rollout.causal_lm import attention_implementation

__all__ = ["DecodePlan", "LayerCall", "PackedPlan", "UnsupportedAttentionError", "plan_active", "windows_handed_over"]

_NAME = "grpo_shared_prefix"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
_CHUNK = 128  # queries of a prefix computed at once on a CPU, whose kernel does not skip keys that lie ahead
_BLOCK = 256  # completion tokens computed at once, or half a prefix: more wastes scores across completions


class UnsupportedAttentionError(Exception):
    """A layer asks for something that these plans do not compute."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The settings of one layer's attention."""

    layer: Any  # its index
    scale: float | None
    dropout: float
    window: int | None  # keys this far back or further are not seen


class AttentionPlan(Protocol):
    """What a forward pass does in place of the model's attention."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: LayerCall) -> Tensor:
        """The output [B, T, H, D] for queries [B, H, T, D]."""
        ...


_active: ContextVar[AttentionPlan | None] = ContextVar("grpo_attention_plan", default=None)


@contextmanager
def plan_active(model: nn.Module, plan: AttentionPlan) -> Iterator[None]:
    """Let `plan` compute the attention of `model` inside."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _attention)
    token = _active.set(plan)
    try:
        with attention_implementation(model, _NAME):
            yield
    finally:
        _active.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    plan = _active.get()
    if plan is None:
        raise UnsupportedAttentionError(f"{_NAME} attention was called outside a rollout pass")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"attention with {name}")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedAttentionError(f"{type(module).__name__} has no layer_idx")
    call = LayerCall(layer=layer, scale=scaling, dropout=dropout, window=sliding_window)
    return plan.attend(query, key, value, call).contiguous(), None


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: LayerCall, *, causal: bool = False
) -> Tensor:
    """[B, T, H, D]"""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and query.device.type != "cpu":  # elsewhere grouped heads under a mask have no fast kernel
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=causal,
        scale=call.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    ).transpose(1, 2)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -torch.inf)


def _within(distance: Tensor, window: int | None) -> Tensor:
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class _Prefix:
    """Left-padded prompts attending to themselves.

    Args:
        mask_PS: True on tokens.
    """

    def __init__(self, mask_PS: Tensor) -> None:
        self.width = mask_PS.shape[1]
        self.padded = not bool(mask_PS.all())
        self.own_mask_PS = mask_PS
        self.mask_PS = mask_PS if self.padded else mask_PS[:1]  # one row stands for all
        self._masks: dict[Any, Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: LayerCall) -> list[Tensor]:
        """Outputs of successive runs of tokens."""
        window = None if call.window is None or call.window >= self.width else call.window
        plain = not self.padded and window is None
        size = _CHUNK if query.device.type == "cpu" else self.width
        if plain and self.width <= size:
            return [_sdpa(query, key, value, None, call, causal=True)]
        parts = []
        for start in range(0, self.width, size):
            stop = min(start + size, self.width)
            first = 0 if window is None else max(0, start - window + 1)
            mask = self._mask(first, start, stop, window, query.dtype)
            run = query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop]
            parts.append(_sdpa(*run, mask, call))
        return parts

    def _mask(self, first: int, start: int, stop: int, window: int | None, dtype: torch.dtype) -> Tensor:
        name = (start, window, dtype)
        if name not in self._masks:
            places = torch.arange(first, stop, device=self.mask_PS.device)
            distance = places[start - first :, None] - places
            seen = _within(distance, window) & self.mask_PS[:, None, first:stop]
            self._masks[name] = _additive(seen | (distance == 0), dtype).unsqueeze(1)  # padding sees itself: no NaN
        return self._masks[name]


class PackedPlan:
    """Rows of S left-padded prefix tokens and then G completions of L tokens, in one pass without a cache.

    Args:
        prefix_mask_PS: True on the prefix's tokens.
        group_size: G.
        length: L.
    """

    def __init__(self, *, prefix_mask_PS: Tensor, group_size: int, length: int) -> None:
        self._prefix = _Prefix(prefix_mask_PS)
        self._group_size, self._length = group_size, length
        room = max(_BLOCK, prefix_mask_PS.shape[1] // 2)
        self._members = min(group_size, max(1, room // length))  # completions attended to at once
        self._masks: dict[Any, Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: LayerCall) -> Tensor:
        """The prefix attends to itself; a completion's tokens to the prefix and their own predecessors."""
        split = self._prefix.width
        head = query[:, :, :split], key[:, :, :split], value[:, :, :split]
        parts = self._prefix.attend(*head, call) if split else []
        mask = self._mask(call.window, query.dtype)
        width = self._members * self._length
        for start in range(split, query.shape[2], width):
            stop = min(start + width, query.shape[2])
            keys, values = (self._seen(states, start, stop) for states in (key, value))
            own = mask[:, :, : stop - start, : split + stop - start]
            parts.append(_sdpa(query[:, :, start:stop], keys, values, own, call))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _seen(self, states: Tensor, start: int, stop: int) -> Tensor:
        split = self._prefix.width
        return states[:, :, :stop] if start == split else torch.cat([states[:, :, :split], states[:, :, start:stop]], 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[P or 1, 1, M·L, S + M·L] for the M completions attended to at once."""
        if (window, dtype) not in self._masks:
            prefix_PS, split = self._prefix.mask_PS, self._prefix.width
            steps_T = torch.arange(self._length, device=prefix_PS.device).repeat(self._members)
            owner_T = torch.arange(self._members, device=prefix_PS.device).repeat_interleave(self._length)
            own_TT = (owner_T[:, None] == owner_T) & _within(steps_T[:, None] - steps_T, window)
            far_TS = split + steps_T[:, None] - torch.arange(split, device=prefix_PS.device)
            seen_PTS = prefix_PS[:, None, :] & _within(far_TS, window)
            seen = torch.cat([seen_PTS, own_TT.expand(len(prefix_PS), -1, -1)], dim=-1)
            self._masks[window, dtype] = _additive(seen, dtype).unsqueeze(1)
        return self._masks[window, dtype]


class DecodePlan:
    """One pass over P left-padded prompts, then passes over rows of G tokens, one for each completion of the group.

    Keys and values lie in one buffer a layer, [P, J, S + L·G, D]: the prompt's, then each step's for all G completions, so
    that a step is one call in which a row's G queries share the prompt. Where completions outweigh prompts, that
    computes too many scores of other completions' keys: then (`split`) each completion has a buffer of its own,
    [P, J, G, L, D], and one softmax spans the scores of both.
    """

    def __init__(self, *, mask_PS: Tensor, group_size: int, length: int, split: bool | None = None) -> None:
        self._prefix = _Prefix(mask_PS)
        self._group_size, self._length = group_size, length
        self.split = group_size * length > max(512, 4 * mask_PS.shape[1]) if split is None else split
        self.step = -1  # the token being appended; -1: the prompts
        self._states: dict[Any, tuple[Tensor, ...]] = {}
        self._masks: dict[Any, Tensor] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: LayerCall) -> Tensor:
        """Keep the layer's keys and values, and attend."""
        if self.step < 0:
            self._states[call.layer] = self._buffers(key) + self._buffers(value)
            parts = self._prefix.attend(query, key, value, call)
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return self._split(query, key, value, call) if self.split else self._joint(query, key, value, call)

    def keep(self, groups_M: Tensor, members_MG: Tensor) -> None:
        """Go on with some groups, and in each with as many of its completions."""
        for layer, states in self._states.items():
            self._states[layer] = tuple(self._kept(buffer, groups_M, members_MG) for buffer in states)
        self._group_size = members_MG.shape[1]
        self._prefix = _Prefix(self._prefix.own_mask_PS[groups_M])
        self._masks.clear()

    def _kept(self, buffer: Tensor, groups_M: Tensor, members_MG: Tensor) -> Tensor:
        width, done = self._prefix.width, (self.step + 1) * self._group_size
        chosen = buffer[groups_M]
        if self.split:  # a prompt's [P, J, S, D], or its completions' [P, J, G, L, D]
            return chosen if chosen.dim() == 4 else _gathered(chosen, members_MG)
        own = chosen[:, :, width : width + done]
        by_member = own.reshape(*own.shape[:2], self.step + 1, self._group_size, own.shape[-1]).transpose(2, 3)
        own = _gathered(by_member, members_MG).transpose(2, 3).flatten(2, 3)
        return self._with_room(torch.cat([chosen[:, :, :width], own], dim=2), members_MG.shape[1])

    def _buffers(self, states: Tensor) -> tuple[Tensor, ...]:
        if not self.split:
            return (self._with_room(states, self._group_size),)
        prompts, heads, _, size = states.shape
        return states, states.new_empty(prompts, heads, self._group_size, self._length, size)

    def _with_room(self, states: Tensor, group_size: int) -> Tensor:
        """The same keys or values in a buffer with room for all steps of `group_size` completions."""
        prompts, heads, filled, size = states.shape
        buffer = states.new_empty(prompts, heads, self._prefix.width + self._length * group_size, size)
        buffer[:, :, :filled] = states
        return buffer

    def _joint(self, query: Tensor, key: Tensor, value: Tensor, call: LayerCall) -> Tensor:
        keys, values = self._states[call.layer]
        start = self._prefix.width + self.step * self._group_size
        stop = start + self._group_size
        keys[:, :, start:stop] = key
        values[:, :, start:stop] = value
        mask = self._joint_mask(self._binding(call.window), query.dtype)[..., :stop]
        return _sdpa(query, keys[:, :, :stop], values[:, :, :stop], mask, call)

    def _binding(self, window: int | None) -> int | None:
        return None if window is None or window >= self._prefix.width + self._length else window

    def _joint_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[P or 1, 1, G, S + L·G]"""
        name = (None if window is None else self.step, window, dtype)  # without a window, one mask serves all steps
        if name not in self._masks:
            self._masks = {n: m for n, m in self._masks.items() if n[0] in (None, self.step)}
            prefix_PS, own_L = self._seen(window)
            members_G = torch.arange(self._group_size, device=prefix_PS.device)
            own_GK = (members_G[:, None] == members_G.repeat(self._length)) & own_L.repeat_interleave(self._group_size)
            rows = len(prefix_PS), self._group_size, -1
            seen = torch.cat([prefix_PS[:, None, :].expand(rows), own_GK.expand(len(prefix_PS), -1, -1)], dim=-1)
            self._masks[name] = _additive(seen, dtype).unsqueeze(1)
        return self._masks[name]

    def _seen(self, window: int | None) -> tuple[Tensor, Tensor]:
        """What this step sees of the prompts [P or 1, S] and of its own completion's tokens [L]."""
        prefix_PS = self._prefix.mask_PS
        steps_L = torch.arange(self._length, device=prefix_PS.device)
        if window is None:
            return prefix_PS, torch.ones_like(steps_L, dtype=torch.bool)
        places_S = torch.arange(self._prefix.width, device=prefix_PS.device)
        return prefix_PS & (self._prefix.width + self.step - places_S < window), self.step - steps_L < window

    def _split(self, query: Tensor, key: Tensor, value: Tensor, call: LayerCall) -> Tensor:
        shared_keys, own_keys, shared_values, own_values = self._states[call.layer]
        own_keys[:, :, :, self.step] = key
        own_values[:, :, :, self.step] = value
        stop = self.step + 1
        prompts, heads, width = shared_keys.shape[:3]
        scaled = query * (query.shape[-1] ** -0.5 if call.scale is None else call.scale)
        rows_PJGRD = scaled.view(prompts, heads, -1, *query.shape[2:]).transpose(2, 3)
        shape = rows_PJGRD.shape[:-1]
        shared = rows_PJGRD.flatten(2, 3) @ shared_keys.transpose(-1, -2)
        own = rows_PJGRD @ own_keys[:, :, :, :stop].transpose(-1, -2)
        scores = torch.cat([shared.view(*shape, width), own], dim=-1)
        if (bias := self._split_bias(self._binding(call.window), scores.dtype)) is not None:
            scores = scores + bias[..., : width + stop]
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        out = (weights[..., :width].flatten(2, 3) @ shared_values).view(*shape, -1)
        out = out + weights[..., width:] @ own_values[:, :, :, :stop]
        return out.transpose(1, 2).reshape(prompts, self._group_size, query.shape[1], -1)

    def _split_bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[P or 1, 1, 1, 1, S + L]; None where everything is seen."""
        if window is None and not self._prefix.padded:
            return None
        name = (None if window is None else self.step, window, dtype)
        if name not in self._masks:
            self._masks = {n: m for n, m in self._masks.items() if n[0] in (None, self.step)}
            prefix_PS, own_L = self._seen(window)
            seen = torch.cat([prefix_PS, own_L.expand(len(prefix_PS), -1)], dim=-1)
            self._masks[name] = _additive(seen, dtype)[:, None, None, None, :]
        return self._masks[name]


def _gathered(states_MJGTD: Tensor, members_MG: Tensor) -> Tensor:
    """Some of each group's completions."""
    return torch.stack([states[:, members] for states, members in zip(states_MJGTD, members_MG, strict=True)])


class _WindowProbe:
    """Attention of single tokens, which see only themselves, that notes each layer's window."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: LayerCall) -> Tensor:
        self.windows.append(call.window)
        return _sdpa(query, key, value, None, call)


def windows_handed_over(model: nn.Module, ids_P1: Tensor) -> list[int | None]:
    """The sliding window that each attention layer of `model` names when it is called."""
    probe = _WindowProbe()
    with plan_active(model, probe):
        model(input_ids=ids_P1, use_cache=False)
    return probe.windows
