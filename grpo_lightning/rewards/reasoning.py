"""The verifiers that reasoning-gym's tasks bring with them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from grpo_lightning.rewards.text import texts_of

__all__ = ["reasoning_gym_score"]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


@cache
def _verifier(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def reasoning_gym_score(completions: list[Any], task: list[str], entry: list[dict[str, Any]], **_: Any) -> list[float]:
    """The task's own score, 0 to 1, of the text in the last <answer> tags, or of the whole response."""
    return [_score(text, name, row) for text, name, row in zip(texts_of(completions), task, entry, strict=True)]


def _score(text: str, task: str, entry: dict[str, Any]) -> float:
    found = _ANSWER.findall(text)
    said = (found[-1] if found else text).strip()
    try:
        return float(_verifier(task)(said, entry))
    except Exception:  # noqa: BLE001 - verifiers differ in what they raise on text they can't read
        return 0.0
