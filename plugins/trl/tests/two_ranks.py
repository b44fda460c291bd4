"""What each of two processes runs: a watched training whose groups are spread over both; see test_trl_ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from grpo_trl import watch
from trl_runs import AtStep, make_trainer, rules, varied

from grpo_lightning.callbacks import RunSettings


def main(folder: Path, model: Path) -> None:
    """Three completions of each group of six on either process; the rules pause at step 6."""
    torch.set_num_threads(1)
    trainer = make_trainer(
        folder, model, varied, max_steps=8, per_device_train_batch_size=3, num_generations=6, beta=0.1
    )
    rank = trainer.accelerator.process_index
    health = rules(folder) if rank == 0 else None
    trainer.accelerator.wait_for_everyone()
    settings: Any = rules(folder) if health is None else health
    watcher = watch(trainer, run=RunSettings(dir=str(folder / "runs"), mlflow=False), health=settings)
    rewards: list[list[float]] = []
    trainer.add_callback(AtStep(6, lambda: rewards.append(list(trainer._logs["rewards"]["varied"])[-6:])))
    trainer.train()
    said = {
        "paused": watcher.paused,
        "step": trainer.state.global_step,
        "rewards": rewards[0],
        "logged": [row for row in trainer.state.log_history if "entropy" in row],
        "recorded": watcher.directory is not None,
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
