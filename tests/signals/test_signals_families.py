"""Every signal by numbers derived by hand, and what other trainers got wrong."""

# ruff: noqa: E501 - one case a line
from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from signal_records import INF, NAN, make_record, of_groups, signals_of

from grpo_lightning.objective import group_advantages
from grpo_lightning.signals import Joined, UpdateSize, join, measure

HALF = math.sqrt(0.5)  # sample std of [0, 1]
LN2 = math.log(2.0)


def _tokens(**values: Any) -> dict[str, Any]:
    return {"tokens": values}


OFF_POLICY = {
    # ratios 1.5, 1.0 (advantage +1) and 0.5, 1.5 (advantage -1): the clip binds at the first and at the third only
    "rewards": [[1.0, 0.0]],
    "ids": [[[1, 2], [3, 4]]],
    "advantages": [[1.0, -1.0]],
    **_tokens(logprobs=[[[math.log(1.5), 0.0], [math.log(0.5), math.log(1.5)]]], old=0.0),
}
CASES = [
    # rewards
    ("reward of all rollouts", {"rewards": [[0.0, 1.0], [2.0, 5.0]]}, {"reward_mean": 2.0, "reward_min": 0.0, "reward_max": 5.0, "reward_std": math.sqrt(14 / 3)}),
    ("weights apply to the logged reward", {"rewards": [[[1.0, 2.0], [0.0, 4.0]]], "weights": [1.0, 0.25]}, {"reward_mean": 1.25, "reward/f0_mean": 0.5, "reward/f1_mean": 3.0, "reward/f1_std": math.sqrt(2)}),
    ("group std and range", {"rewards": [[0.0, 1.0], [0.0, 3.0]]}, {"group_reward_std": 2 * HALF, "group_reward_std_max": 3 * HALF, "group_reward_std_p50": 2 * HALF, "group_reward_std_p10": 1.2 * HALF, "group_reward_std_p90": 2.8 * HALF, "group_reward_range": 2.0}),
    ("a missing reward shifts nothing", {"rewards": [[1.0, NAN, 0.0]]}, {"reward_mean": 0.5, "group_reward_std": HALF, "reward/f0_missing": 1.0, "dead_group_fraction_unscorable": 0.0, "nonfinite_count_rewards": 0.0}),
    ("an infinite reward is counted and shifts nothing", {"rewards": [[1.0, INF, 0.0]]}, {"reward_mean": 0.5, "group_reward_std": HALF, "reward/f0_missing": 1.0, "nonfinite_count_rewards": 1.0, "nonfinite_count": 1.0, "dead_group_fraction": 0.0}),
    ("unscorable is neither live nor dead", {"rewards": [[NAN, NAN], [1.0, 0.0]]}, {"dead_group_fraction_unscorable": 0.5, "dead_group_fraction": 0.0, "group_reward_std": HALF}),
    ("dead groups by level", {"rewards": [[0.0, 0.0], [1.0, 1.0], [0.5, 0.5], [0.0, 1.0]]}, {"dead_group_fraction": 0.75, "dead_group_fraction_all_low": 0.25, "dead_group_fraction_all_high": 0.25, "dead_group_fraction_mid": 0.25}),
    ("dead levels by the rewards seen", {"rewards": [[-5.0, -5.0], [5.0, 5.0], [0.0, 0.0], [1.0, 1.0]]}, {"dead_group_fraction_all_low": 0.25, "dead_group_fraction_all_high": 0.25, "dead_group_fraction_mid": 0.5}),
    ("a reward out of its scale", {"rewards": [[0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 50.0]]}, {"reward_outlier_fraction": 0.125}),
    ("a rare success is no outlier", {"rewards": [[0.0] * 50 + [1.0]]}, {"reward_outlier_fraction": 0.0}),
    ("errors and seconds of a function", {"rewards": [[0.0, 1.0]], "reward_errors": {"f0": 3}, "reward_seconds": {"f0": 0.5}}, {"reward/f0_errors": 3.0, "reward/f0_seconds": 0.5}),
    # advantages
    ("moments of advantages", {"rewards": [[0.0, 1.0]] * 2, "advantages": [[0.0, 0.0], [0.0, 4.0]]}, {"advantage_mean": 1.0, "advantage_std": 2.0, "advantage_skew": 6 / 3**1.5, "advantage_abs_max": 4.0, "advantage_flat_fraction": 0.75, "advantage_tail_fraction": 0.25}),
    ("the tail begins above 1", {"rewards": [[0.0, 1.0]], "advantages": [[1.0, -1.01]]}, {"advantage_tail_fraction": 0.5}),
    ("quantiles of advantages", {"rewards": [[0.0, 1.0]], "advantages": [[-2.0, 2.0]]}, {"advantage_p01": -1.96, "advantage_p99": 1.96}),
    ("energy of the largest group", {"rewards": [[0.0, 1.0]] * 2, "advantages": [[1.0, -1.0], [2.0, -2.0]]}, {"advantage_top_group_share": 0.8}),
    ("advantages against rewards", {"rewards": [[0.0, 1.0, 2.0]], "advantages": [[-1.0, 1.0, 0.5]]}, {"reward_rank_agreement": 2 / 3}),
    ("a tie of advantages is disagreement", {"rewards": [[0.0, 1.0]], "advantages": [[0.5, 0.5]]}, {"reward_rank_agreement": 0.0}),
    ("rounding in a dead group is no order", {"rewards": [[0.3, 0.3 + 1e-13], [0.0, 1.0]]}, {"reward_rank_agreement": 1.0, "dead_group_fraction": 0.5}),
    ("tokens with signal", {"rewards": [[0.0, 1.0], [1.0, 1.0]], "ids": [[[1], [2]], [[1, 2], [3]]]}, {"signal_token_fraction": 0.4}),
    # policy
    ("k1, k2, k3", {"rewards": [[0.0, 1.0]], "ids": [[[1], [2]]], **_tokens(logprobs=[[[0.0], [0.0]]], ref=[[[-LN2], [LN2]]])}, {"kl_k1": 0.0, "kl_k2": LN2**2 / 2, "kl": (0.5 - 1 + LN2 + 2 - 1 - LN2) / 2, "kl_max": 1 - LN2, "kl_clamped_fraction": 0.0}),
    ("a drifted token is clamped and counted", {"rewards": [[0.0, 1.0]], "ids": [[[1], [2]]], **_tokens(logprobs=-100.0, ref=[[[0.0], [-100.0]]])}, {"kl_clamped_fraction": 0.5, "kl_max": math.expm1(20) - 20, "kl_k1": -50.0}),
    ("entropy of completion tokens alone", {"rewards": [[0.0, 1.0]], "ids": [[[1], [2, 3]]], **_tokens(entropies=[[[1.0], [2.0, 3.0]]])}, {"entropy": 2.0, "entropy_p10": 1.2}),
    ("clipping by the sign of the advantage", OFF_POLICY, {"ratio_mean": 4.5 / 4, "ratio_max": 1.5, "clip_high_fraction": 0.25, "clip_low_fraction": 0.25}),
    ("a ratio for each sequence", OFF_POLICY | {"importance_level": "sequence"}, {"ratio_mean": (math.sqrt(1.5) + math.sqrt(0.75)) / 2, "clip_high_fraction": 0.5, "clip_low_fraction": 0.0}),
    ("a broken ratio is in no share", {"rewards": [[0.0, 1.0]], "ids": [[[1, 2], [3]]], "advantages": [[1.0, 1.0]], **_tokens(logprobs=[[[NAN, 1.0], [0.0]]], old=0.0)}, {"clip_high_fraction": 0.5, "clip_low_fraction": 0.0, "ratio_mean": (math.e + 1) / 2}),
    ("nor in the lower one", {"rewards": [[0.0, 1.0]], "ids": [[[1, 2], [3]]], "advantages": [[-1.0, -1.0]], **_tokens(logprobs=[[[NAN, -1.0], [0.0]]], old=0.0)}, {"clip_low_fraction": 0.5, "clip_high_fraction": 0.0}),
    ("on-policy", {"rewards": [[0.0, 1.0]]}, {"ratio_mean": 1.0, "ratio_max": 1.0, "clip_low_fraction": 0.0, "clip_high_fraction": 0.0, "rollout_mismatch_kl": 0.0}),
    ("sampler against trainer", {"rewards": [[0.0, 1.0]], "ids": [[[1], [2]]], **_tokens(sampler=[[[-0.5], [-2.0]]])}, {"rollout_mismatch_kl": -0.25, "rollout_mismatch_max": 1.0}),
    ("log-probs of right and wrong", {"rewards": [[0.9, 1.0]], "ids": [[[1, 2], [3]]], **_tokens(logprobs=[[[-1.0, -2.0], [-4.0]]])}, {"logprob_correct": -4.0, "logprob_wrong": -1.5}),
    ("one broken log-prob", {"rewards": [[0.0, 1.0]], "ids": [[[1, 2], [3, 4]]], **_tokens(logprobs=[[[NAN, 0.0], [0.0, 0.0]]], old=0.0)}, {"ratio_mean": 1.0, "nonfinite_count_logprobs": 1.0, "nonfinite_count_old_logprobs": 0.0, "nonfinite_count": 1.0}),
    ("the reference's and the sampler's broken log-probs", {"rewards": [[0.0, 1.0]], "ids": [[[1, 2], [3]]], **_tokens(ref=[[[-1.0, INF], [-1.0]]], sampler=[[[NAN, -1.0], [NAN]]])}, {"nonfinite_count_ref_logprobs": 1.0, "nonfinite_count_sampler_logprobs": 2.0, "nonfinite_count": 3.0, "kl": 0.0, "rollout_mismatch_kl": 0.0}),
    ("a broken entropy", {"rewards": [[0.0, 1.0]], "ids": [[[1, 2], [3]]], **_tokens(entropies=[[[NAN, 1.0], [2.0]]])}, {"entropy": 1.5, "nonfinite_count_entropies": 1.0}),
    # responses
    ("lengths", {"rewards": [[0.0, 1.0]], "ids": [[[1], [2, 3, 4]]]}, {"response_length_mean": 2.0, "response_length_std": math.sqrt(2), "response_length_max": 3.0, "response_length_min": 1.0, "response_length_correct": 3.0, "response_length_wrong": 1.0}),
    ("truncated is without EOS, however long", {"rewards": [[0.0, 1.0]], "ids": [[[1, 2, 3], [2]]], "terminated": [[True, False]]}, {"truncated_fraction": 0.5, "empty_fraction": 0.0}),
    ("empty is EOS alone", {"rewards": [[0.0, 1.0]], "ids": [[[1], [2, 3]]]}, {"empty_fraction": 0.5, "truncated_fraction": 0.0}),
    ("loops", {"rewards": [[0.0, 1.0]], "ids": [[[5] * 8, [1, 2, 3, 4, 5, 1, 2, 3]]]}, {"ngram_repetition": (1 - 1 / 5 + 0) / 2}),
    ("a period of two", {"rewards": [[0.0, 1.0]], "ids": [[[5, 6, 5, 6, 5, 6], [1, 2]]]}, {"ngram_repetition": 1 - 2 / 3}),
    ("prefixes: pairs share 2, 1 and 1 of 3 tokens", {"rewards": [[0.0, 1.0, 0.0]], "ids": [[[1, 2, 3], [1, 2, 4], [1, 5, 3]]]}, {"prefix_repetition": (2 + 1 + 1) / 3 / 3}),
    ("a prefix that is the whole", {"rewards": [[0.0, 1.0]], "ids": [[[1, 2], [1, 2, 3, 4]]]}, {"prefix_repetition": 2 / 3, "distinct_response_fraction": 1.0}),
    ("equal answers, other rewards", {"rewards": [[0.0, 1.0, 0.5, 0.5]], "ids": [[[1, 2], [1, 2], [3], [3]]]}, {"reward_conflict_fraction": 0.5}),
    ("equal answers, the same reward but for rounding", {"rewards": [[0.3, 0.3 + 1e-9, 0.0, 1.0]], "ids": [[[1, 2], [1, 2], [3], [4]]]}, {"reward_conflict_fraction": 0.0}),
    ("the same answer", {"rewards": [[0.0, 0.0, 0.0, 1.0]], "ids": [[[1, 2], [1, 2], [1, 2], [2, 1]]]}, {"distinct_response_fraction": 0.5, "prefix_repetition": 0.5}),
    # optimizer
    ("norms", {"rewards": [[0.0, 1.0]], "update_skipped": True}, {"grad_norm": 2.0, "grad_norm_clipped": 1.0, "updates_skipped": 1.0}),
    ("the update's numbers are what it said", {"rewards": [[0.0, 1.0]], "loss": 0.75, "policy_loss": 0.5, "kl_loss": 2.5, "kl_coef": 0.1, "lr": 3e-4}, {"loss": 0.75, "policy_loss": 0.5, "kl_loss": 2.5, "kl_coef": 0.1, "lr": 3e-4, "updates_skipped": 0.0, "nonfinite_count_loss": 0.0}),
    ("groups sampled again", {"rewards": [[0.0, 1.0]], "resampled_groups": 3, "unrepaired_groups": 1}, {"rollouts_resampled": 3.0, "rollouts_unrepaired": 1.0}),
    ("a broken loss is counted", {"rewards": [[0.0, 1.0]], "loss": NAN, "grad_norm": INF}, {"nonfinite_count_loss": 1.0, "nonfinite_count_grad_norm": 1.0, "nonfinite_count": 2.0, "grad_norm": INF}),
    ("a broken advantage", {"rewards": [[0.0, 1.0]], "advantages": [[NAN, 3.0]]}, {"advantage_mean": 3.0, "nonfinite_count_advantages": 1.0, "advantage_tail_fraction": 1.0}),
    # overview and data
    ("throughput", {"rewards": [[0.0, 1.0]], "seconds": {"step": 0.5, "rollout": 0.25, "score": 0.1}}, {"tokens_per_second": 16.0, "rollout_seconds": 0.25, "score_seconds": 0.1}),
    ("prompts", {"rewards": [[0.0, 1.0]] * 3, "prompts": [[1], [1, 2], [1, 2, 3]]}, {"prompt_length_mean": 2.0, "prompt_length_max": 3.0, "prompt_length_min": 1.0, "prompt_length_spread": 1.0, "prompt_length_p95": 2.9, "prompt_tokens_total": 6.0, "duplicate_prompt_fraction": 0.0}),
    ("the same text in two rows", {"rewards": [[0.0, 1.0]] * 4, "prompts": [[1, 2], [1, 2], [2, 1], [2]]}, {"duplicate_prompt_fraction": 0.25}),
    ("every completion cut and worth nothing", {"rewards": [[0.0, 0.0]] * 2, "terminated": [[False, False]] * 2}, {"truncated_fraction": 1.0, "dead_group_fraction_all_low": 1.0, "signal_token_fraction": 0.0}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_numbers_derived_by_hand(case: dict[str, Any], expected: dict[str, float]) -> None:
    values = signals_of(make_record(**case))
    assert {name: values.get(name) for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-7)


ABSENT = [
    ("no reference", {}, ("kl", "kl_k1", "kl_k2", "kl_max", "kl_clamped_fraction", "kl_coef", "nonfinite_count_ref_logprobs")),
    ("no entropies", _tokens(entropies=None), ("entropy", "entropy_p10", "nonfinite_count_entropies")),
    ("no seconds", {}, ("step_seconds", "rollout_seconds", "tokens_per_second")),
    ("nothing called this time", {}, ("reward/f0_errors", "reward/f0_seconds")),
    ("no energy", {"rewards": [[1.0, 1.0]]}, ("advantage_top_group_share", "advantage_skew", "reward_rank_agreement")),
    ("no right answer", {"rewards": [[0.0, 0.5]]}, ("response_length_correct", "logprob_correct")),
    ("nothing scored", {"rewards": [[NAN, NAN]]}, ("reward_mean", "reward_std", "group_reward_std", "group_reward_std_p50", "reward_outlier_fraction", "reward/f0_mean")),
    ("no 4-gram", {"ids": [[[1, 2, 3], [4]]]}, ("ngram_repetition",)),
    ("one rank", {}, ("rank_overlap_fraction", "rank_advantage_gap")),
    ("no token at all", {"ids": [[[], []]]}, ("entropy", "ratio_mean", "signal_token_fraction", "prefix_repetition")),
    ("no loss token", {"loss_mask_PGL": torch.zeros(1, 2, 4, dtype=torch.bool)}, ("ratio_mean", "ratio_max", "clip_low_fraction", "signal_token_fraction")),
]  # fmt: skip


@pytest.mark.parametrize(("case", "names"), [c[1:] for c in ABSENT], ids=[c[0] for c in ABSENT])
def test_not_measured_is_absent(case: dict[str, Any], names: tuple[str, ...]) -> None:
    values = signals_of(make_record(**({"rewards": [[0.0, 1.0]]} | case)))
    assert [name for name in names if name in values] == []


@pytest.mark.parametrize("size", range(6, 17))
@pytest.mark.parametrize("reward", [0.3, 0.7, 0.9, 1 / 3, 1e6 / 3, -0.1])
def test_equal_rewards_are_dead_whatever_their_rounding(reward: float, size: int) -> None:
    # their float32 std is about 3e-8; summing weighted parts rounds differently in each rollout
    parts = [[reward, 0.0] if g % 2 else [reward * (1 - 1e-13), 0.0] for g in range(size)]
    values = signals_of(make_record([parts], weights=[1.0, 0.1]))
    assert (values["dead_group_fraction"], values["group_reward_std"], values["signal_token_fraction"]) == (
        1.0,
        0.0,
        0.0,
    )


def test_batch_scaling_hides_no_dead_group() -> None:
    rewards = torch.tensor([[1.0] * 4, [0.0] * 4])
    advantages = group_advantages(rewards, scale="batch").advantages_PG.tolist()
    values = signals_of(make_record(rewards, advantages=advantages))
    assert (values["dead_group_fraction"], values["signal_token_fraction"]) == (1.0, 0.0)
    assert (values["dead_group_fraction_all_low"], values["dead_group_fraction_all_high"]) == (0.5, 0.5)


@pytest.mark.parametrize("size", [2, 3, 8, 16, 64])
def test_advantages_stay_within_their_bound(size: int) -> None:
    values = signals_of(make_record([[1.0] + [0.0] * (size - 1)]))
    bound = (size - 1) / math.sqrt(size)
    assert 0.99 * bound < values["advantage_abs_max"] <= bound


def test_a_nan_loss_is_visible_as_nan() -> None:
    assert math.isnan(signals_of(make_record([[0.0, 1.0]], loss=NAN))["loss"])


def test_what_lies_beyond_the_mask_is_never_read() -> None:
    case: dict[str, Any] = {"rewards": [[0.0, 1.0]], "ids": [[[1, 2, 3, 4, 5], [9]]]}
    clean = make_record(**case, **_tokens(logprobs=-1.0, old=-1.5, ref=-2.0, entropies=1.0, sampler=-1.2))
    beyond = ~clean.rollouts.completion_mask_PGL
    names = ("logprobs_PGL", "old_logprobs_PGL", "ref_logprobs_PGL", "entropies_PGL")
    dirty = {n: getattr(clean, n).masked_fill(beyond, NAN) for n in names}
    rollouts = {"sampler_logprobs_PGL": clean.rollouts.sampler_logprobs_PGL.masked_fill(beyond, NAN)}
    rollouts["completion_ids_PGL"] = clean.rollouts.completion_ids_PGL.masked_fill(beyond, 1)
    assert signals_of(make_record(**case, rollouts=rollouts, **dirty)) == signals_of(clean)


def test_prompts_hash_the_same_under_any_padding() -> None:
    ranks = [make_record([[0.0, 1.0]], prompts=[[4, 5]]), make_record([[0.0, 1.0]] * 2, prompts=[[4, 5], [1, 2, 4, 5]])]
    assert signals_of(*ranks)["duplicate_prompt_fraction"] == pytest.approx(1 / 3)


def test_old_logprobs_that_are_the_new_ones_count_once() -> None:
    broken = torch.tensor([[[NAN, -1.0], [-1.0, -1.0]]])
    record = make_record([[0.0, 1.0]], ids=[[[1, 2], [3, 4]]], logprobs_PGL=broken, old_logprobs_PGL=broken)
    assert signals_of(record)["nonfinite_count"] == 1.0


THREE = make_record([[0.0, 1.0]] * 3, advantages=[[1.0, -1.0], [0.5, -0.5], [3.0, -3.0]])
PARTS = ("step", "rollout", "reward", "score", "update")
RANKS = {
    "the middle row of three is on both": ([of_groups(THREE, [0, 1]), of_groups(THREE, [1, 2])], {"rank_overlap_fraction": 1 / 3}),
    "means of abs(advantage): 0.75 and 1.75": ([of_groups(THREE, [0, 1]), of_groups(THREE, [1, 2])], {"rank_advantage_gap": 1.0}),
    "the slowest rank counts in each part": (
        [make_record([[0.0, 1.0]], seconds=dict(zip(PARTS, seconds, strict=True))) for seconds in ((0.5, 0.1, 0.4, 0.3, 0.2), (2.0, 0.2, 0.1, 0.1, 1.0))],
        {"step_seconds": 2.0, "rollout_seconds": 0.2, "reward_seconds": 0.4, "score_seconds": 0.3, "update_seconds": 1.0, "tokens_per_second": 16 / 2.0},
    ),
    "what ranks sampled again adds up": (
        [make_record([[0.0, 1.0]], resampled_groups=n, unrepaired_groups=n // 2) for n in (1, 2)],
        {"rollouts_resampled": 3.0, "rollouts_unrepaired": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("records", "expected"), RANKS.values(), ids=RANKS.keys())
def test_numbers_of_two_ranks_by_hand(records: list[Any], expected: dict[str, float]) -> None:
    values = signals_of(*records)
    assert {name: values.get(name) for name in expected} == pytest.approx(expected)


def _joined(*records: Any) -> Joined:
    parts = [measure(record) for record in records]
    return join([part.pack() for part in parts], parts[0], records[0])


def test_the_histogram_counts_every_advantage() -> None:
    record = make_record([[0.0, 1.0]] * 2, advantages=[[-9.0, -0.5], [0.25, 2.5]])
    assert _joined(record, record).histogram([-3.0, -1.0, 0.0, 1.0, 3.0]) == [2.0, 2.0, 2.0, 2.0]


def test_sources_are_counted_over_ranks() -> None:
    record = make_record([[0.0, 1.0]] * 3, sources=["math", "code", "math"])
    assert sorted(n for n in _joined(record, record).sources if n) == [2.0, 4.0]
    assert sum(_joined(make_record([[0.0, 1.0]])).sources) == 0.0


UPDATES = {
    "copies are one": ([(9.0, 25.0, 1.0)] * 3, {"update_norm": 3.0, "update_to_weight": 0.6}),
    "shards add up": ([(9.0, 16.0, 0.5), (16.0, 84.0, 0.5)], {"update_norm": 5.0, "update_to_weight": 0.5}),
    "a skipped update is 0": ([(0.0, 0.0, 1.0)], {"update_norm": 0.0}),
    "not measured is absent": ([None], {}),
}


@pytest.mark.parametrize(("sizes", "expected"), UPDATES.values(), ids=UPDATES.keys())
def test_the_size_of_the_update_over_ranks(sizes: Any, expected: dict[str, float]) -> None:
    record = make_record([[0.0, 1.0]])
    made = [s and UpdateSize(update_squares=s[0], weight_squares=s[1], share=s[2]) for s in sizes]
    parts = [measure(record, update=size) for size in made]
    values = join([part.pack() for part in parts], parts[0], record).values
    assert {n: v for n, v in values.items() if n.startswith("update_")} == pytest.approx(expected)
