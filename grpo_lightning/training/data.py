"""Prompts for training and evaluation, as batches of `PromptBatch`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset

from grpo_lightning import shipped
from grpo_lightning.errors import ConfigError, DataError
from grpo_lightning.objective.batch import PromptBatch
from grpo_lightning.training import ranks
from grpo_lightning.training.sampler import PromptSampler, Slot, check_order_seed, sequential_shares
from grpo_lightning.training.sources import Rows, held_out_settings, load_rows, require_column
from grpo_lightning.training.tokenizer import check_chat, load_tokenizer, tokenize_prompts

__all__ = ["PromptDataModule"]

log = logging.getLogger(__name__)


class PromptDataModule(L.LightningDataModule):
    """Prompts from files, datasets or generators, tokenized once, bucketed by length, disjoint across ranks.

    Args:
        train: a .jsonl, .json, .parquet or .csv file, a folder saved by `datasets`, ``hf:name[:split]`` or
            ``reasoning_gym:task``.
        val: held-out prompts, in the same forms; none: no evaluation.
        model: whose tokenizer to use (the command line links it to `model.model`).
        tokenizer: another tokenizer.
        prompt_column: a string, or a list of chat messages, which goes through the chat template.
        source_column: where a prompt came from, for the mix of sources.
        prompts_per_step: P, prompts of a batch over all ranks.
        val_batch_size: held-out prompts answered at once, on each rank.
        max_prompt_tokens: longer prompts are refused or dropped.
        overlong: `refuse` ends with the row's number; `drop` leaves such rows out and says how many.
        system_prompt: makes a chat of each plain prompt, with this as the system's message.
        chat: make a chat of each plain prompt.
        prompt_template: a format string over the row's columns that makes the prompt.
        limit_train: use only so many rows of `train`.
        limit_val: use only so many rows of `val`.
        source_kwargs: settings of a reasoning-gym generator, or of a hub dataset (`name`, `revision`, ...).
        val_source_kwargs: the same for `val`. When not given, a generator gets those of `train` with a seed past all of
            its rows, so that no held-out prompt is a training prompt.
        seed: of the order.
        bucket: batch prompts of similar length.
    """

    def __init__(
        self,
        train: str,
        *,
        model: str,
        val: str | None = None,
        tokenizer: str | None = None,
        gguf_file: str | None = None,
        prompt_column: str = "prompt",
        source_column: str | None = None,
        prompts_per_step: int = 8,
        val_batch_size: int = 64,
        max_prompt_tokens: int | None = None,
        overlong: Literal["refuse", "drop"] = "refuse",
        system_prompt: str | None = None,
        chat: bool = False,
        prompt_template: str | None = None,
        limit_train: int | None = None,
        limit_val: int | None = None,
        source_kwargs: dict[str, Any] | None = None,
        val_source_kwargs: dict[str, Any] | None = None,
        seed: int = 0,
        bucket: bool = True,
    ) -> None:
        super().__init__()
        _check_counts(
            prompts_per_step=prompts_per_step,
            val_batch_size=val_batch_size,
            max_prompt_tokens=max_prompt_tokens,
            limit_train=limit_train,
            limit_val=limit_val,
        )
        check_order_seed(seed)
        self.train_source, self.val_source = train, val
        self.tokenizer_name, self.gguf_file = tokenizer or model, None if tokenizer else gguf_file
        self.prompt_column, self.source_column = prompt_column, source_column
        self.prompts_per_step, self.val_batch_size = prompts_per_step, val_batch_size
        self.max_prompt_tokens, self.overlong = max_prompt_tokens, overlong
        self.system_prompt, self.chat, self.prompt_template = (
            system_prompt,
            chat or system_prompt is not None,
            prompt_template,
        )
        self.limit_train, self.limit_val = limit_train, limit_val
        self.source_kwargs = source_kwargs or {}
        self.val_source_kwargs = val_source_kwargs
        self.seed, self.bucket = seed, bucket
        self.updates_per_batch = 1  # set by the module
        self.dropped = 0  # training prompts over the length limit
        self.accept_changes = False  # resume with other rows than the checkpoint's, at the next epoch
        self._train: _Prompts | None = None
        self._val: _Prompts | None = None
        self._sampler: PromptSampler | None = None
        self._restored: dict[str, int] | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, padding on the left."""
        return load_tokenizer(self.tokenizer_name, gguf_file=self.gguf_file)

    def snapshot_sources(self) -> list[str | tuple[str, Rows]]:
        """What training and evaluation rows come from: paths, or a name and the rows where there is no file."""
        found: list[str | tuple[str, Rows]] = []
        for source, prompts in ((self.train_source, self._train), (self.val_source, self._val)):
            if source is None:
                continue
            path = shipped.expand(source)
            if Path(path).exists():
                found.append(path)
            elif prompts is not None:
                found.append((source, prompts.rows))
        return found

    def setup(self, stage: str) -> None:
        """Read and tokenize, once. Each fit begins at the first epoch, unless a checkpoint says otherwise."""
        if stage == "fit":
            self._sampler, self._restored = None, None
            if self._train is None:
                self._train = self._read_train()
        if self.val_source is not None and self._val is None:
            self._val = self._read_val(self.val_source)
        if self._val is None and stage == "validate":
            raise DataError("data.val is not set: name the held-out prompts to validate on.")

    def _read_train(self) -> _Prompts:
        rows = load_rows(self.train_source, limit=self.limit_train, **self.source_kwargs)
        prompts = self._prompts(rows, self.train_source)
        self.dropped = _say_dropped(prompts, self.train_source)
        return prompts

    def _read_val(self, source: str) -> _Prompts:
        settings = self.val_source_kwargs
        if settings is None:
            settings = held_out_settings(self.train_source, source, self.source_kwargs)
        prompts = self._prompts(load_rows(source, limit=self.limit_val, **settings), source)
        _say_dropped(prompts, source)
        if self._train is not None:
            _say_shared(prompts, self._train, source)
        return prompts

    def _prompts(self, rows: Rows, source: str) -> _Prompts:
        if self.prompt_template is None:
            require_column(rows, self.prompt_column, source)
        if self.source_column is not None:
            require_column(rows, self.source_column, source)
        prompts = [self._prompt(row, f"Row {number} of {source!r}") for number, row in enumerate(rows)]
        ids = tokenize_prompts(self.tokenizer, prompts, source)
        return _Prompts(
            self, rows=rows, prompts=prompts, ids=ids, pad_id=int(self.tokenizer.pad_token_id), source=source
        )

    def _prompt(self, row: dict[str, Any], where: str) -> Any:
        template = self.prompt_template
        prompt = row.get(self.prompt_column) if template is None else _filled(template, row, where)
        if isinstance(prompt, str) and prompt:
            return self._as_chat(prompt) if self.chat else prompt
        check_chat(prompt, where)
        return prompt

    def _as_chat(self, prompt: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": prompt}]

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each training prompt, once they are read."""
        return list(self._train.lengths) if self._train is not None else []

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, training and held-out ones, once they are read."""
        return max(
            (length for part in (self._train, self._val) if part is not None for length in part.lengths), default=0
        )

    @property
    def largest_token(self) -> int:
        """The largest token id of all prompts and of what ends and pads them, once they are read."""
        parts = [part for part in (self._train, self._val) if part is not None]
        own = [int(self.tokenizer.eos_token_id), int(self.tokenizer.pad_token_id)]
        return max(own + [token for part in parts for row in part.kept for token in part.ids[row]])

    @property
    def train_columns(self) -> list[str]:
        """Columns of the training rows that reward functions get, once they are read."""
        return list(self._train.columns) if self._train is not None else []

    @property
    def val_columns(self) -> list[str]:
        """The same of the held-out rows."""
        return list(self._val.columns) if self._val is not None else []

    @property
    def held_out(self) -> int:
        """How many held-out prompts there are, once they are read."""
        return len(self._val) if self._val is not None else 0

    # ---- loaders

    def train_dataloader(self) -> DataLoader[Any]:
        """One `PromptBatch` for each optimizer update."""
        if self._train is None:
            raise DataError("PromptDataModule.setup('fit') has not run: use it through a Trainer, or call it first.")
        if self._sampler is None or self._sampler.updates_per_batch != self.updates_per_batch:
            self._sampler = PromptSampler(
                self._train.lengths,
                prompts_per_step=self.prompts_per_step,
                seed=self.seed,
                bucket=self.bucket,
                rank=ranks.rank(),
                world_size=ranks.world_size(),
                updates_per_batch=self.updates_per_batch,
            )
        if self._restored is not None:
            self._sampler.load_state_dict(self._restored, other_rows=self.accept_changes)
            self._restored = None
        return DataLoader(_Stream(self._train, self._sampler), batch_size=None)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Held-out prompts in order, every rank its own."""
        if self._val is None:
            return []
        shares = sequential_shares(
            len(self._val), per_rank=self.val_batch_size, rank=ranks.rank(), world_size=ranks.world_size()
        )
        slots = [Slot(epoch=0, index=i, repeat=0, final=True, rows=rows) for i, rows in enumerate(shares)]
        return DataLoader(_Stream(self._val, slots), batch_size=None)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Open what the loaders yield: from here on a batch is a `PromptBatch`."""
        return batch.opened if isinstance(batch, Sealed) else batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the batch's tensors."""
        return batch.to(device) if isinstance(batch, PromptBatch) else batch

    def frozen_prompts(self, count: int, *, rank: int = 0, world_size: int = 1) -> PromptBatch:
        """The same prompts at every call, spread over the data, as one batch; with ranks, equal shares of them.

        Held-out prompts where they have every column of the training prompts (reward functions need those), else training
        prompts; fewer than `count` where there are fewer, or where the ranks can't share them evenly.
        """
        source = self._train if self._val is None or not self._covers(self._val) else self._val
        available = min(count, len(source) if source is not None else 0)
        available -= available % world_size
        if source is None or not available:
            raise DataError(f"There are no {count} prompts for {world_size} ranks to share: ask for fewer.")
        places = [i * len(source) // available for i in range(available)]
        return source.batch(tuple(places[rank::world_size]))

    def _covers(self, prompts: _Prompts) -> bool:
        return self._train is None or set(self._train.columns) <= set(prompts.columns)

    # ---- position

    def mark_consumed(self, batch: PromptBatch) -> None:
        """The module has made its update on this batch."""
        if self._sampler is not None:
            self._sampler.mark_consumed(batch.epoch, batch.index, final=batch.final)

    def state_dict(self) -> dict[str, Any]:
        """The position in the data; one that was restored and not yet used stays as it is."""
        if self._restored is not None:
            return dict(self._restored)
        return self._sampler.state_dict() if self._sampler is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position, whether the loader was made already or is made later."""
        if not state_dict:
            return
        if self._sampler is not None:
            self._sampler.load_state_dict(state_dict, other_rows=self.accept_changes)
        else:
            self._restored = dict(state_dict)


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"data.{name} is {value}: give at least 1.")


def _filled(template: str, row: dict[str, Any], where: str) -> str:
    try:
        return template.format(**row)
    except (KeyError, IndexError) as error:
        raise DataError(
            f"data.prompt_template names {error}, which {where} lacks: its columns are {', '.join(sorted(row))}."
        ) from error
    except (ValueError, AttributeError, TypeError, MemoryError, OverflowError) as error:
        raise DataError(
            f"data.prompt_template {template!r} can't be filled from {where} ({error}): write {{column}}, and "
            f"{{{{ }}}} for braces."
        ) from error


def _say_dropped(prompts: _Prompts, source: str) -> int:
    dropped = len(prompts.rows) - len(prompts)
    if dropped:
        log.warning("%d of %d prompts of %s are over data.max_prompt_tokens and were dropped.",
                    dropped, len(prompts.rows), source)  # fmt: skip
    return dropped


def _say_shared(val: _Prompts, train: _Prompts, source: str) -> None:
    known = {tuple(train.ids[row]) for row in train.kept}
    shared = sum(tuple(val.ids[row]) in known for row in val.kept)
    if shared:
        log.warning("%d of %d held-out prompts of %s are training prompts too: evaluation will look better than it is.",
                    shared, len(val), source)  # fmt: skip


class _Prompts:
    """Tokenized rows, the overlong ones refused or dropped; a row keeps the number it has in its source."""

    def __init__(
        self,
        settings: PromptDataModule,
        *,
        rows: Rows,
        prompts: list[Any],
        ids: list[list[int]],
        pad_id: int,
        source: str,
    ) -> None:
        self.settings, self.pad_id = settings, pad_id
        self.rows, self.prompts, self.ids = rows, prompts, ids
        self.kept = [i for i in range(len(rows)) if self._fits(i, source)]
        if not self.kept:
            raise DataError(
                f"Every prompt of {source!r} is over data.max_prompt_tokens ({settings.max_prompt_tokens}): raise it."
            )
        self.lengths = [len(ids[i]) for i in self.kept]
        self.columns = sorted({name for row in rows for name in row} - {settings.prompt_column})

    def _fits(self, row: int, source: str) -> bool:
        length, limit = len(self.ids[row]), self.settings.max_prompt_tokens
        if length == 0:
            raise DataError(f"Row {row} of {source!r} has a prompt of no tokens: give it a text.")
        if limit is None or length <= limit:
            return True
        if self.settings.overlong == "drop":
            return False
        raise DataError(
            f"Row {row} of {source!r} has {length} prompt tokens and data.max_prompt_tokens is {limit}: raise it, or "
            f"set data.overlong: drop."
        )

    def __len__(self) -> int:
        return len(self.kept)

    def batch(self, places: tuple[int, ...], *, epoch: int = 0, index: int = 0, final: bool = True) -> PromptBatch:
        """The prompts at these places, left-padded to the longest."""
        rows = [self.kept[i] for i in places]
        width = max(len(self.ids[r]) for r in rows)
        ids = torch.full((len(rows), width), self.pad_id, dtype=torch.int64)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            own = torch.tensor(self.ids[row], dtype=torch.int64)
            ids[i, width - len(own) :] = own
            mask[i, width - len(own) :] = True
        column = self.settings.source_column
        return PromptBatch(
            ids_PS=ids,
            mask_PS=mask,
            row_ids_P=torch.tensor(rows, dtype=torch.int64),
            prompts=[self.prompts[r] for r in rows],
            columns={name: [self.rows[r].get(name) for r in rows] for name in self.columns},
            sources=[_text(self.rows[r].get(column)) if column else "" for r in rows],
            epoch=epoch,
            index=index,
            final=final,
        )


def _text(value: Any) -> str:
    return "" if value is None else str(value)


class Sealed:
    """A `PromptBatch` on its way to Lightning's transfer hooks.

    The precision plugins of bf16-true, FSDP and DeepSpeed rebuild every dataclass they meet and refuse frozen ones; in
    here the batch is none of their business (it has no floating-point tensor).
    """

    __slots__ = ("opened",)

    def __init__(self, batch: PromptBatch) -> None:
        self.opened = batch


class _Stream(IterableDataset[Sealed]):
    """Slots as batches. It is iterable, so that no sampler is put before it, and has a length, so that epochs end."""

    def __init__(self, prompts: _Prompts, slots: PromptSampler | list[Slot]) -> None:
        self.prompts, self.slots = prompts, slots

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Sealed]:
        for slot in self.slots:
            yield Sealed(self.prompts.batch(slot.rows, epoch=slot.epoch, index=slot.index, final=slot.final))
