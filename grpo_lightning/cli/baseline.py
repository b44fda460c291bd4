"""`baseline build`, `baseline show` and `baseline compare`."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.cli.arguments import Parser, dumps
from grpo_lightning.cli.sources import Source, open_source
from grpo_lightning.health import Baseline, build_baseline, load_baseline, save_baseline
from grpo_lightning.sinks.terminal import plain

__all__ = ["run_baseline"]

_EPILOG = """\
examples:
  grpo-lightning baseline build RUN_A RUN_B -o ruler.json    what good runs of this kind look like
  grpo-lightning fit --health.baseline ruler.json            hold a run against it, step by step
  grpo-lightning baseline compare ruler.json RUN             where a run left it
"""
_FAR = 4.0  # spreads


def run_baseline(argv: list[str]) -> int:
    """0; `compare` gives 1 when a signal left its band for good."""
    args = _parser().parse_args(argv)
    return {"build": _build, "show": _show, "compare": _compare}[args.command](args)


def _parser() -> Parser:
    parser = Parser(prog="grpo-lightning baseline", description="Rulers made of earlier runs.", epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="build|show|compare")
    build = commands.add_parser("build", help="make a ruler of one or several runs or logs")
    build.add_argument("runs", nargs="+", metavar="RUN")
    build.add_argument("-o", "--out", required=True, metavar="F")
    show = commands.add_parser("show", help="the bands and the marked steps")
    show.add_argument("baseline", metavar="F")
    compare = commands.add_parser("compare", help="a run against a ruler")
    compare.add_argument("baseline", metavar="F")
    compare.add_argument("run", metavar="RUN")
    for one in (build, show, compare):
        one.add_argument("--json", action="store_true", help="print JSON")
    for one in (build, compare):
        one.add_argument("--root", default="runs", help="the folder of run directories (default: %(default)s)")
        one.add_argument("--logging-steps", type=int, metavar="N", help="optimizer steps per row, where a log has none")
    return parser


def _build(args: argparse.Namespace) -> int:
    sources = [open_source(run, root=args.root, logging_steps=args.logging_steps) for run in args.runs]
    baseline = build_baseline(dict(zip(_names(sources), (source.steps for source in sources), strict=True)))
    save_baseline(baseline, args.out)
    if args.json:
        print(dumps(_facts(baseline) | {"file": args.out}))
    else:
        print(f"{args.out}: {len(baseline.signals)} signals over {baseline.steps} steps of {len(baseline.runs)} runs.")
        for mark in baseline.marks:
            print(f"  {plain(mark.summary)}")
    return 0


def _names(sources: Sequence[Source]) -> list[str]:
    """The sources' names; those of one name, which are different runs, are numbered."""
    seen: Counter[str] = Counter()
    names = []
    for source in sources:
        seen[source.name] += 1
        names.append(source.name if seen[source.name] == 1 else f"{source.name} ({seen[source.name]})")
    return names


def _facts(baseline: Baseline) -> dict[str, Any]:
    marks = [{"signal": m.signal, "step": m.step, "before": m.before, "after": m.after} for m in baseline.marks]
    return {"runs": list(baseline.runs), "steps": baseline.steps, "signals": sorted(baseline.signals), "marks": marks}


def _show(args: argparse.Namespace) -> int:
    baseline = load_baseline(args.baseline)
    if args.json:
        print(dumps(_facts(baseline)))
        return 0
    table = Table(title=f"{baseline.steps} steps of {plain(', '.join(baseline.runs))}")
    table.add_column("signal", no_wrap=True)
    for name in ("at the start", "in the middle", "at the end", "spread at the end"):
        table.add_column(name)
    for signal, band in baseline.signals.items():
        places = (1.0, baseline.steps / 2, float(baseline.steps))
        cells = (*(f"{band.at(place)[0]:.4g}" for place in places), f"{band.at(places[-1])[1]:.3g}")
        table.add_row(Text(plain(signal)), *cells)
    console = Console()
    console.print(table)
    for mark in baseline.marks:
        console.print(Text(plain(mark.summary)))
    return 0


def _compare(args: argparse.Namespace) -> int:
    baseline = load_baseline(args.baseline)
    source = open_source(args.run, root=args.root, logging_steps=args.logging_steps)
    rows = _distances(baseline, source.steps)
    away = [row for row in rows if row["share_outside"] > 0.5]
    if args.json:
        print(dumps({"run": source.name, "signals": rows, "away": [row["signal"] for row in away]}))
        return int(bool(away))
    table = Table(title=f"{plain(source.name)} against {plain(', '.join(baseline.runs))}")
    table.add_column("signal", no_wrap=True)
    for name in ("outside the band", "first outside", "last distance (spreads)"):
        table.add_column(name)
    for row in rows:
        first = str(row["first_outside"]) if row["first_outside"] is not None else ""
        cells = (f"{row['share_outside']:.0%}", first, f"{row['last_distance']:.1f}")
        table.add_row(Text(plain(row["signal"]), style="red" if row in away else ""), *cells)
    Console().print(table)
    return int(bool(away))


def _distances(baseline: Baseline, steps: Any) -> list[dict[str, Any]]:
    """Per signal: the share of steps more than 4 spreads away, the first of them, and the last distance."""
    seen: dict[str, list[tuple[int, float]]] = {}
    for step in steps:
        for signal, value in step.values.items():
            band = baseline.band(signal, step.step)
            if band is not None and math.isfinite(value):
                seen.setdefault(signal, []).append((step.step, (value - band[0]) / band[1]))
    rows = [_row(signal, distances) for signal, distances in seen.items()]
    return sorted(rows, key=lambda row: -float(row["share_outside"]))


def _row(signal: str, distances: list[tuple[int, float]]) -> dict[str, Any]:
    outside = [step for step, distance in distances if abs(distance) > _FAR]
    return {
        "signal": signal,
        "share_outside": len(outside) / len(distances),
        "first_outside": outside[0] if outside else None,
        "last_distance": distances[-1][1],
    }
