"""A plain Lightning classifier; three lines add the snapshot.

python examples/classifier.py [--root DIR] [--epochs 20] [--ckpt FILE]
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger
from run_snapshot.lightning import SnapshotCallback  # snapshot
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

POINTS = Path(__file__).parent / "points.csv"


class Classifier(LightningModule):
    """Two layers and a cross entropy."""

    def __init__(self, lr: float, hidden: int) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        points, labels = batch
        loss = nn.functional.cross_entropy(self.net(points), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        """The share of right answers."""
        points, labels = batch
        self.log("accuracy", (self.net(points).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def read_points(file: Path) -> TensorDataset:
    """The points and their classes."""
    with file.open() as lines:
        rows = list(csv.DictReader(lines))
    points = torch.tensor([[float(row["x"]), float(row["y"])] for row in rows])
    return TensorDataset(points, torch.tensor([int(row["label"]) for row in rows]))


def main() -> None:
    """Train, and print the accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("points"))
    parser.add_argument("--data", type=Path, default=POINTS)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--ckpt")
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    seed_everything(0)
    train, held_out = random_split(read_points(options.data), [320, 80])
    snapshot = SnapshotCallback(config=vars(options), data_files=[options.data])  # snapshot
    trainer = Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        default_root_dir=options.root,
        logger=MLFlowLogger("points", tracking_uri=f"sqlite:///{(options.root / 'mlflow.db').absolute()}",
                            artifact_location=str((options.root / "artifacts").absolute())),
        callbacks=[snapshot, ModelCheckpoint(options.root / "checkpoints", save_last=True)],  # snapshot
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=5,
    )  # fmt: skip
    loaders = DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=80)
    trainer.fit(Classifier(lr=options.lr, hidden=16), *loaders, ckpt_path=options.ckpt)
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
