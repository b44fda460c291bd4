"""What a completion says, for plain and chat completions alike, and patterns whose cost on hostile text is bounded."""

from __future__ import annotations

from typing import Any

import regex  # type: ignore[import-untyped]

from grpo_lightning.errors import RewardError

__all__ = ["BoundedPattern", "text_of", "texts_of"]


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or the last message's content, whose text parts are joined."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else None
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if part.get("type") == "text")
    return "" if content is None else str(content)


def texts_of(completions: list[Any]) -> list[str]:
    """The texts of completions."""
    return [text_of(c) for c in completions]


class BoundedPattern:
    """A user's regular expression, given up on after a time limit.

    Python's `re` holds the interpreter while it backtracks, so that no time limit could stop it; `regex`, nearly the same
    syntax, has one of its own.

    Args:
        pattern: a regular expression; `.` matches line ends.
        owner: whose setting it is, for the message.
        seconds: the limit for one text, where a call gives none.
    """

    def __init__(self, pattern: str, *, owner: str, seconds: float = 1.0) -> None:
        self._seconds = seconds
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except (regex.error, TypeError) as error:
            raise RewardError(f"{owner}'s pattern {pattern!r} is not a regular expression: {error}.") from error

    def fits(self, text: str, seconds: float | None = None) -> bool:
        """Whether the whole text matches. Raises TimeoutError past the limit."""
        return self._pattern.fullmatch(text, timeout=seconds or self._seconds, concurrent=True) is not None

    def last(self, text: str, seconds: float | None = None) -> str | None:
        """The first group, or all, of the last match. Raises TimeoutError past the limit."""
        found = None
        for found in self._pattern.finditer(text, timeout=seconds or self._seconds, concurrent=True):  # noqa: B007
            pass
        if found is None:
            return None
        return str(found[1] or "") if self._pattern.groups else str(found[0])
