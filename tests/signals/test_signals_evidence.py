"""Which groups and rollouts are picked, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from signal_records import INF, NAN, make_record, of_groups

from grpo_lightning.signals.evidence import rollout_statistics, select

LOOP, PLAIN = [7] * 6, [1, 2, 3, 4, 5, 6]  # repetition 1 - 1/3 and 0


def _picked(record: Any, why: str, **counts: int) -> list[tuple[int, tuple[int, ...], float]]:
    return [
        (p.group, p.rollouts, pytest.approx(p.value))
        for p in select(record, **({"groups": 1} | counts))
        if p.why == why
    ]


REWARDS = [[0.0, 1.0, 0.0], [0.5, 0.5, 0.5], [0.0, 0.2, 9.0], [NAN, NAN, 1.0]]
STD_2 = math.sqrt((0.0 - 9.2 / 3) ** 2 / 2 + (0.2 - 9.2 / 3) ** 2 / 2 + (9.0 - 9.2 / 3) ** 2 / 2)
CASES: dict[str, tuple[str, list[Any], dict[str, int]]] = {
    "the dead group is the smallest": ("smallest spread", [(1, (0, 1, 2), 0.0)], {}),
    "the widest": ("largest spread", [(2, (0, 1, 2), STD_2)], {}),
    "no group is both, unscorable ones are none": (
        "largest spread",
        [(2, (0, 1, 2), STD_2)],
        {"groups": 2},
    ),
    "farthest from the median 0.5": ("reward outlier", [(2, (2,), 8.5)], {"rollouts": 1}),
}


@pytest.mark.parametrize(("why", "expected", "counts"), CASES.values(), ids=CASES.keys())
def test_groups_and_outliers(why: str, expected: list[Any], counts: dict[str, int]) -> None:
    assert _picked(make_record(REWARDS), why, **counts) == expected


def test_an_infinite_reward_comes_first() -> None:
    record = make_record([[0.0, 1.0, INF], [0.0, 50.0, 0.0]])
    assert [(p.group, p.rollouts[0]) for p in select(record) if p.why == "reward outlier"][:2] == [(0, 2), (1, 1)]


def test_the_largest_advantages_whatever_their_sign() -> None:
    record = make_record([[0.0, 1.0]] * 2, advantages=[[0.5, -3.0], [NAN, 0.0]])
    found = [(p.group, p.rollouts[0], p.value) for p in select(record) if p.why == "advantage outlier"]
    assert found == [(1, 0, INF), (0, 1, 3.0), (0, 0, 0.5)]


def test_loops_are_found_and_plain_text_is_not() -> None:
    record = make_record([[0.0, 1.0]] * 2, ids=[[PLAIN, LOOP], [PLAIN, [1]]])
    assert _picked(record, "most repetitive") == [(0, (1,), 1 - 1 / 3)]


def test_statistics_are_over_the_completions_own_tokens() -> None:
    tokens = {"logprobs": [[[-1.0, -3.0], [-5.0]]], "entropies": [[[0.5, 1.5], [2.0]]]}
    found = rollout_statistics(make_record([[0.0, 1.0]], ids=[[[1, 2], [3]]], tokens=tokens))
    assert found["logprob_mean"].tolist() == [[-2.0, -5.0]]
    assert found["entropy_mean"].tolist() == [[1.0, 2.0]]
    assert torch.isnan(found["ngram_repetition"]).all()


@pytest.mark.parametrize(
    "record",
    [
        of_groups(make_record([[0.0, 1.0]]), []),
        make_record([[NAN, NAN]]),
        make_record([[0.0, 1.0]], ids=[[[], []]]),
    ],
    ids=["no group", "nothing scored", "no token"],
)
def test_edges_pick_what_there_is(record: Any) -> None:
    assert all(p.value > 0 or p.why == "smallest spread" for p in select(record))
