"""Records a run: the run directory, its journal, and MLflow, which is filled from the journal in the background.

The hooks gather, have `StepMonitor` make numbers of it, and write. A resumed run continues its own MLflow run and
journal in a new segment.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, time
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grpo_lightning import signals
from grpo_lightning.callbacks.fingerprint import write_fingerprint
from grpo_lightning.callbacks.histogram import EDGES, draw_histogram
from grpo_lightning.callbacks.monitor import StepMonitor, holds_shards
from grpo_lightning.callbacks.probe import Probe
from grpo_lightning.callbacks.session import Session
from grpo_lightning.callbacks.settings import RunSettings
from grpo_lightning.callbacks.sinks import check_sinks, open_sinks
from grpo_lightning.callbacks.summary import say_summary
from grpo_lightning.errors import GrpoError, RunPaused
from grpo_lightning.objective.batch import StepRecord
from grpo_lightning.report import publish_report
from grpo_lightning.sinks import EventRow, RunDirectory, SegmentStatus, StepRow
from grpo_lightning.sinks.console import ConsoleSink
from grpo_lightning.sinks.redact import redact_text
from grpo_lightning.tracking import MetricPump, MLflowRun
from grpo_lightning.training import ranks
from grpo_lightning.training.module import GRPOModule

__all__ = ["RunRecorder", "StepListener"]

_log = logging.getLogger(__name__)

StepListener = Callable[[StepRow, StepRecord], None]

_STATE_KEY = "grpo_run"


class RunRecorder(L.Callback):
    """Writes every step and evaluation to the journal first, then to the sinks, MLflow and the terminal.

    Args:
        settings: the run's name, description, experiment and folder.
        config_yaml: the resolved settings, stored with the run.
        resume_from: the checkpoint that training continues from; its run is continued.

    Attributes:
        listeners: called on the main rank with each step's row, once it is recorded, and this rank's record.
        health_parts: what they give stands in the `.health.json` beside a checkpoint.
        end_as: status and reason of a fit that is stopped early, where it isn't `finished`.
    """

    def __init__(
        self, settings: RunSettings | None = None, *, config_yaml: str = "", resume_from: str | None = None
    ) -> None:
        self.settings = settings or RunSettings()
        check_sinks(self.settings.sinks)
        self.listeners: list[StepListener] = []
        self.health_parts: list[Callable[[], dict[str, Any]]] = []
        self.end_as: tuple[SegmentStatus, str] | None = None
        self.run_id: str | None = None
        self.checkpoint_dir: Path | None = None
        self._config_yaml = config_yaml
        self._resume_from = resume_from
        self._resumed_root: str | None = None
        self._resume_step = 0
        self._open: Session | None = None
        self._lock: Any = None
        self._monitor = StepMonitor()
        self._probe = Probe(self.settings.probe)
        self._probe_identity: dict[str, Any] = {}
        self._step = 0  # the last one recorded
        self._values: dict[str, float] = {}
        self._evaluation: dict[str, float] = {}

    # ---- for other callbacks

    @property
    def directory(self) -> RunDirectory | None:
        """The run directory, on the main rank while the run is recorded."""
        return self._open.directory if self._open else None

    @property
    def segment(self) -> int:
        """The run's part between two (re)starts, counted from 1; 0 where nothing is recorded."""
        return self._open.segment if self._open else 0

    def write_event(self, row: EventRow) -> None:
        """Record an event: journal, sinks, MLflow, terminal. Does nothing on other ranks than the main one."""
        if self._open is not None:
            self._open.write_event(row)

    def say(self, text: str) -> None:
        """A line on the terminal."""
        if self._open is not None:
            self._open.console.say(text)

    def in_mlflow(self, action: Callable[[MLflowRun], object], what: str) -> None:
        """Have `action` done to the MLflow run in the background, in order; nothing where there is none."""
        if self._open is not None:
            self._open.in_mlflow(action, what)

    # ---- life

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Open the run on the main rank and tell the others where it is."""
        opened = self._start(trainer) if trainer.is_global_zero else None
        opened = ranks.broadcast_object(opened)
        if opened is not None:
            self.run_id, self.checkpoint_dir = opened
        if self._open is not None and isinstance(pl_module, GRPOModule):
            self._probe_identity = self._probe.identity(pl_module, _datamodule(trainer))

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
        name = redact_text(mlflow.name if mlflow else self.settings.name or known.get("name") or run_id)
        description = redact_text(self.settings.description or known.get("description", ""))
        journal.set_meta(name=name, description=description, **_where(mlflow))
        total = trainer.max_steps if trainer.max_steps > 0 else None
        console = ConsoleSink(total_steps=total, first_step=from_step, title=name)
        self._open = Session(directory=directory, journal=journal, console=console, segment=segment)
        if mlflow is None and self.settings.mlflow:
            mlflow = MLflowRun.resume(
                run_id,
                segment=segment,
                from_step=from_step,
                config=self._config,
                recorded_uri=known.get("tracking_uri"),
            )
        if mlflow is not None:
            self._open.mlflow = mlflow
            self._open.pump = MetricPump(journal, mlflow, page_of=signals.page_of).start()
            where = str(directory.path)
            self._open.in_mlflow(lambda run: run.set_tags({"grpo.run_dir": where}), "the run directory")
        self._open.sinks = open_sinks(self.settings.sinks, run_id=run_id, run_name=name, description=description)
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
            config=self._config,
        )
        return mlflow, mlflow.run_id, False

    @property
    def _config(self) -> Any:
        return yaml.safe_load(self._config_yaml) if self._config_yaml else None

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The run is finished."""
        status, reason = self.end_as or ("finished", "")
        self._finish(status, reason)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """The run ended otherwise; its record says how."""
        killed = isinstance(exception, KeyboardInterrupt | SIGTERMException | SystemExit)
        paused = isinstance(exception, RunPaused)
        status: SegmentStatus = "paused" if paused else "killed" if killed else "failed"
        self._finish(status, f"{type(exception).__name__}: {exception}"[:2000])

    def _finish(self, status: SegmentStatus, reason: str) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        if 0 < self._step < self.settings.fingerprint_steps:
            self._write_fingerprint(opened)
        publish_report(
            opened.directory,
            lambda path: opened.in_mlflow(lambda run: run.log_artifact(path), "the report"),
            status=status,
        )
        opened.close(status, reason)
        say_summary(
            opened.console,
            status=status,
            directory=opened.path,
            mlflow=opened.mlflow,
            values=self._values,
            evaluation=self._evaluation,
        )
        opened.journal.close()
        self._lock.__exit__(None, None, None)

    # ---- steps

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        """Remember the weights, for the size of the update; a skipped update does not come here."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._monitor.before_update(trained, sharded=holds_shards(trainer.strategy, trained))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the step and write it."""
        record: StepRecord | None = getattr(pl_module, "last_record", None)
        if record is None:
            return
        joined = self._monitor.measure(record, pl_module.device, main=self._open is not None)
        probed = {}
        if isinstance(pl_module, GRPOModule) and self._probe.due(record.step):
            probed = self._probe.measure(pl_module, _datamodule(trainer))
        if joined is not None and self._open is not None:
            started = perf_counter()
            self._write_step(self._open, record, joined.values | probed)
            self._show_histogram(joined, record.step)
            self._monitor.spend(started)

    def _write_step(self, opened: Session, record: StepRecord, values: dict[str, float]) -> None:
        self._step, self._values = record.step, values
        row = StepRow(run_id=self.run_id or "", segment=opened.segment, step=record.step, time=time(), values=values)
        opened.write_step(row)
        if record.step == self.settings.fingerprint_steps:
            self._write_fingerprint(opened)
        for listener in self.listeners:
            listener(row, record)

    def _show_histogram(self, joined: signals.Joined, step: int) -> None:
        every = self.settings.histogram_every
        if every and step % every == 0:
            counts = joined.histogram(EDGES)
            self.in_mlflow(
                lambda run: run.log_image(
                    draw_histogram(counts, title=f"advantages at step {step}"),
                    "2_health/advantage_histogram",
                    step=step,
                ),
                "the advantages' histogram",
            )

    def _write_fingerprint(self, opened: Session) -> None:
        steps = self.settings.fingerprint_steps
        try:
            path = write_fingerprint(opened.directory, steps=steps, probe=self._probe_identity)
        except (OSError, GrpoError) as error:
            _log.warning("Can't write the fingerprint of the run: %s. Training goes on.", error)
            return
        if path is not None:
            opened.in_mlflow(lambda run: run.log_artifact(path), "the fingerprint")

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
        self.write_event(row)

    # ---- checkpoints

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """The run that this checkpoint belongs to and what its signals remember; the journal is on the disk before."""
        root = str(Path(self.settings.dir).absolute())
        if self._open is not None:
            self._open.journal.sync()
            root = str(self._open.path.parent)
        checkpoint[_STATE_KEY] = {"run_id": self.run_id, "root": root, "monitor": self._monitor.state_dict()}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue the run that the checkpoint belongs to, where its directory is."""
        state = checkpoint.get(_STATE_KEY)
        if state is None or trainer.state.fn != "fit":
            return
        self.run_id = state["run_id"]
        self._resumed_root = self._root_of(state)
        self._resume_step = int(checkpoint["global_step"])
        if "monitor" in state:
            self._monitor.load_state_dict(state["monitor"])

    def _root_of(self, state: dict[str, Any]) -> str:
        """The folder of run directories: beside the checkpoint when it was moved, else as recorded."""
        if self._resume_from is not None:
            beside = Path(self._resume_from).resolve().parent.parent
            if beside.name == state["run_id"]:
                return str(beside.parent)
        return str(state["root"])

    def announce_checkpoint(self, path: Path) -> None:
        """Tell MLflow where a checkpoint lies."""
        self.in_mlflow(lambda run: run.log_reference(path), "the checkpoint's place")

    def health(self) -> dict[str, Any]:
        """The judgement so far, in plain types: what lies beside a checkpoint."""
        return {
            "run_id": self.run_id,
            "segment": self._open.segment if self._open else None,
            "signals": {k: v for k, v in self._values.items() if math.isfinite(v)},
            "evaluation": self._evaluation,
            **{name: value for part in self.health_parts for name, value in part().items()},
        }


def _datamodule(trainer: L.Trainer) -> Any:
    return getattr(trainer, "datamodule", None)


def _where(mlflow: MLflowRun | None) -> dict[str, str]:
    """The store that a later resume looks in when the environment names none."""
    return {"tracking_uri": redact_text(mlflow.tracking_uri)} if mlflow else {}
