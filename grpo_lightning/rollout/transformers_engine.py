"""Sampling from any transformers causal LM, each prompt read once for its group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective.batch import PromptBatch, Rollouts
from grpo_lightning.rollout.causal_lm import evaluation_mode, text_config
from grpo_lightning.rollout.check import works
from grpo_lightning.rollout.decoding import DECODERS, Decoder
from grpo_lightning.rollout.engine import SamplingConfig
from grpo_lightning.rollout.sampling import TokenSampler

__all__ = ["TransformersEngine"]

_ENDED_CHECK_EVERY = 4  # steps between looks at whether all have ended; a look waits for the device


class TransformersEngine:
    """The policy itself samples: its weights are always the newest."""

    def sync_weights(self, model: nn.Module) -> None:
        """Nothing to do: the policy is what samples."""

    @torch.no_grad()
    def generate(
        self,
        model: nn.Module,
        prompts: PromptBatch,
        *,
        group_size: int,
        sampling: SamplingConfig,
        seeds_PG: Tensor,
    ) -> Rollouts:
        """G completions for each prompt, right-padded to the longest; see `RolloutEngine`."""
        _check_context(model, prompts, sampling)
        with evaluation_mode(model):
            decoder = _decoder(model, prompts, group_size, sampling)
            if decoder is not None:
                with decoder.active():
                    ids, logprobs = _decode(decoder, sampling, seeds_PG)
            else:
                ids, logprobs = _generate_by_transformers(model, prompts, group_size, sampling, seeds_PG)
        return as_rollouts(prompts, ids, logprobs, sampling)


def _decoder(model: nn.Module, prompts: PromptBatch, group_size: int, sampling: SamplingConfig) -> Decoder | None:
    """The fastest decoder that this model was found equal on; None when there is none."""
    width = max(int(prompts.mask_PS.sum(-1).max()), 1)  # columns that are padding in every row are left out
    for trial, decoder_type in DECODERS.items():
        if works(model, trial, width + sampling.max_new_tokens):
            ids_PS, mask_PS = prompts.ids_PS[:, -width:], prompts.mask_PS[:, -width:]
            return decoder_type(model, ids_PS, mask_PS, group_size, sampling.max_new_tokens)
    return None


def _decode(decoder: Decoder, sampling: SamplingConfig, seeds_PG: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token until all have ended or the limit; ids and log-probs [P, G, T]."""
    shape, sampler = seeds_PG.shape, TokenSampler(sampling, seeds_PG.reshape(-1))
    eos = torch.tensor(sampling.eos_ids, dtype=torch.int64, device=seeds_PG.device)
    ended_PG = torch.zeros(shape, dtype=torch.bool, device=seeds_PG.device)
    ids: list[Tensor] = []
    logprobs: list[Tensor] = []
    logits_PGV = decoder.start()
    for t in range(sampling.max_new_tokens):
        ids_N, logprobs_N = sampler.draw(logits_PGV.reshape(shape.numel(), -1), t)
        ids.append(ids_N.view(shape))
        logprobs.append(logprobs_N.view(shape))
        ended_PG = ended_PG | torch.isin(ids[-1], eos)
        last = t + 1 == sampling.max_new_tokens
        if last or (t % _ENDED_CHECK_EVERY == 0 and bool(ended_PG.all())):
            break
        logits_PGV = decoder.step(ids[-1], t)
    return torch.stack(ids, dim=-1), torch.stack(logprobs, dim=-1)


def as_rollouts(prompts: PromptBatch, ids_PGT: Tensor, logprobs_PGT: Tensor, sampling: SamplingConfig) -> Rollouts:
    """Cut what was drawn after each rollout's end; trim to the longest."""
    eos = torch.tensor(sampling.eos_ids, dtype=torch.int64, device=ids_PGT.device)
    is_eos = torch.isin(ids_PGT, eos)
    ends_before = is_eos.cumsum(-1) - is_eos.long()
    mask = ends_before == 0
    length = max(int(mask.sum(-1).max()), 1)
    mask = mask[..., :length]
    return Rollouts(
        prompt_ids_PS=prompts.ids_PS,
        prompt_mask_PS=prompts.mask_PS,
        completion_ids_PGL=torch.where(mask, ids_PGT[..., :length], sampling.pad_id),
        completion_mask_PGL=mask,
        terminated_PG=is_eos.any(-1),
        sampler_logprobs_PGL=torch.where(mask, logprobs_PGT[..., :length], 0.0),
    )


def _check_context(model: nn.Module, prompts: PromptBatch, sampling: SamplingConfig) -> None:
    limit = getattr(text_config(model), "max_position_embeddings", None)
    longest = int(prompts.mask_PS.sum(-1).max())
    if limit is not None and longest + sampling.max_new_tokens > limit:
        raise ConfigError(
            f"A prompt of {longest} tokens and sampling.max_new_tokens of {sampling.max_new_tokens} exceed the model's "
            f"context of {limit}: lower max_new_tokens, or set data.max_prompt_tokens to "
            f"{max(limit - sampling.max_new_tokens, 0)}."
        )


def _generate_by_transformers(
    model: nn.Module, prompts: PromptBatch, group_size: int, sampling: SamplingConfig, seeds_PG: Tensor
) -> tuple[Tensor, Tensor]:
    """For models whose prefix can't be shared: transformers' own loop and cache, our draws."""
    from transformers import GenerationConfig, LogitsProcessorList

    chooser = _Chooser(TokenSampler(sampling, seeds_PG.reshape(-1)), prompts.ids_PS.shape[1])
    rows = {
        "input_ids": prompts.ids_PS.repeat_interleave(group_size, dim=0),
        "attention_mask": prompts.mask_PS.long().repeat_interleave(group_size, dim=0),
    }
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=list(sampling.eos_ids) or None,
        pad_token_id=sampling.pad_id,
    )
    inner: Any = model
    out: Tensor = inner.generate(**rows, generation_config=config, logits_processor=LogitsProcessorList([chooser]))
    ids = out[:, prompts.ids_PS.shape[1] :].view(*seeds_PG.shape, -1)
    return ids, torch.stack(chooser.logprobs, dim=-1).view(*seeds_PG.shape, -1)


class _Chooser:
    """A logits processor that leaves only the token that our sampler drew."""

    def __init__(self, sampler: TokenSampler, prompt_length: int) -> None:
        self.sampler, self.prompt_length = sampler, prompt_length
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids_N, logprobs_N = self.sampler.draw(scores, input_ids.shape[1] - self.prompt_length)
        self.logprobs.append(logprobs_N)
        only = torch.full_like(scores, -torch.inf)
        return only.scatter(-1, ids_N.unsqueeze(-1), 0.0)
