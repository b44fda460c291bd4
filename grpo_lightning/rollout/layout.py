"""Where a group's tokens lie in one packed row, and what each of them may see, as a mask for the model's own attention.

A packed row holds a prompt once and the completions of its group behind it, so that every layer reads the prompt once
for all G of them:  prompt | c0t0 c0t1 … | c1t0 c1t1 … | …  A completion token sees the prompt and its own completion
only; position ids go on from the prompt in each completion.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["additive", "position_ids", "scoring_mask"]


def position_ids(prompt_mask_PS: Tensor) -> Tensor:
    """Positions of left-padded prompts, 0 on padding, int64 [P, S]."""
    return (prompt_mask_PS.long().cumsum(-1) - 1).clamp(min=0)


def scoring_mask(prompt_mask_PS: Tensor, group_size: int, length: int) -> Tensor:
    """What sees what in rows packed by completion, bool [P, 1, S+G·L, S+G·L]; padding sees itself, to keep softmax finite."""
    prompts, prompt_length = prompt_mask_PS.shape
    device = prompt_mask_PS.device
    total = prompt_length + group_size * length
    seen_PQQ = torch.zeros(prompts, total, total, dtype=torch.bool, device=device)
    causal_SS = torch.ones(prompt_length, prompt_length, dtype=torch.bool, device=device).tril()
    seen_PQQ[:, :prompt_length, :prompt_length] = causal_SS & prompt_mask_PS.unsqueeze(1)
    seen_PQQ[:, prompt_length:, :prompt_length] = prompt_mask_PS.unsqueeze(1)
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    own_GG = torch.eye(group_size, dtype=torch.bool, device=device)
    own = torch.kron(own_GG, causal_LL)
    seen_PQQ[:, prompt_length:, prompt_length:] = own
    diagonal = torch.arange(prompt_length, device=device)
    seen_PQQ[:, diagonal, diagonal] = True
    return seen_PQQ.unsqueeze(1)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that every attention implementation adds to its scores: 0 where seen, the lowest number elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
