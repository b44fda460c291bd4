"""Three faults that TRL's own metrics hide: each pauses the run, with evidence and a checkpoint that can be used."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_trl.demo import Fault, train
from safetensors.torch import load_file
from trl_runs import alerts_of, evidence_of, only_run, steps_of

from grpo_lightning.cli.main import main

FAULTS: dict[str, tuple[Fault, str, int, str]] = {
    "constant reward": ("constant", "no_reward_spread_from_start", 20, "reward"),
    "infinite reward": ("infinite", "rewards_unrepaired", 6, "reward"),
    "NaN loss": ("nan", "loss_not_finite", 6, "algorithm"),
}


def hidden(fault: Fault, row: dict[str, Any]) -> bool:
    """Whether TRL's row of the pausing step looks fine."""
    if fault == "constant":
        return row["frac_reward_zero_std"] == 0.0 and row["reward_std"] > 0
    if fault == "infinite":
        return row["frac_reward_zero_std"] == 0.0 and math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])
    return math.isfinite(row["loss"])


@pytest.mark.parametrize(("fault", "rule", "step", "cause"), FAULTS.values(), ids=FAULTS)
def test_a_fault_pauses_with_evidence(tmp_path: Path, fault: Fault, rule: str, step: int, cause: str) -> None:
    watcher, history = train(fault, tmp_path, steps=30)
    run = only_run(tmp_path)
    checkpoint = tmp_path / "trl" / f"checkpoint-{step}"
    assert watcher.paused is not None
    assert watcher.paused.startswith(f"paused by {rule} at step {step}")
    assert f"{rule}@{step} --cause {cause}" in watcher.paused
    assert f"resume_from_checkpoint='{checkpoint}'" in watcher.paused
    assert [row.step for row in steps_of(run)] == list(range(1, step + 1))
    assert hidden(fault, [row for row in history if "reward" in row][-1])

    alert = alerts_of(run)[0]
    assert (alert.event.name, alert.event.payload["action"], alert.event.payload["cause"]) == (rule, "pause", cause)
    rows = evidence_of(alert)
    assert {row["run_id"] for row in rows} == {run.run_id}
    assert all(row["prompt"] and "advantage" in row for row in rows)
    if fault == "infinite":
        infinite = {(row["why"], row["advantage"]) for row in rows if row["reward"] == "Infinity"}
        assert ("reward outlier", 0.0) in infinite, "TRL gives it no advantage, and says nothing"
    if fault == "constant":
        assert {round(row["reward"], 6) for row in rows} == {0.3}

    assert (checkpoint / "trainer_state.json").is_file()
    assert json.loads((checkpoint / "grpo_health.json").read_text())["health"]["verdict"] == "unhealthy"
    weights = load_file(checkpoint / "model.safetensors")
    assert all(bool(torch.isfinite(value).all()) for value in weights.values()), "the broken update was left out"
    with run.journal(read_only=True) as journal:
        assert (journal.segments()[-1].status, journal.meta()["name"]) == ("paused", f"demo-{fault}")


@pytest.mark.slow
def test_a_broken_update_that_is_not_held_back_breaks_the_weights(tmp_path: Path) -> None:
    """What `hold_back` saves from; also shows that the update, not the test, makes the weights NaN."""
    from support.tiny import make_tiny_model
    from trl import GRPOTrainer
    from trl_runs import make_trainer, watch_run, weights_of

    class Broken(GRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, inputs) * math.nan

    model = make_tiny_model(tmp_path)
    for hold_back in (True, False):
        folder = tmp_path / str(hold_back)
        trainer = make_trainer(folder, model, kind=Broken)
        watch_run(folder, trainer, hold_back=hold_back)
        finite = all(bool(torch.isfinite(value).all()) for value in weights_of(trainer).values())
        (row,) = steps_of(only_run(folder))
        assert finite is hold_back
        assert math.isnan(row.values["loss"])
        assert ("update_norm" in row.values) is not hold_back


def test_the_commands_of_a_run_work_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("nan", tmp_path, steps=8)
    run = only_run(tmp_path)
    assert main(["status", str(run.path)]) == 1
    assert "loss_not_finite@6" in capsys.readouterr().out
    for row in alerts_of(run):
        assert main(["acknowledge", str(run.path), row.event.key, "--cause", "algorithm", "--note", "a test"]) == 0
    assert not any(row.open for row in alerts_of(run))
