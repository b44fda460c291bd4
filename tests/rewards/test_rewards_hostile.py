"""What verifiers do with text that wants to run, to hang or to kill."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.rewards import RewardRunner, RewardSpec
from grpo_lightning.rewards.matching import last_number
from grpo_lightning.rewards.verifier import Verifier, VerifierFailed
from grpo_lightning.rewards.verifier_worker import is_formula

reasoning_gym = pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    helper = Verifier()
    yield helper
    helper.close()


# Tasks whose verifier gives the response to eval() or to sympy's parse_expr, with the score of unreadable text.
EVALUATING = {
    "string_insertion": 0.0,
    "spiral_matrix": 0.0,
    "binary_matrix": 0.0,
    "n_queens": 0.0,
    "countdown": 0.01,
    "puzzle24": 0.01,
    "simple_integration": 0.0,
    "intermediate_integration": 0.0,
    "polynomial_multiplication": 0.0,
}


@pytest.mark.parametrize("task", EVALUATING)
def test_no_response_is_run(task: str, verifier: Verifier, tmp_path: Path) -> None:
    entry = reasoning_gym.create_dataset(task, size=1, seed=0)[0]
    trace = tmp_path / "ran"
    for code in (f"open({str(trace)!r}, 'w').close()", f"[open({str(trace)!r}, 'w')]", f'N("open({str(trace)!r}, 1)")'):
        assert verifier.ask("reasoning_gym", task, entry, code, seconds=5.0) == EVALUATING[task]
    assert not trace.exists()
    assert verifier.ask("reasoning_gym", task, entry, entry["answer"], seconds=10.0) == 1.0


def test_no_other_task_evaluates_a_response() -> None:
    """The list above against reasoning-gym's source, so that a new version can't add one unnoticed."""
    root = Path(reasoning_gym.__file__).parent
    suspects = set()
    for file in root.rglob("*.py"):
        for body in re.findall(r"def score_answer\(.*?(?=\n    def |\nclass |\Z)", file.read_text(), re.DOTALL):
            if re.search(r"\b(eval|exec|parse_expr|sympify)\((?!entry|metadata)", body):
                suspects.add(file.stem)
    assert suspects == set(EVALUATING)


def test_a_list_is_still_read(verifier: Verifier) -> None:
    """Half right, by reasoning-gym's own rule: the right numbers as a Python list."""
    entry = reasoning_gym.create_dataset("spiral_matrix", size=1, seed=0)[0]
    assert verifier.ask("reasoning_gym", "spiral_matrix", entry, str(entry["answer"].split()), seconds=5.0) == 0.1


FORMULAS = {
    "sum": ("6*(98 - 54) - 34", True),
    "power": ("x**2 + 3.5*x + C", True),
    "functions": ("sin(x)*exp(2*x)/sqrt(pi)", True),
    "attribute": ("x.__class__", False),
    "attribute of a number": ("1 .real", False),
    "name": ("open(1)", False),
    "dunder": ("__import__", False),
    "text": ("N('x')", False),
    "brackets": ("[x for x in 1]", False),
    "lambda": ("lambda: 1", False),
    "walrus": ("(a:=1)", False),
    "line continuation": ("1\\\n+1", False),
    "fullwidth letters": ("\uff45\uff56\uff41\uff4c(1)", False),
}


@pytest.mark.parametrize(("text", "want"), FORMULAS.values(), ids=FORMULAS)
def test_is_formula(text: str, want: bool) -> None:
    assert is_formula(text) is want


def test_is_formula_reads_long_text_in_one_pass() -> None:
    begin = time.perf_counter()
    assert not is_formula("1" * 200_000 + "!")
    assert not is_formula("a" * 200_000)
    assert time.perf_counter() - begin < 30  # quadratic: minutes


class StoppedVerifier(Verifier):
    """Its helper stops as one does that computes in C: no alarm reaches it, it can only be killed."""

    def _warm(self, kind: str) -> str:
        line = super()._warm(kind)
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        return line


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs POSIX signals")
def test_a_helper_that_no_alarm_reaches_is_killed_also_twice_in_a_row() -> None:
    helper = StoppedVerifier()
    for _ in range(2):
        begin = time.perf_counter()
        with pytest.raises(TimeoutError, match=r"took longer than 0\.1 seconds"):
            helper.ask("math_verify", "3", "$3$", seconds=0.1)
        assert time.perf_counter() - begin < 120  # nothing of it waits for the helper to end by itself
        assert helper._process is None


def test_a_library_that_is_not_installed(verifier: Verifier) -> None:
    with pytest.raises(VerifierFailed, match="no_such_library"):
        verifier.ask("no_such_library", seconds=1.0)


def test_what_a_verifier_prints_does_not_reach_the_answers(verifier: Verifier) -> None:
    entry = reasoning_gym.create_dataset("rubiks_cube", size=1, seed=0)[0]
    assert verifier.ask("reasoning_gym", "rubiks_cube", entry, "no moves", seconds=5.0) == pytest.approx(0.01, abs=0.05)
    assert verifier.ask("math_verify", "3", "$3$", seconds=5.0) == 1.0


NUMBERS: dict[str, str] = {
    "thousands groups": "1," + "123," * 50_000 + "1234",
    "groups of two": "12," * 100_000,
    "slashes": "1/" * 100_000,
    "dots": "1." * 100_000,
    "exponents": "1e" * 100_000,
    "signs": "-+" * 100_000,
    "fractions": r"\frac{1" * 50_000,
    "spaces": "1 " * 100_000,
}


@pytest.mark.parametrize("text", NUMBERS.values(), ids=NUMBERS)
def test_last_number_reads_long_text_in_one_pass(text: str) -> None:
    begin = time.perf_counter()
    last_number(text)
    assert time.perf_counter() - begin < 60  # quadratic: minutes


@pytest.mark.parametrize("tag", ["<answer>", "</answer>", "<answer></answer>", "<answer" * 3], ids=repr)
def test_answer_tags_cost_one_pass(tag: str) -> None:
    from grpo_lightning.rewards.reasoning import _said

    begin = time.perf_counter()
    _said(tag * 20_000)
    assert time.perf_counter() - begin < 30  # quadratic: minutes


def test_a_hostile_pattern_of_exact_match() -> None:
    spec = RewardSpec(path="exact_match", kwargs={"pattern": "^((a|aa)+)$"})
    texts: list[Any] = ["a" * 60 + "!", "aa"]
    result = RewardRunner([spec]).score(prompts=["", ""], completions=texts, columns={"answer": ["aa", "aa"]})
    assert result.rewards_NK[:, 0].tolist() == [0.0, 1.0]
    assert result.seconds["exact_match"] < 60  # unbounded: years
