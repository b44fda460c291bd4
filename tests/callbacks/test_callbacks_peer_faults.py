"""Misleading numbers that other trainers log, held against the journal of real runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tiny_runs import make_module, record_run, steps_of

from grpo_lightning.objective import LossConfig
from grpo_lightning.rewards import RewardSpec
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.settings import OptimizerSettings, SamplingSettings

MakeData = Callable[..., PromptDataModule]
DENSE, SHARE = (
    RewardSpec(path="support.tiny:dense", weight=1.0),
    RewardSpec(path="support.tiny:share_of_a", weight=-0.5),
)


def zero(completions: list[str], **_: Any) -> list[float]:
    """Nothing is ever right."""
    return [0.0] * len(completions)


class BreaksReference(L.Callback):
    """One reference log-prob of step 2 is NaN: so are the KL and the loss."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        collect = pl_module.collector.collect

        def broken(*args: Any, **kwargs: Any) -> Any:
            window = collect(*args, **kwargs)
            ref_logprobs_PGL = window.ref_logprobs_PGL.clone()
            ref_logprobs_PGL[0, 0, 0] = math.nan
            return replace(window, ref_logprobs_PGL=ref_logprobs_PGL)

        if trainer.global_step == 1:
            pl_module._collect, self.whole = (
                lambda batch: broken(
                    pl_module.policy, pl_module._reference, batch, kl_coef=0.04, keep_old=False, step=1
                ),
                pl_module._collect,
            )
        elif hasattr(self, "whole"):
            pl_module._collect = self.whole


def test_a_nan_loss_is_nan_in_the_log_and_changes_no_weight(
    tmp_path: Path, tiny_model: Path, make_data: MakeData, mlflow_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    monkeypatch.chdir(tmp_path)
    module = make_module(tiny_model)
    run = record_run(tmp_path / "runs", module, make_data(), 3, extra=[BreaksReference()], mlflow=True)
    first, second, third = (row.values for row in steps_of(run))
    assert math.isnan(second["loss"])
    assert (second["updates_skipped"], second["update_norm"]) == (1.0, 0.0)
    assert (second["nonfinite_count_loss"], second["nonfinite_count_ref_logprobs"]) == (1.0, 1.0)
    assert math.isfinite(second["kl"])  # the mean of the finite rest
    assert all(math.isfinite(v["loss"]) and v["update_norm"] > 0 for v in (first, third))
    history = MlflowClient(tracking_uri=mlflow_store).get_metric_history(run.run_id, "1_overview/loss")
    assert [m.step for m in history] == [1, 3]  # a broken point is absent there, and counted
    keys = MlflowClient(tracking_uri=mlflow_store).get_run(run.run_id).data.metrics
    assert [v for k, v in keys.items() if "loss" in k and "nonfinite" in k.lower() and k.endswith("/loss")] in (
        [],
        [1.0],
    )


def test_every_completion_cut_and_worth_nothing_is_said(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    module = make_module(tiny_model, f"{__file__}:zero", sampling=SamplingSettings(max_new_tokens=1))
    (values,) = (row.values for row in steps_of(record_run(tmp_path, module, make_data(), 1)))
    assert values["truncated_fraction"] > 0.8
    assert values["dead_group_fraction"] == values["dead_group_fraction_all_low"] == 1.0
    assert values["signal_token_fraction"] == 0.0
    assert values["grad_norm"] >= 0.0


def test_weights_apply_to_the_logged_reward(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    module = make_module(tiny_model, rewards=[DENSE, SHARE])
    (values,) = (row.values for row in steps_of(record_run(tmp_path, module, make_data(), 1)))
    expected = values["reward/dense_mean"] - 0.5 * values["reward/share_of_a_mean"]
    assert values["reward/share_of_a_mean"] > 0
    assert values["reward_mean"] == pytest.approx(expected)


def test_what_is_clipped_is_measured_before(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    """Norms and ratios from clipped values could never show that something was clipped."""
    optimizer = OptimizerSettings(lr=5e-2, max_grad_norm=1e-3)
    module = make_module(tiny_model, num_iterations=2, optimizer=optimizer, loss=LossConfig(clip_low=0.1))
    first, second = (row.values for row in steps_of(record_run(tmp_path, module, make_data(), 2)))
    assert first["grad_norm"] > 2e-3
    assert first["grad_norm_clipped"] == pytest.approx(1e-3)
    assert (first["ratio_max"], first["clip_low_fraction"], first["clip_high_fraction"]) == (1.0, 0.0, 0.0)
    assert second["ratio_max"] > 1.2
    assert second["clip_low_fraction"] > 0 < second["clip_high_fraction"]


def test_micro_batches_change_no_signal(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    """Uneven ones (8 groups in 3, 3 and 2), one by one, and all at once."""
    found = []
    for micro in (None, 3, 1):
        module = make_module(tiny_model, micro_batch_groups=micro, optimizer=OptimizerSettings(lr=1e-3, eps=1e-6))
        rows = steps_of(record_run(tmp_path / str(micro), module, make_data(), 1))
        found.append({k: v for k, v in rows[0].values.items() if not k.endswith(("_seconds", "_per_second"))})
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=2e-3, abs=2e-6)


def test_a_group_of_equal_rewards_is_dead_in_the_journal(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    module = make_module(tiny_model, f"{__file__}:third", group_size=6)
    (values,) = (row.values for row in steps_of(record_run(tmp_path, module, make_data(), 1)))
    assert (values["dead_group_fraction"], values["group_reward_std"], values["advantage_std"]) == (1.0, 0.0, 0.0)
    assert values["grad_norm"] < 1e-6  # the KL term is 0 at the first update


def third(completions: list[str], **_: Any) -> list[float]:
    """Equal but for the rounding of sums: the float32 std of such rewards is 3e-8."""
    return [(0.1 + 0.2) / 0.9 if i % 2 else 0.3 / 0.9 for i in range(len(completions))]


def test_the_loss_of_an_on_policy_step_is_about_0(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    module = make_module(tiny_model, loss=LossConfig(loss="grpo"))  # a mean over each completion first
    (values,) = (row.values for row in steps_of(record_run(tmp_path, module, make_data(), 1)))
    assert abs(values["policy_loss"]) < 1e-6
    assert values["grad_norm"] > 1e-2  # and yet it learns
    assert torch.isfinite(torch.tensor(values["kl"]))
