"""What is asked of a transformers causal LM: its arguments, its mode, its dtype, its attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn

from grpo_lightning.errors import ConfigError

__all__ = [
    "accepts",
    "attention_implementation",
    "cache_argument",
    "check_context",
    "check_vocabulary",
    "evaluation_mode",
    "model_dtype",
    "recomputes",
    "text_config",
]


def _inner(model: nn.Module) -> Any:
    """The transformers model below peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def text_config(model: nn.Module) -> Any:
    """The language model's part of the configuration."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def check_context(model: nn.Module, longest: int, max_new_tokens: int) -> None:
    """Raise where a prompt of `longest` tokens and its completion don't fit into the model's context."""
    limit = getattr(text_config(model), "max_position_embeddings", None)
    if limit is not None and longest + max_new_tokens > limit:
        room = limit - max_new_tokens
        more = f", or set data.max_prompt_tokens to {room}" if room > 0 else ""
        raise ConfigError(
            f"A prompt of {longest} tokens and sampling.max_new_tokens of {max_new_tokens} exceed the model's "
            f"context of {limit}: lower max_new_tokens{more}."
        )


def check_vocabulary(model: nn.Module, largest_id: int) -> None:
    """Raise where the tokenizer gives ids that the model has no embedding for."""
    size = int(text_config(model).vocab_size)
    if largest_id >= size:
        raise ConfigError(
            f"The tokenizer gives the token id {largest_id} and the model has {size} tokens: they are not of one model; set "
            f"data.tokenizer, or model.model, to what belongs together."
        )


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the model's forward takes an argument of this name."""
    return name in signature(_inner(model).forward).parameters


def cache_argument(model: nn.Module) -> str:
    """What the model's forward calls its cache."""
    return "cache" if accepts(model, "cache") else "past_key_values"


def model_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that attention runs in: autocast's where it is on, else the parameters'."""
    parameter = next(model.parameters())
    if torch.is_autocast_enabled(parameter.device.type):
        return torch.get_autocast_dtype(parameter.device.type)
    return parameter.dtype


def recomputes(model: nn.Module) -> bool:
    """Whether the backward pass will run layers again (gradient checkpointing)."""
    if not (torch.is_grad_enabled() and model.training):
        return False
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off inside; every module gets its own mode back after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Let every attention layer of `model` call the registered attention function `name` inside."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    before = [
        (c, c._attn_implementation_internal) for c in found.values() if hasattr(c, "_attn_implementation_internal")
    ]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, old in before:
            config._attn_implementation_internal = old
