"""Whether a model's prefix can be shared: tried on random tokens, never looked up by name.

Each way of scoring and sampling that shares prompts is compared with one full forward pass per completion, without padding:
log-probs, and for scoring a few parameters' gradients. Models with recurrent state, whose cache can't be repeated, or
that ignore the mask fail, and take full passes. A way is tried when it is first wanted, once a model.
"""

from __future__ import annotations

from typing import Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from grpo_lightning.objective.batch import Rollouts
from grpo_lightning.rollout.attention import windows_handed_over
from grpo_lightning.rollout.causal_lm import evaluation_mode, text_config
from grpo_lightning.rollout.decoding import DECODERS, Decoder, DecoderName
from grpo_lightning.rollout.scoring import Way, score_with

__all__ = ["Trial", "sharing_report", "works"]

Trial = Literal["packed", "masked", "cached"] | DecoderName  # of scoring, of sampling
_TRIALS: tuple[Trial, ...] = ("packed", "masked", "cached", *DECODERS)
# these get each layer's window; in the others a key's place in the row is not its position in the sequence
_OWN_WINDOW: tuple[Trial, ...] = ("packed", "plan_decoding")

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_LOOSE = 0.1  # half-precision models
_PARAMETERS = 8  # whose gradients are compared, spread over the model
_windows: WeakKeyDictionary[nn.Module, list[int | None]] = WeakKeyDictionary()  # of each attention layer
_found: WeakKeyDictionary[nn.Module, dict[Trial, str]] = WeakKeyDictionary()


def works(model: nn.Module, trial: Trial, total_length: int) -> bool:
    """Whether a way is equal to full passes on this model, for sequences of `total_length` tokens."""
    limit = _length_limit(model, trial)
    if limit is not None and total_length > limit:
        return False
    found = _found.setdefault(model, {})
    if trial not in found:
        found[trial] = _try(model, trial)
    return not found[trial]


def sharing_report(model: nn.Module) -> dict[Trial, str]:
    """Why each way can't be taken on this model; empty where it can."""
    for trial in _TRIALS:
        works(model, trial, 0)
    return dict(_found[model])


def _length_limit(model: nn.Module, trial: Trial) -> int | None:
    """Longest sequence in which no attention window binds that the way does not know of; None: no limit."""
    config = text_config(model)
    chunk = getattr(config, "attention_chunk_size", None)  # no layer hands this one to its attention function
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window and trial in _OWN_WINDOW and _window_known(model, window):
        window = None
    return min((int(size) for size in (chunk, window) if size), default=None)


def _window_known(model: nn.Module, window: int) -> bool:
    """Whether every layer with a window hands it to its attention function."""
    if model not in _windows:
        ids_P1 = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        try:
            with evaluation_mode(model), torch.no_grad():
                _windows[model] = windows_handed_over(model, ids_P1)
        except Exception:  # noqa: BLE001 - as in `_try`
            _windows[model] = []
    kinds = getattr(text_config(model), "layer_types", None)
    wanted = sum("sliding" in kind for kind in kinds) if kinds else len(_windows[model])
    return bool(_windows[model]) and _windows[model].count(window) == wanted


def _try(model: nn.Module, trial: Trial) -> str:
    with evaluation_mode(model):
        try:
            return _compare(model, trial)
        except Exception as error:  # noqa: BLE001 - whatever a model of unknown make raises means no
            return f"{type(error).__name__}: {error}"


def _compare(model: nn.Module, trial: Trial) -> str:
    rollouts = _random_rollouts(model)
    if trial in DECODERS:
        with torch.no_grad():
            return _compare_decoding(model, trial, rollouts, score_with("full", model, rollouts).logprobs)
    with torch.enable_grad():
        want = score_with("full", model, rollouts).logprobs
        got = score_with(cast(Way, trial), model, rollouts).logprobs
        if not _close(got, want, model):
            return f"log-probs of {trial} rows differ from full passes"
        pairs = zip(_gradients(model, got), _gradients(model, want), strict=True)
        if not all(_close(g, w, model, gradient=True) for g, w in pairs):
            return f"gradients of {trial} rows differ from full passes"
    return ""


def _compare_decoding(model: nn.Module, trial: DecoderName, rollouts: Rollouts, want_PGL: Tensor) -> str:
    group_size, length = rollouts.completion_ids_PGL.shape[1:]
    for split in (False, True) if trial == "plan_decoding" else (False,):
        decoder = DECODERS[trial](
            model, rollouts.prompt_ids_PS, rollouts.prompt_mask_PS, group_size, length, split=split
        )
        with decoder.active():
            got_PGL = _decoded_logprobs(decoder, rollouts.completion_ids_PGL)
        if not _close(got_PGL, want_PGL, model):
            return f"log-probs of {type(decoder).__name__} differ from full passes"
    return ""


def _decoded_logprobs(decoder: Decoder, ids_PGL: Tensor) -> Tensor:
    """Log-probs of given completions, fed token by token."""
    got = []
    logits_PGV = decoder.start()
    for t, ids_PG in enumerate(ids_PGL.unbind(-1)):
        got.append(torch.log_softmax(logits_PGV.float(), -1).gather(-1, ids_PG.unsqueeze(-1)).squeeze(-1))
        if t + 1 < ids_PGL.shape[-1]:
            logits_PGV = decoder.step(ids_PG, t)
    return torch.stack(got, dim=-1)


def _random_rollouts(model: nn.Module) -> Rollouts:
    """Three prompts of different lengths, two completions each."""
    vocabulary = int(text_config(model).vocab_size)
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
        sampler_logprobs_PGL=torch.zeros(3, 2, 4, dtype=torch.float32, device=device),
    )


def _gradients(model: nn.Module, logprobs: Tensor) -> list[Tensor | None]:
    """Gradients of a weighted sum of log-probs by trainable matrices from all over the model."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    if not matrices or not logprobs.requires_grad:
        return []
    spread = matrices[:: max(1, len(matrices) // _PARAMETERS)]
    weights = torch.linspace(-1, 1, logprobs.numel(), dtype=logprobs.dtype, device=logprobs.device).view_as(logprobs)
    return list(torch.autograd.grad((logprobs * weights).sum(), spread, allow_unused=True))


def _close(got: Tensor | None, want: Tensor | None, model: nn.Module, *, gradient: bool = False) -> bool:
    if got is None or want is None:
        return got is want
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return False
    dtype = next(model.parameters()).dtype
    tolerance = _TOLERANCE.get(dtype, _LOOSE)
    if torch.is_autocast_enabled(got.device.type):
        tolerance = _LOOSE
    scale = max(float(want.detach().abs().max()), 1e-6) if gradient else 1.0
    return float((got.detach() - want.detach()).abs().max()) <= tolerance * max(scale, 1e-3) * (10 if gradient else 1)
