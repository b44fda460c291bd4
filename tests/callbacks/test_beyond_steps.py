"""Signals that are not made of a step's tensors: the monitor's own time, the probe's, held-out prompts, drift."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from signals.signal_records import make_record
from tiny_runs import make_module, record_run, steps_of

from grpo_lightning.callbacks import HealthMonitor, ProbeSettings, RunRecorder, RunSnapshot
from grpo_lightning.callbacks.monitor import StepMonitor
from grpo_lightning.training.data import PromptDataModule

MakeData = Callable[..., PromptDataModule]
LONG = 1000.0  # seconds, beside which what a slow machine adds is nothing
SLEEP = 0.15


def test_monitor_seconds_are_those_spent_since_the_step_before() -> None:
    monitor, record, found = StepMonitor(), make_record([[0.0, 1.0]]), []
    for spent in (0.0, LONG, 2 * LONG, 0.0):
        monitor.spend(time.perf_counter() - spent)
        joined = monitor.measure(record, torch.device("cpu"), main=True)
        assert joined is not None
        found.append(joined.values["monitor_seconds"])
    assert [round(seconds / LONG) for seconds in found] == [0, 1, 2, 0]
    assert all(seconds > 0 for seconds in found)


def slow(completions: list[str], **_: Any) -> list[float]:
    """Takes its time."""
    time.sleep(SLEEP)
    return [float(len(c)) for c in completions]


def test_probe_seconds_hold_the_rewards_of_the_frozen_prompts(
    tmp_path: Path, tiny_model: Path, make_data: MakeData
) -> None:
    probe = ProbeSettings(every_n_steps=2, prompts=2)
    run = record_run(tmp_path, make_module(tiny_model, f"{__file__}:slow"), make_data(), 3, probe=probe)
    measured = [row.values.get("probe_seconds") for row in steps_of(run)]  # at step 1, and at every second one
    assert measured[2] is None, "not probed: absent"
    assert all(seconds is not None and seconds >= SLEEP for seconds in measured[:2])


def three_are_right(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    """Full marks for three of the eight held-out prompts, a bit less for three, none at all for two."""
    marks = [1.0, 1.5, 1.0, 0.999, 0.5, 0.0, None, float("nan")]
    return [marks[int(prompt.split("+")[0]) % 8] for prompt in prompts]


def test_accuracy_is_the_share_of_full_marks(
    tmp_path: Path, tiny_files: Path, tiny_model: Path, make_data: MakeData
) -> None:
    """Prompts 40 to 47: those that could not be scored are not right."""
    data = make_data(val=str(tiny_files / "val.jsonl"))
    run = record_run(tmp_path, make_module(tiny_model, f"{__file__}:three_are_right"), data, 1)
    with run.journal(read_only=True) as journal:
        found = [event.payload for event in journal.evaluations()]
    assert found
    assert {payload["eval_accuracy"] for payload in found} == {3 / 8}
    assert [payload["eval_reward/three_are_right_mean"] for payload in found] == pytest.approx([4.999 / 6] * len(found))


def test_no_held_out_prompts_have_no_accuracy(tiny_model: Path) -> None:
    module = make_module(tiny_model)
    assert "eval_accuracy" not in module.evaluator.finish(torch.device("cpu")).values


def _told(*findings: tuple[str, str, str]) -> list[dict[str, float]]:
    """What the judgement gets, told twice."""
    from run_snapshot.records import Finding

    monitor = HealthMonitor(RunRecorder())
    snapshot = RunSnapshot(RunRecorder(), monitor=monitor)
    made: Any = [Finding(level=level, name=name, verdict=verdict) for level, name, verdict in findings]  # type: ignore[arg-type]
    told = []
    for _ in range(2):
        snapshot._tell(made, step=4)
        told.append(dict(monitor._added))
        monitor._added.clear()
    return told


def test_each_level_counts_what_changed_once() -> None:
    pytest.importorskip("run_snapshot")
    found = _told(
        ("data", "train.jsonl", "changed"),
        ("data", "more.jsonl", "missing"),
        ("reward", "my_reward.py", "changed"),
        ("environment", "torch", "changed"),
        ("environment", "numpy", "changed"),
        ("environment", "rich", "missing"),
    )
    assert found == [{"data_drift": 2.0, "reward_drift": 1.0, "environment_drift": 3.0}, {}]


def test_what_is_unknown_is_no_change() -> None:
    """environment_drift, data_drift and reward_drift are absent then, as where all is as it was."""
    pytest.importorskip("run_snapshot")
    assert _told(("data", "a", "unknown"), ("reward", "b", "ok"), ("environment", "c", "not checked")) == [{}, {}]
