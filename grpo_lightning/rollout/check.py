"""Whether a model's prefix can be shared: tried on random tokens, never looked up by name.

Packed rows, a repeated cache and a step of sampling are compared with one full forward pass per completion, log-probs and
a gradient. Models with recurrent state, whose cache can't be repeated, or that ignore the mask fail and take full passes.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from grpo_lightning.objective.batch import Rollouts

__all__ = ["shared_prefix_works", "sharing_report"]

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_LOOSE = 0.1  # half-precision models
_found: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def shared_prefix_works(model: nn.Module, total_length: int) -> bool:
    """Whether the fast ways are equal on this model, for rows of `total_length` tokens. The check runs once a model."""
    window = _sliding_window(model)
    if window is not None and total_length > window:
        return False
    return not sharing_report(model)


def sharing_report(model: nn.Module) -> str:
    """Why the prefix can't be shared; empty when it can."""
    if model not in _found:
        _found[model] = _try(model)
    return _found[model]


def _sliding_window(model: nn.Module) -> int | None:
    """Keys beyond a window would be seen in packed rows, where a key's place is not its position."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    return int(window) if window and used else None


def _try(model: nn.Module) -> str:
    training, rng = model.training, torch.get_rng_state()
    model.eval()
    try:
        return _compare(model)
    except Exception as error:  # noqa: BLE001 - whatever a model of unknown make raises means no
        return f"{type(error).__name__}: {error}"
    finally:
        model.train(training)
        torch.set_rng_state(rng)


def _compare(model: nn.Module) -> str:
    from grpo_lightning.rollout.scoring import score_with

    rollouts = _random_rollouts(model)
    with torch.enable_grad():
        want = score_with("full", model, rollouts)
        want_grad = _gradient(model, want.logprobs)
        for way in ("packed", "cached"):
            got = score_with(way, model, rollouts)
            if not _close(got.logprobs, want.logprobs, model):
                return f"log-probs of {way} rows differ from full passes"
            if want_grad is not None and not _close(_gradient(model, got.logprobs), want_grad, model, gradient=True):
                return f"gradients of {way} rows differ from full passes"
    return _compare_decoding(model, rollouts, want.logprobs.detach())


def _compare_decoding(model: nn.Module, rollouts: Rollouts, want_PGL: Tensor) -> str:
    from grpo_lightning.rollout.decoding import PackedDecoder, RepeatedDecoder

    group_size, length = rollouts.completion_ids_PGL.shape[1:]
    with torch.no_grad():
        for decoder_type in (PackedDecoder, RepeatedDecoder):
            decoder = decoder_type(model, rollouts.prompt_ids_PS, rollouts.prompt_mask_PS, group_size, length)
            logits_PGV = decoder.start()
            for t in range(length):
                ids_PG = rollouts.completion_ids_PGL[..., t]
                got_PG = torch.log_softmax(logits_PGV.float(), -1).gather(-1, ids_PG.unsqueeze(-1)).squeeze(-1)
                if not _close(got_PG, want_PGL[..., t], model):
                    return f"log-probs of {decoder_type.__name__} differ from full passes"
                if t + 1 < length:
                    logits_PGV = decoder.step(ids_PG, t)
    return ""


def _random_rollouts(model: nn.Module) -> Rollouts:
    """Three prompts of different lengths, two completions each."""
    config: Any = model.config
    vocabulary = int(config.get_text_config().vocab_size)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    prompt_ids_PS = torch.randint(0, vocabulary, (3, 7), generator=generator).to(device)
    completion_ids_PGL = torch.randint(0, vocabulary, (3, 2, 4), generator=generator).to(device)
    lengths_P1 = torch.tensor([[7], [3], [5]], device=device)
    mask_PS = torch.arange(7, device=device).flip(0) < lengths_P1
    return Rollouts(
        prompt_ids_PS=prompt_ids_PS,
        prompt_mask_PS=mask_PS,
        completion_ids_PGL=completion_ids_PGL,
        completion_mask_PGL=torch.ones_like(completion_ids_PGL, dtype=torch.bool),
        terminated_PG=torch.ones(3, 2, dtype=torch.bool, device=device),
        sampler_logprobs_PGL=torch.zeros(3, 2, 4, device=device),
    )


def _gradient(model: nn.Module, logprobs: Tensor) -> Tensor | None:
    """The gradient of a weighted sum of log-probs by the first trainable matrix."""
    parameter = next((p for p in model.parameters() if p.requires_grad and p.dim() >= 2), None)
    if parameter is None or not logprobs.requires_grad:
        return None
    weights = torch.linspace(-1, 1, logprobs.numel(), device=logprobs.device).view_as(logprobs)
    (gradient,) = torch.autograd.grad((logprobs * weights).sum(), parameter, allow_unused=True)
    return gradient


def _close(got: Tensor | None, want: Tensor, model: nn.Module, *, gradient: bool = False) -> bool:
    if got is None or got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return False
    dtype = next(model.parameters()).dtype
    tolerance = _TOLERANCE.get(dtype, _LOOSE)
    if torch.is_autocast_enabled(got.device.type):
        tolerance = _LOOSE
    scale = max(float(want.detach().abs().max()), 1e-6) if gradient else 1.0
    return float((got.detach() - want.detach()).abs().max()) <= tolerance * max(scale, 1e-3) * (10 if gradient else 1)
