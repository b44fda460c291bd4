"""Reward functions tried on responses that nobody would want."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from grpo_lightning.rewards import RewardRunner, RewardSpec
from grpo_lightning.rewards.trials import TRIALS, Responses, find_faults, try_rewards

TEXTS = ["yes it is", "no", "it is not", "maybe so"]  # two prompts, two responses each
_calls = itertools.count()


def right(completions: list[str], **_: Any) -> list[float]:
    """Only the policy's own responses, whole, are worth anything."""
    return [float(c == "yes it is") for c in completions]


def constant(completions: list[str], **_: Any) -> list[float]:
    return [0.3] * len(completions)


def short(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(c)) for c in completions]


def echo(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    return [float(p in c) for p, c in zip(prompts, completions, strict=True)]


def words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(c.split())) for c in completions]


def moody(completions: list[str], **_: Any) -> list[float]:
    call = next(_calls)
    return [float(len(c)) + call for c in completions]


def strict(completions: list[str], **_: Any) -> list[float]:
    return [1.0 / len(c) for c in completions]


def unsure(completions: list[str], **_: Any) -> list[float | None]:
    return [None] * len(completions)


def by_ids(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def given(chat: bool = False) -> Responses:
    return Responses(
        prompts=["is it?", "is it?", "so?", "so?"],
        texts=TEXTS,
        chat=[chat] * 4,
        columns={"answer": ["a", "a", "b", "b"]},
        group_size=2,
        encode=lambda texts: [list(map(ord, text)) for text in texts],
    )


def run(*functions: Callable[..., Any], weights: tuple[float, ...] = ()) -> list[str]:
    specs = [
        RewardSpec(path=f"{__name__}:{f.__name__}", weight=w)
        for f, w in zip(functions, weights or (1.0,) * len(functions), strict=True)
    ]
    own = [
        [
            math.nan if v is None else v
            for v in f(completions=TEXTS, prompts=given().prompts, completion_ids=given().encode(TEXTS))
        ]
        for f in functions
    ]
    return find_faults(try_rewards(RewardRunner(specs), given(), own))


@pytest.mark.parametrize(
    ("trial", "texts"),
    [
        ("again", TEXTS),
        ("empty", [""] * 4),
        ("echoed", ["is it?", "is it?", "so?", "so?"]),
        ("repeated", [f"{t} {t} {t} {t}" for t in TEXTS]),
        ("truncated", ["yes ", "n", "it i", "mayb"]),
        ("swapped", ["it is not", "maybe so", "yes it is", "no"]),
    ],
)
def test_each_trial_makes_its_responses(trial: str, texts: list[str]) -> None:
    assert TRIALS[trial](given()) == texts


@pytest.mark.parametrize(
    ("function", "faults"),
    [
        (right, []),
        (constant, ["'constant' gave 0.3 for every response"]),
        (short, ["an empty response gets 0", "the prompt itself gets -4.5", "the first half of a response gets -3.25"]),
        (echo, ["the prompt itself gets 1"]),
        (words, ["the response four times over gets 9"]),
        (
            strict,
            ["fails on empty responses: The reward 'strict' raised ZeroDivisionError", "prompt itself", "first half"],
        ),
        (unsure, ["no finite value for any of the policy's 4 responses"]),
        (by_ids, ["the response four times over gets 31"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_faults_of_a_function(function: Callable[..., Any], faults: list[str]) -> None:
    found = run(function)
    assert len(found) == len(faults), found
    for text, expected in zip(found, faults, strict=True):
        assert expected in text


def test_a_function_that_changes_its_mind_is_named() -> None:
    assert any("'moody' gave other values for 4 of 4 responses" in text for text in run(moody))


def test_the_total_decides_whether_a_reward_is_won_without_the_task() -> None:
    assert not any("empty" in text for text in run(right, short, weights=(100.0, 1.0)))
    assert any("an empty response" in text for text in run(right, short, weights=(1.0, 1.0)))


def test_chat_completions_are_handed_over_as_messages() -> None:
    assert given(chat=True).completions(["a"] * 4)[0] == [{"role": "assistant", "content": "a"}]


def test_one_function_that_fails_does_not_hide_the_others() -> None:
    found = run(strict, constant)
    assert any("'strict'" in text for text in found)
    assert any("'constant' gave 0.3 for every" in text for text in found)
