"""`check LOG…`: the health verdict on another trainer's log, or on a run."""

from __future__ import annotations

import argparse
import math
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from grpo_lightning.cli.arguments import Parser, dumps
from grpo_lightning.cli.judging import Judged, judge_source, show
from grpo_lightning.cli.sources import Source, open_source
from grpo_lightning.errors import RunPaused, UsageError
from grpo_lightning.health import Baseline, Judge, Rule, Step, load_baseline, load_rules, shipped_rules
from grpo_lightning.logs import FORMATS, LogStep, follow
from grpo_lightning.signals import signal_names

__all__ = ["rules_of", "run_check"]

_REMEMBERED = 20_000  # rows that a restart can go back over

_EPILOG = """\
examples:
  grpo-lightning check train.log                       verdict, findings, charts; exit 1 when unhealthy
  grpo-lightning check trainer_state.json --json       for scripts
  grpo-lightning check train.log --logging-steps 5     a log that prints no steps, one row per 5
  grpo-lightning check train.log --follow || kill %1   stop any trainer: exits with 75 when a rule would pause
"""


def run_check(argv: list[str]) -> int:
    """0 when healthy, 1 when a log is unhealthy (or a warning, with --fail-on warning)."""
    args = _parser().parse_args(argv)
    if args.selftest:
        from grpo_lightning.cli.selftest import run_selftest

        return run_selftest(Console(highlight=False))
    if not args.logs:
        raise UsageError("no LOG is named: give a log's file, a run directory, or a run's id or name.")
    rules, baseline = rules_of(args.rules), load_baseline(args.baseline) if args.baseline else None
    if args.follow:
        return _follow(args, rules, baseline)
    if args.report is not None and len(args.logs) != 1:
        raise UsageError(f"--report is of one log and {len(args.logs)} are named: write one report for each.")
    judged = [judge_source(_open(args, log), rules, baseline=baseline) for log in args.logs]
    if args.json:
        found = [one.to_dict() for one in judged]
        print(dumps(found[0] if len(found) == 1 else found))
    else:
        console = Console()
        for one in judged:
            show(one, console)
    if args.report is not None:
        _report(args, rules, baseline)
    return int(any(_fails(one, args.fail_on) for one in judged))


def rules_of(paths: Sequence[str]) -> list[Rule]:
    """The rules in files, a later one replacing one of the same name; the shipped ones when there are none."""
    if not paths:
        return shipped_rules()
    names = signal_names()
    return list({rule.name: rule for path in paths for rule in load_rules(path, signals=names)}.values())


def _parser() -> Parser:
    parser = Parser(
        prog="grpo-lightning check", description="The health verdict on a log of GRPO training.", epilog=_EPILOG
    )
    parser.add_argument("logs", nargs="*", metavar="LOG", help="a log's file, a run directory, or a run's id or name")
    parser.add_argument("--format", choices=FORMATS, help="how the logs are written; told by their content otherwise")
    parser.add_argument(
        "--logging-steps", type=int, metavar="N", help="optimizer steps per row, where the log has none"
    )
    parser.add_argument("--run", type=int, metavar="N", help="which of several runs in one log, counted from 1")
    parser.add_argument(
        "--rules", action="append", default=[], metavar="F", help="rules to hold (default: the shipped)"
    )
    parser.add_argument("--baseline", metavar="F", help="a ruler made by `baseline build`")
    parser.add_argument(
        "--fail-on", choices=("warning", "critical"), default="critical", help="what makes the exit code 1"
    )
    parser.add_argument("--report", metavar="F", help="write an HTML report of the one log, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--selftest",
        action="store_true",
        help="put the shipped faults through every reader; exit 1 when one is misread",
    )
    parser.add_argument("--follow", action="store_true", help="watch one growing log; exit 75 when a rule would pause")
    parser.add_argument(
        "--poll", type=float, default=1.0, metavar="S", help="seconds between two looks (with --follow)"
    )
    return parser


def _open(args: argparse.Namespace, log: str) -> Source:
    return open_source(log, format=args.format, logging_steps=args.logging_steps, run=args.run)


def _report(args: argparse.Namespace, rules: Sequence[Rule], baseline: Baseline | None) -> None:
    """The log is read once more, whole: a report shows every signal."""
    from grpo_lightning.cli.report import report_source

    report_source(_open(args, args.logs[0]), args.report, rules=rules, baseline=baseline)


def _fails(judged: Judged, fail_on: str) -> bool:
    verdict = judged.replay.verdict
    return verdict == "unhealthy" or (verdict == "warning" and fail_on == "warning")


# ---- watching


def _follow(args: argparse.Namespace, rules: Sequence[Rule], baseline: Baseline | None) -> int:
    if len(args.logs) != 1:
        raise UsageError(f"--follow watches one log and {len(args.logs)} are named: start one check for each.")
    if not 0 < args.poll < math.inf:
        raise UsageError(f"--poll is {args.poll}: give seconds above 0.")
    watch = _Watch(rules, baseline)
    intervals: list[float] = []
    rows = follow(
        Path(args.logs[0]),
        format=args.format,
        logging_steps=args.logging_steps,
        poll_seconds=args.poll,
        seen=lambda reader: intervals.append(reader.interval),
    )
    for row in rows:
        watch.see(row, intervals[-1])
    return 0


class _Watch:
    """Judges rows as they come. After a restart from an earlier step, what came after that step is as if it had never been."""

    def __init__(self, rules: Sequence[Rule], baseline: Baseline | None) -> None:
        self._rules, self._baseline = rules, baseline
        self._judge = Judge(rules, baseline=baseline)
        self._past: deque[Step] = deque(maxlen=_REMEMBERED)

    def see(self, row: LogStep, interval: float) -> None:
        """Judge one row and print what changes.

        Raises:
            RunPaused: a rule would pause the run.
        """
        if self._past and row.step <= self._past[-1].step:
            self._go_back(row.step)
        span = float(row.step - self._past[-1].step) if self._past else interval
        groups = row.groups * span if row.groups is not None else None
        step = Step(step=row.step, values=row.values, span=span, groups=groups)
        self._past.append(step)
        _say(self._judge, step)

    def _go_back(self, step: int) -> None:
        while self._past and self._past[-1].step >= step:
            self._past.pop()
        self._judge = Judge(self._rules, baseline=self._baseline)
        for before in self._past:
            self._judge.observe(before)
        print(f"the log goes back to step {step}: what came after it before counts no more", flush=True)


def _say(judge: Judge, step: Step) -> None:
    for change in judge.observe(step):
        alert = change.alert
        print(f"step {change.step} {change.change} {alert.severity} {alert.rule}: {alert.summary}", flush=True)
        if change.change != "resolved" and alert.action == "pause":
            sys.stdout.flush()
            raise RunPaused(
                f"{alert.rule} would pause this run at step {alert.step}; it began about {alert.onset_step}."
            )
