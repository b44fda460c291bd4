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

__all__ = ["Reference", "count_weights", "load_policy", "model_config"]

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


def model_config(name: str, *, gguf_file: str | None = None) -> Any:
    """The transformers configuration of a model; no weight is read."""
    from transformers import AutoConfig

    path, found_gguf = resolve_model(name)
    chosen = gguf_file or found_gguf
    try:
        return AutoConfig.from_pretrained(path, **({"gguf_file": chosen} if chosen else {}))
    except (OSError, ValueError) as error:
        raise _unloadable(name, path, error) from error


def count_weights(name: str, *, gguf_file: str | None = None, lora: LoraSettings | None = None) -> tuple[int, int]:
    """All weights of a model and the trained ones, counted without reading them."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(model_config(name, gguf_file=gguf_file))
        if lora is not None:
            model = _with_lora(model, lora)
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)


def _from_pretrained(path: str, *, gguf_file: str | None, dtype: torch.dtype, shown: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    extra: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **extra)
    except (OSError, ValueError) as error:
        raise _unloadable(shown, path, error) from error
    return model


def _unloadable(shown: str, path: str, error: Exception) -> ConfigError:
    where = "a folder with config.json and weights" if Path(path).exists() else "an existing folder or a hub name"
    reason = str(error).strip().splitlines()[0]
    return ConfigError(f"model {shown!r} can't be loaded ({reason}): give {where} of a causal language model.")


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
