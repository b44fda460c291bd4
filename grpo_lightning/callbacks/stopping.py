"""Signals that ask a run to end: it finishes its step, saves a checkpoint and ends with the right status, on all ranks together.

Lightning acts on a signal where it comes in: in the middle of an update, with a collective that other ranks do not take part
in, and on Slurm by saving half a step. Here a handler only remembers; a second signal of the same kind ends the run at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from grpo_lightning.callbacks.checkpoint import RunCheckpoint
from grpo_lightning.callbacks.recorder import RunRecorder
from grpo_lightning.training import ranks

__all__ = ["GracefulStop", "requeued_checkpoint"]

_SAID = {
    signal.SIGINT: "Ctrl-C: the run saves a checkpoint after this step and ends; again to end at once",
    signal.SIGTERM: "SIGTERM: the run saves a checkpoint after this step and ends",
}


class GracefulStop(L.Callback):
    """Ends a run at the end of the step in which a signal came.

    SIGINT ends it by `KeyboardInterrupt`, SIGTERM by Lightning's `SIGTERMException`; Slurm's requeue signal saves, has the job
    queued again, and ends the fit as interrupted: the requeued job continues the run (`requeued_checkpoint`).

    Args:
        recorder: of the run.
        checkpoint: saves it.
    """

    def __init__(self, recorder: RunRecorder, checkpoint: RunCheckpoint) -> None:
        self._recorder, self._checkpoint = recorder, checkpoint
        self._asked = 0  # the signal's number
        self._requeue: int | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the signals over; Lightning puts back what was there when the fit ends."""
        self._asked = 0
        if threading.current_thread() is not threading.main_thread():
            return
        environment = trainer._accelerator_connector.cluster_environment
        wanted = [signal.SIGINT, signal.SIGTERM]
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue = int(environment.requeue_signal or signal.SIGUSR1)
            wanted.append(signal.Signals(self._requeue))
        for number in wanted:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._asked == number:
            self._end(number)
        self._asked = number
        # Not the console's panel: its lock may be held by what the signal has interrupted.
        words = _SAID.get(signal.Signals(number), f"signal {number}: the run saves a checkpoint after this step")
        os.write(2, f"\n{words}\n".encode())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """When any rank was asked to, save and end."""
        numbers = ranks.all_gather_tensor(torch.tensor(self._asked, device=pl_module.device))
        number = max(int(n) for n in numbers)
        if not number:
            return
        path = self._checkpoint.save_newest(trainer)
        if number == self._requeue:
            self._queue_again(trainer, path)
            return
        self._end(number)

    def _end(self, number: int) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SIGTERMException

    def _queue_again(self, trainer: L.Trainer, checkpoint: Path) -> None:
        """Leave word of where to continue, and ask Slurm for another turn."""
        if trainer.is_global_zero:
            job = _slurm_job()
            note = _note(checkpoint.parent.parent.parent, job)
            note.write_text(json.dumps({"checkpoint": str(checkpoint)}))
            done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
            said = "queued again" if done.returncode == 0 else f"not queued again: {done.stderr.strip()[:200]}"
            self._recorder.say(f"Slurm's job {job} is {said}; the run continues from {checkpoint}")
        self._recorder.end_as = ("interrupted", "requeued by Slurm")
        trainer.fit_loop.epoch_loop.min_steps, trainer.fit_loop.min_epochs = None, 0  # they would hold a stop up
        trainer.should_stop = True


def requeued_checkpoint(root: Path) -> str | None:
    """Where a job that Slurm has queued again goes on; None for any other start.

    Args:
        root: the folder of run directories.
    """
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0) < 1:
        return None
    note = _note(root.absolute(), _slurm_job())
    if not note.is_file():
        return None
    path = str(json.loads(note.read_text())["checkpoint"])
    return path if Path(path).exists() else None


def _slurm_job() -> str:
    """The job's id, of an array its task's."""
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    return os.environ.get("SLURM_JOB_ID", "")


def _note(root: Path, job: str) -> Path:
    return root / f".slurm-{job}.json"
