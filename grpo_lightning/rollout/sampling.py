"""Drawing tokens: seeds per rollout, counter-based uniforms, filters, and inverse-CDF sampling.

Token t of a rollout with seed s is drawn with the uniform u(s, t), a hash of the two numbers, so that a completion does not
depend on the order or size of the batch. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast
splittable pseudorandom number generators"), computed in int64 with wrap-around.

Log-probs are those of the temperature-scaled distribution *before* top-k, top-p and min-p: what a trainer computes for the same
token, so that the two can be compared.

Letters: N rows, V vocabulary, L token positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lightning.rollout.engine import SamplingConfig

__all__ = ["TokenSampler", "filter_logits", "rollout_seeds", "token_uniforms"]

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_EPOCH_GAMMA = 0x632BE59BD9B4E019  # another odd constant: epochs and places share no sequence
_BLOCK = 256  # vocabulary entries summed at once, before the one block that holds the draw is looked into


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def rollout_seeds(run_seed: int, row_ids_P: Tensor, epoch: int, group_size: int) -> Tensor:
    """One int64 seed per rollout [P, G], a hash of run seed, epoch, dataset row and place in the group."""
    base = torch.tensor([run_seed], dtype=torch.int64, device=row_ids_P.device)
    base = _mix(_mix(base + _GAMMA) + torch.full_like(base, epoch + 1) * _EPOCH_GAMMA)
    rows_P1 = _mix(base ^ _mix(row_ids_P.to(torch.int64) + _GAMMA)).unsqueeze(-1)
    places_G = torch.arange(1, group_size + 1, dtype=torch.int64, device=row_ids_P.device)
    return _mix(rows_P1 + places_G * _GAMMA)


def token_uniforms(seeds_N: Tensor, length: int) -> Tensor:
    """float32 uniforms in [0, 1) for token positions 0..length-1 of each seed, [N, L]."""
    positions_L = torch.arange(1, length + 1, dtype=torch.int64, device=seeds_N.device)
    bits_NL = _mix(_mix(seeds_N).unsqueeze(-1) + positions_L * _GAMMA)
    return _shift_right(bits_NL, 40).to(torch.float32) * 2.0**-24


def filter_logits(logits_NV: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Temperature-scaled logits with -inf where top-k, top-p, then min-p remove a token. The likeliest token always stays.

    The same tokens as transformers' warpers in the same order: ties with the k-th logit stay; top-p keeps the fewest
    likeliest tokens that reach the share.
    """
    if 0 < top_k < logits_NV.shape[-1]:
        kth_N1 = logits_NV.topk(top_k, dim=-1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < kth_N1, -torch.inf)
    if top_p < 1:
        ascending_NV, order_NV = logits_NV.sort(dim=-1)
        drop_NV = ascending_NV.softmax(-1).cumsum(-1) <= 1 - top_p
        drop_NV[:, -1] = False
        logits_NV = logits_NV.masked_fill(drop_NV.scatter(-1, order_NV, drop_NV), -torch.inf)
    if min_p > 0:
        probs_NV = logits_NV.softmax(-1)
        drop_NV = probs_NV < min_p * probs_NV.amax(-1, keepdim=True)
        logits_NV = logits_NV.masked_fill(drop_NV, -torch.inf)
    return logits_NV


class TokenSampler:
    """Draws one token per row and step.

    Args:
        config: temperature, filters, greedy.
        seeds_N: one int64 seed per row.
    """

    def __init__(self, config: SamplingConfig, seeds_N: Tensor) -> None:
        self.config = config
        self.uniforms_LN = None if config.greedy else token_uniforms(seeds_N, config.max_new_tokens).T.contiguous()

    def keep(self, rows_M: Tensor) -> None:
        """Go on with some of the rows only."""
        if self.uniforms_LN is not None:
            self.uniforms_LN = self.uniforms_LN[:, rows_M]

    def draw(self, logits_NV: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Token ids and their log-probs before filtering, [N] each."""
        config = self.config
        scaled_NV = logits_NV.float()
        if config.temperature != 1.0:
            scaled_NV = scaled_NV / config.temperature
        if self.uniforms_LN is None:
            ids_N = scaled_NV.argmax(-1)
            return ids_N, _chosen(scaled_NV, ids_N) - scaled_NV.logsumexp(-1)
        uniforms_N = self.uniforms_LN[step]
        if not config.filters:
            return _inverse_cdf(scaled_NV, uniforms_N)
        kept_NV = filter_logits(scaled_NV, top_k=config.top_k, top_p=config.top_p, min_p=config.min_p)
        ids_N, _ = _inverse_cdf(kept_NV, uniforms_N)
        return ids_N, _chosen(scaled_NV, ids_N) - scaled_NV.logsumexp(-1)


def _chosen(values_NV: Tensor, ids_N: Tensor) -> Tensor:
    return values_NV.gather(-1, ids_N.unsqueeze(-1)).squeeze(-1)


def _inverse_cdf(logits_NV: Tensor, uniforms_N: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest token whose cumulative probability exceeds the uniform, and its log-prob.

    In two levels, first the block of the vocabulary and then the token in it: no cumulative sum over all of it.
    """
    peak_N1 = logits_NV.amax(-1, keepdim=True)
    weights_NV = (logits_NV - peak_N1).exp_()
    block_sums_NB = _block_sums(weights_NV)
    cumulative_NB = block_sums_NB.cumsum(-1)
    total_N1 = cumulative_NB[:, -1:]
    target_N1 = torch.minimum(
        uniforms_N.unsqueeze(-1) * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1))
    )
    block_N1 = torch.searchsorted(cumulative_NB, target_N1, right=True).clamp_(max=cumulative_NB.shape[-1] - 1)
    before_N1 = cumulative_NB.gather(-1, block_N1) - block_sums_NB.gather(-1, block_N1)
    ids_N = _within_block(weights_NV, block_N1, target_N1 - before_N1)
    return ids_N, _chosen(logits_NV, ids_N) - peak_N1.squeeze(-1) - total_N1.squeeze(-1).log()


def _block_sums(weights_NV: Tensor) -> Tensor:
    vocabulary = weights_NV.shape[-1]
    whole = vocabulary - vocabulary % _BLOCK
    sums_NB = weights_NV[:, :whole].reshape(len(weights_NV), -1, _BLOCK).sum(-1) if whole else weights_NV[:, :0]
    if whole == vocabulary:
        return sums_NB
    return torch.cat([sums_NB, weights_NV[:, whole:].sum(-1, keepdim=True)], dim=-1)


def _within_block(weights_NV: Tensor, block_N1: Tensor, target_N1: Tensor) -> Tensor:
    """The token of the block where the cumulative weight first exceeds the target; always one of positive weight."""
    vocabulary = weights_NV.shape[-1]
    size = min(_BLOCK, vocabulary)
    places_NW = block_N1 * _BLOCK + torch.arange(size, device=weights_NV.device)
    inside_NW = places_NW < vocabulary
    weights_NW = weights_NV.gather(-1, places_NW.clamp(max=vocabulary - 1)) * inside_NW
    cumulative_NW = weights_NW.cumsum(-1)
    last_N1 = cumulative_NW[:, -1:]
    target_N1 = torch.minimum(target_N1.clamp_(min=0), torch.nextafter(last_N1, torch.zeros_like(last_N1)))
    place_N1 = torch.searchsorted(cumulative_NW, target_N1, right=True).clamp_(max=size - 1)
    return (block_N1 * _BLOCK + place_N1).clamp_(max=vocabulary - 1).squeeze(-1)
