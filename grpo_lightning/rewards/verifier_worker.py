"""The process in which verifiers read hostile text: `verifier.py` runs it as a script. It imports nothing of this package.

Frames on stdin: 8 bytes of length, then a pickled (kind, arguments, seconds) from the parent, which is trusted. Lines on
stdout: a float, `none`, `late`, `unknown`, or `error` and a text. What verifiers print goes nowhere. It ends with its parent.

It limits time and memory, and is no sandbox: verifiers that would evaluate a response as Python get a reader of literals
instead, or see only formulas of an allowed alphabet.
"""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import re
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, BinaryIO

_MEMORY = 8 << 30  # bytes of address space
_LONGEST = 20_000  # characters of a response that are read, from its end

# reasoning-gym tasks whose verifier calls eval() on the response to read a Python list
_EVALUATED = {"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"}
# those that give it to sympy's parse_expr, which evaluates Python, too
_FORMULAS = {"countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"}
_FORMULA = re.compile(r"(?:[\s()+\-*/^,]|[A-Za-z]\w*|\d+(?:\.\d+)?)*+")
_FUNCTIONS = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln"),
    *("sqrt", "pi", "Abs", "erf", "Ei", "Si", "Ci", "li", "I", "E", "C"),
}


class Late(BaseException):
    """The time for one text is over; not an Exception, so that a verifier's `except Exception` lets it through."""


class Unknown(Exception):  # noqa: N818 - an answer
    """There is no verifier of this name here."""


def math_verify(gold: str, text: str | None) -> float | None:
    """1.0 where `text` equals `gold`, None where `gold` can't be read; without a text, 1.0 where it can."""
    from math_verify import parse, verify

    wanted = parse(gold, parsing_timeout=None)
    if not wanted:
        return None
    if text is None:
        return 1.0
    return float(verify(wanted, parse(text[-_LONGEST:], parsing_timeout=None), timeout_seconds=None))


def reasoning_gym(task: str, entry: dict[str, Any], text: str | None) -> float | None:
    """The task's score of `text`; for None, the score of the entry's own answer, which shows whether the entry fits."""
    score = _scorer(task)
    if text is None:
        return float(score(entry["answer"], entry))
    if len(text) > _LONGEST:
        return 0.0
    if task in _FORMULAS and not is_formula(text):
        text = "("  # what no verifier can read: it gets the task's own score for that
    try:
        return float(score(text, entry))
    except Exception:  # noqa: BLE001 - verifiers differ in what they raise on text they can't read
        return 0.0


@cache
def _scorer(task: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise Unknown
    score: Callable[..., float] = get_score_answer_fn(task)
    if task in _EVALUATED:  # a module's own global comes before the built-in of the same name
        vars(sys.modules[DATASETS[task][0].__module__])["eval"] = ast.literal_eval
    return score


def is_formula(text: str) -> bool:
    """Numbers, one-letter variables and known functions: no attribute, no string, no other name."""
    names = re.findall(r"[A-Za-z_]\w*", text)
    return _FORMULA.fullmatch(text) is not None and all(len(n) == 1 or n in _FUNCTIONS for n in names)


def import_library(name: str) -> None:
    """So that the limit of the first text is the text's alone."""
    importlib.import_module(name)


_VERIFIERS: dict[str, Callable[..., float | None]] = {
    "import": import_library,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}


def answer(kind: str, arguments: tuple[Any, ...], seconds: float) -> str:
    """The line for one question."""
    try:
        with _Limit(seconds):
            value = _VERIFIERS[kind](*arguments)
    except Late:
        return "late"
    except Unknown:
        return "unknown"
    except Exception as error:  # noqa: BLE001 - told to the parent
        return "error " + " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return "none" if value is None else repr(value)


class _Limit:
    """Raises `Late` in its block after some seconds, where the platform has alarms; the parent's own limit holds anyway."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds if hasattr(signal, "setitimer") else 0.0

    def __enter__(self) -> None:
        if self._seconds:
            signal.signal(signal.SIGALRM, _late)
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        if self._seconds:
            signal.setitimer(signal.ITIMER_REAL, 0.0)


def _late(*_: object) -> None:
    raise Late


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY if hard < 0 else min(_MEMORY, hard), hard))


def _private_stdout() -> BinaryIO:
    """The pipe to the parent; whatever prints from now on prints into nothing."""
    pipe = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return pipe


def main() -> None:
    """Answer frames until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    pipe, requests = _private_stdout(), sys.stdin.buffer
    _limit_memory()
    while header := requests.read(8):
        # written by our own parent into a pipe of its own; what goes back is text
        line = answer(*pickle.loads(requests.read(int.from_bytes(header, "little"))))
        pipe.write(line.encode(errors="replace") + b"\n")
        pipe.flush()


if __name__ == "__main__":
    main()
