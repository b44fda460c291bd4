"""The command `run-snapshot`: capture, show, verify, diff, restore. Exit 0 fine, 1 findings, 2 wrong use."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from run_snapshot.capturing import capture
from run_snapshot.differing import diff
from run_snapshot.errors import SnapshotError, UsageError
from run_snapshot.files import printable
from run_snapshot.manifest import Stored, load_snapshot
from run_snapshot.records import Report
from run_snapshot.restoring import restore
from run_snapshot.verifying import verify

__all__ = ["main"]

OK, FINDINGS, WRONG_USE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except SnapshotError as error:
        print(printable(f"run-snapshot: {error}"), file=sys.stderr)
        return WRONG_USE
    except BrokenPipeError:
        return OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run-snapshot", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    json_option = argparse.ArgumentParser(add_help=False)
    json_option.add_argument("--json", action="store_true", help="print JSON")

    add = commands.add_parser("capture", parents=[json_option], help="record what a run is made of")
    add.add_argument("into", metavar="FOLDER")
    add.add_argument("--config", metavar="FILE", help="YAML or JSON settings")
    add.add_argument(
        "--data", action="append", default=[], metavar="PATH", help="a data file or folder; can be repeated"
    )
    add.add_argument(
        "--reward", action="append", default=[], metavar="PATH", help="package.module:function or file.py:function"
    )
    add.add_argument("--weights", metavar="PATH", help="a file or folder of weights")
    add.add_argument("--seed", type=int)
    add.add_argument("--project", metavar="FOLDER", help="whose repository and locks count (the working directory)")
    add.add_argument("--lock", choices=("copy", "make", "off"), default="copy")
    add.add_argument("--full", action="store_true", help="hash every installed file")
    add.set_defaults(command=_capture)

    show = commands.add_parser("show", parents=[json_option], help="what a snapshot holds")
    show.add_argument("snapshot", metavar="SNAPSHOT")
    show.set_defaults(command=_show)

    check = commands.add_parser("verify", parents=[json_option], help="whether it still holds")
    check.add_argument("snapshot", metavar="SNAPSHOT")
    check.add_argument("--quick", action="store_true", help="believe files whose size and time stand")
    check.add_argument("--full", action="store_true", help="hash every installed file")
    check.set_defaults(command=_verify)

    compare = commands.add_parser("diff", parents=[json_option], help="what two snapshots do not share")
    compare.add_argument("a", metavar="A")
    compare.add_argument("b", metavar="B")
    compare.set_defaults(command=_diff)

    back = commands.add_parser("restore", parents=[json_option], help="rebuild environment, code, data and config")
    back.add_argument("snapshot", metavar="SNAPSHOT")
    back.add_argument("into", metavar="FOLDER")
    back.add_argument(
        "--search", action="append", default=[], metavar="FOLDER", help="where to look for data by digest"
    )
    back.add_argument("--no-install", action="store_true", help="make no environment")
    back.set_defaults(command=_restore)
    return parser


def _capture(options: argparse.Namespace) -> int:
    snapshot = capture(
        options.into,
        config=_settings(options.config),
        data_files=options.data,
        reward_paths=options.reward,
        model_state=options.weights,
        seeds={"seed": options.seed} if options.seed is not None else {},
        project=options.project,
        lock=options.lock,
        full_environment=options.full,
    )
    record = {
        "path": str(snapshot.path),
        "digest": snapshot.digest,
        "partial": snapshot.partial,
        "reasons": list(snapshot.reasons),
    }
    lines = [f"{snapshot.digest}  {snapshot.path}", *(f"missing  {reason}" for reason in snapshot.reasons)]
    _print(options, record, lines)
    return FINDINGS if snapshot.partial else OK


def _settings(file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        loaded = yaml.safe_load(Path(file).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"The config {file!r} can't be read: {str(error).splitlines()[0]}.") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"The config {file!r} holds a {type(loaded).__name__}: give settings by name.")
    return loaded


def _show(options: argparse.Namespace) -> int:
    stored = load_snapshot(options.snapshot)
    parts = {name.removesuffix(".json"): stored.json(name) for name in stored.members if name.endswith(".json")}
    parts.pop("stat", None)
    summary = {"digest": stored.digest, "created": stored.created, "reasons": list(stored.reasons)}
    _print(options, {**summary, **parts}, _summary(stored, parts))
    return OK


def _summary(stored: Stored, parts: dict[str, Any]) -> list[str]:
    lines = [f"digest       {stored.digest}", f"created      {stored.created}"]
    lines += [f"missing      {reason}" for reason in stored.reasons]
    if environment := parts.get("environment"):
        devices = ", ".join(environment["accelerator"].get("devices", [])) or "no accelerator"
        count = len(environment["distributions"])
        lines.append(f"environment  Python {environment['python']['version']}, {count} distributions, {devices}")
        lines += [f"             {name}: edited {', '.join(files)}" for name, files in environment["edited"].items()]
        lines.append(f"lock         {(parts.get('locks') or {}).get('status', 'none')}")
    for source in (parts.get("data") or {}).get("sources", ()):
        rows = source["rows"]
        lines.append(f"data         {source['name']}: {rows['count']} rows, {rows['ordered']}" if rows else
                     f"data         {source['name']}: {source['note'] or 'no rows'}")  # fmt: skip
    for file in (parts.get("rewards") or {}).get("files", ()):
        lines.append(f"reward       {file['module']}: {file['blob'][:12]}, {file['state']}")
    for repository in (parts.get("code") or {}).get("repositories", ()):
        told = f"{repository['revision'][:12]}, {repository['state']}, on a remote: {repository['reachable']}"
        lines.append(
            f"code         {repository['root']}: {told if repository['status'] == 'ok' else repository['status']}"
        )
    if weights := parts.get("weights"):
        lines.append(f"weights      {len(weights['tree']['tensors'])} tensors, {weights['tree']['root']}")
    return lines


def _verify(options: argparse.Namespace) -> int:
    report = verify(options.snapshot, full=options.full, quick=options.quick)
    _print(options, report.to_json(), _findings(report))
    return OK if report.ok else FINDINGS


def _findings(report: Report) -> list[str]:
    return [f"{f.verdict:12} {f.level:12} {f.name}: {f.detail}" for f in report.findings]


def _diff(options: argparse.Namespace) -> int:
    differences = diff(options.a, options.b)
    lines = []
    for d in differences:
        values = f": {d.a} -> {d.b}" if d.a or d.b else ""
        lines.append(f"{d.kind:10} {d.level:12} {d.name}{values}")
        lines += [f"    {line}" for line in d.detail.splitlines()]
    _print(options, [d.to_json() for d in differences], lines or ["no differences"])
    return FINDINGS if differences else OK


def _restore(options: argparse.Namespace) -> int:
    report = restore(options.snapshot, options.into, search=options.search, install=not options.no_install)
    _print(options, report.to_json(), _findings(report))
    return OK if report.ok else FINDINGS


def _print(options: argparse.Namespace, record: Any, lines: list[str]) -> None:
    print(json.dumps(record, indent=1) if options.json else "\n".join(printable(line) for line in lines))
