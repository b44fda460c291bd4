"""A callback for any LightningModule: captures before training, checks at every checkpoint, tells MLflow.

from run_snapshot.lightning import SnapshotCallback

trainer = Trainer(logger=MLFlowLogger(...), callbacks=[SnapshotCallback(config=config, data_files=["train.csv"])])
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

from run_snapshot.capturing import OnError, Snapshot, capture
from run_snapshot.checkpoints import KEY, checkpoint_record
from run_snapshot.context import clear_active, set_active, snapshot_tags
from run_snapshot.differing import diff
from run_snapshot.digests.data import Rows
from run_snapshot.errors import SnapshotError
from run_snapshot.locks import LockMode
from run_snapshot.records import Difference, Finding
from run_snapshot.verifying import check

__all__ = ["SnapshotCallback"]

_NAMED = 10  # findings in a warning
_MAX_TAG = 5000  # MLflow cuts tags silently from 8000 characters on

_log = logging.getLogger(__name__)


class SnapshotCallback(Callback):
    """Records what a run is made of, and says so when it changes while the run goes on.

    Args:
        config: the resolved settings.
        data_files: files or folders of data, or `Rows` for rows in memory.
        reward_paths: import paths or functions whose sources matter (metrics and losses too).
        into: the snapshot's folder; a new one under the trainer's root directory when not given.
        weights: digest the weights at the start and in every checkpoint.
        check_drift: look at every checkpoint whether everything still is as captured.
        on_drift: what a change does: `warn` or `raise`.
        on_error: what a part that can't be captured does: leave a `partial` snapshot, or `raise`.
        lock: `copy` the project's lock files, `make` one (needs an index), or `off`.
    """

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        data_files: Iterable[str | Path | Rows] = (),
        reward_paths: Iterable[str | Callable[..., Any]] = (),
        into: str | Path | None = None,
        weights: bool = True,
        check_drift: bool = True,
        on_drift: Literal["warn", "raise"] = "warn",
        on_error: OnError = "partial",
        lock: LockMode = "copy",
    ) -> None:
        self.snapshot: Snapshot | None = None  # on rank 0, once training was set up
        self._parts: dict[str, Any] = {
            "config": config,
            "data_files": list(data_files),
            "reward_paths": list(reward_paths),
            "lock": lock,
        }
        self._into = into
        self._weights = weights
        self._check_drift = check_drift
        self._on_drift = on_drift
        self._on_error: OnError = on_error
        self._told: set[Finding] = set()
        self._last: tuple[int, dict[str, Any]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Capture before the logger makes its run, so that the run is made with the tags."""
        if stage != "fit" or self.snapshot is not None or not trainer.is_global_zero:
            return
        into = Path(self._into or Path(trainer.default_root_dir) / "snapshots" / uuid.uuid4().hex[:12])
        state = pl_module.state_dict() if self._weights else None
        self.snapshot = capture(
            into, model_state=state, seeds=_seeds(), project=Path.cwd(), on_error=self._on_error, **self._parts
        )
        if self.snapshot.partial:
            rank_zero_warn(f"The snapshot in {into} is partial: {'; '.join(self.snapshot.reasons)}")
        if any(isinstance(c, ModelCheckpoint) and c.save_weights_only for c in trainer.callbacks):  # type: ignore[attr-defined]
            rank_zero_warn("save_weights_only leaves callbacks out: such checkpoints will not name their snapshot.")
        set_active(self._tags())

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hand the snapshot to every MLflow logger."""
        if self.snapshot is None:
            return
        for client, run_id in _mlflow_runs(trainer):
            for name, value in self._tags().items():
                client.set_tag(run_id, name, value)
            if self.snapshot.digest:
                client.log_artifacts(run_id, str(self.snapshot.path), "snapshot")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the snapshot's digest and the weights' into the checkpoint, and look for drift. Asked twice, it answers once."""
        state = checkpoint.get("state_dict") or {}
        is_sharded = any(hasattr(tensor, "full_tensor") for tensor in state.values())  # then all ranks gather
        if self.snapshot is None and not is_sharded:
            return
        if self._last is None or self._last[0] != trainer.global_step:
            digest, path = (self.snapshot.digest, str(self.snapshot.path)) if self.snapshot else ("", "")
            record: dict[str, Any] = {"digest": digest, "path": path}
            self._last = (
                trainer.global_step,
                checkpoint_record(state, digest=digest, path=path) if self._weights else record,
            )
            self._look_for_drift(trainer)
        checkpoint[KEY] = self._last[1]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say what is not as it was in the run that the checkpoint is from."""
        record = checkpoint.get(KEY)
        if self.snapshot is None or not isinstance(record, dict) or record.get("digest") == self.snapshot.digest:
            return
        for client, run_id in _mlflow_runs(trainer):
            client.set_tag(run_id, "run_snapshot.resumed_from", str(record.get("digest")))
        try:
            differences = [d for d in diff(record["path"], self.snapshot.path) if d.level not in ("config", "weights")]
        except (SnapshotError, KeyError, TypeError) as error:
            rank_zero_warn(f"The checkpoint's snapshot can't be compared with this run's: {error}")
            return
        if differences:
            rank_zero_warn(f"Since the run that this checkpoint is from: {_listed(differences)}")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Runs that are made after this one are not ours."""
        clear_active()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """After an error Lightning tears nothing down."""
        clear_active()

    def _tags(self) -> dict[str, str]:
        if self.snapshot is None:
            return {}
        return snapshot_tags(self.snapshot.digest, partial=self.snapshot.partial)

    def _look_for_drift(self, trainer: Trainer) -> None:
        if not self._check_drift or self.snapshot is None or not self.snapshot.digest:
            return
        new = [finding for finding in check(self.snapshot.path) if finding not in self._told]
        if not new:
            return
        self._told.update(new)
        message = f"Since the start of this run: {_listed(new)}"
        for client, run_id in _mlflow_runs(trainer):
            client.set_tag(run_id, "run_snapshot.drift", f"step {trainer.global_step}: {message}"[:_MAX_TAG])
        if self._on_drift == "raise" and any(finding.verdict != "unknown" for finding in new):
            raise SnapshotError(message)
        rank_zero_warn(message)


def _listed(items: list[Finding] | list[Difference]) -> str:
    told = [
        f"{item.level}: {item.name} {item.verdict if isinstance(item, Finding) else item.kind} ({item.detail[:200]})"
        for item in items[:_NAMED]
    ]
    return "; ".join(told) + (f"; and {len(items) - _NAMED} more" if len(items) > _NAMED else "")


def _mlflow_runs(trainer: Trainer) -> list[tuple[Any, str]]:
    """Client and run id of every MLflow logger, whatever its class; one that fails must not end the run."""
    runs = []
    for logger in trainer.loggers:
        if not hasattr(logger, "run_id"):
            continue
        try:
            client, run_id = logger.experiment, str(logger.run_id)  # type: ignore[attr-defined]
        except Exception:  # noqa: BLE001
            _log.warning("The logger %s gave no run to tag.", type(logger).__name__, exc_info=True)
            continue
        if run_id and hasattr(client, "set_tag") and hasattr(client, "log_artifacts"):
            runs.append((client, run_id))
    return runs


def _seeds() -> dict[str, Any]:
    import os

    import torch

    return {"PL_GLOBAL_SEED": os.environ.get("PL_GLOBAL_SEED"), "torch_initial": torch.initial_seed()}
