"""Runs that are killed and continued end as runs that never were: weights, signals and alerts, bit for bit.

Each job is `fit` as a user types it, killed by SIGKILL at a moment of its own and continued from `last.ckpt`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.killing import BOMBS

from grpo_lightning.sinks import RunDirectory

STEPS = 18
RULES = {
    "level": {"signal": "reward_mean", "above": 0.0, "for_steps": 7},
    "recent": {"signal": "entropy", "trend_below": 0.0, "over_steps": 6},
    "spread": {"signal": "group_reward_std", "above": 0.01, "for_steps": 11},
}
COMMON = [
    "--data.limit_train=128",
    "--data.limit_val=32",
    f"--trainer.max_steps={STEPS}",
    "--trainer.val_check_interval=5",
    "--checkpoint.every_n_steps=3",
    "--run.probe.every_n_steps=4",
    "--run.probe.prompts=8",
    "--run.experiment=kill",
]
VARIANTS: dict[str, list[str]] = {
    "plain": [],
    "windows": ["--model.num_iterations=2", "--model.num_minibatches=2"],
    "accumulation": ["--model.micro_batch_groups=8", "--model.num_iterations=2"],
    "kl": ["--model.kl.use=loss", "--model.kl.coef=0.05", "--model.kl.adaptive_bound=0.001"],
    "two ranks": ["--trainer.strategy=ddp", "--trainer.devices=2", "--model.num_iterations=2"],
}
ALERT_FACTS = ("severity", "onset_step", "value", "bound", "summary")
TIMED = ("_seconds", "tokens_per_second", "_per_hour")  # clocks, not training


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What is left of a run."""

    signals: dict[int, dict[str, str]]  # by step, bit for bit
    alerts: list[tuple[Any, ...]]
    weights: dict[str, torch.Tensor]
    optimizer: str
    evaluations: dict[int, dict[str, str]]


class Runs:
    """Carries jobs out, and compares each with the uninterrupted run of its variant."""

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder, self.template, self.jobs = folder, template, list[dict[str, Any]]()

    def add(self, name: str, variant: str, *bombs: dict[str, Any], **settings: Any) -> None:
        """One job more."""
        folder = self.folder / name
        folder.mkdir()
        shutil.copy(self.template, folder / "store.db")
        rules = [_rule(name, settings) for name, settings in RULES.items()]
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        (folder / "runbook.md").write_text("# what to do\n")
        self.jobs.append(
            {
                "folder": str(folder),
                "args": [*COMMON, *VARIANTS[variant], f"--health.rules=[{folder / 'rules.yaml'}]"],
                "ranks": 2 if variant == "two ranks" else 1,
                "bombs": list(bombs),
                "variant": variant,
                **settings,
            }
        )

    def carry_out(self, seconds: int) -> None:
        """All of them; each variant's uninterrupted run besides."""
        for variant in dict.fromkeys(job["variant"] for job in self.jobs):
            self.add(f"whole {variant}", variant)
        plan = self.folder / "jobs.json"
        plan.write_text(json.dumps(self.jobs))
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        }
        command = [sys.executable, "-m", "support.killing", str(plan)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds, check=False)
        assert done.returncode == 0, done.stderr[-3000:]


