"""Broken rollouts are dropped and others sampled in their place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_lightning.objective.batch import PromptBatch, Rollouts
from grpo_lightning.rewards import RewardResult
from grpo_lightning.training.resampling import (
    CutMemory,
    broken_groups,
    replace_groups,
    replace_rewards,
    select_prompts,
)

EOS, PAD = 2, 0


def rollouts(lengths_PG: list[list[int]], cut_PG: list[list[bool]] | None = None, length: int = 4) -> Rollouts:
    lengths = torch.tensor(lengths_PG)
    P, G = lengths.shape
    mask = torch.arange(length)[None, None] < lengths[..., None]
    return Rollouts(
        prompt_ids_PS=torch.ones(P, 3, dtype=torch.long),
        prompt_mask_PS=torch.ones(P, 3, dtype=torch.bool),
        completion_ids_PGL=torch.where(mask, 7, PAD),
        completion_mask_PGL=mask,
        terminated_PG=~torch.tensor(cut_PG) if cut_PG else torch.ones(P, G, dtype=torch.bool),
        sampler_logprobs_PGL=torch.where(mask, -0.5, 0.0),
    )


@pytest.mark.parametrize(
    ("lengths", "rewards", "expected"),
    [
        ([[3, 2], [2, 4]], [[0, 1], [1, 0]], {}),
        ([[1, 1], [2, 4]], [[0, 0], [1, 0]], {0: "empty"}),
        ([[1, 2], [2, 4]], [[0, 0], [1, 0]], {}),  # one of two is not empty
        ([[3, 2], [0, 4]], [[0, 1], [1, 0]], {1: "padding"}),
        ([[3, 2], [2, 4]], [[0, math.inf], [1, 0]], {0: "non-finite reward"}),
        ([[3, 2], [2, 4]], [[0, 1], [-math.inf, 0]], {1: "non-finite reward"}),
        ([[3, 2], [2, 4]], [[0, math.nan], [1, 0]], {}),  # missing is no fault
    ],
    ids=["fine", "all empty", "one empty", "padding", "inf", "-inf", "missing"],
)
def test_which_groups_are_broken(lengths: Any, rewards: Any, expected: dict[int, str]) -> None:
    rewards_NK = torch.tensor(rewards, dtype=torch.float64).reshape(-1, 1)
    assert broken_groups(rollouts(lengths), rewards_NK, all_cut=False) == expected


def test_a_step_that_is_cut_at_once_is_broken_whole() -> None:
    assert broken_groups(rollouts([[3, 2], [2, 4]]), torch.zeros(4, 1), all_cut=True) == {
        0: "all cut at once",
        1: "all cut at once",
    }


def test_a_cut_step_is_unusual_only_where_steps_are_not_usually_cut() -> None:
    memory = CutMemory()
    for _ in range(5):
        assert not memory.unusual(1.0)
        memory.push(0.1)
    assert memory.unusual(1.0)
    assert not memory.unusual(0.99)
    again = CutMemory()
    again.load_state_dict(memory.state_dict())
    assert again.unusual(1.0)
    for _ in range(20):
        memory.push(0.9)
    assert not memory.unusual(1.0)


def test_replaced_groups_lie_in_their_places_and_are_padded() -> None:
    own, others = rollouts([[3, 2], [1, 1], [4, 4]]), rollouts([[6, 5]], [[True, False]], length=6)
    joined = replace_groups(own, [1], others, pad_id=PAD)
    assert joined.completion_ids_PGL.shape == (3, 2, 6)
    assert joined.lengths_PG.tolist() == [[3, 2], [6, 5], [4, 4]]
    assert joined.terminated_PG.tolist() == [[True, True], [False, True], [True, True]]
    assert joined.completion_ids_PGL[0, 0].tolist() == [7, 7, 7, PAD, PAD, PAD]
    assert joined.sampler_logprobs_PGL[0, 1].tolist() == [-0.5, -0.5, 0, 0, 0, 0]


def test_replaced_rewards_keep_the_others_and_add_errors_up() -> None:
    own = RewardResult(
        rewards_NK=torch.tensor([[0.0], [1.0], [math.inf], [3.0]], dtype=torch.float64),
        missing={"r": 0},
        errors={"r": 1},
        seconds={"r": 0.5},
        extras={"note": ["a", "b", "c", "d"]},
    )
    others = replace(own, rewards_NK=torch.tensor([[8.0], [9.0]], dtype=torch.float64), extras={"note": ["x", "y"]})
    joined = replace_rewards(own, [1], others, group_size=2)
    assert joined.rewards_NK.flatten().tolist() == [0.0, 1.0, 8.0, 9.0]
    assert (joined.errors, joined.seconds, joined.extras) == ({"r": 2}, {"r": 1.0}, {"note": ["a", "b", "x", "y"]})


def test_selected_prompts_keep_their_columns() -> None:
    batch = PromptBatch(
        ids_PS=torch.arange(6).view(3, 2),
        mask_PS=torch.ones(3, 2, dtype=torch.bool),
        row_ids_P=torch.tensor([10, 11, 12]),
        prompts=["a", "b", "c"],
        columns={"answer": [1, 2, 3]},
        sources=["s", "t", "u"],
        epoch=4,
    )
    part = select_prompts(batch, [2, 0])
    assert (part.prompts, part.columns, part.sources) == (["c", "a"], {"answer": [3, 1]}, ["u", "s"])
    assert part.row_ids_P.tolist() == [12, 10]
    assert (part.epoch, part.ids_PS.tolist()) == (4, [[4, 5], [0, 1]])
