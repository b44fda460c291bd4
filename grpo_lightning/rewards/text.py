"""What a completion says, for plain and chat completions alike."""

from __future__ import annotations

from typing import Any

__all__ = ["text_of", "texts_of"]


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the last message's content."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1]["content"]) if completion else ""


def texts_of(completions: list[Any]) -> list[str]:
    """The texts of completions."""
    return [text_of(c) for c in completions]
