"""Rewards by comparing a response with the dataset's `answer` column. Responses are hostile text: nothing is evaluated."""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from time import perf_counter
from typing import Any

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.text import BoundedPattern, texts_of
from grpo_lightning.rewards.verifier import Patience

__all__ = ["ExactMatch", "NumericMatch", "RegexFormat", "last_number"]

# The scan is linear in the text: possessive quantifiers (`++`) never step back, and the thousands at most once.
_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]++)(?:\.[0-9]++)?|(?<![0-9.])\.[0-9]++"
_UNSIGNED = rf"(?:{_PLAIN})(?:[eE][-+]?[0-9]++)?"
_NUMBER = re.compile(rf"(?P<top>(?:(?<![\w).])[-+])?{_UNSIGNED})(?:[ ]?/[ ]?(?P<bottom>{_UNSIGNED}))?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s?\{\s?([0-9.]{1,99})\s?\}\s?\{\s?([0-9.]{1,99})\s?\}")
_LONGEST_FORMATTED = 100_000  # characters of a response whose format is judged
_MOST_DIGITS = 4000  # Python itself refuses to read longer ones


class ExactMatch:
    """1.0 where the response is the answer, both without surrounding space; else 0.0.

    Args:
        pattern: where the answer stands in the response: the first group, or all, of its last match; without a match 0.0.
        casefold: whether capital letters don't matter.
    """

    __name__ = "exact_match"

    def __init__(self, pattern: str | None = None, casefold: bool = False) -> None:
        self._pattern = None if pattern is None else BoundedPattern(pattern, owner="exact_match")
        self._casefold = casefold

    def __call__(self, completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
        """One value a response, 0.0 where the pattern takes over a second on it; None where there is no answer."""
        patience = Patience(most=1.0, least=0.05)
        pairs = zip(texts_of(completions), answer, strict=True)
        return [None if want is None else self._score(text, str(want), patience) for text, want in pairs]

    def _score(self, text: str, want: str, patience: Patience) -> float:
        begin = perf_counter()
        try:
            said = text if self._pattern is None else self._pattern.last(text, patience.limit())
        except TimeoutError:
            return 0.0
        finally:
            patience.spend(perf_counter() - begin)
        return 0.0 if said is None else float(self._plain(said) == self._plain(want))

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self._casefold else text.strip()


class NumericMatch:
    """1.0 where the response's last number is the answer's last number; else 0.0.

    Reads signs, thousands commas, decimals, exponents and fractions (3/4, \\frac{3}{4}); `nan` and `inf` are no numbers.

    Args:
        tolerance: how far they may differ, as a share of the answer's size (of 1 for smaller answers).
    """

    __name__ = "numeric_match"

    def __init__(self, tolerance: float = 1e-6) -> None:
        if not 0 <= tolerance < math.inf:
            raise RewardError(f"numeric_match has the tolerance {tolerance}: give a finite number of at least 0.")
        self._tolerance = Fraction(tolerance)

    def __call__(self, completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
        """One value a response; None where the answer itself holds no number."""
        return [self._score(text, str(want)) for text, want in zip(texts_of(completions), answer, strict=True)]

    def _score(self, text: str, answer: str) -> float | None:
        want, got = last_number(answer), last_number(text)
        if want is None:
            return None
        return 0.0 if got is None else float(abs(got - want) <= self._tolerance * max(Fraction(1), abs(want)))


def last_number(text: str) -> Fraction | None:
    """The last number in a text, exactly; None without one, or where it is too large to be meant.

    >>> last_number("-1,234.5 apples")
    Fraction(-2469, 2)
    """
    text = _LATEX_FRACTION.sub(r"\1/\2", text.replace("\N{MINUS SIGN}", "-"))
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007
        pass
    if found is None:
        return None
    top, bottom = _fraction(found["top"]), _fraction(found["bottom"] or "1")
    return None if top is None or not bottom else top / bottom


def _fraction(digits: str) -> Fraction | None:
    if len(digits) > _MOST_DIGITS:
        return None
    try:
        number = Decimal(digits.replace(",", ""))
    except InvalidOperation:
        return None
    return None if abs(number.adjusted()) > _MOST_DIGITS else Fraction(number)


class RegexFormat:
    """1.0 where the whole response fits a pattern, else 0.0.

    Args:
        pattern: a regular expression in Python's syntax; `.` matches line ends.
    """

    __name__ = "regex_format"

    def __init__(self, pattern: str) -> None:
        self._pattern = BoundedPattern(pattern, owner="regex_format")

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        """One value a response; 0.0 for one of over 100,000 characters, or on which the pattern takes over a second."""
        patience = Patience(most=1.0, least=0.05)
        return [self._score(text, patience) for text in texts_of(completions)]

    def _score(self, text: str, patience: Patience) -> float:
        if len(text) > _LONGEST_FORMATTED:
            return 0.0
        begin = perf_counter()
        try:
            return float(self._pattern.fits(text, patience.limit()))
        except TimeoutError:
            return 0.0
        finally:
            patience.spend(perf_counter() - begin)
