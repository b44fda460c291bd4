"""Loading the policy and its reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from grpo_lightning.errors import ConfigError
from grpo_lightning.training.settings import LoraSettings
from grpo_lightning.training.tokenizer import resolve_model

__all__ = ["Reference", "load_policy"]

_DROPOUT_KEYS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "dropout")


def load_policy(
    name: str, *, gguf_file: str | None, dtype: Literal["float32", "bfloat16", "float16"], lora: LoraSettings | None
) -> nn.Module:
    """A causal LM with dropout off, trainable whole or through LoRA adapters.

    Dropout stays off throughout: with it, the ratio to the old policy and the KL to the reference measure noise.
    """
    path, found_gguf = resolve_model(name)
    model = _from_pretrained(path, gguf_file=gguf_file or found_gguf, dtype=getattr(torch, dtype), shown=name)
    if lora is not None:
        model = _with_lora(model, lora)
    _switch_dropout_off(model)
    return model


def _from_pretrained(path: str, *, gguf_file: str | None, dtype: torch.dtype, shown: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    extra: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **extra)
    except (OSError, ValueError) as error:
        where = "a folder with config.json and weights" if Path(path).exists() else "an existing folder or a hub name"
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model {shown!r} can't be loaded ({reason}): give {where} of a causal language model."
        ) from error
    return model


def _with_lora(model: nn.Module, lora: LoraSettings) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    try:
        adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"lora.target_modules {lora.target_modules!r} does not fit this model: {error}") from error
    return adapted


def _switch_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key in _DROPOUT_KEYS:
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)


class Reference:
    """The model that KL is measured against: the policy without its adapter, or a frozen copy."""

    def __init__(self, policy: nn.Module) -> None:
        self._adapter = hasattr(policy, "disable_adapter")
        self._policy = policy
        self.model: nn.Module | None = None if self._adapter else _frozen_copy(policy)

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The reference model, for the time of the block."""
        if self.model is not None:
            yield self.model
            return
        with self._policy.disable_adapter():  # type: ignore[operator]
            yield self._policy

    @torch.no_grad()
    def sync(self, mix: float) -> None:
        """Move a copied reference towards the policy: ref = mix * policy + (1 - mix) * ref."""
        if self.model is None:
            raise ConfigError(
                "kl.reference_sync_steps is set with LoRA: the reference is the base model there and never moves; set it to 0."
            )
        for ref, new in zip(self.model.parameters(), self._policy.parameters(), strict=True):
            ref.lerp_(new.to(ref.dtype), mix)


def _frozen_copy(policy: nn.Module) -> nn.Module:
    reference = copy.deepcopy(policy).eval()
    for parameter in reference.parameters():
        parameter.requires_grad_(False)
    return reference
