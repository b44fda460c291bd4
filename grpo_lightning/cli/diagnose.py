"""`diagnose RUN`: where to look first, in the order environment, data, reward and sampling, algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpo_lightning.cli.arguments import Parser, dumps
from grpo_lightning.cli.sources import Source, open_source
from grpo_lightning.errors import UsageError
from grpo_lightning.health import Baseline, Rule, load_baseline
from grpo_lightning.health.diagnosis import Finding, Level, Number
from grpo_lightning.report import Examined, examine_log, examine_run
from grpo_lightning.report.numbers import short, times
from grpo_lightning.sinks import RunDirectory
from grpo_lightning.sinks.terminal import plain

__all__ = ["Asked", "examine", "examine_source", "run_diagnose"]

_EPILOG = """\
examples:
  grpo-lightning diagnose RUN                around the onset of its open alert
  grpo-lightning diagnose RUN --step 800     what was different after step 800
  grpo-lightning diagnose train.log --json   another trainer's log
"""
_COLOURS = {"healthy": "green", "warning": "yellow", "unhealthy": "red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What to examine, and how to read it."""

    what: str
    root: str = "runs"
    step: int | None = None
    baseline: str | None = None
    format: str | None = None
    logging_steps: int | None = None
    run: int | None = None


def run_diagnose(argv: list[str]) -> int:
    """0 when nothing is found, 1 with findings (hints don't count)."""
    parser = Parser(prog="grpo-lightning diagnose", description="Where to look first.", epilog=_EPILOG)
    parser.add_argument("run", metavar="RUN", help="a run's id, name or directory, or another trainer's log")
    parser.add_argument("--step", type=int, metavar="N", help="diagnose around this step")
    parser.add_argument("--root", default="runs", help="the folder of run directories (default: %(default)s)")
    parser.add_argument("--baseline", metavar="F", help="a ruler made by `baseline build`")
    parser.add_argument("--logging-steps", type=int, metavar="N", help="optimizer steps per row, where a log has none")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.step is not None and args.step < 1:
        raise UsageError(f"--step is {args.step}: steps are counted from 1.")
    found = examine(
        Asked(what=args.run, root=args.root, step=args.step, baseline=args.baseline, logging_steps=args.logging_steps)
    )
    if args.json:
        print(dumps(found.to_dict()))
    else:
        show(found, Console())
    return int(any(f.strength == "strong" for level in found.diagnosis.levels for f in level.findings))


def examine(asked: Asked) -> Examined:
    """A run or a log, diagnosed.

    Raises:
        UsageError: nothing of that name, nothing in it, or a step that it doesn't have.
    """
    baseline = load_baseline(asked.baseline) if asked.baseline else None
    source = open_source(
        asked.what, format=asked.format, logging_steps=asked.logging_steps, run=asked.run, root=asked.root
    )
    return examine_source(source, baseline=baseline, at_step=asked.step)


def examine_source(
    source: Source,
    *,
    baseline: Baseline | None = None,
    at_step: int | None = None,
    rules: Sequence[Rule] | None = None,
) -> Examined:
    """The same of a source that is open. `rules` are for logs; a run has its recorded alerts."""
    if source.path is not None:
        found = examine_run(RunDirectory.open(source.path), baseline=baseline, at_step=at_step)
        if not found.run:
            raise UsageError(f"{source.name} has no recorded steps yet: there is nothing to examine.")
    else:
        log = source.log
        facts = {"format": log.format, "trainer": log.trainer, "file": source.name} if log is not None else {}
        found = examine_log(
            Path(source.name).name, source.steps, rules=rules, baseline=baseline, at_step=at_step, facts=facts
        )
    if at_step is not None and at_step > found.run.steps[-1]:
        raise UsageError(f"--step is {at_step} and {source.name} ends at step {found.run.steps[-1]}.")
    return found


# ---- the terminal


def show(found: Examined, console: Console) -> None:
    """The findings, level by level, and the repair."""
    diagnosis = found.diagnosis
    console.print(Text(f"{plain(found.name)}: {found.verdict}", style=f"bold {_COLOURS[found.verdict]}"))
    if found.description:
        console.print(Text(f"  {plain(found.description)}"))
    console.print(Text(f"  {_window(found)}"))
    if diagnosis.moved:
        moved = ", ".join(f"{plain(m.number.signal)} at {m.step}" for m in diagnosis.moved[:6])
        console.print(Text(f"  moved first: {moved}"))
    if diagnosis.earlier is not None:
        console.print(
            Text(f"  {plain(diagnosis.earlier.number.signal)} had moved before: see --step {diagnosis.earlier.step}")
        )
    for place, level in enumerate(diagnosis.levels, start=1):
        _show_level(level, place, console)
    for repair in found.repairs:
        console.print(Text(f"\n{plain(repair.what)}"))
        if repair.command:
            console.print(Text(f"  {plain(repair.command)}", style="bold"), soft_wrap=True)


def _window(found: Examined) -> str:
    diagnosis = found.diagnosis
    if diagnosis.before is None:
        return f"{plain(diagnosis.chosen)}; there are no steps before it"
    return f"steps {diagnosis.before} against {diagnosis.after} ({plain(diagnosis.chosen)})"


def _show_level(level: Level, place: int, console: Console) -> None:
    style = "" if level.findings else "green" if level.said == "nothing found" else "dim"
    console.print(Text(f"\n{place}. {level.title}: {level.said}", style=f"bold {style}"))
    for finding in level.findings:
        _show_finding(finding, console)
    for said in level.unchecked:
        console.print(Padding(Text(f"not checked: {plain(said)}", style="dim"), (0, 0, 0, 3)))


def _show_finding(finding: Finding, console: Console) -> None:
    strong = finding.strength == "strong"
    where = f" [steps {finding.steps}]" if finding.steps is not None else ""
    head = Text.assemble(("finding: ", "red") if strong else ("hint: ", "yellow"), f"{plain(finding.what)}{where}")
    console.print(Padding(head, (0, 0, 0, 3)))
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 1), pad_edge=True)
    for number in finding.numbers:
        table.add_row("     ", *(Text(cell) for cell in _cells(number)))
    if finding.numbers:
        console.print(table)
    for word, said in (("why", finding.why), ("first", finding.first)):
        console.print(Padding(Text(f"{word}: {plain(said)}"), (0, 0, 0, 5)))


def _cells(number: Number) -> tuple[str, str, str, str]:
    step = f"at step {number.step}" if number.step is not None else ""
    change = f"{short(number.before)} -> {short(number.after)}"
    return plain(number.signal), change, times(number.before, number.after), step
