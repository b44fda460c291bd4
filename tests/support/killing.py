"""Runs of the command line that are killed and continued, from one process that has imported everything once.

    python -m support.killing JOBS.json

A job is a folder, the arguments of `fit`, how many ranks, and a list of bombs: each attempt but the last is killed by SIGKILL
(or gets another signal) at its bomb, and the next goes on from the run's `last.ckpt` as a user would, or begins anew where there
is none. With `same`, every attempt has the same arguments, as a scheduler starts a job again; with `env` it has these variables,
where `{attempt}` is its number. The result of each attempt is written to `attempts.json` in the job's folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Bomb = dict[str, Any]

_PATIENCE = 300.0  # seconds for an attempt
_ALONE = 120.0  # seconds in which a rank must notice that the other one is dead


def run_jobs(jobs: list[Job], *, at_once: int = 2) -> None:
    """Every job, `at_once` of them side by side."""
    _import_everything()
    waiting, running = list(jobs), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                _carry_out(job)
                os._exit(0)
            running[pid] = job
        pid, _ = os.wait()
        running.pop(pid, None)


def _import_everything() -> None:
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import grpo_lightning.callbacks
    import grpo_lightning.cli.fit
    import grpo_lightning.training.data
    import grpo_lightning.training.module  # noqa: F401

    torch.set_num_threads(1)


def _carry_out(job: Job) -> None:
    """The attempts of one job, each in processes of its own."""
    folder, attempts = Path(job["folder"]), []
    for number, bomb in enumerate([*job["bombs"], None]):
        checkpoint = next(iter(sorted(folder.glob("runs/*/checkpoints/last.ckpt"))), None)
        again = checkpoint is not None and not job.get("same")
        argv = ["fit", "--ckpt_path", str(checkpoint)] if again else ["fit", *job["args"]]
        os.environ |= {name: value.format(attempt=number) for name, value in job.get("env", {}).items()}
        codes = _attempt(folder, argv, bomb, ranks=job["ranks"], number=number)
        attempts.append({"argv": argv, "bomb": bomb, "codes": codes})
        if all(code == 0 for code in codes) and not job.get("same"):
            break  # the bomb came too late, or there was none
    (folder / "attempts.json").write_text(json.dumps(attempts, indent=1))


def _attempt(folder: Path, argv: list[str], bomb: Bomb | None, *, ranks: int, number: int) -> list[int | None]:
    """The exit codes of the ranks; negative for a signal, None for one that had to be killed from outside."""
    port = str(29_000 + os.getpid() % 20_000)
    pids = [_start(folder, argv, bomb, rank=rank, ranks=ranks, port=port, number=number) for rank in range(ranks)]
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + _PATIENCE
    kill_at = time.monotonic() + bomb["seconds"] if bomb and bomb["at"] == "time" else None
    while len(codes) < ranks:
        for pid in pids:
            if pid not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(done[1])
                deadline = min(deadline, time.monotonic() + _ALONE)
        now = time.monotonic()
        if kill_at is not None and now >= kill_at:
            kill_at = None
            for pid in pids:
                os.kill(pid, signal.SIGKILL) if pid not in codes else None
        if now > deadline:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = None
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def _start(folder: Path, argv: list[str], bomb: Bomb | None, *, rank: int, ranks: int, port: str, number: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
        os.chdir(folder)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder / 'store.db'}"
        if ranks > 1:
            os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        log = os.open(folder / f"attempt-{number}-rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if bomb is not None and bomb.get("rank", rank) == rank and bomb["at"] != "time":
            for each in (bomb, *bomb.get("and", [])):
                _bomb_signal[each["at"]] = each.get("signal", signal.SIGKILL)
                BOMBS[each["at"]](each["count"])
        from grpo_lightning.cli.main import main

        code = main(argv)
    except BaseException:  # noqa: BLE001 - whatever it is, it belongs in the log
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ---- where a process dies


_bomb_signal: dict[str, int] = {}


def _die(at: str) -> None:
    os.kill(os.getpid(), _bomb_signal[at])


def _at_call(at: str, owner: Any, name: str, *, before: bool = True) -> Callable[[int], None]:
    """Die at the n-th call of a function, before or after it."""

    def plant(count: int) -> None:
        inner, calls = getattr(owner(), name), iter(range(1, 10**9))

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            last = next(calls) == count
            if last and before:
                _die(at)
            result = inner(*args, **kwargs)
            if last and not before:
                _die(at)
            return result

        setattr(owner(), name, wrapped)

    return plant


def _half_a_checkpoint(count: int) -> None:
    """Die when half of the n-th checkpoint is on the disk."""
    import io

    import torch

    from grpo_lightning.training import checkpoint_io

    inner, calls = checkpoint_io._write, iter(range(1, 10**9))

    def wrapped(checkpoint: dict[str, Any], path: Path) -> None:
        if next(calls) < count:
            inner(checkpoint, path)
            return
        whole = io.BytesIO()
        torch.save(checkpoint, whole)
        path.write_bytes(whole.getvalue()[: whole.tell() // 2])
        _die("half a checkpoint is written")

    checkpoint_io._write = wrapped


def _module() -> Any:
    from grpo_lightning.training.module import GRPOModule

    return GRPOModule


def _journal() -> Any:
    from grpo_lightning.sinks import Journal

    return Journal


def _checkpoint_io() -> Any:
    from grpo_lightning.training import checkpoint_io

    return checkpoint_io


def _checkpoint() -> Any:
    from grpo_lightning.callbacks import checkpoint

    return checkpoint


def _evaluator() -> Any:
    from grpo_lightning.training.evaluation import GreedyEvaluator

    return GreedyEvaluator


def _fit_loop() -> Any:
    from lightning.pytorch.loops.fit_loop import _FitLoop

    return _FitLoop


def _probe() -> Any:
    from grpo_lightning.callbacks.probe import Probe

    return Probe


_CALLS: dict[str, tuple[Any, str, bool]] = {
    "a step begins": (_module, "training_step", True),
    "a backward pass is done": (_module, "manual_backward", False),
    "an update is done": (_module, "_after_update", True),
    "a checkpoint is not yet renamed": (_checkpoint_io, "_write", False),
    "a checkpoint has no health file": (_checkpoint, "_write_health", True),
    "a step is measured": (_journal, "write_step", True),
    "a step is recorded": (_journal, "write_step", False),
    "an evaluation begins": (_evaluator, "add", True),
    "an epoch ends": (_fit_loop, "on_advance_end", True),
    "a probe begins": (_probe, "measure", True),
}
BOMBS: dict[str, Callable[[int], None]] = {
    "half a checkpoint is written": _half_a_checkpoint,
    **{at: _at_call(at, owner, name, before=before) for at, (owner, name, before) in _CALLS.items()},
}


if __name__ == "__main__":
    run_jobs(json.loads(Path(sys.argv[1]).read_text()))
