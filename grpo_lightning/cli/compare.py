"""`compare RUN_A RUN_B`: what differs, environment first, and what the results can be put down to."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.cli.arguments import Parser, dumps
from grpo_lightning.cli.sides import made_of, side_of
from grpo_lightning.registry.comparing import Comparison, LevelResult, compare_runs
from grpo_lightning.sinks.terminal import plain

__all__ = ["run_compare"]

_COLOURS = {"equal": "green", "differs": "yellow", "unknown": "magenta"}
_SHOWN = 40  # differences of a level


def run_compare(argv: list[str]) -> int:
    """0 when the results are put down to one level, or every level is equal; 1 when they can't be."""
    parser = Parser(
        prog="grpo-lightning compare",
        description="What two runs do not share: environment, data, reward, code, config, weights, results. Results are put "
        "down to a level only when all others are equal.",
        epilog="examples:\n  grpo-lightning compare RUN_A RUN_B\n  grpo-lightning compare RUN_A RUN_B --json",
    )
    parser.add_argument("a", metavar="RUN_A")
    parser.add_argument("b", metavar="RUN_B")
    parser.add_argument(
        "--force", action="store_true", help="show the results even where they can't be put down to a level"
    )
    parser.add_argument("--root", default="runs", help="the folder of run directories (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    with made_of(args.a, args.root) as a, made_of(args.b, args.root) as b:
        found = compare_runs(side_of(a), side_of(b))
    if args.json:
        print(dumps(found.to_dict()))
    else:
        _show(found, Console(highlight=False), force=args.force)
    return int(bool(found.stopped) and not args.force)


def _show(found: Comparison, console: Console, *, force: bool) -> None:
    console.print(Text(plain(f"{found.a}  against  {found.b}")))
    for level in found.levels:
        _show_level(level, console)
    if found.stopped:
        console.print(Text(plain(f"stop: {found.stopped}"), style="bold yellow"), soft_wrap=True)
        if not force:
            console.print("The results are not shown: they can't be put down to one level (--force shows them).")
            return
    elif found.attributed:
        console.print(Text(f"results: what differs is put down to the {found.attributed}", style="bold"))
    else:
        console.print(Text("results: every recorded level is equal, so these should be, too", style="bold"))
    console.print(_results(found))


def _show_level(level: LevelResult, console: Console) -> None:
    console.print(Text(f"{level.level:<12} {level.verdict}", style=_COLOURS[level.verdict]))
    for difference in level.differences[:_SHOWN]:
        a, b = plain(str(difference["a"])), plain(str(difference["b"]))
        values = f": {a} -> {b}" if a or b else ""
        console.print(Text(f"  {difference['kind']:<10} {plain(str(difference['name']))}{values}"), soft_wrap=True)
        for line in str(difference["detail"]).splitlines():
            console.print(Text(f"      {plain(line)}", style="dim"), soft_wrap=True)
    more = len(level.differences) - _SHOWN
    if more > 0:
        console.print(f"  and {more} more (--json lists all)")


def _results(found: Comparison) -> Table:
    table = Table(box=None, padding=(0, 1))
    table.add_column("")
    for column in ("a", "b", "b - a"):
        table.add_column(column, justify="right")
    for row in found.results:
        gap = "" if row.a is None or row.b is None else f"{row.b - row.a:+.4g}"
        cells = ["-" if value is None else f"{value:.4g}" for value in (row.a, row.b)]
        table.add_row(Text(plain(row.name)), *cells, gap)
    return table
