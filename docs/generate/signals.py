"""The page of all signals, made from the catalogue.

    python docs/generate/signals.py [-o FILE]

MkDocs runs it as a hook (`hooks:` in mkdocs.yml): the page is in the site, not in the repository, so it can't fall behind.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from grpo_lightning.signals import CATALOGUE, Signal
from grpo_lightning.signals.entries import PATTERNS, Page

__all__ = ["on_files", "page"]

NAME = "signals.md"
_SENSES = {"low": "low", "high": "high", "both": "both", "none": ""}
_PROSE = Path(__file__).with_name("signals.md")  # what people write; the tables go where it says so
_TABLES = "<!-- tables -->\n"


def page() -> str:
    """The page as Markdown."""
    parts = []
    for number in get_args(Page):
        parts.append(f"## {number}\n")
        entries = [entry for entry in CATALOGUE.values() if entry.page == number]
        for family, rows in groupby(entries, key=lambda entry: entry.family):
            parts.append(f"### {family} ({number})\n")
            parts.append(_table(map(_row, rows)))
    parts.append("## A run's own reward functions\n")
    parts.append(
        _table(_cells(name, unit, formula, sense, reading) for name, unit, formula, sense, _, reading in PATTERNS)
    )
    return _PROSE.read_text(encoding="utf-8").replace(_TABLES, "\n".join(parts))


def _row(entry: Signal) -> str:
    return _cells(entry.name, entry.unit, entry.formula, entry.sense, entry.reading)


def _cells(name: str, unit: str, formula: str, sense: str, reading: str) -> str:
    cells = [f"`{name}`", unit, _text(formula), _SENSES[sense], _text(reading)]
    return f"| {' | '.join(cells)} |"


def _table(rows: Iterator[str] | map[str]) -> str:
    return "\n".join(["| signal | unit | formula | bad | reading |", "|---|---|---|---|---|", *rows, ""])


def _text(text: str) -> str:
    """Characters that Markdown would read as something else."""
    for character in "\\|*_`<>[]":
        text = text.replace(character, f"\\{character}")
    return text


def on_files(files: Any, config: Any) -> Any:
    """MkDocs' hook: add the page to the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, NAME, content=page()))
    return files


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page to a file or to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    out = parser.parse_args(argv).out
    if out is None:
        sys.stdout.write(page())
    else:
        out.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
