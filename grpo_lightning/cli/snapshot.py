"""`snapshot show / verify / diff / restore RUN`: what a run was made of, whether that still holds, and making it again."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_lightning.cli.arguments import Parser, dumps
from grpo_lightning.cli.sides import Made, made_of
from grpo_lightning.errors import UsageError
from grpo_lightning.registry.checkpoints import check_checkpoints, check_one
from grpo_lightning.registry.plugin import snapshot_plugin
from grpo_lightning.registry.repeating import restore_run
from grpo_lightning.sinks.terminal import plain

__all__ = ["run_snapshot"]

_PROBLEMS = ("changed", "missing", "unknown")
_EPILOG = """\
examples:
  grpo-lightning snapshot show RUN
  grpo-lightning snapshot verify RUN                     everything it describes, and the weights of each checkpoint
  grpo-lightning snapshot verify RUN --checkpoint last    the weights of one
  grpo-lightning snapshot diff RUN_A RUN_B
  grpo-lightning snapshot restore RUN -o again           environment, code, data and config in the folder `again`
"""


def run_snapshot(argv: list[str]) -> int:
    """0 fine; 1 something is changed, missing or unknown."""
    plugin = snapshot_plugin()
    args = _parser().parse_args(argv)
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
    show.set_defaults(command=_show)

    verify = commands.add_parser("verify", parents=[common], help="whether it still holds")
    verify.add_argument("runs", metavar="RUN", nargs="+")
    verify.add_argument("--checkpoint", metavar="FILE", action="append", help="these checkpoints only, by file or name")
    verify.add_argument("--quick", action="store_true", help="believe files whose size and time stand")
    verify.add_argument("--full", action="store_true", help="hash every installed file")
    verify.set_defaults(command=_verify)

    diff = commands.add_parser("diff", parents=[common], help="what two snapshots do not share")
    diff.add_argument("a", metavar="RUN_A")
    diff.add_argument("b", metavar="RUN_B")
    diff.set_defaults(command=_diff)

    restore = commands.add_parser("restore", parents=[common], help="make environment, code, data and config again")
    restore.add_argument("run", metavar="RUN")
    restore.add_argument("-o", "--into", metavar="FOLDER", help="a new folder (default: restored/RUN_ID)")
    restore.add_argument(
        "--search", action="append", default=[], metavar="FOLDER", help="look for data here, by digest"
    )
    restore.add_argument("--no-install", action="store_true", help="make no environment")
    restore.set_defaults(command=_restore)
    return parser


def _show(args: Any) -> int:
    with made_of(args.run, args.root) as made:
        return _plugin(args, "show", made.snapshot)


def _diff(args: Any) -> int:
    with made_of(args.a, args.root) as a, made_of(args.b, args.root) as b:
        return _plugin(args, "diff", a.snapshot, b.snapshot)


def _plugin(args: Any, command: str, *arguments: str | Path) -> int:
    """The plug-in's own command."""
    main = import_module("run_snapshot.cli").main
    return int(main([command, *map(str, arguments), *(["--json"] if args.json else [])]))


# ---- verify


def _verify(args: Any) -> int:
    reports = []
    for run in args.runs:
        with made_of(run, args.root) as made:
            reports.append((made.run_id, _findings(made, args)))
    if args.json:
        print(dumps([{"run_id": run_id, "findings": found} for run_id, found in reports]))
    else:
        for run_id, found in reports:
            _say(run_id, found)
    return int(any(finding["verdict"] in _PROBLEMS for _, found in reports for finding in found))


def _findings(made: Made, args: Any) -> list[dict[str, str]]:
    """About the snapshot, unless single checkpoints are asked for, and about checkpoints."""
    plugin = import_module("run_snapshot")
    if args.checkpoint:
        paths = [_checkpoint(made, text) for text in args.checkpoint]
        return [finding.to_dict() for path in paths for finding in check_one(path, made.run_id)]
    found = [f.to_json() for f in plugin.verify(made.snapshot, full=args.full, quick=args.quick).findings]
    if made.directory is None:
        detail = "its run directory is not on this machine"
        return [*found, {"level": "weights", "name": "checkpoints", "verdict": "not checked", "detail": detail}]
    audited = check_checkpoints(made.directory.path, {}, quick=args.quick, remapped=str)
    return [*found, *(finding.to_dict() for finding in audited)]


def _checkpoint(made: Made, text: str) -> Path:
    """A file, or the name of one of the run's."""
    path = Path(text).expanduser()
    if path.exists() or made.directory is None:
        return path
    name = path.name if path.suffix == ".ckpt" else f"{path.name}.ckpt"
    return made.directory.checkpoints / name if path.name == text else path


def _say(title: str, findings: Sequence[dict[str, str]]) -> None:
    print(plain(title))
    for finding in findings:
        print(plain(f"  {finding['verdict']:<12} {finding['level']:<12} {finding['name']}: {finding['detail']}"))


# ---- restore


def _restore(args: Any) -> int:
    with made_of(args.run, args.root) as made:
        into = Path(args.into or Path("restored") / made.run_id)
        restored = restore_run(made.snapshot, into, search=args.search, install=not args.no_install)
    if args.json:
        print(dumps(restored.to_dict()))
    else:
        _say(f"restored into {into}", [finding.to_json() for finding in restored.findings])
        print(plain(f"repeat the run: {restored.command}"))
    return int(not restored.ok)
