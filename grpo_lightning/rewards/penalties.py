"""Penalties for long and for repetitive responses: 0 is none, -1 the most."""

from __future__ import annotations

from typing import Any

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.text import texts_of

__all__ = ["LengthPenalty", "RepetitionPenalty"]


class LengthPenalty:
    """0 up to `start` tokens, then linearly down to -1 at `limit`.

    Args:
        start: tokens without a penalty.
        limit: tokens of the full penalty.
    """

    __name__ = "length_penalty"

    def __init__(self, start: int, limit: int) -> None:
        if not 0 <= start < limit:
            raise RewardError(f"length_penalty has start {start} and limit {limit}: start must be below limit.")
        self._start, self._limit = start, limit

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """One value a response."""
        width = self._limit - self._start
        return [-min(max((len(ids) - self._start) / width, 0.0), 1.0) for ids in completion_ids]


class RepetitionPenalty:
    """-(1 - distinct / total n-grams) of a response's words.

    Args:
        n: words of an n-gram.
    """

    __name__ = "repetition_penalty"

    def __init__(self, n: int = 4) -> None:
        if n < 1:
            raise RewardError(f"repetition_penalty has n {n}: give at least 1.")
        self._n = n

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        """One value a response; 0 for responses shorter than n words."""
        return [self._one(text.split()) for text in texts_of(completions)]

    def _one(self, words: list[str]) -> float:
        grams = [tuple(words[i : i + self._n]) for i in range(len(words) - self._n + 1)]
        return -(1 - len(set(grams)) / len(grams)) if grams else 0.0
