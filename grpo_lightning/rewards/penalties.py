"""Penalties for long and for repetitive responses: 0 is none, -1 the most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.text import texts_of

__all__ = ["LengthPenalty", "RepetitionPenalty"]


class LengthPenalty:
    """0 up to `start` tokens, then linearly down to -1 at `limit`: with 100 and 200, a response of 150 gets -0.5.

    Args:
        start: tokens without a penalty.
        limit: tokens of the full penalty.
    """

    __name__ = "length_penalty"

    def __init__(self, start: int, limit: int) -> None:
        if not 0 <= start < limit:
            raise RewardError(f"length_penalty has start {start} and limit {limit}: start must be below limit.")
        self._start, self._limit = start, limit

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """One value a response."""
        return [self._one(len(ids)) for ids in completion_ids]

    def _one(self, tokens: int) -> float:
        share = (tokens - self._start) / (self._limit - self._start)
        return min(max(-share, -1.0), 0.0)


class RepetitionPenalty:
    """-(1 - distinct / total n-grams): "a b a b a" with n = 2 has 2 distinct bigrams of 4, and gets -0.5.

    Args:
        n: words, or tokens, of an n-gram.
        unit: `tokens` also sees repetition in text without spaces.
    """

    __name__ = "repetition_penalty"

    def __init__(self, n: int = 4, unit: Literal["words", "tokens"] = "words") -> None:
        if n < 1:
            raise RewardError(f"repetition_penalty has n {n}: give at least 1.")
        if unit not in ("words", "tokens"):
            raise RewardError(f"repetition_penalty has the unit {unit!r}: give words or tokens.")
        self._n, self._unit = n, unit

    def __call__(self, completions: list[Any], completion_ids: list[list[int]] | None = None, **_: Any) -> list[float]:
        """One value a response; 0 for responses shorter than n."""
        if self._unit == "words":
            return [self._one(text.split()) for text in texts_of(completions)]
        if completion_ids is None:
            raise RewardError("repetition_penalty by tokens needs completion_ids: set unit: words.")
        return [self._one(ids) for ids in completion_ids]

    def _one(self, items: Sequence[Any]) -> float:
        grams = [tuple(items[i : i + self._n]) for i in range(len(items) - self._n + 1)]
        return len(set(grams)) / len(grams) - 1 if grams else 0.0
