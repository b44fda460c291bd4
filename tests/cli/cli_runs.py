"""Run directories and logs of known content, for tests of the commands that read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from grpo_lightning.callbacks.health import plain
from grpo_lightning.health import Judge, Rule, Step, shipped_rules
from grpo_lightning.sinks import EventRow, RunDirectory, StepRow

Columns = Mapping[str, Sequence[float]]


def collapsing(collapse_at: int = 60, steps: int = 90) -> dict[str, list[float]]:
    """The spread of the rewards is gone from a step on, without a better reward."""
    gone = [i >= collapse_at for i in range(steps)]
    wave = [0.01 * math.sin(i) for i in range(steps)]
    return {
        "reward_mean": [0.5 + w for w in wave],
        "reward_std": [0.0 if g else 0.45 + w for g, w in zip(gone, wave, strict=True)],
        "group_reward_std": [0.0 if g else 0.4 + w for g, w in zip(gone, wave, strict=True)],
        "dead_group_fraction": [1.0 if g else 0.25 + 0.125 * (i % 3) for i, g in enumerate(gone)],
        "kl": [0.01 + 0.1 * abs(w) for w in wave],
        "entropy": [1.0 + w for w in wave],
    }


def calm(steps: int = 90) -> dict[str, list[float]]:
    """Nothing happens."""
    return collapsing(collapse_at=10**9, steps=steps)


def write_log(path: Path, columns: Columns, every: int = 1) -> Path:
    """JSON lines, a row each `every` steps: their mean, as trainers print it."""
    count = len(next(iter(columns.values())))
    rows = [
        {"step": i} | {n: sum(c[i - every : i]) / every for n, c in columns.items()}
        for i in range(every, count + 1, every)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_run(
    root: Path, run_id: str, columns: Columns, *, name: str = "", prompts: int = 8, rules: Sequence[Rule] | None = None
) -> RunDirectory:
    """A run that was judged as it went; its alerts are in the journal."""
    directory = RunDirectory.create(root, run_id)
    directory.config.write_text(
        yaml.safe_dump({"data": {"prompts_per_step": prompts}, "model": {"num_minibatches": 1}})
    )
    judge = Judge(list(rules) if rules is not None else shipped_rules())
    with directory.journal() as journal:
        journal.set_meta(name=name or run_id, description="what for")
        segment = journal.start_segment(from_step=0)
        for i in range(len(next(iter(columns.values())))):
            values = {n: c[i] for n, c in columns.items()}
            journal.write_step(StepRow(run_id=run_id, segment=segment, step=i + 1, time=1000.0 + i, values=values))
            for change in judge.observe(Step(step=i + 1, values=values, groups=float(prompts))):
                alert = change.alert
                journal.write_event(
                    EventRow(
                        run_id=run_id,
                        segment=segment,
                        step=change.step,
                        time=1000.0 + i,
                        kind="alert",
                        name=alert.rule,
                        payload=plain(alert) | {"state": change.change},
                        id=alert.id,
                    )
                )
        journal.end_segment("paused" if judge.alerts else "finished")
    return directory


def alerts_of(directory: RunDirectory) -> list[str]:
    """Ids in the journal, in order."""
    with directory.journal(read_only=True) as journal:
        return [row.event.key for row in journal.alerts(all_segments=True)]
