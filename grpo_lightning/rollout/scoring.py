"""Log-probs and entropies of completions under a model, with gradient, each prompt read once for its group.

Four ways that give the same numbers; the first that a model was found equal on (`check`) and that fits is taken:

* ``packed``: one row a group and a single forward pass without a cache, attention by `PackedPlan`;
* ``masked``: the same rows, with the model's own attention under a mask; for gradient checkpointing, whose second forward
  pass knows no plan, and for models that do not call a registered attention;
* ``cached``: the prompts are read into a cache, which is repeated G times; where completions are so long that most of a
  masked row's tokens do not see each other;
* ``full``: one row a completion, prompts of one length together and none padded; right for every causal model.

In all of them a completion's first input is its prompt's last token, so that its L inputs predict its L tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from grpo_lightning.objective.batch import Rollouts
from grpo_lightning.objective.logprobs import TokenScores, score_tokens
from grpo_lightning.rollout.attention import PackedPlan, plan_active
from grpo_lightning.rollout.causal_lm import accepts, cache_argument, model_dtype, recomputes, text_config
from grpo_lightning.rollout.layout import additive, position_ids, scoring_mask

__all__ = ["Way", "choose_way", "score_completions", "score_with"]

Way = Literal["packed", "masked", "cached", "full"]
_MASKED_WASTE = 3.0  # attention scores computed per score needed


def score_completions(
    model: nn.Module, rollouts: Rollouts, *, temperature: float = 1.0, with_entropy: bool = True
) -> TokenScores:
    """Log-probs (and exact entropies) of every completion token, float32 [P, G, L]; 0 where the mask is False.

    Differentiable where gradients are on. Dropout is as the model's mode says: put it in evaluation mode for none.
    """
    return score_with(choose_way(model, rollouts), model, rollouts, temperature=temperature, with_entropy=with_entropy)


def choose_way(model: nn.Module, rollouts: Rollouts) -> Way:
    """The fastest way that this model was found equal on, and that fits the shape."""
    from grpo_lightning.rollout.check import works

    prompt_length = rollouts.prompt_ids_PS.shape[1]
    group_size, length = rollouts.completion_ids_PGL.shape[1:]
    again = recomputes(model)
    if not again and works(model, "packed", prompt_length + length):
        return "packed"
    masked = (prompt_length + group_size * length) ** 2
    needed = prompt_length**2 + group_size * length * (prompt_length + length)
    if (again or masked <= _MASKED_WASTE * needed) and works(model, "masked", prompt_length + length):
        return "masked"
    return "cached" if not again and works(model, "cached", prompt_length + length) else "full"


def score_with(
    way: Way, model: nn.Module, rollouts: Rollouts, *, temperature: float = 1.0, with_entropy: bool = True
) -> TokenScores:
    """`score_completions` by a given way."""
    part = _trimmed(rollouts)
    logits_PGLV = {"packed": _packed, "masked": _masked, "cached": _cached, "full": _full}[way](model, part)
    scores = score_tokens(logits_PGLV, part.completion_ids_PGL, temperature=temperature, with_entropy=with_entropy)
    return TokenScores(
        logprobs=_filled(scores.logprobs, rollouts),
        entropies=None if scores.entropies is None else _filled(scores.entropies, rollouts),
    )


def _trimmed(rollouts: Rollouts) -> Rollouts:
    """Less the columns that are padding in every row."""
    mask_PGL, prompt_mask_PS = rollouts.completion_mask_PGL, rollouts.prompt_mask_PS
    length = max(int(mask_PGL.sum(-1).max()), 1)
    width = max(int(prompt_mask_PS.sum(-1).max()), 1)
    return replace(
        rollouts,
        prompt_ids_PS=rollouts.prompt_ids_PS[:, -width:],
        prompt_mask_PS=prompt_mask_PS[:, -width:],
        completion_ids_PGL=rollouts.completion_ids_PGL[..., :length],
        completion_mask_PGL=mask_PGL[..., :length],
    )


def _filled(values_PGT: Tensor, rollouts: Rollouts) -> Tensor:
    """Back to the full length, 0 outside the mask."""
    mask_PGL = rollouts.completion_mask_PGL
    missing = mask_PGL.shape[-1] - values_PGT.shape[-1]
    return torch.where(mask_PGL, pad(values_PGT, (0, missing)) if missing else values_PGT, 0.0)


def _inputs(rollouts: Rollouts) -> Tensor:
    """What predicts each completion token: the prompt's last token, then the completion less its last; [P, G, L]."""
    last_P11 = rollouts.prompt_ids_PS[:, None, -1:]
    return torch.cat(
        [last_P11.expand(-1, rollouts.completion_ids_PGL.shape[1], -1), rollouts.completion_ids_PGL[..., :-1]], -1
    )


