"""Two gloo ranks: what lies behind an alert, a pause or a repair is every rank's, not the main one's alone."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tiny_runs import make_module

from grpo_lightning.callbacks import CheckpointSettings, HealthSettings, RunSettings, run_callbacks
from grpo_lightning.errors import RunPaused
from grpo_lightning.sinks import RunDirectory
from grpo_lightning.training.data import PromptDataModule

RULES = """
- {name: told, signal: reward_mean, above: -1.0, for_steps: 2, action: notify, cause: data, summary: "s", runbook: r.md}
- {name: also, signal: lr, above: -1.0, for_steps: 2, action: notify, cause: data, summary: "s", runbook: r.md}
- {name: ends, signal: entropy, above: -1.0, for_steps: 3, action: pause, severity: critical, cause: data, summary: "s",
   runbook: r.md}
"""
_broken: list[int] = []


def broken_on_rank_1(completions: list[str], **_: Any) -> list[float]:
    """The first call of the second rank gives an infinite reward."""
    rewards = [float(len(set(c))) for c in completions]
    if os.environ.get("LOCAL_RANK") == "1" and not _broken:
        _broken.append(1)
        rewards[0] = math.inf
    return rewards


class Rows(L.Callback):
    """Which prompts each rank had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        record = pl_module.last_record
        path = self.folder / f"rows-{record.step}-{trainer.global_rank}.json"
        path.write_text(json.dumps(record.row_ids_P.tolist()))


def train(folder: Path, files: Path) -> None:
    """Until the third step, which pauses the run."""
    torch.set_num_threads(1)
    rules = folder / f"rules-{os.environ.get('LOCAL_RANK', '0')}.yaml"
    rules.write_text(RULES)
    own = run_callbacks(
        run=RunSettings(dir=str(folder / "runs"), mlflow=False),
        checkpoint=CheckpointSettings(every_n_steps=0),
        health=HealthSettings(rules=[str(rules)]),
    )
    trainer = L.Trainer(
        max_steps=5,
        max_epochs=-1,
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Rows(folder), *own],
        default_root_dir=folder,
    )
    model = files / "tiny-llama"
    data = PromptDataModule(str(files / "train.jsonl"), model=str(model), prompts_per_step=8, source_column="source")
    try:
        trainer.fit(make_module(model, f"{__file__}:broken_on_rank_1"), datamodule=data)
    except RunPaused:
        (folder / f"paused-{trainer.global_rank}").touch()


def test_evidence_is_of_every_rank(tmp_path: Path, tiny_files: Path) -> None:
    tests = Path(__file__).resolve().parent.parent
    paths = os.pathsep.join([str(tests), str(tests / "callbacks"), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    ended = subprocess.run(
        [*command, str(tmp_path), str(tiny_files)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert sorted(p.name for p in tmp_path.glob("paused-*")) == ["paused-0", "paused-1"]
    (path,) = (tmp_path / "runs").glob("*/journal.sqlite")
    run = RunDirectory.open(path.parent)
    files = {p.name: [json.loads(line) for line in p.read_text().splitlines()] for p in run.evidence.iterdir()}
    alerts = {"step-000002-told.jsonl", "step-000002-also.jsonl", "step-000003-ends.jsonl"}
    assert set(files) == {"step-000001-resample.jsonl", *alerts}

    for name in alerts:
        for rank in (0, 1):
            held = set(json.loads((tmp_path / f"rows-{files[name][0]['step']}-{rank}.json").read_text()))
            own = [row for row in files[name] if row["rank"] == rank]
            assert {row["why"] for row in own} >= {"smallest spread", "largest spread", "advantage outlier"}, name
            assert {row["row_id"] for row in own} <= held
        assert {(row["reason"], row["run_id"]) for row in files[name]} == {(name[12:-6], run.run_id)}

    assert {(row["rank"], row["why"]) for row in files["step-000001-resample.jsonl"]} == {(1, "non-finite reward")}
    with run.journal(read_only=True) as journal:
        (repair,) = journal.recoveries()
        told = {row.event.name: Path(row.event.payload["evidence"]).name for row in journal.alerts()}
    assert (repair.step, repair.payload["cause"]) == (1, "reward"), "what the other rank's rewards broke"
    assert {f"step-00000{2 if name != 'ends' else 3}-{name}.jsonl" for name in ("told", "also", "ends")} == alerts
    assert set(told.values()) == alerts


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]))
