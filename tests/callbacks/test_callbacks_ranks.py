"""Several gloo ranks record what one process does: signals, probe, evidence, one update norm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tiny_runs import make_module, steps_of

from grpo_lightning.callbacks import CheckpointSettings, ProbeSettings, RunSettings, run_callbacks
from grpo_lightning.sinks import RunDirectory
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.settings import OptimizerSettings

ABOUT_THE_SPLIT = {"rank_overlap_fraction", "rank_advantage_gap"}


def train(folder: Path, files: Path, devices: int) -> None:
    """Three steps, everything recorded below `folder`."""
    torch.set_num_threads(1)
    settings = RunSettings(
        dir=str(folder), mlflow=False, evidence_every=2, probe=ProbeSettings(every_n_steps=2, prompts=4)
    )
    trainer = L.Trainer(
        max_steps=3,
        max_epochs=-1,
        accelerator="cpu",
        strategy="ddp" if devices > 1 else "auto",
        devices=devices,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=run_callbacks(run=settings, checkpoint=CheckpointSettings(every_n_steps=0)),
        default_root_dir=folder,
    )
    module = make_module(files / "tiny-llama", "support.tiny:telling", optimizer=OptimizerSettings(lr=1e-3, eps=1e-6))
    data = PromptDataModule(
        str(files / "train.jsonl"), model=str(files / "tiny-llama"), prompts_per_step=8, source_column="source"
    )
    trainer.fit(module, datamodule=data)


def _run(folder: Path) -> RunDirectory:
    (path,) = folder.glob("*/journal.sqlite")
    return RunDirectory.open(path.parent)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_record_what_one_process_does(tmp_path: Path, tiny_files: Path, count: int) -> None:
    tests = Path(__file__).resolve().parent.parent
    paths = os.pathsep.join([str(tests), str(tests / "callbacks"), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", __file__]
    ended = subprocess.run(
        [*command, str(tmp_path / "several"), str(tiny_files), str(count)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    train(tmp_path / "one", tiny_files, 1)
    two, one = steps_of(_run(tmp_path / "several")), steps_of(_run(tmp_path / "one"))
    for both, alone in zip(two, one, strict=True):
        kept: dict[str, Any] = {
            k: v
            for k, v in both.values.items()
            if not k.endswith(("_seconds", "_per_second")) and k not in ABOUT_THE_SPLIT
        }
        assert set(kept) == {k for k in alone.values if not k.endswith(("_seconds", "_per_second"))}
        assert kept == pytest.approx({k: alone.values[k] for k in kept}, rel=2e-3, abs=2e-5)
        assert both.values["rank_overlap_fraction"] == 0.0
        assert "rank_advantage_gap" in both.values
    assert "probe_entropy" in two[0].values
    lines = (_run(tmp_path / "several").evidence / "step-000002-regular.jsonl").read_text().splitlines()
    assert {json.loads(line)["rank"] for line in lines} == set(range(count))


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
