"""An audit as one self-contained page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from grpo_lightning.errors import UsageError

__all__ = ["audit_page", "write_audit"]

_ORDER = ("changed", "missing", "unknown", "not checked", "ok")
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --paper: #ffffff; --line: #d1d5db; --bad: #b91c1c; --good: #15803d;
  --odd: #7e22ce; --pale: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --paper: #111827; --line: #374151; --bad: #fca5a5;
  --good: #86efac; --odd: #d8b4fe; --pale: #9ca3af; } }
body { margin: 2rem auto; max-width: 80rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { position: sticky; top: 0; background: var(--paper); }
.changed, .missing { color: var(--bad); font-weight: 600; } .ok { color: var(--good); } .unknown { color: var(--odd);
  font-weight: 600; } .not-checked { color: var(--pale); }
code { overflow-wrap: anywhere; }
"""


def write_audit(path: str | Path, audits: Sequence[Mapping[str, Any]], *, levels: Sequence[str], quick: bool) -> Path:
    """Write the page; a crash leaves the old file or the new one."""
    target = Path(path).expanduser()
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        draft.write_text(audit_page(audits, levels=levels, quick=quick), encoding="utf-8", errors="backslashreplace")
        draft.replace(target)
    except OSError as error:
        raise UsageError(f"Can't write {target}: {error.strerror}.") from error
    return target


def audit_page(audits: Sequence[Mapping[str, Any]], *, levels: Sequence[str], quick: bool) -> str:
    """The page's HTML; names and details are escaped."""
    bad = sum(not audit["ok"] for audit in audits)
    head = "".join(Markup('<th scope="col">{}</th>').format(level) for level in ("run", *levels))
    rows = Markup("").join(_row(audit, levels) for audit in audits)
    found = Markup("").join(_problems(audit) for audit in audits if not audit["ok"])
    said = (
        "Quick: weights were not read again, nor files whose size and time stand."
        if quick
        else "Everything was read again."
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Audit of runs</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>Audit of {len(audits)} runs</h1>"
        f"<p>{bad} with findings. {said}</p>"
        '<div class="wide" tabindex="0" role="region" aria-label="Verdicts by run"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{found}</main></body></html>\n"
    )


def _row(audit: Mapping[str, Any], levels: Sequence[str]) -> Markup:
    cells = Markup("").join(_cell(_worst(audit, level)) for level in levels)
    name = Markup("{} <code>{}</code>").format(audit["name"], audit["run_id"][:8])
    return Markup('<tr><th scope="row">{}</th>{}</tr>').format(name, cells)


def _cell(verdict: str) -> Markup:
    return Markup('<td class="{}">{}</td>').format(verdict.replace(" ", "-"), verdict)


def _worst(audit: Mapping[str, Any], level: str) -> str:
    found = {finding["verdict"] for finding in audit["findings"] if finding["level"] == level}
    return next((verdict for verdict in _ORDER if verdict in found), "-")


def _problems(audit: Mapping[str, Any]) -> Markup:
    bad = [f for f in audit["findings"] if f["verdict"] in ("changed", "missing", "unknown")]
    items = Markup("").join(
        Markup('<li><span class="{}">{}</span> {}: <code>{}</code> {}</li>').format(
            f["verdict"], f["verdict"], f["level"], f["name"], f["detail"]
        )
        for f in bad
    )
    return Markup("<h2>{} <code>{}</code></h2><ul>{}</ul>").format(audit["name"], audit["run_id"], items)
