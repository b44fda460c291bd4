"""Faults injected into real training of the tiny model, and healthy runs: what the judgement says, and when.

    python benchmarks/faults/run.py [--seeds 5] [--only FAULT …] [--quick] [--healthy 30]

A fault is detected by an alert of the right action at or after its onset, in a run that is quiet before. The delay is
counted in optimizer steps. A pause ends the run; a repair that the fault outlives must pause it, too.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch

sys.path.insert(0, str(Path(__file__).parent))
from injections import FAULTS as INJECTED
from injections import Fault
from surroundings import SURROUNDINGS, Project

from grpo_lightning import shipped
from grpo_lightning.callbacks import CheckpointSettings, RunSettings, SnapshotSettings, run_callbacks
from grpo_lightning.errors import GrpoError, RunPaused
from grpo_lightning.rewards import RewardSpec
from grpo_lightning.sinks import Journal
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.settings import (
    AdvantageSettings,
    KLSettings,
    OptimizerSettings,
    SamplingSettings,
)

FAULTS: dict[str, Fault] = INJECTED | SURROUNDINGS
STEPS, QUICK_STEPS = 160, 150
CHECKED_EVERY = 5  # steps between the checkpoints, and the looks at the snapshot, of a run with files of its own
HEALTHY: tuple[dict[str, Any], ...] = (
    {},
    {"group_size": 4},
    {"group_size": 16, "prompts": 16},
    {"prompts": 8},
    {"lr": 3e-5},
    {"lr": 2e-4},
    {"kl": "loss"},
    {"kl": "measure", "scale": "batch"},
    {"scale": "none"},
    {"num_minibatches": 2},
    {"temperature": 0.8},
    {"max_new_tokens": 8},
    {"loss": "dr_grpo"},
    {"loss": "dapo", "kl": "measure"},
    {"prompts": 4, "group_size": 8},
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run told."""

    alerts: list[dict[str, Any]]  # rule, step, action, severity, cause
    steps: int
    error: str
    seconds: float


def run(seed: int, steps: int, *, settings: dict[str, Any], fault: Fault | None, onset: int = 0) -> Outcome:
    """Train, judged; what was told."""
    started, error = perf_counter(), ""
    with tempfile.TemporaryDirectory() as folder:
        project = Project(Path(folder)) if fault is not None and fault.project else None
        others = []
        if project is not None:
            project.write(seed)
        if fault is not None and fault.ranks > 1:
            others = _start_others(seed, steps, settings, fault, onset, folder)
        try:
            _fit(seed, steps, settings, fault, onset, folder)
        except RunPaused:
            pass
        except GrpoError as found:
            error = f"{type(found).__name__}: {found}"
        finally:
            _end(others)
            if project is not None:
                project.leave()
        (path,) = Path(folder, "runs").glob("*/journal.sqlite")
        with Journal(path, read_only=True) as journal:
            events = [row.event for row in journal.alerts(all_segments=True)]
            latest = journal.latest()
        alerts = [
            {"rule": e.name, "step": e.payload["step"]}
            | {k: e.payload[k] for k in ("action", "severity", "cause", "onset_step")}
            for e in events
        ]
    return Outcome(alerts=alerts, steps=latest.step if latest else 0, error=error, seconds=perf_counter() - started)


def _fit(seed: int, steps: int, settings: dict[str, Any], fault: Fault | None, onset: int, folder: str) -> None:
    """Train on this rank."""
    project = Project(Path(folder)) if fault is not None and fault.project else None
    count = fault.ranks if fault is not None else 1
    L.seed_everything(seed, verbose=False)
    callbacks = run_callbacks(
        run=RunSettings(dir=str(Path(folder) / "runs"), mlflow=False, fingerprint_steps=0),
        checkpoint=CheckpointSettings(every_n_steps=CHECKED_EVERY if project is not None else 0),
        snapshot=SnapshotSettings(lock="off", weights=False) if project is not None else None,
    )
    trainer = L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        devices=count,
        strategy="ddp" if count > 1 else "auto",
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        val_check_interval=10,
        check_val_every_n_epoch=None,
        callbacks=[*([fault.inject(onset)] if fault is not None else []), *callbacks],
        default_root_dir=folder,
    )
    trainer.fit(_module(seed, settings, project), datamodule=_data(seed, settings, project))


# ---- several ranks


def _start_others(
    seed: int, steps: int, settings: dict[str, Any], fault: Fault, onset: int, folder: str
) -> list[SpawnProcess]:
    """The other ranks, as processes of their own; this one becomes rank 0."""
    name = next(name for name, known in FAULTS.items() if known is fault)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": "0", "LOCAL_RANK": "0"}
    context = multiprocessing.get_context("spawn")
    others = []
    for rank in range(1, fault.ranks):
        words = (rank, name, seed, steps, settings, onset, folder)
        others.append(context.Process(target=_as_rank, args=words, daemon=True))
        others[-1].start()
    return others


def _as_rank(rank: int, name: str, seed: int, steps: int, settings: dict[str, Any], onset: int, folder: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(RunPaused):
        _fit(seed, steps, settings, FAULTS[name], onset, folder)


def _end(others: list[SpawnProcess]) -> None:
    for process in others:
        process.join(60)
        process.kill()
    if others:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)


