"""Log-probs of chosen tokens and the exact entropy of their distributions.

Logits are divided by the temperature first, as the sampler does. Everything is computed in float32 whatever the model's
dtype; masked vocabulary (logits of -inf) adds nothing to the entropy: 0 * -inf is 0 there, not NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TokenScores", "score_tokens", "selected_logprobs", "token_entropy"]

_CHUNK_ELEMENTS = 1 << 26  # logits held in float32 at once


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScores:
    """What a model says of given tokens; [..., L]."""

    logprobs: Tensor  # float32
    entropies: Tensor | None  # float32, nats; None when not asked for


def score_tokens(logits: Tensor, ids: Tensor, *, temperature: float = 1.0, with_entropy: bool = True) -> TokenScores:
    """Log-probs of `ids` [...] and entropies under `logits` [..., V]."""
    flat_NV, flat_N = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1)
    rows = max(1, _CHUNK_ELEMENTS // flat_NV.shape[-1])
    parts = [
        _score_rows(chunk_NV, chunk_N, temperature, with_entropy)
        for chunk_NV, chunk_N in zip(flat_NV.split(rows), flat_N.split(rows), strict=True)
    ]
    logprobs = torch.cat([p[0] for p in parts]).view(ids.shape)
    entropies = torch.cat([p[1] for p in parts]).view(ids.shape) if with_entropy else None
    return TokenScores(logprobs=logprobs, entropies=entropies)


def _score_rows(logits_NV: Tensor, ids_N: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    scaled_NV = logits_NV.float()
    if temperature != 1.0:
        scaled_NV = scaled_NV / temperature
    logprobs_NV = torch.log_softmax(scaled_NV, dim=-1)
    chosen_N = logprobs_NV.gather(-1, ids_N.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return chosen_N, chosen_N
    probs_NV = logprobs_NV.exp()
    finite_NV = logprobs_NV.masked_fill(torch.isneginf(logprobs_NV), 0.0)
    return chosen_N, -(probs_NV * finite_NV).sum(-1)


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
