"""`audit`: every registered run against what is recorded of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.cli.arguments import Parser, dumps
from grpo_lightning.errors import UsageError
from grpo_lightning.registry.audit import audit_runs, local_runs
from grpo_lightning.registry.records import LEVELS, Candidate, RunAudit, Verdict
from grpo_lightning.sinks.terminal import plain

__all__ = ["candidates", "run_audit"]

_SHORT = {"changed": "chg", "missing": "gone", "unknown": "?", "not checked": "skip"}
_COLOURS = {"ok": "green", "changed": "red", "missing": "red", "unknown": "magenta", "not checked": "dim"}
_NAMED = 6  # runs by name behind a finding


def run_audit(argv: list[str]) -> int:
    """0 when nothing was found; 1 with findings."""
    parser = Parser(
        prog="grpo-lightning audit",
        description="Read every registered run again: snapshot, environment, data, reward code, weights, judgement, status.",
        epilog="examples:\n  grpo-lightning audit\n  grpo-lightning audit --experiment grpo-lightning --html audit.html\n"
        "  grpo-lightning audit --quick --remap /old/disk=/new/disk",
    )
    parser.add_argument("--experiment", metavar="E", help="runs of this MLflow experiment only")
    parser.add_argument("--root", default="runs", help="the folder of run directories (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="read no weights, and no file whose size and time stand")
    parser.add_argument("--remap", action="append", default=[], metavar="OLD=NEW", help="where moved files lie now")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="F", help="write a page")
    args = parser.parse_args(argv)
    remap = dict(_moved(text) for text in args.remap)
    runs = candidates(args.experiment, Path(args.root), remap)
    if not runs:
        raise UsageError(f"There is no run to audit in {args.root}/ or in MLflow: name another --root or --experiment.")
    audits = audit_runs(runs, quick=args.quick, remap=remap)
    if args.html:
        from grpo_lightning.report.audit import write_audit

        write_audit(args.html, [audit.to_dict() for audit in audits], levels=LEVELS, quick=args.quick)
    if args.json:
        print(dumps([audit.to_dict() for audit in audits]))
    else:
        _show(audits, Console(highlight=False), quick=args.quick)
    return int(any(audit.problems for audit in audits))


def _moved(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise UsageError(f"--remap {text!r}: write OLD=NEW, the beginnings of paths.")
    return old.rstrip("/"), new.rstrip("/")


def candidates(experiment: str | None, root: Path, remap: dict[str, str]) -> list[Candidate]:
    """What MLflow lists, and the run directories that it does not."""
    from grpo_lightning.tracking import recorded_runs

    listed = [
        Candidate(
            run_id=run.run_id,
            name=run.name,
            path=_place(run.run_id, run.tags, root, remap),
            status=run.status,
            experiment=run.experiment,
            tags=run.tags,
        )
        for run in recorded_runs(experiment)
    ]
    return listed if experiment else [*listed, *local_runs(root, listed)]


def _place(run_id: str, tags: dict[str, str], root: Path, remap: dict[str, str]) -> Path | None:
    told = tags.get("grpo.run_dir")
    places = [Path(told)] if told else []
    places += [Path(new + told[len(old) :]) for old, new in remap.items() if told and told.startswith(old)]
    found = [place for place in (*places, root / run_id) if (place / "journal.sqlite").is_file()]
    return found[0].absolute() if found else None


# ---- the terminal


def _show(audits: Sequence[RunAudit], console: Console, *, quick: bool) -> None:
    table = Table(box=None, padding=(0, 1))
    table.add_column("run", no_wrap=True)
    for level in LEVELS:
        table.add_column(level[:8], no_wrap=True)
    for audit in audits:
        verdicts = [audit.verdict_of(level) for level in LEVELS]
        cells = [Text(_SHORT.get(v, v), style=_COLOURS.get(v, "dim")) for v in verdicts]
        table.add_row(Text(plain(f"{audit.run.run_id[:8]} {audit.run.name[:16]}")), *cells)
    console.print(table)
    console.print("chg changed, gone missing, ? unknown, skip not checked, - nothing to check", style="dim")
    _show_problems(audits, console)
    bad = sum(bool(audit.problems) for audit in audits)
    console.print(f"{len(audits)} runs, {bad} with findings")
    if quick:
        console.print("quick: weights were not read again, nor files whose size and time stand")


def _show_problems(audits: Sequence[RunAudit], console: Console) -> None:
    """Each finding once, with the runs that it is about: an upgraded distribution concerns them all."""
    runs: dict[tuple[str, Verdict, str, str], list[str]] = {}
    for audit in audits:
        for found in audit.problems:
            key = (found.level, found.verdict, found.name, found.detail)
            runs.setdefault(key, []).append(audit.run.run_id[:8])
    counts = Counter(level for level, *_ in runs)
    for key, names in sorted(runs.items(), key=lambda item: LEVELS.index(item[0][0])):
        level, verdict, name, detail = key
        who = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
        console.print(
            Text(f"{verdict:<8} {level:<12} {plain(name)}: {plain(detail)}  [{who}]", style=_COLOURS[verdict]),
            soft_wrap=True,
        )
    if counts:
        console.print(", ".join(f"{level}: {count}" for level, count in counts.items()))
