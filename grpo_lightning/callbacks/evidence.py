"""Evidence: the groups and responses behind a step, as JSON lines in the run directory and a table in MLflow."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from grpo_lightning.callbacks.recorder import RunRecorder
from grpo_lightning.objective.batch import StepRecord
from grpo_lightning.signals.evidence import Pick, rollout_statistics, select
from grpo_lightning.training import ranks

__all__ = ["EvidenceWriter", "dropped_rows", "evidence_rows"]

_log = logging.getLogger(__name__)

Row = dict[str, Any]


class EvidenceWriter(L.Callback):
    """Writes ``evidence/step-000123-<reason>.jsonl`` when asked, and every N steps.

    Args:
        recorder: of the run.
        every: steps between two regular files; 0: none.
    """

    def __init__(self, recorder: RunRecorder, *, every: int = 0) -> None:
        self._recorder, self._every = recorder, every
        self._tokenizer: Any = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Responses are decoded with the module's tokenizer."""
        self._tokenizer = getattr(pl_module, "tokenizer", None)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The regular file, when it is time."""
        record: StepRecord | None = getattr(pl_module, "last_record", None)
        if self._every and record is not None and record.step % self._every == 0:
            self.capture(record, "regular")

    def capture(self, record: StepRecord, *reasons: str) -> list[Path | None]:
        """Write a file for each reason (a word or a rule's name) with what every rank's rollouts tell.

        All ranks call it together; the files, on the main rank.
        """
        rows = self._gathered(lambda: evidence_rows(record, select(record), self._tokenizer))
        return [self._write(rows, record.step, reason) for reason in reasons]

    def capture_dropped(self, record: StepRecord) -> Path | None:
        """What was dropped as broken and sampled again, of every rank; all ranks call it together."""
        rows = self._gathered(lambda: dropped_rows(record, self._tokenizer))
        return self._write(rows, record.step, "resample") if rows else None

    def _gathered(self, own: Callable[[], list[Row]]) -> list[Row]:
        """Every rank's rows. A rank that can't make its own has none: the others wait for it."""
        try:
            rows = [{"rank": ranks.rank()} | row for row in own()]
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            _log.warning("Can't make evidence of a step: %s: %s. Training goes on.", type(error).__name__, error)
            rows = []
        return [row for given in ranks.all_gather_object(rows) for row in given]

    def _write(self, rows: Sequence[Row], step: int, reason: str) -> Path | None:
        directory = self._recorder.directory
        if directory is None:
            return None
        slug = re.sub(r"[^a-z0-9_]+", "-", reason.lower()).strip("-")[:80] or "evidence"
        path = directory.evidence / f"step-{step:06d}-{slug}.jsonl"
        head = {"run_id": self._recorder.run_id, "segment": self._recorder.segment, "step": step, "reason": reason}
        rows = [head | row for row in rows]
        try:
            _write_lines(path, rows)
        except OSError as error:
            _log.warning("Can't write the evidence %s: %s. Training goes on.", path, error)
            return None
        table = [_flat(row) for row in rows]
        self._recorder.in_mlflow(lambda run: run.log_artifact(path, "evidence"), "the evidence")
        self._recorder.in_mlflow(lambda run: run.log_table(table, f"evidence/{slug}.json"), "the table of evidence")
        return path


def evidence_rows(record: StepRecord, picks: Sequence[Pick], tokenizer: Any) -> list[Row]:
    """A row for each rollout picked: why, prompt, response, rewards, advantage, token statistics.

    A missing reward is None; an infinite one is the text ``Infinity`` or ``-Infinity``.
    """
    statistics = {name: values.tolist() for name, values in rollout_statistics(record).items()}
    return [_row(record, pick, g, statistics, tokenizer) for pick in picks for g in pick.rollouts]


def dropped_rows(record: StepRecord, tokenizer: Any) -> list[Row]:
    """A row for each rollout that was dropped with its group as broken: why, response and rewards."""
    return [
        {
            "why": group.why,
            "row_id": group.row_id,
            "attempt": group.attempt,
            "rollout": g,
            "response": _text(tokenizer, ids),
            "rewards": {n: _number(v) for n, v in zip(record.reward_names, rewards, strict=True)},
            "extras": {},
        }
        for group in record.dropped
        for g, (ids, rewards) in enumerate(zip(group.completion_ids, group.rewards_GK, strict=True))
    ]


def _row(record: StepRecord, pick: Pick, g: int, statistics: dict[str, Any], tokenizer: Any) -> Row:
    p, rollouts = pick.group, record.rollouts
    given = record.rewards_PGK[p, g].tolist()
    place = p * record.rewards_PG.shape[1] + g
    return {
        "why": pick.why,
        "value": _number(pick.value),
        "row_id": int(record.row_ids_P[p]),
        "source": record.sources[p],
        "rollout": g,
        "prompt": _text(tokenizer, rollouts.prompt_ids_PS[p][rollouts.prompt_mask_PS[p]].tolist(), special=True),
        "response": _text(tokenizer, rollouts.completion_ids_PGL[p, g][rollouts.completion_mask_PGL[p, g]].tolist()),
        "reward": _number(float(record.rewards_PG[p, g])),
        "rewards": {name: _number(value) for name, value in zip(record.reward_names, given, strict=True)},
        "advantage": _number(float(record.advantages_PG[p, g])),
        "length": int(rollouts.completion_mask_PGL[p, g].sum()),
        "truncated": not bool(rollouts.terminated_PG[p, g]),
        **{name: _number(values[p][g]) for name, values in statistics.items()},
        "extras": {name: _extra(values[place]) for name, values in record.reward_extras.items()},
    }


def _text(tokenizer: Any, ids: list[int], *, special: bool = False) -> str:
    """The tokens' text, or their numbers where there is no tokenizer."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    text: str = tokenizer.decode(ids, skip_special_tokens=not special)
    return text


def _number(value: float) -> float | str | None:
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return None if math.isnan(value) else value


def _extra(value: Any) -> Any:
    return _number(value) if isinstance(value, float) else value


def _flat(row: Row) -> Row:
    """A table's row: one value a column."""
    rewards = {f"reward/{name}": value for name, value in row["rewards"].items()}
    out = {k: v for k, v in row.items() if k not in ("rewards", "extras")} | rewards
    out |= {"extras": json.dumps(row["extras"], ensure_ascii=False)}
    return {name: _whole(value) if isinstance(value, str) else value for name, value in out.items()}


def _whole(text: str) -> str:
    """Half a surrogate pair, which no file takes, written out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _write_lines(path: Path, rows: Sequence[Row]) -> None:
    """A crash leaves the whole file or none."""
    draft = path.with_name(f".{path.name}.part")
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    draft.write_text(text, encoding="utf-8", errors="backslashreplace")
    draft.replace(path)
