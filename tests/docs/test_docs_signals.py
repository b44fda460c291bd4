"""The generated page of signals."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lightning.signals import CATALOGUE, Signal
from grpo_lightning.signals.entries import PATTERNS

SCRIPT = Path(__file__).parents[2] / "docs" / "generate" / "signals.py"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("docs") / "signals.md"
    subprocess.run([sys.executable, str(SCRIPT), "-o", str(out)], check=True)
    return out.read_text()


def rows(page: str) -> dict[str, list[str]]:
    """The cells of each signal's row, escapes taken off."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 5 and cells[0].startswith("`"):
            assert cells[0] not in found
            found[cells[0].strip("`")] = [re.sub(r"\\(.)", r"\1", cell) for cell in cells[1:]]
    return found


def expected(entry: Signal) -> list[str]:
    return [entry.unit, entry.formula, "" if entry.sense == "none" else entry.sense, entry.reading]


def test_every_signal_is_there_with_unit_formula_sense_and_reading(page: str) -> None:
    found = rows(page)
    assert {name: found[name] for name in CATALOGUE} == {name: expected(s) for name, s in CATALOGUE.items()}
    assert set(found) == set(CATALOGUE) | {row[0] for row in PATTERNS}


def test_signals_stand_under_their_page(page: str) -> None:
    parts = re.split(r"^## (.+)$", page, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    for entry in CATALOGUE.values():
        assert f"| `{entry.name}` |" in sections[entry.page]


def test_entropy_and_kl_are_read_together_in_four_quadrants(page: str) -> None:
    joint = page[page.index("## Entropy and KL together") : page.index("## 1_overview")]
    quadrants = [
        cell for line in joint.splitlines() if line.startswith("| **`entropy`") for cell in line.split("|")[2:4]
    ]
    assert len(quadrants) == 4
    assert all(re.match(r" \*\w", cell) for cell in quadrants), "each has a name and what to look at"
    for name in re.findall(r"`(\w+)`", joint):
        assert name in CATALOGUE, name
