"""`status RUN` and `acknowledge RUN ALERT`."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.cli.arguments import Parser, dumps
from grpo_lightning.cli.sources import run_directory
from grpo_lightning.errors import UsageError
from grpo_lightning.health import CAUSES, acknowledge_command
from grpo_lightning.sinks import AlertRow, Journal, RunDirectory
from grpo_lightning.sinks.terminal import plain, sparkline

__all__ = ["run_acknowledge", "run_status"]

_SHOWN = (
    "reward_mean", "group_reward_std", "dead_group_fraction", "advantage_std", "kl", "entropy", "response_length_mean",
    "truncated_fraction", "ngram_repetition", "grad_norm", "update_norm", "step_seconds",
)  # fmt: skip


def run_status(argv: list[str]) -> int:
    """One screen: health, open alerts, last values against the run's own start. 1 when an alert is open."""
    parser = Parser(prog="grpo-lightning status", description="One screen about a run.")
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--root", default="runs", help="the folder of run directories (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    directory = run_directory(args.run, args.root)
    with directory.journal(read_only=True) as journal:
        facts = _facts(directory, journal)
        if args.json:
            print(dumps(facts))
        else:
            _show(facts, journal, Console())
    return int(any(alert["open"] and alert["severity"] == "critical" for alert in facts["alerts"]))


def run_acknowledge(argv: list[str]) -> int:
    """Record why an alert fired: in the journal, and in MLflow where it is reached."""
    parser = Parser(
        prog="grpo-lightning acknowledge",
        description="Close an alert by saying what caused it. A paused run goes on after that.",
        epilog='example:\n  grpo-lightning acknowledge RUN variance_collapse@120 --cause reward --note "regex too strict"',
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("alert", metavar="ALERT", help="an alert's id, such as variance_collapse@120")
    parser.add_argument("--cause", required=True, choices=CAUSES)
    parser.add_argument("--note", required=True, help="what it was, in a sentence")
    parser.add_argument("--root", default="runs", help="the folder of run directories (default: %(default)s)")
    args = parser.parse_args(argv)
    if not args.note.strip():
        raise UsageError("--note is empty: say in a sentence what the cause was; the next reader has only that.")
    directory = run_directory(args.run, args.root)
    with directory.journal() as journal:
        journal.acknowledge(args.alert, cause=args.cause, note=args.note)
        left = [
            row
            for row in journal.alerts(open_only=True, all_segments=True)
            if row.event.payload.get("action") == "pause"
        ]
    print(f"{plain(args.alert)} is acknowledged: {args.cause}.")
    _tell_mlflow(directory, args.alert, args.cause, args.note)
    for row in left:
        print(f"still open: {acknowledge_command(directory.path, row.event.key, str(row.event.payload.get('cause')))}")
    last = _newest(directory.checkpoints)
    if not left and last is not None:
        print(f"continue: python -m grpo_lightning fit --ckpt_path {last}")
    return 0


def _newest(checkpoints: Path) -> Path | None:
    found = sorted(checkpoints.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _tell_mlflow(directory: RunDirectory, alert: str, cause: str, note: str) -> None:
    """The journal has it; MLflow gets it where it answers."""
    from grpo_lightning.tracking import MLflowRun, TrackingError

    with directory.journal(read_only=True) as journal:
        meta = journal.meta()
    if "tracking_uri" not in meta:
        return
    try:
        run = MLflowRun.open(directory.run_id, recorded_uri=meta["tracking_uri"])
        run.set_tags({f"health.acknowledged.{alert.replace('@', '.')}": f"{cause}: {note}"})
    except (TrackingError, OSError) as error:
        print(f"MLflow was not told ({str(error)[:200]}); the journal has it.")


# ---- status


def _facts(directory: RunDirectory, journal: Journal) -> dict[str, Any]:
    segments, latest, meta = journal.segments(), journal.latest(), journal.meta()
    alerts = [_alert(row) for row in journal.alerts(all_segments=True)]
    open_ones = [a for a in alerts if a["open"]]
    critical = any(a["severity"] == "critical" for a in open_ones)
    return {
        "run_id": directory.run_id,
        "name": meta.get("name", directory.run_id),
        "description": meta.get("description", ""),
        "directory": str(directory.path),
        "status": segments[-1].status if segments else "new",
        "live": directory.is_live(),
        "segments": len(segments),
        "verdict": "unhealthy" if critical else "warning" if open_ones else "healthy",
        "step": latest.step if latest else 0,
        "age_seconds": time.time() - latest.time if latest else None,
        "alerts": alerts,
        "recoveries": len(journal.recoveries()),
        "evaluation": dict(journal.evaluations()[-1].payload) if journal.evaluations() else {},
        "values": dict(latest.values) if latest else {},
    }


def _alert(row: AlertRow) -> dict[str, Any]:
    payload = row.event.payload
    names = ("severity", "action", "cause", "onset_step", "summary", "runbook", "evidence", "checkpoint_before_onset")
    told = row.acknowledged
    word = {"cause": told.cause, "note": told.note, "time": told.time} if told is not None else None
    facts = {name: payload.get(name) for name in names}
    return {
        "id": row.event.key,
        "rule": row.event.name,
        "step": row.event.step,
        "open": row.open,
        "acknowledged": word,
    } | facts


def _show(facts: dict[str, Any], journal: Journal, console: Console) -> None:
    colour = {"healthy": "green", "warning": "yellow", "unhealthy": "red"}[facts["verdict"]]
    console.print(Text(f"{plain(facts['name'])} ({facts['run_id']}): {facts['verdict']}", style=f"bold {colour}"))
    if facts["description"]:
        console.print(Text(f"  {plain(facts['description'])}"))
    live = "running now" if facts["live"] else facts["status"]
    console.print(
        Text(f"  step {facts['step']}, segment {facts['segments']}, {live}; {facts['recoveries']} recoveries")
    )
    for alert in facts["alerts"]:
        _show_alert(alert, facts["directory"], console)
    table = Table(box=None, padding=(0, 1))
    for name in ("signal", "run", "start", "now"):
        table.add_column(name)
    for name in _SHOWN:
        values = [v for v in journal.series(name).values if math.isfinite(v)]
        if values:
            start = sorted(values[:20])[len(values[:20]) // 2]
            table.add_row(
                name, sparkline(values[:: max(len(values) // 60, 1)], 60), f"{start:.4g}", f"{values[-1]:.4g}"
            )
    console.print(table)
    for name, value in facts["evaluation"].items():
        console.print(Text(f"  {plain(name)} {value:.4f}"))


def _show_alert(alert: dict[str, Any], directory: str, console: Console) -> None:
    state = "open" if alert["open"] else f"acknowledged: {plain(alert['acknowledged']['cause'])}"
    head = (
        f"  {plain(alert['id'])} ({alert['severity']}, {alert['action']}, began about {alert['onset_step']}; {state})"
    )
    console.print(Text(head, style="red" if alert["open"] and alert["severity"] == "critical" else ""))
    console.print(Text(f"    {plain(str(alert['summary']))}"))
    if alert["open"]:
        command = acknowledge_command(directory, alert["id"], str(alert["cause"]))
        console.print(Text(f"    {command}", style="dim"), soft_wrap=True)
