"""Mathematical equality by the math-verify library."""

from __future__ import annotations

from typing import Any

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.text import texts_of
from grpo_lightning.rewards.verifier import Patience, VerifierFailed, shared_verifier

__all__ = ["MathVerify"]


class MathVerify:
    """1.0 where math-verify finds the response equal to the answer, else 0.0: `\\boxed{\\frac12}` equals 0.5.

    It runs in a helper process: the library's own time limit needs the main thread, and nothing in this process could stop
    a huge power. Once responses that take too long have cost a call 30 seconds, its other responses are None.

    Args:
        seconds: how long one response may take; past it, it counts as wrong.
    """

    __name__ = "math_verify"

    def __init__(self, seconds: float = 2.0) -> None:
        if not seconds > 0:
            raise RewardError(f"math_verify has {seconds} seconds: give a number above 0.")
        self._seconds = seconds

    def __call__(self, completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
        """One value a response; None where the answer itself can't be read."""
        patience = Patience(most=self._seconds)
        pairs = zip(answer, texts_of(completions), strict=True)
        return [self._score(str(want), text, patience) for want, text in pairs]

    def _score(self, gold: str, text: str, patience: Patience) -> float | None:
        return self._ask(gold, text, patience) if self._ask(gold, None, patience) else None

    def _ask(self, gold: str, text: str | None, patience: Patience) -> float | None:
        try:
            return patience.ask(shared_verifier(), "math_verify", gold, text)
        except VerifierFailed as error:
            raise RewardError(f"math-verify failed ({error}): is it installed? pip install math-verify") from error
