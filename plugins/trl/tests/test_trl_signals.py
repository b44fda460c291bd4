"""The signals of TRL steps against TRL's own metrics and against numbers made by hand; nothing of the training changes."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from support.tiny import make_tiny_model
from trl_runs import logged, long_ones, make_trainer, only_run, steps_of, varied, watch_run, weights_of

from grpo_lightning.signals import signal


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("trl"))


LAYOUTS: dict[str, dict[str, Any]] = {
    "one generation a step": {"beta": 0.1},
    "two micro-batches": {"gradient_accumulation_steps": 2, "beta": 0.1},
    "two generations a step": {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "beta": 0.1},
    "two steps a generation": {"steps_per_generation": 2, "beta": 0.1, "max_steps": 4},
    "two rounds": {"num_iterations": 2, "max_steps": 4, "beta": 0.1, "learning_rate": 1e-2},
    "truncated ones masked": {"mask_truncated_completions": True, "beta": 0.1},
    "sequence level": {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "num_iterations": 2,
        "max_steps": 4,
    },
    "another loss": {"loss_type": "cispo", "epsilon_high": 5.0},
}
SAME = {
    "reward_mean": "reward",
    "entropy": "entropy",
    "kl": "kl",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "response_length_mean": "completions/mean_length",
    "response_length_max": "completions/max_length",
    "loss": "loss",
}


SLOW = {"two micro-batches", "two rounds", "sequence level", "another loss"}  # the rest covers their parts


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, layout in LAYOUTS.items()],
)
def test_they_agree_with_what_trl_logs(tmp_path: Path, model: Path, layout: dict[str, Any]) -> None:
    trainer = make_trainer(tmp_path, model, varied, **({"use_bias_correction_kl": False} | layout))
    watch_run(tmp_path, trainer)
    rows, theirs = steps_of(only_run(tmp_path)), logged(trainer)
    assert [row.step for row in rows] == [row["step"] for row in theirs]
    last: dict[str, Any] = {}
    for row, told in zip(rows, theirs, strict=True):
        last |= told  # a step without a generation logs no reward
        nothing_left = "mask_truncated_completions" in layout and last["completions/clipped_ratio"] == 1.0
        absent = {"entropy", "kl"} if nothing_left else set() if "beta" in layout else {"kl"}
        assert not absent & row.values.keys()
        for ours, name in SAME.items():
            if ours not in absent:  # TRL averages its micro-batches' means, where we average tokens
                assert row.values[ours] == pytest.approx(float(last[name]), rel=3e-2, abs=1e-6), (ours, row.step)
        assert row.values["reward_rank_agreement"] == 1.0
        assert row.values["nonfinite_count"] == 0.0


def test_groups_are_measured_as_groups(tmp_path: Path, model: Path) -> None:
    """Two prompts of four, all in one step: everything by hand from what the reward function gave."""
    seen: list[list[float]] = []
    cut: list[float] = []

    def told(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append(long_ones(completions))
        cut.append(
            fmean(ids[-1] != 1 for ids in completion_ids)
        )  # <eos> is 1; TRL takes a sampled <pad> for an end too
        return seen[-1]

    trainer = make_trainer(tmp_path, model, told, max_steps=4)
    watch_run(tmp_path, trainer, source_column="source")
    rows = steps_of(only_run(tmp_path))
    assert len(seen) == len(rows) == 4
    for row, rewards in zip(rows, seen, strict=True):
        groups = [rewards[:4], rewards[4:]]
        stds = [stdev(group) for group in groups]
        advantages = [(r - fmean(g)) / (stdev(g) + 1e-4) for g in groups for r in g]
        assert row.values["group_reward_std"] == pytest.approx(fmean(stds))
        assert row.values["dead_group_fraction"] == pytest.approx(fmean(std == 0 for std in stds))
        assert row.values["reward_std"] == pytest.approx(stdev(rewards))
        assert row.values["truncated_fraction"] == cut[row.step - 1]
        assert row.values["advantage_std"] == pytest.approx(stdev(advantages), rel=1e-4)
        assert row.values["reward/told_mean"] == pytest.approx(fmean(rewards))
        assert row.values["update_norm"] > 0 or row.values["grad_norm"] == 0
        assert row.values["step_seconds"] > row.values["rollout_seconds"] > 0
    assert sum(row.values["dead_group_fraction"] for row in rows) > 0, "no group was dead: the test says nothing"


def test_what_trl_does_not_show_is_absent(tmp_path: Path, model: Path) -> None:
    watch_run(tmp_path, make_trainer(tmp_path, model, max_steps=1, beta=0.1))
    (row,) = steps_of(only_run(tmp_path))
    unknown = {
        "rollout_mismatch_kl",
        "nonfinite_count_sampler_logprobs",
        "rollouts_resampled",
        "policy_loss",
        "kl_loss",
    }
    assert not unknown & row.values.keys()
    assert not {"rank_overlap_fraction", "eval_accuracy"} & row.values.keys()
    for name in row.values:
        signal(name)  # each is in the catalogue
    assert {"clip_low_fraction", "kl", "kl_max", "entropy_p10", "advantage_top_group_share"} <= row.values.keys()


def test_policy_loss_and_clips_are_measured_where_the_loss_has_them(tmp_path: Path, model: Path) -> None:
    watch_run(tmp_path, make_trainer(tmp_path, model, max_steps=1, loss_type="cispo"))
    (row,) = steps_of(only_run(tmp_path))
    assert row.values["policy_loss"] == row.values["loss"]
    assert "clip_high_fraction" not in row.values


def test_watching_changes_nothing(tmp_path: Path, model: Path) -> None:
    plain = make_trainer(tmp_path / "a", model, varied, gradient_accumulation_steps=2, max_steps=4)
    plain.train()
    watched = make_trainer(tmp_path / "b", model, varied, gradient_accumulation_steps=2, max_steps=4)
    watch_run(tmp_path / "b", watched)
    before, after = weights_of(plain), weights_of(watched)
    assert all(torch.equal(before[name], after[name]) for name in before)
    times = ("step_time", "profiling/")
    for one, other in zip(logged(plain), logged(watched), strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(times)} == {
            k: v for k, v in other.items() if not k.startswith(times)
        }


def test_metrics_and_extras_of_reward_functions_are_kept(tmp_path: Path, model: Path) -> None:
    def telling(completions: list[str], log_metric: Any, log_extra: Any, **_: Any) -> list[float | None]:
        log_metric("digits", sum(any(c.isdigit() for c in text) for text in completions) / len(completions))
        log_extra("first", [text[:1] for text in completions])
        return [None if i == 0 else value for i, value in enumerate(varied(completions))]

    always = "- {name: at_once, signal: lr, above: -1.0, action: notify, cause: data, summary: 's', runbook: r.md}\n"
    from trl_runs import alerts_of, evidence_of, rules

    trainer = make_trainer(tmp_path, model, telling, varied, max_steps=1, reward_weights=[1.0, 0.5])
    watch_run(tmp_path, trainer, health=rules(tmp_path, always))
    run = only_run(tmp_path)
    (row,) = steps_of(run)
    assert 0.0 <= row.values["reward_metric/digits"] <= 1.0
    assert row.values["reward/telling_missing"] == 1.0
    assert row.values["reward_mean"] == pytest.approx(logged(trainer)[0]["reward"])
    rows = evidence_of(alerts_of(run)[0])
    assert all(r["extras"]["first"] == r["response"][:1] for r in rows)
    assert all(set(r["rewards"]) == {"telling", "varied"} for r in rows)


def test_tokens_of_an_environment_and_log_probs_of_a_sampler(tmp_path: Path, model: Path) -> None:
    """A rollout function: each answer has five tokens, of which the environment gave two; one log-prob is unknown."""

    def roll(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[5 + i, 6, 7, 8, 1] for i in range(len(prompts))]
        given = trainer.processing_class(prompts)["input_ids"]
        logprobs = [[-3.5, -3.5, 0.0, 0.0, float("nan")] for _ in prompts]
        return {
            "prompt_ids": given,
            "completion_ids": ids,
            "logprobs": logprobs,
            "env_mask": [[1, 1, 0, 0, 1]] * len(ids),
        }

    trainer = make_trainer(tmp_path, model, varied, max_steps=2, rollout_func=roll)
    watch_run(tmp_path, trainer)
    for row, told in zip(steps_of(only_run(tmp_path)), logged(trainer), strict=True):
        assert row.values["entropy"] == pytest.approx(told["entropy"], rel=1e-5)
        assert (row.values["response_length_mean"], told["completions/mean_length"]) == (5.0, 3.0)
        assert (row.values["truncated_fraction"], row.values["nonfinite_count"]) == (0.0, 0.0)
        ours = row.values["logprob_wrong"]  # the mean over the three tokens, of which two have a sampler's
        assert row.values["rollout_mismatch_max"] < 1.5
        assert abs(row.values["rollout_mismatch_kl"] - 2 / 3 * (-3.5 - ours)) < 0.2


@pytest.mark.slow
def test_two_reward_functions_of_one_name_are_told_apart(tmp_path: Path, model: Path) -> None:
    watch_run(tmp_path, make_trainer(tmp_path, model, varied, varied, max_steps=1))
    (row,) = steps_of(only_run(tmp_path))
    assert row.values["reward/varied_mean"] == row.values["reward/varied_2_mean"]


def test_evaluations_are_recorded_and_are_no_steps(tmp_path: Path, model: Path) -> None:
    trainer = make_trainer(
        tmp_path, model, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8, max_steps=4
    )
    watch_run(tmp_path, trainer)
    run = only_run(tmp_path)
    assert [row.step for row in steps_of(run)] == [1, 2, 3, 4]
    with run.journal(read_only=True) as journal:
        found = journal.evaluations()
    assert [event.step for event in found] == [2, 4]
    assert all(math.isfinite(event.payload["eval_reward"]) for event in found)
    for row, told in zip(steps_of(run), logged(trainer), strict=True):
        assert row.values["reward_mean"] == pytest.approx(told["reward"])
