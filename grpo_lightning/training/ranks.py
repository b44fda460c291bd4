"""Small collectives over the ranks of a run; each is the identity with one rank."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gather_object", "all_gather_tensor", "all_reduce_sum", "broadcast_object", "rank", "world_size"]

T = TypeVar("T")


def _joined() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_size() -> int:
    """How many ranks train together."""
    return dist.get_world_size() if _joined() else 1


def rank() -> int:
    """This rank's number, from 0."""
    return dist.get_rank() if _joined() else 0


def all_reduce_sum(values: Tensor) -> Tensor:
    """The sum of `values` over all ranks, as a new tensor."""
    if not _joined():
        return values
    total = values.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank."""
    if world_size() == 1:
        return flag
    return bool(all_reduce_sum(torch.tensor([float(flag)], device=device)).item() > 0)


def all_gather_tensor(values: Tensor) -> list[Tensor]:
    """`values` of every rank, in rank order; all ranks give the same shape."""
    if not _joined():
        return [values]
    out = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(out, values.contiguous())
    return out


def all_gather_object(value: T) -> list[T]:
    """`value` of every rank, in rank order."""
    if not _joined():
        return [value]
    out: list[Any] = [None] * world_size()
    dist.all_gather_object(out, value)
    return out


def broadcast_object(value: T) -> T:
    """Rank 0's `value`, on every rank."""
    if not _joined():
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    result: T = box[0]
    return result