def _row(rollouts: Rollouts) -> dict[str, Tensor]:
    """Ids and positions of packed rows: the prompt less its last token, then the inputs of each completion."""
    positions_PS = position_ids(rollouts.prompt_mask_PS)
    inputs_PGL = _inputs(rollouts)
    _, group_size, length = inputs_PGL.shape
    steps_T = torch.arange(length, device=inputs_PGL.device).repeat(group_size)
    return {
        "input_ids": torch.cat([rollouts.prompt_ids_PS[:, :-1], inputs_PGL.flatten(1)], dim=1),
        "position_ids": torch.cat([positions_PS[:, :-1], positions_PS[:, -1:] + steps_T], dim=1),
    }


def _packed(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """Logits [P, G, L, V]."""
    prompts, group_size, length = rollouts.completion_ids_PGL.shape
    plan = PackedPlan(prefix_mask_PS=rollouts.prompt_mask_PS[:, :-1], group_size=group_size, length=length)
    with plan_active(model, plan):
        logits = _logits(model, keep=group_size * length, **_row(rollouts), use_cache=False)
    return logits.view(prompts, group_size, length, -1)


def _masked(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """Logits [P, G, L, V]."""
    prompts, group_size, length = rollouts.completion_ids_PGL.shape
    seen = scoring_mask(rollouts.prompt_mask_PS[:, :-1], group_size, length)
    mask = additive(seen, model_dtype(model))
    logits = _logits(model, keep=group_size * length, **_row(rollouts), attention_mask=mask, use_cache=False)
    return logits.view(prompts, group_size, length, -1)


def _cached(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """Logits [P, G, L, V]."""
    from transformers import DynamicCache

    prompts, group_size, length = rollouts.completion_ids_PGL.shape
    positions_PS = position_ids(rollouts.prompt_mask_PS)
    cache = DynamicCache(config=text_config(model))
    extra = {cache_argument(model): cache, "use_cache": True}
    if positions_PS.shape[1] > 1:
        _logits(
            model,
            keep=1,
            input_ids=rollouts.prompt_ids_PS[:, :-1],
            attention_mask=rollouts.prompt_mask_PS[:, :-1].long(),
            position_ids=positions_PS[:, :-1],
            **extra,
        )
        cache.batch_repeat_interleave(group_size)
    inputs_NL = _inputs(rollouts).flatten(0, 1)
    wide_NS = rollouts.prompt_mask_PS[:, :-1].repeat_interleave(group_size, dim=0)
    steps_L = torch.arange(length, device=inputs_NL.device)
    logits = _logits(
        model,
        keep=length,
        input_ids=inputs_NL,
        attention_mask=torch.cat([wide_NS, torch.ones_like(inputs_NL, dtype=torch.bool)], dim=1).long(),
        position_ids=positions_PS[:, -1:].repeat_interleave(group_size, dim=0) + steps_L,
        **extra,
    )
    return logits.view(prompts, group_size, length, -1)


def _full(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """Logits [P, G, L, V]."""
    _, group_size, length = rollouts.completion_ids_PGL.shape
    lengths_P = rollouts.prompt_mask_PS.sum(-1)
    order, parts = [], []
    for width in sorted(set(lengths_P.tolist())):
        rows_M = (lengths_P == width).nonzero().squeeze(-1)
        prompt_NS = rollouts.prompt_ids_PS[rows_M, -width:].repeat_interleave(group_size, dim=0)
        ids = torch.cat([prompt_NS, rollouts.completion_ids_PGL[rows_M, :, :-1].flatten(0, 1)], dim=1)
        logits = _logits(model, keep=length, input_ids=ids, use_cache=False)
        order.append(rows_M)
        parts.append(logits.view(len(rows_M), group_size, length, -1))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)[torch.cat(order).argsort()]


def _logits(model: nn.Module, *, keep: int, **inputs: Any) -> Tensor:
    """Logits of the last `keep` positions; only these go through the language-model head where the model allows it."""
    if accepts(model, "logits_to_keep"):
        inputs["logits_to_keep"] = keep
    for name in ("position_ids", "use_cache"):
        if not accepts(model, name):
            inputs.pop(name, None)
    logits: Tensor = model(**inputs).logits
    return logits[:, -keep:]
