"""Runs and logs as steps to be judged: a run directory, a run by name or id, or another trainer's log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from grpo_lightning.errors import UsageError
from grpo_lightning.health import Step
from grpo_lightning.logs import LogReader, LogStep, open_log
from grpo_lightning.logs.names import Translator, trainer_of
from grpo_lightning.logs.records import Row, Tally
from grpo_lightning.sinks import Journal, RunDirectory

__all__ = ["Source", "open_source", "run_directory", "steps_of_journal", "steps_of_log"]


_OUR_PAGES = ("1_overview/", "2_health/", "3_diagnosis/")
_MLFLOW_SCHEMES = ("mlflow:", "runs:/")


@dataclass(kw_only=True, slots=True)
class Source:
    """Steps, and what is to be said about them. Of a log, the facts are complete once the steps are read."""

    name: str
    steps: Iterable[Step]
    log: LogReader | None = None
    path: Path | None = None  # a run's directory
    notes: list[str] = field(default_factory=list)
    translator: Translator | None = None  # of a run that only MLflow has

    @property
    def unknown_keys(self) -> list[dict[str, str | None]]:
        """Keys that no table knows, each with what it might be."""
        reader = self.log.unknown_keys if self.log is not None else {}
        keys = self.translator.unknown if self.translator is not None else reader
        return [{"key": key, "perhaps": near} for key, near in keys.items()]

    @property
    def unread(self) -> int:
        """Lines, rows and values that could not be read."""
        return self.log.unread if self.log is not None else 0


def open_source(
    text: str,
    *,
    format: str | None = None,
    logging_steps: int | None = None,
    run: int | None = None,
    root: str = "runs",
    experiment: str | None = None,
) -> Source:
    """What `text` names: a log's file, a run directory, a run id, its unique prefix or its name.

    A run that has no directory here, another trainer's say, is read from MLflow; `mlflow:RUN` and `runs:/ID` ask for that.

    Raises:
        UsageError: nothing of that name, or a file that is no log.
    """
    for scheme in _MLFLOW_SCHEMES:
        if text.startswith(scheme):
            return _open_mlflow(text.removeprefix(scheme).split("/")[0], root, experiment)
    path = Path(text).expanduser()
    if path.name == "journal.sqlite" and path.is_file():
        path = path.parent
    if path.is_file():
        log = open_log(path, format=format, logging_steps=logging_steps, run=run)
        return Source(name=text, steps=steps_of_log(log), log=log, notes=log.notes)
    return _open_run(str(path) if path.is_dir() else text, root, experiment)


def _open_run(text: str, root: str, experiment: str | None) -> Source:
    from grpo_lightning.tracking import resolve_run

    if Path(text).is_dir() and not (Path(text) / "journal.sqlite").is_file():
        raise UsageError(f"{text} is a folder without a journal.sqlite: name a run directory, a run or a log's file.")
    found = resolve_run(text, root=root, experiment=experiment)
    if found.path is None:
        return _of_metrics(found.name, found.run_id)
    return Source(name=found.name, steps=steps_of_journal(found.path / "journal.sqlite"), path=found.path)


def _open_mlflow(text: str, root: str, experiment: str | None) -> Source:
    from grpo_lightning.tracking import resolve_run

    found = resolve_run(text, root=root, experiment=experiment)
    return _of_metrics(found.name, found.run_id)


def _of_metrics(name: str, run_id: str) -> Source:
    """A run's steps from MLflow, by the names of whichever trainer wrote them."""
    from grpo_lightning.tracking import metric_rows

    rows = metric_rows(run_id)
    if not rows:
        raise UsageError(f"The run {name} ({run_id}) has no metrics in MLflow.")
    keys = dict.fromkeys(key for _, values in rows for key in values)
    ours = any(key.startswith(_OUR_PAGES) for key in keys)
    trainer = "grpo-lightning" if ours else trainer_of(keys)
    translator = Translator(trainer)
    note = f"read from MLflow, by {trainer}'s names"
    return Source(name=name, steps=_translated(rows, translator), notes=[note], translator=translator)


def _translated(rows: list[tuple[int, dict[str, float]]], translator: Translator) -> Iterator[Step]:
    """Training rows as steps; an evaluation is judged with the step after it, or with its own."""
    tally, last, waiting = Tally(), 0, dict[str, float]()
    for step, given in rows:
        parsed = translator.parse(Row(given, step), tally)
        if parsed is None:
            continue
        if parsed.kind == "eval":
            waiting |= parsed.values
            continue
        span = float(max(step - last, 1)) if last else 1.0
        yield Step(step=step, values=waiting | parsed.values, span=span)
        last, waiting = step, {}


def run_directory(run: str, root: str = "runs") -> RunDirectory:
    """The directory of the run that `run` names: a directory, a run id, its unique prefix or its name.

    Raises:
        UsageError: nothing of that name, or its directory is not on this machine.
    """
    for path in (Path(run).expanduser(), Path(root) / run):
        if (path / "journal.sqlite").is_file():
            return RunDirectory.open(path)
    from grpo_lightning.tracking import resolve_run

    found = resolve_run(run, root=root)
    if found.path is None:
        raise UsageError(f"The run {found.name} ({found.run_id}) has no run directory on this machine.")
    return RunDirectory.open(found.path)


def steps_of_log(log: LogReader) -> Iterator[Step]:
    """A log's rows, each standing for the optimizer steps since the row before. Repeated rows are measured once."""
    last: int | None = None
    before: LogStep | None = None
    skipped = 0
    for row in log:
        if log.repeats > 1 and before is not None and row.values == before.values and skipped < log.repeats - 1:
            skipped += 1
            continue
        before, skipped = row, 0
        span = log.interval if last is None else float(row.step - last)
        last = row.step
        span = max(span, 1e-6)
        groups = row.groups * span if row.groups is not None else None
        yield Step(step=row.step, values=row.values, span=span, groups=groups)


def steps_of_journal(path: Path) -> Iterator[Step]:
    """A run's steps, one value per step; an evaluation is judged with the step after it, as it was live."""
    groups = _groups_per_step(path.parent / "config.yaml")
    with Journal(path, read_only=True) as journal:
        evaluations = sorted((event.step, dict(event.payload)) for event in journal.evaluations())
        waiting = 0
        last = 0
        for row in journal.rows():
            values = dict(row.values)
            while waiting < len(evaluations) and evaluations[waiting][0] < row.step:
                values |= {k: float(v) for k, v in evaluations[waiting][1].items()}
                waiting += 1
            span = float(max(row.step - last, 1)) if last else 1.0
            yield Step(step=row.step, values=values, span=span, groups=groups * span if groups is not None else None)
            last = row.step


def _groups_per_step(config: Path) -> float | None:
    """Prompts in an optimizer step, as the run's settings have it: what it was judged by while it ran."""
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
        return float(settings["data"]["prompts_per_step"]) / float(settings["model"].get("num_minibatches") or 1)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError, ArithmeticError):
        return None
