"""What a real run's journal holds, and that a resumed run's holds the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from tiny_runs import make_module, record_run, steps_of, weights_of, without_timings

from grpo_lightning.callbacks import RunRecorder
from grpo_lightning.callbacks.monitor import _means
from grpo_lightning.signals import CATALOGUE
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.window import _plain_columns

MakeData = Callable[..., PromptDataModule]

OVER_STEPS = {
    *("kl_speed", "kl_acceleration", "kl_stairs", "grad_norm_ratio", "length_growth_per_hour", "source_shift"),
    *("update_norm", "update_to_weight", "update_norm_rolling", "monitor_seconds"),
}
NOT_HERE = {
    "eval_accuracy",
    "data_drift",
    "environment_drift",
    "reward_drift",
    "rollouts_resampled",
    "rank_overlap_fraction",
    "rank_advantage_gap",
}
TWICE = {"num_iterations": 2}  # each batch serves two updates; the run stops between them
NEEDS_LUCK = {"response_length_correct", "logprob_correct"}  # full marks


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, make_data: MakeData) -> Any:
    """An uninterrupted run of 34 steps: the sources' ruler needs 256 prompts."""
    module = make_module(tiny_model, **TWICE)
    run = record_run(tmp_path_factory.mktemp("whole"), module, make_data(), 34, every=17)
    return run, weights_of(module)


def test_every_signal_of_the_catalogue_is_in_the_journal(whole: Any) -> None:
    found = {name for row in steps_of(whole[0]) for name in row.values}
    assert found >= OVER_STEPS
    absent = {n for n in CATALOGUE if not n.startswith("probe_")} - found - NOT_HERE - NEEDS_LUCK
    assert absent == set()


class Changes(L.Callback):
    """The L2 norm of each step's change, by whole copies of the weights."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.before = [p.detach().double() for p in pl_module.policy.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        after = [p.detach().double() for p in pl_module.policy.parameters()]
        self.norms.append(sum(float((a - b).square().sum()) for a, b in zip(after, self.before, strict=True)) ** 0.5)


def test_the_update_norm_is_that_of_the_weights(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    seen = Changes()
    run = record_run(tmp_path, make_module(tiny_model), make_data(), 3, extra=[seen])
    values = [row.values for row in steps_of(run)]
    assert [v["update_norm"] for v in values] == pytest.approx(seen.norms, rel=1e-5)
    assert all(v["update_norm"] > 0 for v in values)
    assert values[2]["update_norm_rolling"] == pytest.approx(sum(seen.norms) / 3, rel=1e-5)
    assert all(1e-4 < v["update_to_weight"] < 1 for v in values)


def test_a_skipped_update_has_norm_0(
    tmp_path: Path, tiny_model: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = GRPOModule.manual_backward

    def poisoned(self: GRPOModule, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        real(self, loss * (float("nan") if self.global_step == 1 else 1.0), *args, **kwargs)

    monkeypatch.setattr(GRPOModule, "manual_backward", poisoned)
    values = [row.values for row in steps_of(record_run(tmp_path, make_module(tiny_model), make_data(), 3))]
    assert [v["updates_skipped"] for v in values] == [0.0, 1.0, 0.0]
    assert values[1]["update_norm"] == 0.0
    assert values[0]["update_norm"] > 0 < values[2]["update_norm"]
    assert "grad_norm_ratio" not in values[1]


def test_a_resumed_run_has_the_signals_of_an_uninterrupted_one(
    tmp_path: Path, tiny_model: Path, make_data: MakeData, whole: Any
) -> None:
    first = record_run(tmp_path, make_module(tiny_model, **TWICE), make_data(), 17, every=17)
    module = make_module(tiny_model, **TWICE)
    ckpt = first.checkpoints / "step-0000017.ckpt"
    resumed = record_run(tmp_path, module, make_data(), 34, ckpt=ckpt)
    assert [row.step for row in steps_of(resumed)] == list(range(1, 35))
    for row, other in zip(steps_of(resumed), steps_of(whole[0]), strict=True):
        assert without_timings(row.values) == without_timings(other.values), row.step
    assert all(torch.equal(v, whole[1][k]) for k, v in weights_of(module).items())


def test_saving_twice_gives_the_same_state_and_plain_types(
    tmp_path: Path, tiny_model: Path, make_data: MakeData
) -> None:
    run = record_run(tmp_path, make_module(tiny_model), make_data(), 3, every=3)
    one, two = (torch.load(run.checkpoints / name, weights_only=True) for name in ("step-0000003.ckpt", "last.ckpt"))
    assert one["grpo_run"] == two["grpo_run"]
    assert len(one["grpo_run"]["monitor"]["temporal"]["norms"]) == 3


def test_without_a_recorder_nothing_is_remembered(tiny_model: Path) -> None:
    recorder = RunRecorder()
    assert (recorder.directory, recorder.segment) == (None, 0)
    recorder.say("nothing happens")


class Extras(L.Callback):
    """Keeps what reward functions logged of each rollout."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.all.append((pl_module.last_record.reward_extras, pl_module.last_record.rewards_PG.numel()))


def test_what_reward_functions_log_is_recorded(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    seen = Extras()
    module = make_module(tiny_model, "support.tiny:telling", num_minibatches=2)
    values = [row.values for row in steps_of(record_run(tmp_path, module, make_data(), 3, extra=[seen]))]
    shares = [v.get("reward_metric/with digit") for v in values]
    assert shares[1] is None  # the second update on the same rollouts
    assert all(0 < share < 1 for share in (shares[0], shares[2]) if share is not None)
    assert [set(extras) for extras, _ in seen.all] == [{"first"}] * 3
    assert [(len(extras["first"]), count) for extras, count in seen.all] == [(16, 16)] * 3


def test_logged_metrics_are_averaged_over_ranks() -> None:
    assert _means([{"a": 1.0, "b": 2.0}, {"a": 3.0}, {"a": math.nan}]) == {"a": 2.0, "b": 2.0}
    assert math.isnan(_means([{"c": math.inf}])["c"])


def test_logged_columns_become_plain_values() -> None:
    class Hostile:
        def __str__(self) -> str:
            raise RuntimeError

    given = {"x": [1, np.float64(0.5), torch.tensor(2), "s", None, [1, 2], Hostile(), True], "short": [1]}
    assert _plain_columns(given, 8) == {"x": [1, 0.5, 2, "s", None, "[1, 2]", "Hostile", True]}
    assert {type(v) for v in _plain_columns(given, 8)["x"]} == {int, float, str, type(None), bool}
