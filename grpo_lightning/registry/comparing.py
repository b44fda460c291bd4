"""What two runs do not share: environment, then data, then reward code, then code, config and weights, then the results.

Results are put down to a level only when every other level is equal: with two levels that differ nobody can say which of them
made the difference, and the one that comes first has to be made equal first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from statistics import fmean
from typing import Any, Literal

from grpo_lightning.errors import UsageError
from grpo_lightning.sinks import Journal, RunDirectory

__all__ = ["LEVELS", "Comparison", "LevelResult", "Result", "compare_runs"]

LEVELS = ("environment", "data", "reward", "code", "config", "weights")
_OF_RECORDS = (
    "run.",
    "seeds.run.",
    "snapshot.",
    "checkpoint.",
    "ckpt_path",
)  # what a run is called and where it is kept
_SIGNALS = (
    "reward_mean", "group_reward_std", "dead_group_fraction", "advantage_std", "kl", "entropy", "response_length_mean",
    "truncated_fraction", "grad_norm",
)  # fmt: skip
_LAST = 10  # steps that a final value is the mean of


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelResult:
    """One level of two snapshots."""

    level: str
    verdict: Literal["equal", "differs", "unknown"]
    differences: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One number of both runs; None where a run has none."""

    name: str
    a: float | None
    b: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two runs."""

    a: str  # run ids
    b: str
    levels: Sequence[LevelResult]
    results: Sequence[Result]

    @property
    def unequal(self) -> list[str]:
        """Levels that differ, or of which it is not known, in order of suspicion."""
        return [level.level for level in self.levels if level.verdict != "equal"]

    @property
    def attributed(self) -> str | None:
        """The level that the results are put down to; None where several differ, or one is not known."""
        unequal = [level for level in self.levels if level.verdict != "equal"]
        return unequal[0].level if len(unequal) == 1 and unequal[0].verdict == "differs" else None

    @property
    def stopped(self) -> str:
        """Why the results can't be put down to anything; empty when they can, or when all levels are equal."""
        unequal = [level for level in self.levels if level.verdict != "equal"]
        if not unequal or self.attributed:
            return ""
        first = unequal[0]
        if len(unequal) == 1:
            return f"whether the {first.level} is the same is not known: capture both snapshots whole first"
        others = ", ".join(level.level for level in unequal[1:])
        word = "differs" if first.verdict == "differs" else "is not known to be the same"
        return f"the {first.level} {word}, and so it is with {others}: make the {first.level} equal first"

    def to_dict(self) -> dict[str, Any]:
        """As plain types."""
        return {
            "a": self.a,
            "b": self.b,
            "levels": [
                {"level": x.level, "verdict": x.verdict, "differences": list(x.differences)} for x in self.levels
            ],
            "attributed": self.attributed,
            "stopped": self.stopped,
            "results": [{"name": r.name, "a": r.a, "b": r.b} for r in self.results],
        }


def compare_runs(a: RunDirectory, b: RunDirectory) -> Comparison:
    """Hold two runs against each other.

    Raises:
        UsageError: the snapshot plug-in is not installed.
    """
    if find_spec("run_snapshot") is None:
        raise UsageError("Comparing runs needs the snapshot plug-in: pip install lightning-run-snapshot.")
    levels = _levels(a, b)
    with a.journal(read_only=True) as one, b.journal(read_only=True) as two:
        first, second = _numbers(one), _numbers(two)
    names = dict.fromkeys([*first, *second])
    results = [Result(name=name, a=first.get(name), b=second.get(name)) for name in names]
    return Comparison(a=a.run_id, b=b.run_id, levels=levels, results=results)


def _levels(a: RunDirectory, b: RunDirectory) -> list[LevelResult]:
    plugin = import_module("run_snapshot")
    try:
        found = [d.to_json() for d in plugin.diff(a.snapshot, b.snapshot)]
    except (plugin.SnapshotError, plugin.UsageError) as error:
        gone = {"name": "snapshot", "kind": "unknown", "a": "", "b": "", "detail": str(error)}
        return [LevelResult(level=level, verdict="unknown", differences=[gone | {"level": level}]) for level in LEVELS]
    found += _missing_parts(a, b)
    kept = [d for d in found if not _of_records(d)]
    return [_level(level, [d for d in kept if d["level"] == level]) for level in LEVELS]


def _missing_parts(a: RunDirectory, b: RunDirectory) -> list[dict[str, Any]]:
    """Parts that neither snapshot holds are not equal, but unknown."""
    manifest = import_module("run_snapshot.manifest")
    parts = import_module("run_snapshot.differing").PARTS
    sides = [manifest.load_snapshot(run.snapshot) for run in (a, b)]
    return [
        {"level": level, "name": part, "kind": "unknown", "a": "not captured", "b": "not captured", "detail": ""}
        for level, part in parts.items()
        if level != "weights" and not any(side.has(part) for side in sides)
    ]


def _of_records(difference: Mapping[str, Any]) -> bool:
    return difference["level"] == "config" and str(difference["name"]).startswith(_OF_RECORDS)


def _level(level: str, differences: list[dict[str, Any]]) -> LevelResult:
    if not differences:
        return LevelResult(level=level, verdict="equal", differences=())
    unknown = all(d["kind"] == "unknown" for d in differences)
    return LevelResult(level=level, verdict="unknown" if unknown else "differs", differences=differences)


def _numbers(journal: Journal) -> dict[str, float]:
    """What came out: steps, evaluations, the last steps' signals, alerts by rule."""
    latest = journal.latest()
    out = {"steps": float(latest.step)} if latest else {}
    evaluations = [event.payload for event in journal.evaluations()]
    accuracies = [float(e["eval_accuracy"]) for e in evaluations if "eval_accuracy" in e]
    if accuracies:
        out |= {"eval_accuracy, last": accuracies[-1], "eval_accuracy, best": max(accuracies)}
    for name in _SIGNALS:
        values = [v for v in journal.series(name).values[-_LAST:] if math.isfinite(v)]
        if values:
            out[f"{name}, last {_LAST} steps"] = fmean(values)
    for alert in journal.alerts():
        name = f"alerts: {alert.event.name}"
        out[name] = out.get(name, 0.0) + 1.0
    return out
