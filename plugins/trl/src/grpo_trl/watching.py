"""`watch(trainer)`: a callback and wrapped methods that give a `GRPOTrainer` signals, rules, evidence and a pause."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from grpo_lightning import signals
from grpo_lightning.callbacks import HealthSettings, RunSettings
from grpo_lightning.callbacks.health import judge_of
from grpo_lightning.callbacks.pausing import require_acknowledged
from grpo_lightning.callbacks.sinks import check_sinks
from grpo_lightning.errors import RunPaused
from grpo_lightning.objective import StepRecord
from grpo_lightning.sinks import RunDirectory, SegmentStatus
from grpo_lightning.training import ranks
from grpo_trl.alerts import AlertDesk, pause_message
from grpo_trl.hooks import Hooks, Seen
from grpo_trl.records import Facts, StepFacts, absent_names, build_record, measured
from grpo_trl.run import RunLog
from grpo_trl.state import read_state, write_state

__all__ = ["Watcher", "watch"]

_log = logging.getLogger("grpo_trl")


def watch(
    trainer: Any,
    *,
    run: RunSettings | None = None,
    health: HealthSettings | None = None,
    source_column: str | None = None,
    hold_back: bool = True,
    raise_on_pause: bool = False,
) -> Watcher:
    """Watch a `GRPOTrainer`; call it once, before `train`.

    Args:
        trainer: of TRL 1.16, or a subclass that keeps its methods.
        run: name, description, folder, MLflow and sinks of the run's record.
        health: rules, ruler, overrides.
        source_column: the dataset's column that says where a prompt comes from.
        hold_back: leave out an update whose loss or gradient is not finite: the checkpoint of the pause is then sound.
        raise_on_pause: end `train` by `RunPaused` once the checkpoint is saved, where it would return otherwise.

    Returns:
        The watcher; its `paused` is the message of a pause.
    """
    watcher = Watcher(
        trainer,
        run=run or RunSettings(),
        health=health or HealthSettings(),
        source_column=source_column,
        hold_back=hold_back,
        raise_on_pause=raise_on_pause,
    )
    trainer.add_callback(watcher)
    return watcher


class Watcher(TrainerCallback):  # type: ignore[misc]
    """Measures, judges and records every optimizer step of a `GRPOTrainer`. Made by `watch`.

    Attributes:
        paused: what paused the run, with what to do next; None while nothing has.
        directory: of the run's record, on the main process.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        run: RunSettings,
        health: HealthSettings,
        source_column: str | None,
        hold_back: bool,
        raise_on_pause: bool,
    ) -> None:
        check_sinks(run.sinks)
        judge_of(health)  # wrong rules are said now, not after the first step
        self.paused: str | None = None
        self.directory: RunDirectory | None = None
        self._trainer, self._settings, self._health = trainer, run, health
        self._hold_back, self._raise = hold_back, raise_on_pause
        self._facts = Facts.of(trainer, source_column=source_column)
        self._hooks = Hooks(trainer)
        self._norm = signals.UpdateNorm()
        self._update: signals.UpdateSize | None = None
        self._before: list[Tensor] | None = None  # the weights that an update is being made on
        self._lr = math.nan
        self._started = self._monitor_seconds = 0.0
        self._run: RunLog | None = None
        self._desk: AlertDesk | None = None
        self._temporal = signals.TemporalState()
        self._evaluation: dict[str, float] = {}
        self._broken = False  # measuring has failed
        self._wrap_loop()

    # ---- the whole of a training

    def _wrap_loop(self) -> None:
        original = self._trainer._inner_training_loop

        @functools.wraps(original)
        def loop(*args: Any, **kwargs: Any) -> Any:
            return self._around_loop(original, *args, **kwargs)

        self._trainer._inner_training_loop = loop

    def _around_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        resumed = kwargs.get("resume_from_checkpoint")
        self._begin(Path(resumed) if resumed else None)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            killed = isinstance(error, KeyboardInterrupt | SystemExit)
            self._end("killed" if killed else "failed", f"{type(error).__name__}: {error}"[:2000])
            raise
        self._end("paused" if self.paused else "finished", self.paused or "")
        if self.paused and self._raise:
            raise RunPaused(self.paused)
        return result

    def _begin(self, checkpoint: Path | None) -> None:
        self.paused, self._evaluation, self._temporal = None, {}, signals.TemporalState()
        self._hooks.take()
        self._broken = False
        state = read_state(checkpoint) if checkpoint is not None else None
        directory = _directory_of(state)
        if directory is not None:
            require_acknowledged(directory.checkpoints / "checkpoint")
        if not self._main:
            return
        self._run = self._open(state, directory, checkpoint)
        self.directory = self._run.directory
        folder = Path(self._trainer.args.output_dir)
        tokenizer = getattr(self._trainer, "_tokenizer", self._trainer.processing_class)
        self._desk = AlertDesk(self._run, self._health, tokenizer=tokenizer, checkpoints=folder)
        if state is not None:
            self._desk.judge.load_state_dict(state["judge"])
            self._temporal.load_state_dict(state["temporal"])
            self._evaluation = dict(state["evaluation"])

    def _open(self, state: dict[str, Any] | None, directory: RunDirectory | None, checkpoint: Path | None) -> RunLog:
        args = self._trainer.args
        config = {
            "trl": args.to_dict(),
            "model": getattr(self._trainer.model.config, "_name_or_path", ""),
            "run": asdict(self._settings),
            "health": asdict(self._health),
        }
        if directory is not None and state is not None:
            return RunLog.resume(self._settings, config, directory, int(state["step"]))
        if checkpoint is not None:
            _log.warning(
                "%s has no record of its run on this machine: it is judged from its first step here.", checkpoint
            )
        return RunLog.begin(self._settings, config, self._settings.name or args.run_name)

    def _end(self, status: SegmentStatus, reason: str) -> None:
        run, self._run, self._desk = self._run, None, None
        if run is not None:
            run.close(status, reason)

    @property
    def _main(self) -> bool:
        return bool(self._trainer.accelerator.is_main_process)

    # ---- an optimizer step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time."""
        self._started = perf_counter()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Leave a broken update out, and remember the weights before a sound one."""
        started = perf_counter()
        self._lr = float(optimizer.param_groups[0]["lr"])
        self._update, self._before = None, None
        if self._hold_back and ranks.any_rank(self._broken_update(), self._trainer.accelerator.device):
            for parameter in model.parameters():
                parameter.grad = None
        elif not self._trainer.is_deepspeed_enabled:  # its weights have moved by now
            self._before = [p for group in optimizer.param_groups for p in group["params"]]
            self._norm.before(self._before)
        self._monitor_seconds += perf_counter() - started

    def _broken_update(self) -> bool:
        """Whether the update would make the weights NaN. A loss scaler sees to that by itself."""
        seen = self._hooks.seen
        if self._trainer.accelerator.scaler is not None or self._trainer.is_deepspeed_enabled:
            return False
        loss_is_finite = seen.loss is None or bool(torch.isfinite(seen.loss))
        return not loss_is_finite or (seen.grad_norm is not None and not math.isfinite(seen.grad_norm))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The size of the update."""
        if self._before is None:
            return
        started = perf_counter()
        sharded = any(hasattr(p, "to_local") for p in self._before) or self._trainer.is_fsdp_enabled
        self._update = self._norm.after(self._before, share=1 / ranks.world_size() if sharded else 1.0)
        self._before = None
        self._monitor_seconds += perf_counter() - started

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Measure, judge and record the step; carry a pause out, on all processes together."""
        seconds, started = perf_counter() - self._started, perf_counter()
        seen = self._hooks.seen
        if not seen.parts:
            self._hooks.take()
            return control
        own = StepFacts(
            step=state.global_step,
            loss=self._mean_loss(seen),
            lr=self._lr,
            update_skipped=bool(self._trainer.accelerator.optimizer_step_was_skipped),
            seconds=seconds,
        )
        record, seen_PG = build_record(seen, self._facts, own, self._gather)
        update = self._joined_update()
        absent = absent_names(seen, self._facts)
        self._hooks.take()
        if self._main:
            self._judge(record, seen_PG, update, absent, started)
        if ranks.any_rank(self.paused is not None, self._trainer.accelerator.device):
            self.paused = ranks.broadcast_object(self.paused)
            control.should_save = control.should_training_stop = True
        return control

    def _judge(
        self,
        record: StepRecord,
        seen_PG: Tensor,
        update: signals.UpdateSize | None,
        absent: set[str],
        started: float,
    ) -> None:
        """A fault of the watching itself is said once; training goes on."""
        if self._run is None or self._desk is None:
            return
        try:
            joined = measured(record, seen_PG, update=update, absent=absent)
            values = joined.values
            values |= {f"reward_metric/{name}": value for name, value in record.reward_metrics.items()}
            values |= self._temporal.update(values, sources=joined.sources)
            values["monitor_seconds"] = self._monitor_seconds + perf_counter() - started
            self._run.write_step(record.step, values)
            evaluation, self._evaluation = self._evaluation, {}
            alert = self._desk.step(record.step, values | evaluation, record)
        except Exception:  # noqa: BLE001 - whatever it is, training goes on
            if not self._broken:
                _log.exception("Watching failed at step %d. Training goes on.", record.step)
            self._broken = True
            return
        finally:
            self._monitor_seconds = 0.0
        if alert is not None:
            self.paused = pause_message(alert, run=self._run.directory, checkpoint=self._checkpoint(record.step))
            _log.warning("%s", self.paused)

    def _checkpoint(self, step: int) -> Path:
        return Path(self._trainer.args.output_dir).absolute() / f"checkpoint-{step}"

    def _mean_loss(self, seen: Seen) -> float:
        if seen.loss is None:
            return math.nan
        return float(self._trainer.accelerator.gather(seen.loss).float().mean())

    def _joined_update(self) -> signals.UpdateSize | None:
        """Shards add up; copies are the same on every rank."""
        update, self._update = self._update, None
        found = ranks.all_gather_object(update)
        if any(one is None for one in found):
            return None
        sizes = [one for one in found if one is not None]
        share = sum(one.share for one in sizes)
        return signals.UpdateSize(
            update_squares=sum(one.update_squares for one in sizes) / share,
            weight_squares=sum(one.weight_squares for one in sizes) / share,
        )

    def _gather(self, values: Tensor, fill: float, before: bool) -> Tensor:
        """The rows of all processes, padded to one width."""
        if ranks.world_size() == 1:
            return values
        accelerator = self._trainer.accelerator
        flags = values.dtype == torch.bool
        numbers = values.int() if flags else values
        if numbers.dim() > 1:
            numbers = accelerator.pad_across_processes(numbers, dim=1, pad_index=fill, pad_first=before)
        gathered: Tensor = accelerator.gather(numbers)
        return gathered.bool() if flags else gathered

    # ---- evaluations and checkpoints

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any = None, **kwargs: Any) -> None:
        """An evaluation is recorded, and judged with the step after it."""
        if self._run is None or not metrics:
            return
        numbers = {k: float(v) for k, v in metrics.items() if k.startswith("eval_") and isinstance(v, int | float)}
        self._evaluation = numbers
        self._run.write_event("evaluation", "eval", state.global_step, numbers)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The monitoring state lies beside the checkpoint's `trainer_state.json`."""
        if self._run is None or self._desk is None:
            return
        folder = self._checkpoint(state.global_step)
        if not folder.is_dir():
            return
        self._run.sync()
        path = write_state(
            folder,
            {
                "run_id": self._run.run_id,
                "root": str(self._run.directory.path.parent),
                "step": state.global_step,
                "judge": self._desk.judge.state_dict(),
                "temporal": self._temporal.state_dict(),
                "evaluation": self._evaluation,
                "health": self._desk.health(),
            },
        )
        self._run.in_mlflow(lambda run: run.log_reference(path.parent), "the checkpoint's place")


def _directory_of(state: dict[str, Any] | None) -> RunDirectory | None:
    """Where the run of a checkpoint is recorded, if it still is."""
    if state is None:
        return None
    path = Path(state["root"]) / state["run_id"]
    return RunDirectory.open(path) if (path / "journal.sqlite").is_file() else None
