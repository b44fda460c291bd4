"""Every signal of a step at the edges: no token, one token, dead groups, everything NaN, everything infinite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from signal_records import INF, NAN, make_record, of_groups, signals_of

from grpo_lightning.objective import StepRecord
from grpo_lightning.signals import UpdateSize, join, measure

H = math.sqrt(0.5)  # sample std of 0 and 1
A = 0.5 / (H + 1e-4)  # advantage of 1 beside 0: the deviation over the std, with the eps of TRL and DeepSeekMath's code
_PARTS = dict.fromkeys(("step", "rollout", "reward", "score", "update"), 2.0)


def _tokens(value: float, shape: tuple[int, ...]) -> dict[str, Any]:
    return {name: torch.full(shape, value) for name in ("logprobs", "old", "ref", "entropies", "sampler")}


def _broken(value: float) -> dict[str, Any]:
    everywhere = dict.fromkeys(("loss", "policy_loss", "kl_loss", "grad_norm", "grad_norm_clipped"), value)
    return {
        "rewards": [[value] * 2] * 2,
        "advantages": [[value] * 2] * 2,
        "tokens": _tokens(value, (2, 2, 4)),
        "update_skipped": True,
        **everywhere,
    }


# 2 groups of 2 with prompts of 2 tokens; `one` has 1 group; `dead`, `nan` and `inf` have completions of 4 tokens
RECORDS: dict[str, dict[str, Any]] = {
    "none": {"rewards": [[0.0, 1.0], [1.0, 0.0]], "ids": [[[], []], [[], []]], "tokens": _tokens(0.0, (2, 2, 0))},
    "one": {"rewards": [[0.0, 1.0]], "ids": [[[5], [6]]], "tokens": {"ref": -1.0}},
    "dead": {"rewards": [[1.0, 1.0], [1.0, 1.0]], "tokens": {"ref": -1.0}},
    "nan": _broken(NAN),
    "inf": _broken(INF),
}
_SAID = {"loss": 0.25, "policy_loss": 0.2, "kl_loss": 0.5, "kl_coef": 0.1}
# fmt: off
EXPECTED: dict[str, tuple[float | None, ...]] = {  # of each record in turn; None: absent
    "loss": (0.25, 0.25, 0.25, NAN, INF),
    "policy_loss": (0.2, 0.2, 0.2, NAN, INF),
    "kl_loss": (0.5, 0.5, 0.5, NAN, INF),
    "kl_coef": (0.1,) * 5,
    "lr": (1e-3,) * 5,
    "grad_norm": (2, 2, 2, NAN, INF),
    "grad_norm_clipped": (1, 1, 1, NAN, INF),
    "update_norm": (3, 3, 3, 0, 0),
    "update_to_weight": (0.6, 0.6, 0.6, None, None),
    "updates_skipped": (0, 0, 0, 1, 1),
    "rollouts_resampled": (0,) * 5,
    "rollouts_unrepaired": (0,) * 5,
    "tokens_per_second": (0, 1, 8, 8, 8),
    "step_seconds": (2,) * 5,
    "rollout_seconds": (2,) * 5,
    "reward_seconds": (2,) * 5,
    "score_seconds": (2,) * 5,
    "update_seconds": (2,) * 5,
    # rewards
    "reward_mean": (0.5, 0.5, 1, None, None),
    "reward_min": (0, 0, 1, None, None),
    "reward_max": (1, 1, 1, None, None),
    "reward_std": (math.sqrt(1 / 3), H, 0, None, None),
    "group_reward_std": (H, H, 0, None, None),
    "group_reward_std_max": (H, H, 0, None, None),
    "group_reward_std_p10": (H, H, 0, None, None),
    "group_reward_std_p50": (H, H, 0, None, None),
    "group_reward_std_p90": (H, H, 0, None, None),
    "group_reward_range": (1, 1, 0, None, None),
    "dead_group_fraction": (0, 0, 1, 0, 0),
    "dead_group_fraction_all_low": (0, 0, 0, 0, 0),
    "dead_group_fraction_all_high": (0, 0, 1, 0, 0),
    "dead_group_fraction_mid": (0, 0, 0, 0, 0),
    "dead_group_fraction_unscorable": (0, 0, 0, 1, 1),
    "reward_conflict_fraction": (1, None, None, None, None),  # two answers of nothing, one of them rewarded
    "reward_outlier_fraction": (0, 0, 0, None, None),
    "reward/f0_mean": (0.5, 0.5, 1, None, None),
    "reward/f0_std": (math.sqrt(1 / 3), H, 0, None, None),
    "reward/f0_missing": (0, 0, 0, 4, 4),
    "reward/f0_errors": (0,) * 5,
    "reward/f0_seconds": (0.5,) * 5,
    # advantages
    "advantage_mean": (0, 0, 0, None, None),
    "advantage_std": (A * math.sqrt(4 / 3), A * math.sqrt(2), 0, None, None),
    "advantage_skew": (0, 0, None, None, None),
    "advantage_p01": (-A, -0.98 * A, 0, None, None),
    "advantage_p99": (A, 0.98 * A, 0, None, None),
    "advantage_abs_max": (A, A, 0, None, None),
    "advantage_tail_fraction": (0, 0, 0, None, None),
    "advantage_flat_fraction": (0, 0, 1, None, None),
    "advantage_top_group_share": (0.5, 1, None, None, None),
    "reward_rank_agreement": (1, 1, None, None, None),
    "signal_token_fraction": (None, 1, 0, 1, 1),  # what is not finite is not 0: it is counted, and the update skipped
    # policy
    "kl": (None, 0, 0, None, None),
    "kl_k1": (None, 0, 0, None, None),
    "kl_k2": (None, 0, 0, None, None),
    "kl_max": (None, 0, 0, None, None),
    "kl_clamped_fraction": (None, 0, 0, None, None),
    "entropy": (None, 0.5, 0.5, None, None),
    "entropy_p10": (None, 0.5, 0.5, None, None),
    "ratio_mean": (None, 1, 1, None, None),
    "ratio_max": (None, 1, 1, None, None),
    "clip_low_fraction": (None, 0, 0, None, None),
    "clip_high_fraction": (None, 0, 0, None, None),
    "rollout_mismatch_kl": (None, 0, 0, None, None),
    "rollout_mismatch_max": (None, 0, 0, None, None),
    "logprob_correct": (None, -1, -1, None, None),
    "logprob_wrong": (None, -1, None, None, None),
    # responses
    "response_length_mean": (0, 1, 4, 4, 4),
    "response_length_std": (0, 0, 0, 0, 0),
    "response_length_min": (0, 1, 4, 4, 4),
    "response_length_max": (0, 1, 4, 4, 4),
    "response_length_correct": (0, 1, 4, None, None),
    "response_length_wrong": (0, 1, None, None, None),
    "truncated_fraction": (0,) * 5,
    "empty_fraction": (1, 1, 0, 0, 0),
    "ngram_repetition": (None, None, 0, 0, 0),
    "prefix_repetition": (None, 0, 0, 0, 0),
    "distinct_response_fraction": (0.5, 1, 1, 1, 1),
    # what is not finite, by source: 4 rollouts of 4 tokens
    "nonfinite_count_loss": (0, 0, 0, 1, 1),
    "nonfinite_count_grad_norm": (0, 0, 0, 1, 1),
    "nonfinite_count_rewards": (0, 0, 0, 0, 4),  # NaN is a missing reward
    "nonfinite_count_advantages": (0, 0, 0, 4, 4),
    "nonfinite_count_logprobs": (None, 0, 0, 16, 16),
    "nonfinite_count_old_logprobs": (None, 0, 0, 16, 16),
    "nonfinite_count_ref_logprobs": (None, 0, 0, 16, 16),
    "nonfinite_count_sampler_logprobs": (None, 0, 0, 16, 16),
    "nonfinite_count_entropies": (None, 0, 0, 16, 16),
    "nonfinite_count": (0, 0, 0, 86, 90),
    # prompts
    "prompt_length_mean": (2,) * 5,
    "prompt_length_min": (2,) * 5,
    "prompt_length_max": (2,) * 5,
    "prompt_length_p95": (2,) * 5,
    "prompt_length_spread": (0, None, 0, 0, 0),
    "prompt_tokens_total": (4, 2, 4, 4, 4),
    "duplicate_prompt_fraction": (0,) * 5,
}
# fmt: on


def _values(name: str) -> dict[str, float]:
    made = {"seconds": _PARTS, "reward_errors": {"f0": 0}, "reward_seconds": {"f0": 0.5}, **_SAID, **RECORDS[name]}
    record: StepRecord = make_record(**made)
    moved = 0.0 if record.update_skipped else 9.0
    part = measure(record, update=UpdateSize(update_squares=moved, weight_squares=25.0 if moved else 0.0))
    return join([part.pack()], part, record).values


@pytest.fixture(scope="module")
def at_the_edge() -> dict[str, dict[str, float]]:
    return {name: _values(name) for name in RECORDS}


@pytest.mark.parametrize("signal", EXPECTED)
def test_every_signal_at_every_edge(signal: str, at_the_edge: dict[str, dict[str, float]]) -> None:
    found = [at_the_edge[name].get(signal) for name in RECORDS]
    assert [value is None for value in found] == [value is None for value in EXPECTED[signal]]
    numbers = [value for value in found if value is not None]
    expected = [value for value in EXPECTED[signal] if value is not None]
    assert numbers == pytest.approx(expected, rel=1e-5, abs=1e-9, nan_ok=True)


def test_nothing_else_is_measured_there(at_the_edge: dict[str, dict[str, float]]) -> None:
    assert set().union(*at_the_edge.values()) == set(EXPECTED)


RANK_EDGES = {
    "a rank without groups has no advantages to compare": ([0, 1], [], {"rank_overlap_fraction": 0.0}),
    "all rows on both": ([0, 1], [0, 1], {"rank_overlap_fraction": 1.0, "rank_advantage_gap": 0.0}),
}


@pytest.mark.parametrize(("one", "other", "expected"), RANK_EDGES.values(), ids=RANK_EDGES.keys())
def test_ranks_at_the_edge(one: list[int], other: list[int], expected: dict[str, float]) -> None:
    whole = make_record([[0.0, 1.0], [1.0, 0.0]])
    values = signals_of(of_groups(whole, one), of_groups(whole, other))
    assert {name: value for name, value in values.items() if name.startswith("rank_")} == expected


@pytest.mark.parametrize("broken", [NAN, INF])
def test_a_rank_of_broken_advantages_is_not_compared(broken: float) -> None:
    ranks = [make_record([[0.0, 1.0]], advantages=[[a, -a]]) for a in (1.0, broken)]
    assert "rank_advantage_gap" not in signals_of(*ranks)
