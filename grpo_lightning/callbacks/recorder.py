"""Records a run: the run directory, its journal, and MLflow, which is filled from the journal in the background.

The hooks gather, call `signals.measure` / `signals.finish`, and write. A resumed run continues its own MLflow run and
journal in a new segment.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grpo_lightning import signals
from grpo_lightning.callbacks.settings import RunSettings
from grpo_lightning.callbacks.summary import say_summary
from grpo_lightning.errors import RunPaused
from grpo_lightning.objective.batch import StepRecord
from grpo_lightning.sinks import EventRow, Journal, RunDirectory, StepRow
from grpo_lightning.sinks.console import ConsoleSink
from grpo_lightning.sinks.redact import redact_text
from grpo_lightning.tracking import MetricPump, MLflowRun
from grpo_lightning.training import ranks

__all__ = ["RunRecorder"]

_STATE_KEY = "grpo_run"
_FLUSH_SECONDS = 60.0


@dataclass(kw_only=True)
class _Open:
    """What the main rank holds while a run is recorded."""

    directory: RunDirectory
    journal: Journal
    console: ConsoleSink
    segment: int
    mlflow: MLflowRun | None
    pump: MetricPump | None


class RunRecorder(L.Callback):
    """Writes every step and evaluation to the journal first, then to MLflow and the terminal.

    Args:
        settings: the run's name, description, experiment and folder.
        config_yaml: the resolved settings, stored with the run.
        resume_from: the checkpoint that training continues from; its run is continued.
    """

    def __init__(
        self, settings: RunSettings | None = None, *, config_yaml: str = "", resume_from: str | None = None
    ) -> None:
        self.settings = settings or RunSettings()
        self._config_yaml = config_yaml
        self._resume_from = resume_from
        self.run_id: str | None = None
        self._resumed_root: str | None = None
        self._resume_step = 0
        self._open: _Open | None = None
        self._lock: Any = None
        self._values: dict[str, float] = {}
        self._evaluation: dict[str, float] = {}
        self.checkpoint_dir: Path | None = None

    # ---- life

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the run on the main rank and tell the others where it is."""
        opened = self._start(trainer) if trainer.is_global_zero else None
        opened = ranks.broadcast_object(opened)
        if opened is not None:
            self.run_id, self.checkpoint_dir = opened

    def _start(self, trainer: L.Trainer) -> tuple[str, Path]:
        step = trainer.global_step
        mlflow, run_id, resumed = self._identify()
        root = Path(self._resumed_root or self.settings.dir)
        directory = RunDirectory.open(root / run_id) if resumed else RunDirectory.create(root, run_id)
        self._lock = directory.lock()
        self._lock.__enter__()
        if self._config_yaml:
            directory.write_config(self._config_yaml)
        journal = directory.journal()
        from_step = self._resume_step if resumed else step
        segment = journal.start_segment(from_step=from_step, reason="resumed" if resumed else "")
        known = journal.meta()
        name = mlflow.name if mlflow else self.settings.name or known.get("name") or run_id
        description = self.settings.description or known.get("description", "")
        journal.set_meta(name=name, description=description, **_where(mlflow))
        if mlflow is None and self.settings.mlflow:
            mlflow = MLflowRun.resume(
                run_id,
                segment=segment,
                from_step=from_step,
                config=yaml.safe_load(self._config_yaml) if self._config_yaml else None,
                recorded_uri=known.get("tracking_uri"),
            )
        pump = None
        if mlflow is not None:
            run, where = mlflow, str(directory.path)
            pump = MetricPump(journal, mlflow, page_of=signals.page_of)
            pump.start()
            pump.submit(lambda: run.set_tags({"grpo.run_dir": where}), "the run directory")
        console = ConsoleSink(total_steps=trainer.max_steps if trainer.max_steps > 0 else None, first_step=from_step)
        self._open = _Open(
            directory=directory, journal=journal, console=console, segment=segment, mlflow=mlflow, pump=pump
        )
        console.say(
            f"run {name} ({run_id}) in {directory.path}" + (f", continued at step {from_step}" if resumed else "")
        )
        return run_id, directory.checkpoints

    def _identify(self) -> tuple[MLflowRun | None, str, bool]:
        """A new MLflow run, or the id of the run to continue (its MLflow run is opened with the segment)."""
        if self.run_id is not None:
            return None, self.run_id, True
        if not self.settings.mlflow:
            return None, uuid.uuid4().hex, False
        mlflow = MLflowRun.create(
            experiment=self.settings.experiment,
            name=self.settings.name,
            description=self.settings.description,
            config=yaml.safe_load(self._config_yaml) if self._config_yaml else None,
        )
        return mlflow, mlflow.run_id, False

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The run is finished."""
        self._finish("finished", "")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The run ended otherwise; its record says how."""
        killed = isinstance(exception, KeyboardInterrupt | SIGTERMException | SystemExit)
        paused = isinstance(exception, RunPaused)
        status = "paused" if paused else "killed" if killed else "failed"
        self._finish(status, f"{type(exception).__name__}: {exception}"[:2000])

    def _finish(self, status: Any, reason: str) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        opened.console.close()
        opened.journal.end_segment(status, reason=reason)
        if opened.pump is not None and opened.mlflow is not None:
            run = opened.mlflow
            opened.pump.submit(lambda: run.set_status(status, reason=reason))
            opened.pump.close(timeout=_FLUSH_SECONDS)
        say_summary(
            opened.console,
            status=status,
            directory=opened.directory.path,
            mlflow=opened.mlflow,
            values=self._values,
            evaluation=self._evaluation,
        )
        opened.journal.close()
        self._lock.__exit__(None, None, None)

    # ---- steps

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the step and write it."""
        record: StepRecord | None = getattr(pl_module, "last_record", None)
        if record is None:
            return
        started = perf_counter()
        own = signals.measure(record)
        packs = ranks.all_gather_tensor(own.pack().to(pl_module.device))
        if self._open is None:
            return
        values = signals.finish(packs, own, record)
        values["monitor_seconds"] = perf_counter() - started
        self._values = values
        self._write_step(self._open, record.step, values)

    def _write_step(self, opened: _Open, step: int, values: dict[str, float]) -> None:
        row = StepRow(run_id=self.run_id or "", segment=opened.segment, step=step, time=time(), values=values)
        opened.journal.write_step(row)
        if opened.pump is not None:
            opened.pump.notify()
        opened.console.step(step, values)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the evaluation that the module has just finished."""
        evaluation = getattr(pl_module, "last_evaluation", None)
        if evaluation is None or self._open is None:
            return
        self._evaluation = evaluation.values
        row = EventRow(
            run_id=self.run_id or "",
            segment=self._open.segment,
            step=trainer.global_step,
            time=time(),
            kind="evaluation",
            name="val",
            payload=evaluation.values,
        )
        self._open.journal.write_event(row)
        if self._open.pump is not None:
            self._open.pump.notify()
        self._open.console.evaluation(trainer.global_step, evaluation.values)

    # ---- checkpoints

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """The run that this checkpoint belongs to; the journal is on the disk before the checkpoint is."""
        checkpoint[_STATE_KEY] = {"run_id": self.run_id, "root": str(Path(self.settings.dir).absolute())}
        if self._open is not None:
            self._open.journal.sync()
            checkpoint[_STATE_KEY]["root"] = str(self._open.directory.path.parent)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue the run that the checkpoint belongs to, where its directory is."""
        state = checkpoint.get(_STATE_KEY)
        if state is None or trainer.state.fn != "fit":
            return
        self.run_id = state["run_id"]
        self._resumed_root = self._root_of(state)
        self._resume_step = int(checkpoint["global_step"])

    def _root_of(self, state: dict[str, Any]) -> str:
        """The folder of run directories: beside the checkpoint when it was moved, else as recorded."""
        if self._resume_from is not None:
            beside = Path(self._resume_from).resolve().parent.parent
            if beside.name == state["run_id"]:
                return str(beside.parent)
        return str(state["root"])

    def announce_checkpoint(self, path: Path) -> None:
        """Tell MLflow where a checkpoint lies."""
        if self._open is not None and self._open.pump is not None and self._open.mlflow is not None:
            run = self._open.mlflow
            self._open.pump.submit(lambda: run.log_reference(path))

    def health(self) -> dict[str, Any]:
        """The judgement so far, in plain types: what lies beside a checkpoint."""
        return {
            "run_id": self.run_id,
            "segment": self._open.segment if self._open else None,
            "signals": {k: v for k, v in self._values.items() if math.isfinite(v)},
            "evaluation": self._evaluation,
        }


def _where(mlflow: MLflowRun | None) -> dict[str, str]:
    """The store that a later resume looks in when the environment names none."""
    return {"tracking_uri": redact_text(mlflow.tracking_uri)} if mlflow else {}
