"""Prompts for training and evaluation, as batches of `PromptBatch`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal

import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset

from grpo_lightning.errors import ConfigError, DataError
from grpo_lightning.objective.batch import PromptBatch
from grpo_lightning.training import ranks
from grpo_lightning.training.sampler import PromptSampler, Slot
from grpo_lightning.training.sources import Rows, load_rows, require_column
from grpo_lightning.training.tokenizer import load_tokenizer

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
        source_kwargs: settings of a reasoning-gym generator.
        val_source_kwargs: the same for `val`; `source_kwargs` when not given.
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
        if prompts_per_step < 1 or val_batch_size < 1:
            raise ConfigError(
                f"data.prompts_per_step is {prompts_per_step} and data.val_batch_size {val_batch_size}: give at least 1."
            )
        self.train_source, self.val_source = train, val
        self.tokenizer_name, self.gguf_file = tokenizer or model, gguf_file
        self.prompt_column, self.source_column = prompt_column, source_column
        self.prompts_per_step, self.val_batch_size = prompts_per_step, val_batch_size
        self.max_prompt_tokens, self.overlong = max_prompt_tokens, overlong
        self.system_prompt, self.chat, self.prompt_template = system_prompt, chat or system_prompt is not None, prompt_template
        self.limit_train, self.limit_val = limit_train, limit_val
        self.source_kwargs = source_kwargs or {}
        self.val_source_kwargs = val_source_kwargs if val_source_kwargs is not None else self.source_kwargs
        self.seed, self.bucket = seed, bucket
        self.updates_per_batch = 1  # set by the module
        self.dropped = 0  # training prompts over the length limit
        self._train: _Prompts | None = None
        self._val: _Prompts | None = None
        self._sampler: PromptSampler | None = None
        self._restored: dict[str, int] | None = None

    def setup(self, stage: str) -> None:
        """Read and tokenize."""
        tokenizer = load_tokenizer(self.tokenizer_name, gguf_file=self.gguf_file)
        if stage == "fit" and self._train is None:
            rows = load_rows(self.train_source, limit=self.limit_train, **self.source_kwargs)
            self._train = self._prompts(rows, tokenizer, self.train_source)
            self.dropped = len(rows) - len(self._train)
            if self.dropped:
                log.warning("%d of %d prompts of %s are over data.max_prompt_tokens and were dropped.",
                            self.dropped, len(rows), self.train_source)  # fmt: skip
        if self.val_source is not None and self._val is None:
            rows = load_rows(self.val_source, limit=self.limit_val, **self.val_source_kwargs)
            self._val = self._prompts(rows, tokenizer, self.val_source)

    def _prompts(self, rows: Rows, tokenizer: Any, source: str) -> _Prompts:
        if self.prompt_template is None:
            require_column(rows, self.prompt_column, source)
        if self.source_column is not None:
            require_column(rows, self.source_column, source)
        prompts = [self._prompt(row, number, source) for number, row in enumerate(rows)]
        ids = _tokenize(tokenizer, prompts)
        return _Prompts(self, rows, prompts, ids, int(tokenizer.pad_token_id), source)

    def _prompt(self, row: dict[str, Any], number: int, source: str) -> Any:
        prompt = row.get(self.prompt_column)
        if self.prompt_template is not None:
            try:
                prompt = self.prompt_template.format(**row)
            except (KeyError, IndexError) as error:
                raise DataError(f"data.prompt_template names {error}, which row {number} of {source!r} lacks.") from error
        if isinstance(prompt, str) and prompt and self.chat:
            system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
            return [*system, {"role": "user", "content": prompt}]
        if not isinstance(prompt, str | list) or not prompt:
            raise DataError(
                f"Row {number} of {source!r} has the prompt {prompt!r}: it must be a text or a list of chat messages, not empty."
            )
        return prompt

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
            self._sampler.load_state_dict(self._restored)
            self._restored = None
        return DataLoader(_TrainStream(self._train, self._sampler), batch_size=None)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Held-out prompts in order, every rank its own."""
        if self._val is None:
            return []
        own = range(ranks.rank(), len(self._val), ranks.world_size())
        slots = [own[i : i + self.val_batch_size] for i in range(0, len(own), self.val_batch_size)]
        return DataLoader(_ValBatches(self._val, [tuple(s) for s in slots]), batch_size=None, shuffle=False)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the batch's tensors."""
        return batch.to(device) if isinstance(batch, PromptBatch) else batch

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
            self._sampler.load_state_dict(state_dict)
        else:
            self._restored = dict(state_dict)


def _tokenize(tokenizer: Any, prompts: list[Any]) -> list[list[int]]:
    plain = [i for i, p in enumerate(prompts) if isinstance(p, str)]
    out: list[list[int]] = [[] for _ in prompts]
    if plain:
        encoded = tokenizer([prompts[i] for i in plain], add_special_tokens=True)["input_ids"]
        for i, ids in zip(plain, encoded, strict=True):
            out[i] = list(ids)
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            out[i] = _chat_ids(tokenizer, prompt, i)
    return out


def _chat_ids(tokenizer: Any, messages: list[Any], number: int) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(f"Row {number} is a chat, and the tokenizer has no chat template: give plain prompts, or a chat model.")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise DataError(f"The chat of row {number} does not fit the chat template: {error}") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class _Prompts:
    """Tokenized rows, the overlong ones refused or dropped; a row keeps the number it has in its source."""

    def __init__(
        self, settings: PromptDataModule, rows: Rows, prompts: list[Any], ids: list[list[int]], pad_id: int, source: str
    ) -> None:
        self.settings, self.pad_id = settings, pad_id
        self.rows, self.prompts, self.ids = rows, prompts, ids
        self.kept = [i for i in range(len(rows)) if self._fits(i, source)]
        if not self.kept:
            raise DataError(
                f"Every prompt of {source!r} is over data.max_prompt_tokens ({settings.max_prompt_tokens}): raise the limit."
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
            f"Row {row} of {source!r} has {length} prompt tokens and data.max_prompt_tokens is {limit}: raise it, or set "
            f"data.overlong: drop."
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
            sources=[str(self.rows[r].get(column, "")) if column else "" for r in rows],
            epoch=epoch,
            index=index,
            final=final,
        )


class _TrainStream(IterableDataset[PromptBatch]):
    """The sampler's slots as batches. It has a length, so that epochs end where they should."""

    def __init__(self, prompts: _Prompts, sampler: PromptSampler) -> None:
        self.prompts, self.sampler = prompts, sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[PromptBatch]:
        slot: Slot
        for slot in self.sampler:
            yield self.prompts.batch(slot.rows, epoch=slot.epoch, index=slot.index, final=slot.final)


class _ValBatches(torch.utils.data.Dataset[PromptBatch]):
    def __init__(self, prompts: _Prompts, slots: list[tuple[int, ...]]) -> None:
        self.prompts, self.slots = prompts, slots

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, index: int) -> PromptBatch:
        if index >= len(self.slots):
            raise IndexError(index)
        return self.prompts.batch(self.slots[index], index=index)
