"""Rewards by comparing a response with the dataset's `answer` column. Responses are hostile text: nothing is evaluated."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.text import texts_of

__all__ = ["RegexFormat", "exact_match", "math_verify", "numeric_match"]

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]{0,400}(?:\.\d{0,400})?|\.\d{1,400})(?:[eE][-+]?\d{1,4})?(?:\s?/\s?\d{1,400})?")
_LONGEST = 20_000  # characters of a response that are read, from its end


def exact_match(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """1.0 where the response, stripped, is the answer, stripped."""
    return [float(text.strip() == str(want).strip()) for text, want in zip(texts_of(completions), answer, strict=True)]


def numeric_match(
    completions: list[Any], answer: list[Any], tolerance: float = 1e-6, **_: Any
) -> list[float | None]:
    """1.0 where the response's last number is the answer's, within `tolerance` of its size (at least 1).

    Reads signs, thousands commas, decimals, exponents and fractions. None where the answer itself has no number.
    """
    return [_numbers_agree(text, str(want), tolerance) for text, want in zip(texts_of(completions), answer, strict=True)]


def _numbers_agree(text: str, answer: str, tolerance: float) -> float | None:
    want = _last_number(answer)
    if want is None:
        return None
    got = _last_number(text)
    return 0.0 if got is None else float(abs(got - want) <= Fraction(tolerance) * max(1, abs(want)))


def _last_number(text: str) -> Fraction | None:
    found = _NUMBER.findall(text[-_LONGEST:])
    if not found:
        return None
    over, _, under = found[-1].replace(",", "").partition("/")
    try:
        top, bottom = Decimal(over.strip()), Decimal(under.strip() or "1")
        if abs(top.adjusted()) > 400 or bottom == 0:
            return None
        return Fraction(top) / Fraction(bottom)
    except (InvalidOperation, OverflowError, ValueError):
        return None


def math_verify(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    """1.0 where math-verify finds the response equal to the answer; None where it can't read the answer."""
    from math_verify import parse, verify

    scores: list[float | None] = []
    for text, want in zip(texts_of(completions), answer, strict=True):
        # its own time limit uses signals, which only the main thread may; the caller's limit holds instead
        gold = parse(str(want), parsing_timeout=None, raise_on_error=False)
        if not gold:
            scores.append(None)
            continue
        said = parse(text[-_LONGEST:], parsing_timeout=None, raise_on_error=False)
        scores.append(float(verify(gold, said, timeout_seconds=None, raise_on_error=False)))
    return scores


class RegexFormat:
    """1.0 where the whole response fits a pattern.

    Args:
        pattern: a regular expression in Python's syntax; `.` matches line ends.
    """

    __name__ = "regex_format"

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise RewardError(f"regex_format's pattern {pattern!r} is not a regular expression: {error}.") from error

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        """One value a response; only its last 20,000 characters are read."""
        return [float(self._pattern.fullmatch(text[-_LONGEST:]) is not None) for text in texts_of(completions)]
