"""`rules check`, `rules test`, `rules replay` and `rules stats`."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.cli.arguments import Parser, dumps
from grpo_lightning.cli.check import rules_of
from grpo_lightning.cli.judging import judge_source, show
from grpo_lightning.cli.sources import open_source
from grpo_lightning.errors import ConfigError, UsageError
from grpo_lightning.health import load_baseline as _load_baseline
from grpo_lightning.health import load_rules, load_tests, run_test, runbook_path, shipped_path, tests_path
from grpo_lightning.signals import signal_names
from grpo_lightning.sinks import Journal

__all__ = ["run_rules"]

_EPILOG = """\
examples:
  grpo-lightning rules check my.yaml                   unknown signals, bounds that can't hold, forbidden actions, runbooks
  grpo-lightning rules test my.yaml                    the tests in my.test.yaml
  grpo-lightning rules replay my.yaml RUN train.log    what would have fired on recorded runs and logs
  grpo-lightning rules stats                           each rule's record over the runs in runs/

F may be `shipped`: the rules that come with the package.
"""


def run_rules(argv: list[str]) -> int:
    """0 fine; 1 a failed test or an unhealthy run."""
    args = _parser().parse_args(argv)
    command = {"check": _check, "test": _test, "replay": _replay, "stats": _stats}[args.command]
    return command(args)


def _parser() -> Parser:
    parser = Parser(prog="grpo-lightning rules", description="Check, test and replay health rules.", epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="check|test|replay|stats")
    check = commands.add_parser("check", help="validate a file of rules")
    check.add_argument("rules", metavar="F")
    test = commands.add_parser("test", help="run the unit tests of a file of rules")
    test.add_argument("rules", metavar="F")
    test.add_argument("tests", nargs="?", metavar="TESTS", help="default: F's name with .test before the suffix")
    replay = commands.add_parser("replay", help="what would have fired on recorded runs")
    replay.add_argument("rules", metavar="F")
    replay.add_argument("runs", nargs="+", metavar="RUN", help="runs, run directories or logs")
    replay.add_argument("--baseline", metavar="F")
    replay.add_argument("--logging-steps", type=int, metavar="N")
    replay.add_argument("--root", default="runs", help="the folder of run directories (default: %(default)s)")
    stats = commands.add_parser("stats", help="fired, acknowledged by cause, false alarms")
    stats.add_argument("--root", default="runs", help="the folder of run directories (default: %(default)s)")
    for one in (check, test, replay, stats):
        one.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _path(text: str) -> Path:
    return shipped_path() if text == "shipped" else Path(text)


def _check(args: argparse.Namespace) -> int:
    path = _path(args.rules)
    rules = load_rules(path, signals=signal_names())
    missing = [rule.name for rule in rules if not rule.quiet and runbook_path(rule, path) is None]
    if missing:
        raise ConfigError(
            f"{path}: the runbook of {missing[0]} is missing: each alert sends its reader to one; write it beside the rules."
        )
    if args.json:
        print(dumps({"rules": [rule.name for rule in rules]}))
    else:
        print(f"{path}: {len(rules)} rules are fine.")
    return 0


def _test(args: argparse.Namespace) -> int:
    path = _path(args.rules)
    rules = load_rules(path, signals=signal_names())
    tests = load_tests(args.tests or tests_path(path))
    failures = {test.name: run_test(test, rules) for test in tests}
    failed = {name: found for name, found in failures.items() if found}
    if args.json:
        print(dumps({"tests": len(tests), "failed": failed}))
        return int(bool(failed))
    for name, found in failed.items():
        print(f"FAILED {name}: {'; '.join(found)}")
    print(f"{len(tests) - len(failed)} of {len(tests)} tests passed.")
    return int(bool(failed))


def _replay(args: argparse.Namespace) -> int:
    rules = rules_of([] if args.rules == "shipped" else [args.rules])
    baseline = _load_baseline(args.baseline) if args.baseline else None
    judged = [
        judge_source(open_source(run, root=args.root, logging_steps=args.logging_steps), rules, baseline=baseline)
        for run in args.runs
    ]
    if args.json:
        found = [one.to_dict() for one in judged]
        print(dumps(found[0] if len(found) == 1 else found))
    else:
        console = Console()
        for one in judged:
            show(one, console)
    return int(any(one.replay.verdict == "unhealthy" for one in judged))


def _stats(args: argparse.Namespace) -> int:
    journals = sorted(Path(args.root).glob("*/journal.sqlite"))
    if not journals:
        raise UsageError(f"There are no run directories in {args.root}: name their folder with --root.")
    fired: Counter[str] = Counter()
    told: dict[str, Counter[str]] = {}
    for path in journals:
        with Journal(path, read_only=True) as journal:
            for row in journal.alerts(all_segments=True):
                fired[row.event.name] += 1
                word = row.acknowledged.cause if row.acknowledged is not None else "open"
                told.setdefault(row.event.name, Counter())[word] += 1
    if args.json:
        rows = [{"rule": rule, "fired": n, "causes": dict(told[rule])} for rule, n in fired.most_common()]
        print(dumps({"runs": len(journals), "rules": rows}))
    else:
        _show_stats(fired, told, len(journals))
    return 0


def _show_stats(fired: Counter[str], told: dict[str, Counter[str]], runs: int) -> None:
    table = Table(title=f"{runs} runs")
    for name in ("rule", "fired", "false alarms", "open", "acknowledged causes"):
        table.add_column(name)
    for rule, count in fired.most_common():
        causes = told[rule]
        others = ", ".join(f"{c} {n}" for c, n in causes.most_common() if c not in ("open", "false-alarm"))
        row = (rule, str(count), str(causes["false-alarm"]), str(causes["open"]), others)
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
