"""What a run is made of: captured, checked at checkpoints and at resume, and changed on purpose with a note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_tiny_model
from tiny_runs import make_module

from grpo_lightning.callbacks import CheckpointSettings, RunSettings, SnapshotSettings, run_callbacks
from grpo_lightning.errors import ConfigError, RunPaused
from grpo_lightning.sinks import RunDirectory
from grpo_lightning.training.data import PromptDataModule

pytest.importorskip("run_snapshot")

REWARD = "def length(completion_ids, **_):\n    return [float(len(ids) % 3) for ids in completion_ids]\n"


class Project:
    """A folder with a model, prompts and a reward, and runs of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, make_tiny_model(folder)
        self.rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(24)]
        self.write()
        self.reward = folder / "my_reward.py"
        self.reward.write_text(REWARD)

    def write(self) -> None:
        (self.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def run(
        self, steps: int, *, ckpt: Path | None = None, accept: tuple[str, ...] = (), note: str = "", **settings: Any
    ) -> RunDirectory:
        import lightning as L

        callbacks = run_callbacks(
            run=RunSettings(dir=str(self.folder / "runs"), mlflow=False, fingerprint_steps=0),
            checkpoint=CheckpointSettings(every_n_steps=2, keep=-1),
            snapshot=SnapshotSettings(lock="off", **settings),
            resume_from=str(ckpt) if ckpt else None,
            accept_drift=accept,
            note=note,
        )
        data = PromptDataModule(str(self.folder / "train.jsonl"), model=str(self.model), prompts_per_step=4)
        data.accept_changes = "data" in accept
        trainer = L.Trainer(
            max_steps=steps,
            max_epochs=-1,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=callbacks,
            default_root_dir=self.folder,
        )
        module = make_module(self.model, f"{self.reward}:length")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True if ckpt else None)
        (path,) = (self.folder / "runs").glob("*/journal.sqlite")
        return RunDirectory.open(path.parent)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def notes(run: RunDirectory) -> list[tuple[str, str]]:
    with run.journal(read_only=True) as journal:
        return [(event.name, event.payload["message"]) for event in journal.events("note", all_segments=True)]


def fired(run: RunDirectory) -> list[str]:
    with run.journal(read_only=True) as journal:
        return [row.event.name for row in journal.alerts(all_segments=True)]


def test_a_run_that_nothing_happens_to_is_silent_and_its_checkpoints_name_the_snapshot(project: Project) -> None:
    run = project.run(4)
    assert (notes(run), fired(run)) == ([], [])
    manifest = json.loads((run.snapshot / "manifest.json").read_text())
    held = torch.load(run.checkpoints / "last.ckpt", weights_only=True)["run_snapshot"]
    assert held["digest"] in json.dumps(manifest) or len(held["digest"]) == 64
    assert held["weights"]["tensors"]
    assert (run.snapshot / "data.json").is_file()


def test_what_changes_during_the_run_is_named_at_the_next_checkpoint(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning as L

    from grpo_lightning.callbacks.snapshot import RunSnapshot

    edit = RunSnapshot.on_save_checkpoint

    def save(self: Any, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step == 4 and len(project.rows) == 24:
            project.rows.append({"prompt": "1+1=", "answer": "2"})
            project.write()
            project.reward.write_text(REWARD + "# edited\n")
        edit(self, trainer, *rest)

    monkeypatch.setattr(RunSnapshot, "on_save_checkpoint", save)
    run = project.run(7)
    ((name, message),) = notes(run)
    assert name == "drift"
    assert "train.jsonl changed (row 25 appended" in message
    assert "my_reward" in message
    assert sorted(fired(run)) == ["data_changed", "reward_code_changed"]
    with run.journal(read_only=True) as journal:
        told = {row.event.name: row.event for row in journal.alerts()}
    assert told["data_changed"].step == 5
    assert "row 25 appended" in told["data_changed"].payload["message"]


@pytest.mark.parametrize(("on_drift", "error"), [("refuse", ConfigError), ("pause", RunPaused)])
def test_a_changed_reward_stops_a_resume(project: Project, on_drift: str, error: type[Exception]) -> None:
    run = project.run(4)
    project.reward.write_text(REWARD.replace("% 3", "% 4"))
    with pytest.raises(error, match=r"(?s)my_reward.*--accept_drift '\[reward\]' --note"):
        project.run(6, ckpt=run.checkpoints / "last.ckpt", on_drift=on_drift)


def test_a_change_that_is_accepted_is_written_down_and_checked_against_from_then_on(project: Project) -> None:
    run = project.run(4)
    project.rows += [{"prompt": f"{i}-1=", "answer": str(i - 1)} for i in range(8)]
    project.write()
    last = run.checkpoints / "last.ckpt"
    with pytest.raises(ConfigError, match=r"rows 24 in its data and this run has 32.*--accept_drift"):
        project.run(8, ckpt=last)
    project.run(8, ckpt=last, accept=("data",), note="eight more rows", on_drift="refuse")
    ((_, message),) = [note for note in notes(run) if note[0] == "drift_accepted"]
    assert "eight more rows" in message
    assert list((run.path / "snapshots").iterdir())
    project.run(10, ckpt=run.checkpoints / "last.ckpt", on_drift="refuse")
    assert fired(run) == []


@pytest.mark.parametrize(
    ("accept", "note", "said"),
    [(("data",), " ", "needs --note"), (("weather",), "x", "'weather'")],
    ids=["no note", "unknown level"],
)
def test_accepting_needs_a_level_and_a_note(project: Project, accept: tuple[str, ...], note: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        project.run(2, accept=accept, note=note)
