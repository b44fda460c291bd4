"""`snapshot show / verify / diff / restore RUN`: what a run was made of, whether that still holds, and making it again."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_lightning.cli.arguments import Parser, dumps
from grpo_lightning.cli.sources import run_directory
from grpo_lightning.errors import UsageError
from grpo_lightning.sinks import RunDirectory
from grpo_lightning.sinks.terminal import plain

__all__ = ["run_snapshot"]

_EPILOG = """\
examples:
  grpo-lightning snapshot show RUN
  grpo-lightning snapshot verify RUN                     everything it describes, and the weights of each checkpoint
  grpo-lightning snapshot verify RUN --checkpoint runs/RUN/checkpoints/last.ckpt
  grpo-lightning snapshot diff RUN_A RUN_B
  grpo-lightning snapshot restore RUN -o again           environment, code, data and config in the folder `again`
"""


def run_snapshot(argv: list[str]) -> int:
    """0 fine; 1 something is changed, missing or unknown."""
    if find_spec("run_snapshot") is None:
        raise UsageError("Snapshots need their plug-in: pip install lightning-run-snapshot.")
    args = _parser().parse_args(argv)
    plugin = import_module("run_snapshot")
    try:
        return int(args.command(args))
    except plugin.SnapshotError as error:
        raise UsageError(str(error)) from error


def _parser() -> Parser:
    parser = Parser(prog="grpo-lightning snapshot", description="What a run was made of.", epilog=_EPILOG)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = Parser(prog="", add_help=False)
    common.add_argument("--root", default="runs", help="the folder of run directories (default: %(default)s)")
    common.add_argument("--json", action="store_true", help="print JSON")

    show = commands.add_parser("show", parents=[common], help="what a snapshot holds")
    show.add_argument("run", metavar="RUN")
    show.set_defaults(command=lambda args: _plugin(args, "show", _snapshot(args.run, args.root)))

    verify = commands.add_parser("verify", parents=[common], help="whether it still holds")
    verify.add_argument("runs", metavar="RUN", nargs="+")
    verify.add_argument("--checkpoint", metavar="FILE", action="append", help="these checkpoints' weights only")
    verify.add_argument("--quick", action="store_true", help="believe files whose size and time stand")
    verify.add_argument("--full", action="store_true", help="hash every installed file")
    verify.set_defaults(command=_verify)

    diff = commands.add_parser("diff", parents=[common], help="what two snapshots do not share")
    diff.add_argument("a", metavar="RUN_A")
    diff.add_argument("b", metavar="RUN_B")
    diff.set_defaults(
        command=lambda args: _plugin(args, "diff", _snapshot(args.a, args.root), _snapshot(args.b, args.root))
    )

    restore = commands.add_parser("restore", parents=[common], help="make environment, code, data and config again")
    restore.add_argument("run", metavar="RUN")
    restore.add_argument("-o", "--into", metavar="FOLDER", help="a new folder (default: restored/RUN_ID)")
    restore.add_argument(
        "--search", action="append", default=[], metavar="FOLDER", help="look for data here, by digest"
    )
    restore.add_argument("--no-install", action="store_true", help="make no environment")
    restore.set_defaults(command=_restore)
    return parser


def _snapshot(run: str, root: str) -> Path:
    return run_directory(run, root).snapshot


def _plugin(args: Any, command: str, *arguments: str | Path) -> int:
    """The plug-in's own command."""
    main = import_module("run_snapshot.cli").main
    return int(main([command, *map(str, arguments), *(["--json"] if args.json else [])]))


def _verify(args: Any) -> int:
    plugin = import_module("run_snapshot")
    reports = []
    for run in args.runs:
        directory = run_directory(run, args.root)
        findings: list[Any] = []
        if not args.checkpoint:
            findings += plugin.verify(directory.snapshot, full=args.full, quick=args.quick).findings
        for path in _checkpoints(directory, args.checkpoint):
            findings += plugin.check_checkpoint(path)
        reports.append((directory, findings))
    if args.json:
        print(dumps([{"run_id": d.run_id, "findings": [f.to_json() for f in found]} for d, found in reports]))
    else:
        for directory, found in reports:
            _say(directory.run_id, found)
    return int(any(f.is_problem for _, found in reports for f in found))


def _checkpoints(directory: RunDirectory, chosen: Sequence[str] | None) -> list[Path]:
    return [Path(path) for path in chosen] if chosen else sorted(directory.checkpoints.glob("*.ckpt"))


def _say(title: str, findings: Sequence[Any]) -> None:
    print(plain(title))
    for finding in findings:
        print(plain(f"  {finding.verdict:<12} {finding.level:<12} {finding.name}: {finding.detail}"))


def _restore(args: Any) -> int:
    plugin = import_module("run_snapshot")
    directory = run_directory(args.run, args.root)
    into = Path(args.into or Path("restored") / directory.run_id)
    report = plugin.restore(directory.snapshot, into, search=args.search, install=not args.no_install)
    if args.json:
        print(dumps(report.to_json()))
    else:
        _say(f"restored into {into}", report.findings)
        python = into / "venv" / "bin" / "python"
        program = python if python.exists() else "python"
        print(
            plain(
                f"repeat the run: cd {into / 'code'} && {program} -m grpo_lightning fit --config {into / 'config.yaml'}"
            )
        )
    return int(not report.ok)
