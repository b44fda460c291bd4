"""Runs and logs as steps to be judged: a run directory, a run by name or id, or another trainer's log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from grpo_lightning.errors import UsageError
from grpo_lightning.health import Step
from grpo_lightning.logs import LogReader, LogStep, open_log
from grpo_lightning.sinks import Journal, RunDirectory

__all__ = ["Source", "open_source", "run_directory", "steps_of_journal", "steps_of_log"]


@dataclass(kw_only=True, slots=True)
class Source:
    """Steps, and what is to be said about them. Of a log, the facts are complete once the steps are read."""

    name: str
    steps: Iterable[Step]
    log: LogReader | None = None
    path: Path | None = None  # a run's directory
    notes: list[str] = field(default_factory=list)

    @property
    def unknown_keys(self) -> list[dict[str, str | None]]:
        """Keys that no table knows, each with what it might be."""
        keys = self.log.unknown_keys if self.log is not None else {}
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

    Raises:
        UsageError: nothing of that name, or a file that is no log.
    """
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
        raise UsageError(f"The run {found.name} ({found.run_id}) has no run directory on this machine.")
    return Source(name=found.name, steps=steps_of_journal(found.path / "journal.sqlite"), path=found.path)


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
