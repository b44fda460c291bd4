"""Log-probs and entropies of completions under a model, with gradient, each prompt read once for its group.

Three ways that give the same numbers, the first that fits is taken:

* ``packed``: one row a group (`layout`), a single ordinary forward pass and no cache;
* ``cached``: the prompts are read into a cache, which is repeated G times; for long completions, where packed rows would
  spend most of their attention on tokens that do not see each other;
* ``full``: one row a completion, for models where the first two are not equal to this (see `check`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo_lightning.objective.batch import Rollouts
from grpo_lightning.objective.logprobs import TokenScores, score_tokens
from grpo_lightning.rollout.layout import additive, position_ids, scoring_mask

__all__ = ["Way", "accepts", "cache_argument", "choose_way", "model_dtype", "score_completions", "score_with"]

Way = Literal["packed", "cached", "full"]
_PACKED_WASTE = 3.0  # attention scores computed per score needed


def score_completions(
    model: nn.Module, rollouts: Rollouts, *, temperature: float = 1.0, with_entropy: bool = True
) -> TokenScores:
    """Log-probs (and exact entropies) of every completion token, float32 [P, G, L]; 0 where the mask is False."""
    return score_with(choose_way(model, rollouts), model, rollouts, temperature=temperature, with_entropy=with_entropy)


def choose_way(model: nn.Module, rollouts: Rollouts) -> Way:
    """The fastest way that this model was found equal on, and that fits the shape."""
    from grpo_lightning.rollout.check import shared_prefix_works

    prompt_length = rollouts.prompt_ids_PS.shape[1]
    group_size, length = rollouts.completion_ids_PGL.shape[1:]
    if not shared_prefix_works(model, prompt_length + length):
        return "full"
    packed = (prompt_length + group_size * length) ** 2
    needed = prompt_length**2 + group_size * length * (prompt_length + length)
    return "packed" if packed <= _PACKED_WASTE * needed else "cached"


def score_with(
    way: Way, model: nn.Module, rollouts: Rollouts, *, temperature: float = 1.0, with_entropy: bool = True
) -> TokenScores:
    """`score_completions` by a given way."""
    run = {"packed": _packed, "cached": _cached, "full": _full}[way]
    scores = run(model, rollouts, temperature, with_entropy)
    mask = rollouts.completion_mask_PGL
    entropies = scores.entropies
    return TokenScores(
        logprobs=torch.where(mask, scores.logprobs, 0.0),
        entropies=None if entropies is None else torch.where(mask, entropies, 0.0),
    )


def _packed(model: nn.Module, rollouts: Rollouts, temperature: float, with_entropy: bool) -> TokenScores:
    prompt_mask_PS = rollouts.prompt_mask_PS
    prompts, group_size, length = rollouts.completion_ids_PGL.shape
    inner = length - 1  # the last token predicts nothing
    packed_ids = torch.cat([rollouts.prompt_ids_PS, rollouts.completion_ids_PGL[..., :-1].flatten(1)], dim=1)
    positions_PS = position_ids(prompt_mask_PS)
    steps_K = torch.arange(inner, device=packed_ids.device).repeat(group_size)
    packed_positions = torch.cat([positions_PS, positions_PS[:, -1:] + 1 + steps_K], dim=1)
    logits = _logits(
        model,
        keep=group_size * inner + 1,
        input_ids=packed_ids,
        attention_mask=additive(scoring_mask(prompt_mask_PS, group_size, inner), model_dtype(model)),
        position_ids=packed_positions,
        use_cache=False,
    )
    inner_logits = logits[:, 1:].reshape(prompts, group_size, inner, -1)
    return _joined(logits[:, 0], inner_logits, rollouts.completion_ids_PGL, temperature, with_entropy)


def _cached(model: nn.Module, rollouts: Rollouts, temperature: float, with_entropy: bool) -> TokenScores:
    from transformers import DynamicCache

    prompts, group_size, length = rollouts.completion_ids_PGL.shape
    positions_PS = position_ids(rollouts.prompt_mask_PS)
    cache = DynamicCache()
    first = _logits(
        model,
        keep=1,
        input_ids=rollouts.prompt_ids_PS,
        attention_mask=rollouts.prompt_mask_PS.long(),
        position_ids=positions_PS,
        use_cache=True,
        **{cache_argument(model): cache},
    )[:, -1]
    if length == 1:
        inner = first.new_empty(prompts, group_size, 0, first.shape[-1])
        return _joined(first, inner, rollouts.completion_ids_PGL, temperature, with_entropy)
    cache.batch_repeat_interleave(group_size)
    ids_NL = rollouts.completion_ids_PGL[..., :-1].flatten(0, 1)
    wide_NS = rollouts.prompt_mask_PS.repeat_interleave(group_size, dim=0)
    steps = torch.arange(length - 1, device=ids_NL.device)
    inner = _logits(
        model,
        keep=length - 1,
        input_ids=ids_NL,
        attention_mask=torch.cat([wide_NS, torch.ones_like(ids_NL, dtype=torch.bool)], dim=1).long(),
        position_ids=positions_PS[:, -1:].repeat_interleave(group_size, dim=0) + 1 + steps,
        use_cache=True,
        **{cache_argument(model): cache},
    ).view(prompts, group_size, length - 1, -1)
    return _joined(first, inner, rollouts.completion_ids_PGL, temperature, with_entropy)


def _full(model: nn.Module, rollouts: Rollouts, temperature: float, with_entropy: bool) -> TokenScores:
    _, group_size, length = rollouts.completion_ids_PGL.shape
    ids_NL = rollouts.completion_ids_PGL.flatten(0, 1)
    row_ids = torch.cat([rollouts.prompt_ids_PS.repeat_interleave(group_size, dim=0), ids_NL], dim=1)
    wide_NS = rollouts.prompt_mask_PS.repeat_interleave(group_size, dim=0)
    mask = torch.cat([wide_NS, torch.ones_like(ids_NL, dtype=torch.bool)], dim=1)
    logits = _logits(
        model,
        keep=length + 1,
        input_ids=row_ids,
        attention_mask=mask.long(),
        position_ids=position_ids(mask),
        use_cache=False,
    )
    scores = score_tokens(logits[:, :-1], ids_NL, temperature=temperature, with_entropy=with_entropy)
    shape = rollouts.completion_ids_PGL.shape
    entropies = scores.entropies
    return TokenScores(
        logprobs=scores.logprobs.view(shape), entropies=None if entropies is None else entropies.view(shape)
    )


def _joined(
    first_PV: Tensor, inner_PGKV: Tensor, ids_PGL: Tensor, temperature: float, with_entropy: bool
) -> TokenScores:
    """The first tokens of a group share one distribution: that of the prompt's last position."""
    first_PV = first_PV.float() if temperature == 1.0 else first_PV.float() / temperature
    shared_PV = torch.log_softmax(first_PV, dim=-1)
    first_PG = shared_PV.gather(-1, ids_PGL[..., 0])
    inner = score_tokens(inner_PGKV, ids_PGL[..., 1:], temperature=temperature, with_entropy=with_entropy)
    logprobs = torch.cat([first_PG.unsqueeze(-1), inner.logprobs], dim=-1)
    if inner.entropies is None:
        return TokenScores(logprobs=logprobs, entropies=None)
    finite_PV = shared_PV.masked_fill(torch.isneginf(shared_PV), 0.0)
    entropy_P = -(shared_PV.exp() * finite_PV).sum(-1)
    entropies = torch.cat([entropy_P[:, None, None].expand(-1, ids_PGL.shape[1], 1), inner.entropies], dim=-1)
    return TokenScores(logprobs=logprobs, entropies=entropies)


def _logits(model: nn.Module, *, keep: int, **inputs: Any) -> Tensor:
    """Logits of the last `keep` positions; only these go through the language-model head where the model allows it."""
    if accepts(model, "logits_to_keep"):
        inputs["logits_to_keep"] = keep
    if not accepts(model, "position_ids"):
        inputs.pop("position_ids", None)
    logits: Tensor = model(**inputs).logits
    return logits[:, -keep:]


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the model's forward takes an argument of this name."""
    from inspect import signature

    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return name in signature(inner.forward).parameters


def cache_argument(model: nn.Module) -> str:
    """What the model's forward calls its cache."""
    return "cache" if accepts(model, "cache") else "past_key_values"


def model_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that attention runs in: autocast's where it is on, else the parameters'."""
    parameter = next(model.parameters())
    if torch.is_autocast_enabled(parameter.device.type):
        return torch.get_autocast_dtype(parameter.device.type)
    return parameter.dtype
