"""The position in the data through a real Trainer: stopped anywhere, it goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.tiny import make_tiny_model, write_prompts

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective.batch import PromptBatch
from grpo_lightning.training.data import PromptDataModule

ROWS, PER_STEP = 11, 4  # three batches an epoch, of 4, 4 and 3 rows
BATCHES = 3


class Boring(L.LightningModule):
    """Notes each batch it trains on: Lightning's epoch, the batch's epoch, index, rows and whether it is the last repeat."""

    def __init__(self, *, schedule: bool = False, die_at: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[tuple[Any, ...]] = []
        self.validated: list[int] = []
        self.schedule, self.die_at = schedule, die_at

    def configure_optimizers(self) -> Any:
        if self.schedule:
            assert self.trainer.estimated_stepping_batches > 0  # makes the loader before the checkpoint's state arrives
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        if self.die_at == self.global_step:
            raise KeyboardInterrupt
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(torch.ones(1, 1)).sum())
        optimizer.step()
        self.seen.append((self.trainer.current_epoch, batch.epoch, batch.index, batch.row_ids_P.tolist(), batch.final))
        self.trainer.datamodule.mark_consumed(batch)  # type: ignore[attr-defined]

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.validated += batch.row_ids_P.tolist()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("data") / "train.jsonl", ROWS)


@pytest.fixture
def data(model_path: Path, prompts: Path) -> Callable[..., PromptDataModule]:
    def make(updates: int = 1, **changes: Any) -> PromptDataModule:
        settings: dict[str, Any] = {"train": str(prompts), "model": str(model_path), "prompts_per_step": PER_STEP}
        made = PromptDataModule(**(settings | changes))
        made.updates_per_batch = updates
        return made

    return make


def trainer(tmp_path: Path, *callbacks: L.Callback, **changes: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": list(callbacks),
        "default_root_dir": tmp_path,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**(settings | changes))


def whole_run(tmp_path: Path, data: PromptDataModule, **changes: Any) -> list[tuple[Any, ...]]:
    module = Boring()
    trainer(tmp_path / "whole", **changes).fit(module, datamodule=data)
    return module.seen


def test_a_whole_run_shows_each_row_once_an_epoch_and_each_batch_as_often_as_asked(
    tmp_path: Path, data: Callable[..., PromptDataModule]
) -> None:
    seen = whole_run(tmp_path, data(updates=2))
    assert len(seen) == 3 * BATCHES * 2
    assert [s[:3] for s in seen] == [(e, e, i) for e in range(3) for i in range(BATCHES) for _ in range(2)]
    assert [s[4] for s in seen] == [False, True] * 9
    for epoch in range(3):
        rows = [row for s in seen if s[1] == epoch and s[4] for row in s[3]]
        assert sorted(rows) == list(range(ROWS))
    assert len({tuple(map(tuple, (s[3] for s in seen if s[1] == epoch))) for epoch in range(3)}) == 3


@pytest.mark.parametrize("schedule", [False, True], ids=["", "reads the number of steps"])
@pytest.mark.parametrize("updates", [1, 2], ids=["one update", "two updates"])
@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 17}], ids=["epochs", "steps"])
def test_a_run_stopped_at_any_step_continues_where_it_was(
    tmp_path: Path, data: Callable[..., PromptDataModule], updates: int, schedule: bool, limit: dict[str, Any]
) -> None:
    expected = whole_run(tmp_path, data(updates), **limit)
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer(tmp_path, saver, **limit).fit(Boring(schedule=schedule), datamodule=data(updates))
    for stop in range(1, len(expected)):
        module = Boring(schedule=schedule)
        trainer(tmp_path, **limit).fit(module, datamodule=data(updates), ckpt_path=tmp_path / f"step={stop}.ckpt")
        assert module.seen == expected[stop:], stop


SAVERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "at the end of an epoch": ({"save_on_train_epoch_end": True, "every_n_epochs": 1}, [3, 6]),
    "after a validation": ({"save_on_train_epoch_end": False, "every_n_epochs": 1}, [3, 6]),
}


@pytest.mark.parametrize(("saving", "steps"), SAVERS.values(), ids=SAVERS.keys())
def test_a_checkpoint_of_an_epochs_end_starts_the_next_epoch(
    tmp_path: Path, data: Callable[..., PromptDataModule], prompts: Path, saving: dict[str, Any], steps: list[int]
) -> None:
    expected = whole_run(tmp_path, data(val=str(prompts)))
    saver = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename="{step}", **saving)
    trainer(tmp_path, saver).fit(Boring(), datamodule=data(val=str(prompts)))
    for stop in steps:
        module = Boring()
        resumed = trainer(tmp_path)
        resumed.fit(module, datamodule=data(val=str(prompts)), ckpt_path=tmp_path / f"step={stop}.ckpt")
        assert module.seen == expected[stop:]
        assert resumed.global_step == len(expected)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_finished_run_is_continued_with_more_epochs(
    tmp_path: Path, data: Callable[..., PromptDataModule], updates: int
) -> None:
    expected = whole_run(tmp_path, data(updates))
    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True, every_n_train_steps=1)
    trainer(tmp_path, saver, max_epochs=1).fit(Boring(), datamodule=data(updates))
    module = Boring()
    trainer(tmp_path).fit(module, datamodule=data(updates), ckpt_path=tmp_path / "last.ckpt")
    assert module.seen == expected[BATCHES * updates :]


@pytest.mark.parametrize("every", [1, 2])
def test_validation_inside_an_epoch_does_not_move_the_position(
    tmp_path: Path, data: Callable[..., PromptDataModule], prompts: Path, every: int
) -> None:
    settings = {"val_check_interval": every, "check_val_every_n_epoch": None}
    expected = whole_run(tmp_path, data(val=str(prompts)), **settings)
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer(tmp_path, saver, **settings).fit(Boring(), datamodule=data(val=str(prompts)))
    for stop in range(1, len(expected)):
        module = Boring()
        ckpt = tmp_path / f"step={stop}.ckpt"
        trainer(tmp_path, **settings).fit(module, datamodule=data(val=str(prompts)), ckpt_path=ckpt)
        assert module.seen == expected[stop:], stop


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("stop", [2, 3, 4, 7])
def test_a_run_resumed_twice_continues_twice(tmp_path: Path, data: Callable[..., PromptDataModule], stop: int) -> None:
    """A resumed run saves a position that is as good as the first run's."""
    expected = whole_run(tmp_path, data(updates=2))

    def saver(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(dirpath=tmp_path / name, every_n_train_steps=1, save_top_k=-1, filename="{step}")

    trainer(tmp_path, saver("a"), max_steps=stop).fit(Boring(), datamodule=data(updates=2))
    ckpt = tmp_path / "a" / f"step={stop}.ckpt"
    trainer(tmp_path, saver("b"), max_steps=stop + 5).fit(Boring(), datamodule=data(updates=2), ckpt_path=ckpt)
    module = Boring()
    ckpt = tmp_path / "b" / f"step={stop + 5}.ckpt"
    trainer(tmp_path).fit(module, datamodule=data(updates=2), ckpt_path=ckpt)
    assert module.seen == expected[stop + 5 :]


def test_a_batch_that_was_fetched_and_not_trained_on_comes_again(
    tmp_path: Path, data: Callable[..., PromptDataModule]
) -> None:
    expected = whole_run(tmp_path, data())
    interrupted, made = trainer(tmp_path), data()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        interrupted.fit(Boring(die_at=4), datamodule=made)
    again = data()
    again.load_state_dict(made.state_dict())
    again.setup("predict")
    again._train = made._train
    first = next(iter(again.train_dataloader())).opened
    assert (first.epoch, first.index, first.row_ids_P.tolist()) == expected[4][1:4]


def test_each_fit_of_one_data_module_begins_at_the_beginning(
    tmp_path: Path, data: Callable[..., PromptDataModule]
) -> None:
    made = data()
    first, second = Boring(), Boring()
    trainer(tmp_path, max_steps=2).fit(first, datamodule=made)
    trainer(tmp_path, max_steps=2).fit(second, datamodule=made)
    assert first.seen == second.seen


def test_held_out_prompts_come_in_order_and_once(
    tmp_path: Path, data: Callable[..., PromptDataModule], prompts: Path
) -> None:
    module = Boring()
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=data(val=str(prompts), val_batch_size=4))
    assert module.validated == list(range(ROWS))


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, "seed 0 .* has 1"),
    "prompts per step": ({"prompts_per_step": 2}, "prompts_per_step 4 .* has 2"),
    "rows": ({"limit_train": 8}, "rows 11 .* has 8"),
    "bucket": ({"bucket": False}, "bucket 1 .* has 0"),
    "updates": ({"updates": 3}, "updates_per_batch 1 .* has 3"),
}


@pytest.mark.parametrize(("changes", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_position_in_other_data_is_refused(
    tmp_path: Path, data: Callable[..., PromptDataModule], changes: dict[str, Any], message: str
) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, filename="last")
    trainer(tmp_path, saver, max_steps=1).fit(Boring(), datamodule=data())
    with pytest.raises(ConfigError, match=f"{message}.*resume with the same"):
        trainer(tmp_path, max_steps=2).fit(Boring(), datamodule=data(**changes), ckpt_path=tmp_path / "last.ckpt")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_every_precision_takes_the_batches(
    tmp_path: Path, data: Callable[..., PromptDataModule], prompts: Path, precision: str
) -> None:
    """bf16-true, FSDP and DeepSpeed rebuild the dataclasses that a loader yields, and refuse frozen ones."""
    module = Boring()
    module.training_step = lambda batch, batch_idx: module.seen.append(batch)  # type: ignore[assignment]
    trainer(tmp_path, precision=precision, max_epochs=1).fit(module, datamodule=data(val=str(prompts)))
    assert [type(batch) for batch in module.seen] == [PromptBatch] * BATCHES
    assert sorted(module.validated) == list(range(ROWS))
