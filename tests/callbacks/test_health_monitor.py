"""A run that is judged: alerts are recorded, a pause is carried out, and going on needs a cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import health_rewards
import lightning as L
import pytest
import torch
from tiny_runs import make_module, record_run, steps_of

from grpo_lightning.callbacks import HealthSettings
from grpo_lightning.errors import ConfigError, RunPaused
from grpo_lightning.sinks import RunDirectory
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.settings import RecoverySettings

MakeData = Callable[..., PromptDataModule]

PAUSE_AT_6 = """
- name: six_steps
  signal: reward_mean
  above: -1.0
  for_steps: 6
  action: pause
  severity: critical
  cause: data
  summary: "for {steps} steps"
  runbook: six.md
"""


def rules(folder: Path, text: str = PAUSE_AT_6) -> HealthSettings:
    path = folder / "rules.yaml"
    path.write_text(text)
    return HealthSettings(rules=[str(path)])


def only_run(folder: Path) -> RunDirectory:
    (path,) = folder.glob("*/journal.sqlite")
    return RunDirectory.open(path.parent)


def alerts(run: RunDirectory) -> list[tuple[str, int, str]]:
    with run.journal(read_only=True) as journal:
        return [
            (row.event.name, row.event.step, row.event.payload["state"]) for row in journal.alerts(all_segments=True)
        ]


def acknowledge(run: RunDirectory) -> None:
    with run.journal() as journal:
        for row in journal.alerts(open_only=True, all_segments=True):
            journal.acknowledge(row.event.key, cause="reward", note="a test")


def test_a_pause_saves_says_and_waits_for_a_cause(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    settings = rules(tmp_path)
    with pytest.raises(
        RunPaused, match=r"(?s)paused by six_steps at step 6.*acknowledge .* six_steps@6 --cause data"
    ) as told:
        record_run(tmp_path, make_module(tiny_model), make_data(), 12, health=settings, every=4)
    run = only_run(tmp_path)
    checkpoint = run.checkpoints / "paused-step-0000006.ckpt"
    assert f"fit --ckpt_path {checkpoint}" in str(told.value)
    assert [row.step for row in steps_of(run)] == [1, 2, 3, 4, 5, 6]
    with run.journal(read_only=True) as journal:
        assert journal.segments()[-1].status == "paused"
        (event,) = [row.event for row in journal.alerts()]
    assert Path(event.payload["evidence"]).is_file()
    assert event.payload["checkpoint_before_onset"] is None
    health = json.loads(checkpoint.with_name("paused-step-0000006.health.json").read_text())
    assert (health["verdict"], health["firing"]) == ("unhealthy", ["six_steps@6"])

    with pytest.raises(ConfigError, match=r"acknowledge .* six_steps@6 --cause data"):
        record_run(tmp_path, make_module(tiny_model), make_data(), 12, ckpt=checkpoint, health=settings)
    acknowledge(run)
    record_run(tmp_path, make_module(tiny_model), make_data(), 12, ckpt=checkpoint, health=settings)
    assert [row.step for row in steps_of(run)] == list(range(1, 13))
    assert alerts(run) == [("six_steps", 6, "firing")]  # one-shot: it goes on holding and isn't told again
    with run.journal(read_only=True) as journal:
        assert [s.status for s in journal.segments()] == ["paused", "finished"]


def test_a_streak_survives_a_checkpoint(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    settings = rules(tmp_path)
    record_run(tmp_path, make_module(tiny_model), make_data(), 5, health=settings)
    checkpoint = only_run(tmp_path).checkpoints / "last.ckpt"
    with pytest.raises(RunPaused, match="at step 6"):
        record_run(tmp_path, make_module(tiny_model), make_data(), 12, ckpt=checkpoint, health=settings)


def test_the_judgement_of_a_resumed_run_is_that_of_an_uninterrupted_one(
    tmp_path: Path, tiny_model: Path, make_data: MakeData
) -> None:
    def state(folder: Path) -> str:
        held = torch.load(folder / "last.ckpt", weights_only=True)["grpo_health"]["judge"]
        for name in [n for n in held["feeds"] if n.endswith("_seconds")]:
            del held["feeds"][name]
        for track in held["tracks"].values():
            del track["_seconds"]
        return json.dumps(held)

    whole = record_run(tmp_path / "a", make_module(tiny_model), make_data(), 9)
    record_run(tmp_path / "b", make_module(tiny_model), make_data(), 4)
    parts = record_run(
        tmp_path / "b", make_module(tiny_model), make_data(), 9, ckpt=only_run(tmp_path / "b").checkpoints / "last.ckpt"
    )
    assert state(whole.checkpoints) == state(parts.checkpoints)


def test_a_notebook_stops_without_an_exception(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    from grpo_lightning.callbacks import CheckpointSettings, HealthMonitor, RunCheckpoint, RunRecorder, RunSettings

    recorder = RunRecorder(RunSettings(dir=str(tmp_path), mlflow=False))
    saver = RunCheckpoint(recorder, CheckpointSettings(every_n_steps=0))
    monitor = HealthMonitor(recorder, checkpoint=saver, settings=rules(tmp_path), raise_on_pause=False)
    trainer = L.Trainer(
        max_steps=12,
        min_steps=10,  # must not hold the stop up
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[recorder, monitor, saver],
        default_root_dir=tmp_path,
    )
    trainer.fit(make_module(tiny_model), datamodule=make_data())
    assert monitor.paused is not None
    assert "paused by six_steps" in monitor.paused
    run = only_run(tmp_path)
    assert [row.step for row in steps_of(run)] == [1, 2, 3, 4, 5, 6]
    with run.journal(read_only=True) as journal:
        assert journal.segments()[-1].status == "paused"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"actions": {"nothing": "off"}}, "'nothing'"),
        ({"actions": {"kl_runaway": "explode"}}, "notify, pause or off"),
        ({"rules": ["/nowhere.yaml"]}, "/nowhere.yaml is no file"),
        ({"baseline": "/nowhere.json"}, "/nowhere.json"),
    ],
    ids=["unknown rule", "unknown action", "no rules", "no baseline"],
)
def test_bad_settings_are_one_sentence(settings: dict[str, Any], said: str) -> None:
    from grpo_lightning.callbacks.health import judge_of

    with pytest.raises(ConfigError, match=said):
        judge_of(HealthSettings(**settings))


def test_an_override_turns_a_rule_off_or_down() -> None:
    from grpo_lightning.callbacks.health import judge_of

    judge, _ = judge_of(HealthSettings(actions={"kl_runaway": "off", "groups_died": "notify"}))
    by_name = {rule.name: rule for rule in judge.rules}
    assert "kl_runaway" not in by_name
    assert (by_name["groups_died"].action, by_name["groups_died"].severity) == ("notify", "warning")


# ---- the two faults that repair themselves


def test_broken_rollouts_are_sampled_again_and_training_goes_on(
    tmp_path: Path, tiny_model: Path, make_data: MakeData
) -> None:
    health_rewards.calls.clear()
    run = record_run(tmp_path, make_module(tiny_model, "health_rewards:infinite_once"), make_data(), 6)
    values = {row.step: row.values for row in steps_of(run)}
    assert [values[step]["rollouts_resampled"] for step in range(1, 7)] == [0, 0, 0, 1, 0, 0]
    assert [values[step]["nonfinite_count"] for step in range(1, 7)] == [0] * 6
    with run.journal(read_only=True) as journal:
        (repair,) = journal.recoveries()
        assert journal.segments()[-1].status == "finished"
    assert (repair.name, repair.step, repair.payload["count"]) == ("resample", 4, 1)
    assert ("rollouts_resampled", 4, "firing") in alerts(run)
    (row, *_) = [json.loads(x) for x in (run.evidence / "step-000004-resample.jsonl").read_text().splitlines()]
    assert row["why"] == "non-finite reward"


def test_rollouts_that_stay_broken_pause_with_the_reward_as_cause(
    tmp_path: Path, tiny_model: Path, make_data: MakeData
) -> None:
    with pytest.raises(RunPaused, match=r"(?s)rewards_unrepaired at step 4.*cause: reward"):
        record_run(tmp_path, make_module(tiny_model, "health_rewards:infinite_forever"), make_data(), 9)


class ExplodesAt(L.Callback):
    """Makes the gradient of some steps infinite, after the backward pass."""

    def __init__(self, steps: set[int]) -> None:
        self._steps = steps
        self.weights: dict[int, torch.Tensor] = {}

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_step + 1 in self._steps:
            next(p for p in pl_module.policy.parameters() if p.grad is not None).grad.fill_(float("inf"))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.weights[trainer.global_step] = next(pl_module.policy.parameters()).detach().clone()


def test_an_infinite_gradient_is_skipped_and_recorded(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    bad = ExplodesAt({3})
    run = record_run(tmp_path, make_module(tiny_model), make_data(), 5, extra=[bad])
    assert torch.equal(bad.weights[2], bad.weights[3])
    assert not torch.equal(bad.weights[3], bad.weights[4])
    assert [row.values["updates_skipped"] for row in steps_of(run)] == [0, 0, 1, 0, 0]
    with run.journal(read_only=True) as journal:
        assert [(r.name, r.step) for r in journal.recoveries()] == [("skip_update", 3)]
    assert ("update_skipped", 3, "firing") in alerts(run)


def test_past_the_budget_of_repairs_the_run_pauses_also_across_a_resume(
    tmp_path: Path, tiny_model: Path, make_data: MakeData
) -> None:
    module = make_module(tiny_model, recovery=RecoverySettings(skip_budget=2))
    record_run(tmp_path, module, make_data(), 4, extra=[ExplodesAt({2, 4})])
    checkpoint = only_run(tmp_path).checkpoints / "last.ckpt"
    again = make_module(tiny_model, recovery=RecoverySettings(skip_budget=2))
    with pytest.raises(RunPaused, match=r"recovery_budget_spent at step 5: 3 updates were skipped within 100 steps"):
        record_run(tmp_path, again, make_data(), 9, ckpt=checkpoint, extra=[ExplodesAt({5})])


def test_acknowledged_repairs_count_no_more(tmp_path: Path, tiny_model: Path, make_data: MakeData) -> None:
    module = make_module(tiny_model, recovery=RecoverySettings(skip_budget=2))
    record_run(tmp_path, module, make_data(), 4, extra=[ExplodesAt({2, 4})])
    run = only_run(tmp_path)
    acknowledge(run)
    again = make_module(tiny_model, recovery=RecoverySettings(skip_budget=2))
    record_run(tmp_path, again, make_data(), 6, ckpt=run.checkpoints / "last.ckpt", extra=[ExplodesAt({5})])
    with run.journal(read_only=True) as journal:
        assert journal.segments()[-1].status == "finished"
