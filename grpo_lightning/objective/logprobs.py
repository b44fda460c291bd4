"""Log-probs of chosen tokens and the exact entropy of their distributions.

Logits are divided by the temperature first, as the sampler does. Everything is computed in float32 whatever the model's
dtype; masked vocabulary (logits of -inf) adds nothing to the entropy: 0 * -inf is 0 there, not NaN. NaN stays NaN.

Letters here: ``N`` tokens, ``V`` vocabulary. With x the logits less their row's maximum, over the temperature, and
Z = sum e^x:

    log p(i) = x_i - log Z
    H        = log Z - sum e^x x / Z                         both terms are at least 0: nothing cancels
    dlog p(i) / dx_j = [i = j] - p_j
    dH / dx_j        = -p_j (log p_j + H)

The gradient is written out, so that autograd keeps the logits alone and no float32 copies of them, and works through
them in pieces that fit the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_lightning.errors import ConfigError

__all__ = ["TokenScores", "score_tokens", "selected_logprobs", "token_entropy"]

_CPU_ELEMENTS = 1 << 20  # logits worked on at once: what a cache holds
_DEVICE_ELEMENTS = 1 << 26  # on an accelerator: what keeps it busy
_LOWEST = -1e4  # stands in for -inf where it is multiplied by e^-inf: e^-1e4 is 0 too


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """What a model says of given tokens; [..., L]."""

    logprobs: Tensor  # float32
    entropies: Tensor | None  # float32, nats; None when not asked for


def score_tokens(logits: Tensor, ids: Tensor, *, temperature: float = 1.0, with_entropy: bool = True) -> TokenScores:
    """Log-probs of `ids` [...] and entropies under `logits` [..., V]; differentiable once.

    Example:
        >>> score_tokens(torch.zeros(1, 4), torch.tensor([2]))
        TokenScores(logprobs=tensor([-1.3863]), entropies=tensor([1.3863]))
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(f"The temperature is {temperature}: log-probs divide logits by it, so give a number above 0.")
    logits_NV = logits.reshape(-1, logits.shape[-1])
    logprobs_N, entropies_N = _Scores.apply(logits_NV, ids.reshape(-1), temperature, with_entropy)
    entropies = entropies_N.view(ids.shape) if with_entropy else None
    return TokenScores(logprobs=logprobs_N.view(ids.shape), entropies=entropies)


def selected_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probs of `ids` [...] under `logits` [..., V], float32."""
    return score_tokens(logits, ids, temperature=temperature, with_entropy=False).logprobs


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """H = -sum p log p in nats of `logits` [..., V], exact, float32 [...]."""
    ids = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    entropies = score_tokens(logits, ids, temperature=temperature).entropies
    if entropies is None:  # pragma: no cover - asked for above
        raise RuntimeError("score_tokens gave no entropies")
    return entropies


class _Scores(torch.autograd.Function):
    """(logprobs_N, entropies_N or None) of (logits_NV, ids_N, temperature, with_entropy)."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, ids_N: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs_N = torch.empty(ids_N.shape, dtype=torch.float32, device=logits_NV.device)
        top_N1, log_z_N1 = logprobs_N.new_empty(len(ids_N), 1), logprobs_N.new_empty(len(ids_N), 1)
        entropies_N = torch.empty_like(logprobs_N) if with_entropy else None
        for rows in _pieces(logits_NV):
            top_N1[rows] = logits_NV[rows].amax(-1, keepdim=True)
            x_NV = _shifted(logits_NV[rows], top_N1[rows], temperature)
            chosen_N1 = x_NV.gather(-1, ids_N[rows, None])
            exp_NV = x_NV.exp()
            z_N1 = exp_NV.sum(-1, keepdim=True)
            log_z_N1[rows] = z_N1.log()
            logprobs_N[rows] = (chosen_N1 - log_z_N1[rows]).squeeze(-1)
            if entropies_N is not None:
                weighted_N1 = exp_NV.mul_(x_NV.clamp_(min=_LOWEST)).sum(-1, keepdim=True)
                entropies_N[rows] = (log_z_N1[rows] - weighted_N1 / z_N1).squeeze(-1)
        ctx.save_for_backward(logits_NV, ids_N, top_N1, log_z_N1, entropies_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropies_N: Tensor | None) -> Any:
        logits_NV, ids_N, top_N1, log_z_N1, entropies_N = ctx.saved_tensors
        grad_NV = torch.empty_like(logits_NV)
        for rows in _pieces(logits_NV):
            logp_NV = _shifted(logits_NV[rows], top_N1[rows], ctx.temperature).sub_(log_z_N1[rows]).clamp_(min=_LOWEST)
            piece_NV = logp_NV.exp()
            if grad_entropies_N is None:
                piece_NV.mul_(0.0 if grad_logprobs_N is None else -grad_logprobs_N[rows, None])
            else:
                per_p_NV = logp_NV.add_(entropies_N[rows, None]).mul_(-grad_entropies_N[rows, None])
                if grad_logprobs_N is not None:
                    per_p_NV.sub_(grad_logprobs_N[rows, None])
                piece_NV.mul_(per_p_NV)
            if grad_logprobs_N is not None:
                piece_NV.scatter_add_(-1, ids_N[rows, None], grad_logprobs_N[rows, None])
            grad_NV[rows] = piece_NV.div_(ctx.temperature)
        return grad_NV, None, None, None


def _pieces(logits_NV: Tensor) -> list[slice]:
    """Rows to work on at once."""
    elements = _CPU_ELEMENTS if logits_NV.device.type == "cpu" else _DEVICE_ELEMENTS
    rows = max(1, elements // logits_NV.shape[-1])
    return [slice(start, start + rows) for start in range(0, len(logits_NV), rows)]


def _shifted(logits_NV: Tensor, top_N1: Tensor, temperature: float) -> Tensor:
    """Logits less their maximum, over the temperature, in a new float32 tensor: at most 0, so e^x can't overflow."""
    x_NV = logits_NV.float() - top_N1
    return x_NV if temperature == 1.0 else x_NV.div_(temperature)
