"""Reward functions that break on purpose, by the step that they are called for."""

from __future__ import annotations

import math
from typing import Any

calls: list[int] = []


def _lengths(completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids) % 3) for ids in completion_ids]


def infinite_once(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    """Infinite in the first call of step 3 (counted from 0), fine when asked again."""
    rewards = _lengths(completion_ids)
    if trainer_state.global_step == 3:
        calls.append(1)
        if len(calls) == 1:
            rewards[1] = math.inf
    return rewards


def infinite_forever(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    """Infinite from step 3 on."""
    rewards = _lengths(completion_ids)
    if trainer_state.global_step >= 3:
        rewards[0] = math.inf
    return rewards


def constant(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The same for every answer."""
    return [0.3] * len(completion_ids)


def lengths(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Fine."""
    return _lengths(completion_ids)
