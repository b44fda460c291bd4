"""What two runs do not share: environment, then data, then reward code, then code, config and weights, then the results.

Results are put down to a level only when every other level is equal: with two levels that differ nobody can say which of them
made the difference, and the one that comes first has to be made equal first. Initial weights that differ because the settings
name another model or seed are the settings' doing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from grpo_lightning.registry.plugin import snapshot_plugin
from grpo_lightning.sinks import Journal, RunDirectory

__all__ = [
    "LEVELS",
    "Comparison",
    "LevelResult",
    "Result",
    "Side",
    "compare_runs",
    "side_of_directory",
    "side_of_metrics",
]

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
_SETS_WEIGHTS = (
    "model.model",
    "model.gguf_file",
    "model.dtype",
    "model.lora",
    "model.seed",
    "seed_everything",
    "seeds.",
)
_PAGES = ("1_overview/", "2_health/", "3_diagnosis/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """What is known of a run that is compared."""

    run_id: str
    snapshot: Path
    numbers: Mapping[str, float]  # what came out
    changes: Sequence[Mapping[str, Any]] = field(default_factory=tuple)  # of what it is made of, while it ran


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
    def unequal(self) -> list[LevelResult]:
        """Levels that differ, or of which it is not known, in order of suspicion; not what another explains."""
        unequal = [level for level in self.levels if level.verdict != "equal"]
        explained = any(_sets_weights(level) for level in unequal)
        return [
            level for level in unequal if not (level.level == "weights" and level.verdict == "differs" and explained)
        ]

    @property
    def attributed(self) -> str | None:
        """The level that the results are put down to; None where several differ, or one is not known."""
        unequal = self.unequal
        return unequal[0].level if len(unequal) == 1 and unequal[0].verdict == "differs" else None

    @property
    def stopped(self) -> str:
        """Why the results can't be put down to anything; empty when they can, or when all levels are equal."""
        unequal = self.unequal
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


def compare_runs(a: Side, b: Side) -> Comparison:
    """Hold two runs against each other.

    Raises:
        UsageError: the snapshot plug-in is not installed.
    """
    names = dict.fromkeys([*a.numbers, *b.numbers])
    results = [Result(name=name, a=a.numbers.get(name), b=b.numbers.get(name)) for name in names]
    return Comparison(a=a.run_id, b=b.run_id, levels=_levels(a, b), results=results)


def _levels(a: Side, b: Side) -> list[LevelResult]:
    plugin = snapshot_plugin()
    try:
        found = [d.to_json() for d in plugin.diff(a.snapshot, b.snapshot)]
        found += _missing_parts(a, b)
    except (plugin.SnapshotError, plugin.UsageError) as error:
        gone = {"name": "snapshot", "kind": "unknown", "a": "", "b": "", "detail": str(error)}
        return [LevelResult(level=level, verdict="unknown", differences=[gone | {"level": level}]) for level in LEVELS]
    found += _changed_on_the_way(a, b)
    kept = [d for d in found if not _of_records(d)]
    of_all = [d for d in kept if d["level"] not in LEVELS]  # about a snapshot as a whole
    return [_level(level, [*of_all, *(d for d in kept if d["level"] == level)]) for level in LEVELS]


def _missing_parts(a: Side, b: Side) -> list[dict[str, Any]]:
    """Parts that neither snapshot holds are not equal, but unknown."""
    manifest = import_module("run_snapshot.manifest")
    parts = import_module("run_snapshot.differing").PARTS
    sides = [manifest.load_snapshot(run.snapshot) for run in (a, b)]
    return [
        {"level": level, "name": part, "kind": "unknown", "a": "not captured", "b": "not captured", "detail": ""}
        for level, part in parts.items()
        if level != "weights" and not any(side.has(part) for side in sides)
    ]


def _changed_on_the_way(a: Side, b: Side) -> list[dict[str, Any]]:
    """A run whose data changed while it ran is not a run on either: its snapshot says what it ended with."""
    return [
        {
            "level": change["level"],
            "name": f"changed at step {change['step']}",
            "kind": "changed",
            "a": "changed" if side is a else "",
            "b": "changed" if side is b else "",
            "detail": change["message"],
        }
        for side in (a, b)
        for change in side.changes
    ]


def _of_records(difference: Mapping[str, Any]) -> bool:
    return difference["level"] == "config" and str(difference["name"]).startswith(_OF_RECORDS)


def _sets_weights(level: LevelResult) -> bool:
    """Whether the settings that differ are such as choose the weights that a run starts from."""
    names = [str(difference["name"]) for difference in level.differences]
    return level.level == "config" and any(name.startswith(_SETS_WEIGHTS) for name in names)


def _level(level: str, differences: list[dict[str, Any]]) -> LevelResult:
    if not differences:
        return LevelResult(level=level, verdict="equal", differences=())
    unknown = all(d["kind"] == "unknown" for d in differences)
    return LevelResult(level=level, verdict="unknown" if unknown else "differs", differences=differences)


# ---- what came out


def side_of_directory(directory: RunDirectory) -> Side:
    """A run by its directory."""
    with directory.journal(read_only=True) as journal:
        return Side(
            run_id=directory.run_id,
            snapshot=directory.snapshot,
            numbers=_numbers(journal),
            changes=_changes(journal),
        )


def side_of_metrics(run_id: str, snapshot: Path, rows: Sequence[tuple[int, Mapping[str, float]]]) -> Side:
    """A run that has no directory here, by its metrics: (step, values by metric) in order."""
    series: dict[str, list[float]] = {}
    for _, values in rows:
        for key, value in values.items():
            name = next((key.removeprefix(page) for page in _PAGES if key.startswith(page)), key)
            series.setdefault(name, []).append(value)
    steps = float(rows[-1][0]) if rows else None
    evaluated = {name: values for name, values in series.items() if name.startswith("eval_")}
    return Side(run_id=run_id, snapshot=snapshot, numbers=_summary(steps, evaluated, series))


def _numbers(journal: Journal) -> dict[str, float]:
    """What came out: steps, evaluations, the last steps' signals, alerts by rule."""
    latest = journal.latest()
    evaluated: dict[str, list[float]] = {}
    for event in journal.evaluations():
        for name, value in event.payload.items():
            if isinstance(value, int | float):
                evaluated.setdefault(name, []).append(float(value))
    series = {name: journal.series(name).values for name in _SIGNALS}
    out = _summary(float(latest.step) if latest else None, evaluated, series)
    for alert in journal.alerts():
        name = f"alerts: {alert.event.name}"
        out[name] = out.get(name, 0.0) + 1.0
    return out


def _summary(
    steps: float | None, evaluated: Mapping[str, Sequence[float]], series: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    out = {"steps": steps} if steps is not None else {}
    for name, values in evaluated.items():
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            out[f"{name}, last"] = finite[-1]
        if finite and name == "eval_accuracy":
            out[f"{name}, best"] = max(finite)
    for name in _SIGNALS:
        last = [value for value in series.get(name, ())[-_LAST:] if math.isfinite(value)]
        if last:
            out[f"{name}, last {_LAST} steps"] = fmean(last)
    return out


def _changes(journal: Journal) -> list[dict[str, Any]]:
    """What changed under a run, accepted or not: level, step, in words."""
    found = []
    for event in journal.events("note"):
        told = event.payload.get("levels") if event.name == "drift_accepted" else None
        if event.name == "drift":
            told = dict.fromkeys(str(finding).split(":")[0] for finding in event.payload.get("findings", ()))
        for level in told or ():
            if level in LEVELS:
                found.append({"level": level, "step": event.step, "message": str(event.payload.get("message", ""))})
    return found
