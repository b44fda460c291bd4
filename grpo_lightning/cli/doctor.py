"""`doctor`: before a long run, whether this machine and this config can carry it. Nothing is trained or written.

Each line is a verdict (ok, warning, problem, unknown), what was found, and for what is not ok the way out. Exit code 1 when
there is a problem.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from grpo_lightning.cli.arguments import dumps
from grpo_lightning.errors import GrpoError
from grpo_lightning.sinks.terminal import plain

__all__ = ["Finding", "run_doctor"]

Verdict = Literal["ok", "warning", "problem", "unknown"]
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red", "unknown": "magenta"}
_HELP = """\
usage: grpo-lightning doctor [--json] [options of fit]

Looks at versions, the accelerator, MLflow's store, disk space, and at what the config needs: data, rewards, model, memory.
With no config, at the shipped example's. Nothing is trained or written.

examples:
  grpo-lightning doctor
  grpo-lightning doctor --config my.yaml --data.prompts_per_step 64
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at."""

    about: str
    verdict: Verdict
    said: str
    fix: str = ""


def run_doctor(argv: list[str]) -> int:
    """Look, show, and say whether something stands in the way."""
    if any(a in ("-h", "--help") for a in argv):
        print(_HELP)
        return 0
    as_json = "--json" in argv
    findings = list(_findings(_config([a for a in argv if a != "--json"])))
    if as_json:
        print(dumps([asdict(f) for f in findings]))
    else:
        _show(findings)
    return int(any(f.verdict == "problem" for f in findings))


def _config(argv: list[str]) -> Any:
    """The settings of `fit`, without making anything of them."""
    from grpo_lightning.cli.fit import parse_fit

    return parse_fit(argv)


def _findings(config: Any) -> Iterator[Finding]:
    from grpo_lightning.cli import doctoring

    looks: list[tuple[str, Callable[[doctoring.Plan], Iterator[Finding]]]] = [
        ("versions", doctoring.versions),
        ("accelerator", doctoring.accelerator),
        ("MLflow", doctoring.store),
        ("data", doctoring.data),
        ("rewards", doctoring.rewards),
        ("memory", doctoring.memory),
        ("disk", doctoring.disk),
    ]
    plan = doctoring.Plan(config=config)
    for about, look in looks:
        try:
            yield from look(plan)
        except GrpoError as error:
            yield Finding(about=about, verdict="problem", said=str(error))
        except Exception as error:  # noqa: BLE001 - the rest is still worth looking at
            yield Finding(about=about, verdict="unknown", said=f"{type(error).__name__}: {error}")


def _show(findings: list[Finding]) -> None:
    console = Console(highlight=False)
    for found in findings:
        head = Text(f"{found.verdict:<8}", style=_COLOURS[found.verdict])
        console.print(head + Text(f"{found.about:<13}{plain(' '.join(found.said.split()))}"), soft_wrap=True)
        if found.fix:
            console.print(Text(f"{'':<21}-> {plain(found.fix)}"), soft_wrap=True)
    bad = sum(f.verdict == "problem" for f in findings)
    console.print("nothing stands in the way" if not bad else f"{bad} problem{'s' if bad > 1 else ''}")
    sys.stdout.flush()


def existing_parent(path: Path) -> Path:
    """The nearest folder of `path` that exists."""
    found = path.expanduser().absolute()
    while not found.exists():
        found = found.parent
    return found