def _module(seed: int, settings: dict[str, Any], project: Project | None) -> GRPOModule:
    from grpo_lightning.objective import LossConfig

    return GRPOModule(
        "shipped:arithmetic",
        [RewardSpec(path="exact_match" if project is None else f"{project.reward}:right")],
        eval_rewards=[RewardSpec(path="exact_match")],
        group_size=settings.get("group_size", 8),
        num_minibatches=settings.get("num_minibatches", 1),
        sampling=SamplingSettings(
            max_new_tokens=settings.get("max_new_tokens", 6), temperature=settings.get("temperature", 1.0)
        ),
        advantages=AdvantageSettings(scale=settings.get("scale", "group")),
        loss=LossConfig(loss=settings.get("loss", "grpo")),
        kl=KLSettings(use=settings.get("kl", "measure")),
        optimizer=OptimizerSettings(lr=settings.get("lr", 1e-4), warmup_steps=5),
        seed=seed,
    )


def _data(seed: int, settings: dict[str, Any], project: Project | None) -> PromptDataModule:
    return PromptDataModule(
        shipped.expand("shipped:arithmetic/train.jsonl") if project is None else str(project.data),
        bucket=project is None,
        val=shipped.expand("shipped:arithmetic/val.jsonl"),
        model="shipped:arithmetic",
        prompts_per_step=settings.get("prompts", 16),
        source_column="source",
        val_batch_size=256,
        seed=seed,
    )


# ---- judging the judgement


def judge(fault: Fault, outcome: Outcome, onset: int) -> dict[str, Any]:
    """Detected, delay, action and cause of a fault's run."""
    early = [a for a in outcome.alerts if a["step"] < onset]
    found = [a for a in outcome.alerts if a["step"] >= onset and a["action"] in fault.actions]
    pauses = [a for a in found if a["action"] == "pause"]
    first = found[0] if found else None
    pauses = sorted(pauses, key=lambda a: (a["step"], a["onset_step"]))
    deciding = pauses[0] if pauses and fault.actions != ("skip_update",) else first
    repaired = first is not None and first["action"] == "skip_update" and fault.actions == ("skip_update",)
    right = bool(pauses) or repaired
    return {
        "early": [a["rule"] for a in early],
        "detected": first is not None and not any(a["action"] == "pause" for a in early),
        "delay": first["step"] - onset if first else None,
        "action_right": right,
        "cause_right": deciding is not None and deciding["cause"] in fault.causes,
        "rules": [f"{a['rule']}@{a['step'] - onset:+d}" for a in outcome.alerts][:6],
        "error": outcome.error,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run, print the table, and one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--healthy", type=int, default=30)
    parser.add_argument("--only", nargs="*", help="faults, by name")
    parser.add_argument("--quick", action="store_true", help="one seed, shorter runs, 6 healthy ones")
    args = parser.parse_args(argv)
    torch.set_num_threads(2)
    warnings.filterwarnings("ignore")
    seeds, steps = (1, QUICK_STEPS) if args.quick else (args.seeds, STEPS)
    names = args.only or list(FAULTS)
    results = {name: [_faulty(name, seed, steps) for seed in range(seeds)] for name in names}
    count = 0 if args.only else 6 if args.quick else args.healthy
    healthy = [_healthy(i, steps) for i in range(count)]
    _print(results, healthy)


def _faulty(name: str, seed: int, steps: int) -> dict[str, Any]:
    fault = FAULTS[name]
    onset = 50 + 7 * (seed % 5)
    with contextlib.redirect_stdout(io.StringIO()):
        outcome = run(seed, steps, settings=dict(fault.settings), fault=fault, onset=onset)
    found = judge(fault, outcome, onset)
    told = f"{' '.join(found['rules'])} {found['error']} {outcome.seconds:.0f} s"
    print(f"{name:<32} seed {seed} onset {onset} {found['delay']!s:>5} {told}", flush=True)
    return found


def _healthy(index: int, steps: int) -> Outcome:
    settings = HEALTHY[index % len(HEALTHY)]
    with contextlib.redirect_stdout(io.StringIO()):
        outcome = run(100 + index, steps, settings=settings, fault=None)
    told = [(a["rule"], a["step"]) for a in outcome.alerts]
    print(
        f"healthy {index} {settings} {outcome.steps} steps {told} {outcome.error} {outcome.seconds:.0f} s", flush=True
    )
    return outcome


def _print(results: dict[str, list[dict[str, Any]]], healthy: list[Outcome]) -> None:
    print(f"\n{'fault':<32}{'detected':>10}{'action':>8}{'cause':>8}{'median delay':>14}")
    by_fault = {}
    for name, found in results.items():
        delays = [f["delay"] for f in found if f["detected"]]
        row = {
            "injected": len(found),
            "detected": sum(f["detected"] for f in found),
            "action_right": sum(f["action_right"] for f in found),
            "cause_right": sum(f["cause_right"] for f in found),
            "median_delay_steps": statistics.median(delays) if delays else None,
        }
        by_fault[name] = row
        print(
            f"{name:<32}{row['detected']:>7}/{row['injected']:<2}{row['action_right']:>8}{row['cause_right']:>8}{row['median_delay_steps']!s:>14}"
        )
    steps = sum(o.steps for o in healthy)
    pauses = sum(any(a["action"] == "pause" for a in o.alerts) for o in healthy)
    warned = sum(a["severity"] == "warning" for o in healthy for a in o.alerts)
    rate = 1000 * warned / steps if steps else 0.0
    print(f"healthy: {len(healthy)} runs, {steps} steps, {pauses} paused, {rate:.2f} warnings per 1,000 steps")
    delays = [f["delay"] for found in results.values() for f in found if f["detected"]]
    totals = {
        key: sum(row[key] for row in by_fault.values())
        for key in ("injected", "detected", "action_right", "cause_right")
    }
    summary = totals | {
        "median_delay_steps": statistics.median(delays) if delays else None,
        "healthy_steps": steps,
        "false_pauses": pauses,
        "false_warnings_per_1000_steps": rate,
        "by_fault": by_fault,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