def _rule(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    words = {
        "action": "notify",
        "severity": "warning",
        "cause": "algorithm",
        "summary": "seen",
        "runbook": "runbook.md",
    }
    return {"name": name, **settings, **words}


def finished_run(folder: Path) -> RunDirectory:
    """The run that came to its end; those that died before their first checkpoint have none."""
    (checkpoint,) = folder.glob("runs/*/checkpoints/last.ckpt")
    return RunDirectory.open(checkpoint.parent.parent)


def outcome(folder: Path) -> Outcome:
    directory = finished_run(folder)
    with directory.journal(read_only=True) as journal:
        signals = {row.step: _exact(dict(row.values)) for row in journal.rows()}
        alerts = [
            (a.event.name, a.event.step, *(str(a.event.payload.get(k)) for k in ALERT_FACTS)) for a in journal.alerts()
        ]
        evaluations = {e.step: _exact(dict(e.payload)) for e in journal.evaluations()}
    saved = torch.load(directory.checkpoints / "last.ckpt", weights_only=True)
    assert saved["global_step"] == STEPS
    return Outcome(
        signals=signals,
        alerts=sorted(alerts),
        weights=saved["state_dict"],
        optimizer=repr([{k: _digest(v) for k, v in s.items()} for s in saved["optimizer_states"][0]["state"].values()]),
        evaluations=evaluations,
    )


def _exact(values: dict[str, Any]) -> dict[str, str]:
    return {
        name: float(value).hex()
        for name, value in values.items()
        if isinstance(value, int | float) and not any(part in name for part in TIMED)
    }


def _digest(value: Any) -> Any:
    return value.double().sum().item().hex() if isinstance(value, torch.Tensor) else value


def assert_same(found: Outcome, whole: Outcome) -> None:
    assert sorted(found.signals) == list(range(1, STEPS + 1))
    for step, values in whole.signals.items():
        differing = {n: (values.get(n), found.signals[step].get(n)) for n in values.keys() | found.signals[step].keys()}
        differing = {n: pair for n, pair in differing.items() if pair[0] != pair[1]}
        assert not differing, f"step {step}: {differing}"
    assert found.alerts == whole.alerts
    assert found.evaluations == whole.evaluations
    assert all(torch.equal(found.weights[name], value) for name, value in whole.weights.items())
    assert found.optimizer == whole.optimizer


def assert_recorded_once(folder: Path) -> None:
    """The journal has each step once a segment, MLflow each of these rows; both are closed and nothing is left behind."""
    directory = finished_run(folder)
    with directory.journal(read_only=True) as journal:
        rows = [(r.segment, r.step) for r in journal.rows(all_segments=True)]
        statuses = [segment.status for segment in journal.segments()]
        wanted = sum("group_reward_std" in r.values for r in journal.rows(all_segments=True))
    assert len(rows) == len(set(rows))
    assert statuses[-1] == "finished"
    assert "running" not in statuses
    store = sqlite3.connect(folder / "store.db")
    key = "2_health/group_reward_std"
    (sent,) = store.execute(
        "SELECT count(*) FROM metrics WHERE run_uuid = ? AND key = ?", (directory.run_id, key)
    ).fetchone()
    (status,) = store.execute("SELECT status FROM runs WHERE run_uuid = ?", (directory.run_id,)).fetchone()
    store.close()
    assert (sent, status) == (wanted, "FINISHED")
    assert [p.name for p in directory.path.rglob(".*") if ".part" in p.name] == []


def check(runs: Runs) -> None:
    """Every job ended as the uninterrupted run of its variant."""
    whole = {job["variant"]: outcome(Path(job["folder"])) for job in runs.jobs if not job["bombs"]}
    assert all(len(found.alerts) >= 2 for found in whole.values()), "the rules are there to fire"
    for job in runs.jobs:
        folder = Path(job["folder"])
        attempts = json.loads((folder / "attempts.json").read_text())
        codes = [attempt["codes"] for attempt in attempts]
        print(folder.name, codes)
        assert set(codes[-1]) == {0}, (folder.name, codes, _log(folder, len(codes) - 1))
        assert None not in [code for each in codes for code in each], (folder.name, "a rank waits for a dead one")
        assert_same(outcome(folder), whole[job["variant"]])
        assert_recorded_once(folder)


def _log(folder: Path, attempt: int) -> str:
    return "".join(p.read_text(errors="replace")[-2000:] for p in sorted(folder.glob(f"attempt-{attempt}-*.log")))


@pytest.fixture
def runs(tmp_path: Path, mlflow_template: Path) -> Runs:
    return Runs(tmp_path, mlflow_template)


def test_killed_inside_windows_and_in_the_middle_of_a_checkpoint(runs: Runs) -> None:
    runs.add("in a window", "windows", {"at": "a step begins", "count": 8})
    runs.add("in a checkpoint", "windows", {"at": "half a checkpoint is written", "count": 4})
    runs.carry_out(seconds=600)
    check(runs)
    attempts = [json.loads((Path(job["folder"]) / "attempts.json").read_text()) for job in runs.jobs if job["bombs"]]
    assert [[a["codes"] for a in each] for each in attempts] == [[[-9], [0]]] * 2, "each died once"


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_forty_runs_that_are_killed_at_any_moment(runs: Runs) -> None:
    dice = random.Random(40)
    singles = [v for v in VARIANTS if v != "two ranks"]
    at = list(BOMBS)
    for number in range(30):
        variant = singles[number % len(singles)]
        bombs = [_bomb(dice, at[number % len(at)])] if number < 2 * len(at) else [_late(dice)]
        if number % 5 == 4:
            bombs.append(_bomb(dice, dice.choice(at)))  # twice
        runs.add(f"{number} {variant}", variant, *bombs)
    for number in range(10):
        bomb = _late(dice) if number < 4 else _bomb(dice, at[number % len(at)])
        bomb = bomb if number < 8 else _bomb(dice, "a backward pass is done") | {"rank": 1}
        runs.add(f"{number} two ranks", "two ranks", bomb)
    runs.carry_out(seconds=2600)
    check(runs)
    codes = [
        [a["codes"] for a in json.loads((Path(job["folder"]) / "attempts.json").read_text())]
        for job in runs.jobs
        if job["bombs"]
    ]
    assert sum(-9 in each[0] for each in codes) >= 36, "most bombs went off"


def _bomb(dice: random.Random, at: str) -> dict[str, Any]:
    seldom = {"an evaluation begins": 3, "an epoch ends": 1, "a probe begins": 4}
    checkpoints = 6 if "checkpoint" in at else None
    return {"at": at, "count": dice.randint(1, seldom.get(at) or checkpoints or STEPS - 2)}


def _late(dice: random.Random) -> dict[str, Any]:
    return {"at": "time", "seconds": dice.uniform(0.5, 6.0)}
