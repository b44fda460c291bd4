"""`check` on real logs: the verdict on each against what a person read from its numbers.

    python benchmarks/real_logs.py DIR

DIR holds `index.tsv` (columns n, expected, trainer, what) and the logs, `tidy/NN.csv` or `NN.csv.gz`; the copy in
`tests/logs/data` is one. Each log is opened, judged by the shipped rules and compared: healthy, warning or unhealthy. Where the
index says that a row stands for several steps, that is told as `check --logging-steps` would. With rldoctor installed, its
diagnosis of the same rows stands beside ours: unhealthy where it is critical, warning where it warns.

The last line is JSON: `agree`, `total`, `healthy_called_unhealthy`, `unhealthy_called_healthy`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peer_adapters import TOOLS

from grpo_lightning.cli.sources import steps_of_log
from grpo_lightning.health import Rule, replay, shipped_rules
from grpo_lightning.logs import open_log

__all__ = ["Entry", "Judged", "logging_steps", "main", "read_index", "score"]

RLDOCTOR = next(tool for tool in TOOLS if tool.name == "rldoctor")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A line of the index."""

    n: str
    expected: str
    what: str
    path: Path
    logging_steps: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The verdicts on a log."""

    entry: Entry
    ours: str
    findings: str  # rule and step of ours
    rldoctor: str | None


def read_index(folder: Path) -> list[Entry]:
    """The logs of a folder."""
    with (folder / "index.tsv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [
        Entry(
            n=row["n"],
            expected=row["expected"],
            what=row["what"],
            path=_log_of(folder, row["n"]),
            logging_steps=logging_steps(row["trainer"]),
        )
        for row in rows
    ]


def _log_of(folder: Path, n: str) -> Path:
    found = [
        path for path in (folder / "tidy" / f"{n}.csv", folder / f"{n}.csv", folder / f"{n}.csv.gz") if path.is_file()
    ]
    if not found:
        raise SystemExit(f"{folder} has no log {n}: expected tidy/{n}.csv, {n}.csv or {n}.csv.gz")
    return found[0]


def logging_steps(trainer: str) -> int | None:
    """Optimizer steps per row, where the index tells: "row=5 steps", "every 20 steps", "every 2".

    Example:
        >>> logging_steps("TRL (logging_steps=5, so row=5 steps)"), logging_steps("TRL console, every step")
        (5, None)
    """
    match = re.search(r"(?:row=|every )(\d+)", trainer)
    return int(match.group(1)) if match else None


# ---- judging


def judge(entry: Entry, rules: Sequence[Rule]) -> Judged:
    """Ours and rldoctor's verdict on a log."""
    with tempfile.TemporaryDirectory() as folder:
        path = _unpacked(entry.path, Path(folder))
        made = replay(steps_of_log(open_log(path, logging_steps=entry.logging_steps)), rules)
        other = None if RLDOCTOR.missing else _rldoctor(path, entry.logging_steps or 1)
    findings = ", ".join(f"{alert.rule} @{alert.step}" for alert in made.alerts)
    return Judged(entry=entry, ours=made.verdict, findings=findings, rldoctor=other)


def _unpacked(path: Path, folder: Path) -> Path:
    if path.suffix != ".gz":
        return path
    out = folder / path.stem
    with gzip.open(path, "rb") as packed, out.open("wb") as file:
        shutil.copyfileobj(packed, file)
    return out


def _rldoctor(path: Path, per_row: int) -> str:
    """Its diagnosis of the whole log, as its command gives: every column it knows, with steps where the log has none."""
    import rl_doctor
    from rl_doctor.detectors import Severity

    with path.open(newline="", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = [{k: v for k, v in row.items() if v != ""} for row in csv.DictReader(file)]
    for i, row in enumerate(rows):
        row.setdefault("step", (i + 1) * per_row)
    worst = rl_doctor.diagnose(rl_doctor.run_from_records(rows)).worst
    return {Severity.CRITICAL: "unhealthy", Severity.WARNING: "warning"}.get(worst, "healthy")


def score(pairs: Sequence[tuple[str, str]]) -> dict[str, int]:
    """How (expected, called) pairs agree."""
    return {
        "agree": sum(expected == called for expected, called in pairs),
        "total": len(pairs),
        "healthy_called_unhealthy": pairs.count(("healthy", "unhealthy")),
        "unhealthy_called_healthy": pairs.count(("unhealthy", "healthy")),
    }


# ---- telling


def _line(one: Judged) -> str:
    entry = one.entry
    mark = " " if one.ours == entry.expected else "!"
    return f"| {entry.n} | {entry.expected} | {one.ours}{mark} | {one.rldoctor or '-'} | {one.findings} | {entry.what[:60]} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Judge every log, print the table, end with JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder = parser.parse_args(argv).folder
    rules = shipped_rules()
    judged = [judge(entry, rules) for entry in read_index(folder)]
    print("| log | expected | grpo-lightning | rldoctor | our findings | what it shows |\n|---|---|---|---|---|---|")
    print("\n".join(_line(one) for one in judged))
    if RLDOCTOR.missing:
        print(f"\nrldoctor: not measured ({RLDOCTOR.missing})")
    else:
        other = score([(one.entry.expected, one.rldoctor) for one in judged if one.rldoctor is not None])
        print(f"\nrldoctor: {json.dumps(other)}")
    print(json.dumps(score([(one.entry.expected, one.ours) for one in judged])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
