"""Sampling from any transformers causal LM, each prompt read once for its group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.objective.batch import PromptBatch, Rollouts
from grpo_lightning.rollout.causal_lm import check_context, evaluation_mode
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
        check_context(model, int(prompts.mask_PS.sum(-1).max()), sampling.max_new_tokens)
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
    count, limit, device = seeds_PG.numel(), sampling.max_new_tokens, seeds_PG.device
    sampler = TokenSampler(sampling, seeds_PG.reshape(-1))
    eos = torch.tensor(sampling.eos_ids, dtype=torch.int64, device=device)
    ids_TN = torch.full((limit, count), sampling.pad_id, dtype=torch.int64, device=device)
    logprobs_TN = torch.zeros(limit, count, dtype=torch.float32, device=device)
    rows_PG = torch.arange(count, device=device).view(seeds_PG.shape)  # the rollouts that are still sampled
    ended_PG = torch.zeros_like(rows_PG, dtype=torch.bool)
    logits_PGV = decoder.start()
    for t in range(limit):
        drawn_N, logprobs_N = sampler.draw(logits_PGV.flatten(0, 1), t)
        ids_TN[t, rows_PG.flatten()] = drawn_N
        logprobs_TN[t, rows_PG.flatten()] = logprobs_N
        drawn_PG = drawn_N.view(rows_PG.shape)
        ended_PG = ended_PG | torch.isin(drawn_PG, eos)
        if t + 1 == limit:
            break
        look = t % _ENDED_CHECK_EVERY == 0
        if look and bool(ended_PG.all()):
            break
        logits_PGV = decoder.step(drawn_PG, t)
        if look and (kept := _kept_rows(ended_PG)) is not None:
            groups_M, members_MG = kept
            decoder.keep(groups_M, members_MG)
            sampler.keep((groups_M[:, None] * rows_PG.shape[1] + members_MG).flatten())
            pick = groups_M[:, None], members_MG
            rows_PG, ended_PG, logits_PGV = rows_PG[pick], ended_PG[pick], logits_PGV[pick]
    shape = (t + 1, *seeds_PG.shape)
    return ids_TN[: t + 1].view(shape).movedim(0, -1), logprobs_TN[: t + 1].view(shape).movedim(0, -1)


def _kept_rows(ended_PG: Tensor) -> tuple[Tensor, Tensor] | None:
    """Groups with rollouts that go on, and these first in each group, when they fit half the rows; else None."""
    going_P = (~ended_PG).sum(-1)
    groups_M = going_P.nonzero().squeeze(-1)
    members = int(going_P.max())
    if 2 * len(groups_M) * members > ended_PG.numel():
        return None
    return groups_M, ended_PG[groups_M].long().argsort(dim=-1, stable=True)[:, :members]


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
