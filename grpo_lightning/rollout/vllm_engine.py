"""Sampling with vLLM beside the trainer, in the same process; needs `pip install 'grpo-lightning[vllm]'`.

Deviations from the transformers engine:

1. Seeds are handed to vLLM, one request a rollout; the tokens differ from the transformers engine's for equal seeds.
2. Log-probs are vLLM's processed ones: after temperature and, where they are on, after top-p, top-k and min-p too.

The two sets of kernels never agree exactly: keep `loss.sampler_is_cap` on and watch `rollout_mismatch_kl`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective.batch import PromptBatch, Rollouts
from grpo_lightning.rollout.engine import SamplingConfig

__all__ = ["VLLMEngine", "merged_weights"]

_SEED_BITS = (1 << 63) - 1


class VLLMEngine:
    """A vLLM engine that takes over the policy's weights after each update.

    Args:
        model: folder or hub name of the architecture and its first weights.
        settings: of `vllm.LLM`, such as `dtype` and `gpu_memory_utilization`.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        vllm = _import_vllm()
        defaults = {"logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True}
        self._llm: Any = vllm.LLM(model=model, **(defaults | settings))
        self._params: Any = vllm.SamplingParams

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
        """G completions for each prompt; see `RolloutEngine`."""
        ids = [row[mask].tolist() for row, mask in zip(prompts.ids_PS, prompts.mask_PS, strict=True)]
        requests = [{"prompt_token_ids": own} for own in ids for _ in range(group_size)]
        params = [self._request(sampling, seed) for seed in seeds_PG.flatten().tolist()]
        answers = self._llm.generate(requests, sampling_params=params, use_tqdm=False)
        return _as_rollouts(prompts, [answer.outputs[0] for answer in answers], group_size, sampling)

    def _request(self, sampling: SamplingConfig, seed: int) -> Any:
        return self._params(
            n=1,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_new_tokens,
            seed=seed & _SEED_BITS,
            logprobs=0,
            stop_token_ids=list(sampling.eos_ids),
            detokenize=False,
        )

    @torch.no_grad()
    def sync_weights(self, model: nn.Module) -> None:
        """Load the policy's weights, adapters merged, and forget cached prefixes of the old ones."""
        weights = list(merged_weights(model))
        self._llm.apply_model(lambda inner: inner.load_weights(iter(weights)))
        self._llm.reset_prefix_cache()


def _import_vllm() -> Any:
    os.environ.setdefault(
        "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
    )  # its model must live in this process to be loaded into
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(
            "engine: vllm needs vLLM: pip install 'grpo-lightning[vllm]', or set engine: transformers."
        ) from error
    return vllm


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and weights as the plain architecture has them; LoRA adapters are merged for the time of the walk."""
    inner: Any = model
    if not hasattr(inner, "merge_adapter"):
        yield from ((name, value.detach()) for name, value in model.state_dict().items())
        return
    inner.merge_adapter()
    try:
        for name, value in inner.get_base_model().state_dict().items():
            if "lora_" not in name:
                yield name.replace(".base_layer.", "."), value.detach().clone()
    finally:
        inner.unmerge_adapter()


def _as_rollouts(prompts: PromptBatch, outputs: list[Any], group_size: int, sampling: SamplingConfig) -> Rollouts:
    length = max(1, *(len(o.token_ids) for o in outputs))
    shape, device = (len(prompts), group_size, length), prompts.ids_PS.device
    ids = torch.full((len(outputs), length), sampling.pad_id, dtype=torch.int64)
    logprobs, mask = torch.zeros(len(outputs), length), torch.zeros(len(outputs), length, dtype=torch.bool)
    for row, output in enumerate(outputs):
        count = len(output.token_ids)
        ids[row, :count] = torch.tensor(list(output.token_ids), dtype=torch.int64)
        chosen = [at[token].logprob for token, at in zip(output.token_ids, output.logprobs, strict=True)]
        logprobs[row, :count] = torch.tensor(chosen)
        mask[row, :count] = True
    ended = torch.tensor([bool(o.token_ids) and o.token_ids[-1] in sampling.eos_ids for o in outputs])
    return Rollouts(
        prompt_ids_PS=prompts.ids_PS,
        prompt_mask_PS=prompts.mask_PS,
        completion_ids_PGL=ids.view(shape).to(device),
        completion_mask_PGL=mask.view(shape).to(device),
        terminated_PG=ended.view(shape[:2]).to(device),
        sampler_logprobs_PGL=logprobs.view(shape).to(device),
    )
