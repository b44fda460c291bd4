"""Two ranks under DDP: disjoint in every step, together the whole epoch, also after a resume."""

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
from lightning.pytorch.callbacks import ModelCheckpoint
from support.tiny import make_tiny_model, write_prompts

from grpo_lightning.training.data import PromptDataModule

ROWS, STOP = 11, 4  # three batches an epoch; the resumed run begins inside the second epoch


class Noting(L.LightningModule):
    """Notes the rows of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []
        self.validated: list[int] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.layer(torch.ones(1, 1)).sum())
        optimizer.step()
        self.seen.append([batch.epoch, batch.index, batch.row_ids_P.tolist()])
        self.trainer.datamodule.mark_consumed(batch)  # type: ignore[attr-defined]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch.row_ids_P.tolist()


def run_rank(folder: Path, name: str, *, ckpt_path: Path | None, max_epochs: int, **changes: Any) -> None:
    torch.set_num_threads(1)
    module = Noting()
    saver = ModelCheckpoint(dirpath=folder / name, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=max_epochs,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **changes,
    )
    data = PromptDataModule(
        str(folder / "train.jsonl"),
        val=str(folder / "train.jsonl"),
        model=str(folder / "tiny-llama"),
        prompts_per_step=4,
        val_batch_size=2,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    noted = {"seen": module.seen, "validated": module.validated}
    (folder / f"{name}-{trainer.global_rank}.json").write_text(json.dumps(noted))


def run_all(folder: Path) -> None:
    """On each rank: a whole run, the same with Lightning's own sampler allowed, and a resumed one."""
    run_rank(folder, "whole", ckpt_path=None, max_epochs=2, use_distributed_sampler=False)
    run_rank(folder, "sampler", ckpt_path=None, max_epochs=2)
    ckpt_path = folder / "whole" / f"step={STOP}.ckpt"
    run_rank(folder, "resumed", ckpt_path=ckpt_path, max_epochs=2, use_distributed_sampler=False)


@pytest.mark.slow
def test_two_ranks_share_each_epoch_without_overlap(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    write_prompts(tmp_path / "train.jsonl", ROWS)
    tests = Path(__file__).resolve().parent.parent
    paths = os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        __file__,
        str(tmp_path),
    ]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    noted = {
        name: [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]
        for name in ("whole", "sampler", "resumed")
    }
    ours, theirs = (noted["whole"][rank]["seen"] for rank in (0, 1))
    assert [s[:2] for s in ours] == [s[:2] for s in theirs] == [[e, i] for e in (0, 1) for i in (0, 1, 2)]
    for own, other in zip(ours, theirs, strict=True):
        assert own[2]
        assert other[2]
        assert not set(own[2]) & set(other[2])
    for epoch in (0, 1):
        rows = [row for seen in (ours, theirs) for s in seen if s[0] == epoch for row in s[2]]
        assert sorted(rows) == list(range(ROWS))
    validated = noted["whole"][0]["validated"] + noted["whole"][1]["validated"]
    assert sorted(validated) == sorted(list(range(ROWS)) * 2)  # two epochs, each row once in each
    assert noted["sampler"] == noted["whole"]
    for rank in (0, 1):
        assert noted["resumed"][rank]["seen"] == noted["whole"][rank]["seen"][STOP:]


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
