"""Key-value storage that is allocated once: the stock cache copies itself whole at every new token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["PreallocatedCache"]


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    is_sliding = False

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._filled = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate room for `room` positions."""
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _allocate(self, states: Tensor) -> Tensor:
        batch, heads, _, width = states.shape
        return torch.empty(batch, heads, self._room, width, dtype=states.dtype, device=states.device)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write behind what is there; views of all that is filled."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, end = self._filled, self._filled + key_states.shape[-2]
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self._filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def repeat(self, times: int, room: int) -> None:
        """Each row `times` times, in a row, with room for `room` positions."""
        self.keys, self.values = (self._repeated(states, times, room) for states in (self.keys, self.values))
        self._room = room

    def _repeated(self, states: Tensor, times: int, room: int) -> Tensor:
        batch, heads, _, width = states.shape
        wide = torch.empty(batch * times, heads, room, width, dtype=states.dtype, device=states.device)
        filled = states[:, :, : self._filled]
        wide[:, :, : self._filled] = filled.repeat_interleave(times, dim=0)
        return wide

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with some of the rows."""
        self.keys, self.values = self.keys[indices], self.values[indices]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a query of this length sees."""
        return self._filled + query_length, 0

    def get_seq_length(self) -> int:
        """Positions filled."""
        return self._filled

    def get_max_length(self) -> int:
        """Positions allocated."""
        return self._room

    def get_max_cache_shape(self) -> int:
        """Positions allocated."""
        return self._room


class PreallocatedCache(Cache):  # type: ignore[misc]
    """A transformers cache with room for `room` positions in every layer."""

    def __init__(self, layers: int, room: int) -> None:
        super().__init__(layers=[_Layer(room) for _ in range(layers)])

    def repeat(self, times: int, room: int) -> None:
        """Each row `times` times, in a row, with room for `room` positions."""
        for layer in self.layers:
            layer.repeat(times, room)
