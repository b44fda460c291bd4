"""The page: views of everything, rendered once, small enough, written whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from grpo_lightning.errors import UsageError
from grpo_lightning.health import shipped_path
from grpo_lightning.health.diagnosis import Finding, Number
from grpo_lightning.report.charts import time_bar
from grpo_lightning.report.examining import Examined
from grpo_lightning.report.numbers import short, times
from grpo_lightning.report.rows import view_evidence
from grpo_lightning.report.signals import ACCEPTED, MOST_DRAWN, SignalView, families, view_signals
from grpo_lightning.report.told import Told
from grpo_lightning.sinks.terminal import plain

__all__ = ["LARGEST", "render_report", "write_report"]

LARGEST = 6_000_000  # bytes
_SIZES = ((400, 1_500_000), (200, 900_000), (100, 400_000), (40, 100_000), (12, 20_000), (4, 0))  # pixels, text
_KEY = (
    "reward_mean", "eval_accuracy", "group_reward_std", "dead_group_fraction", "entropy", "kl", "response_length_mean",
    "grad_norm", "truncated_fraction",
)  # fmt: skip
_CODE = re.compile(r"`([^`\n]{1,80})`")
_BYTES_A_POINT = 22
_LONGEST = 2_000  # characters of a name, a description, a summary
_KEYS_SHOWN = 8
_TIMES = ("rollout_seconds", "reward_seconds", "score_seconds", "update_seconds", "monitor_seconds")


def write_report(found: Examined, path: str | Path) -> Path:
    """Write the report; a crash leaves the old file or the new one.

    Raises:
        UsageError: the file can't be written.
    """
    target = Path(path).expanduser().absolute()
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    text = render_report(found)
    try:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UsageError(f"Can't write the report {target}: {error.strerror}.") from error
    return target


def render_report(found: Examined) -> str:
    """The whole page; with many long series or much evidence drawn coarser, until it has at most 6 MB."""
    for pixels, budget in _SIZES:
        if _estimate(found, pixels) > LARGEST and pixels != _SIZES[-1][0]:
            continue
        text = _render(found, pixels, budget)
        if len(text.encode("utf-8", errors="backslashreplace")) <= LARGEST:
            return text
    raise UsageError(
        f"{found.name} has {len(found.told)} alerts and long texts: that does not fit into a report of 6 MB."
    )


def _estimate(found: Examined, pixels: int) -> int:
    """Bytes that the charts take, about."""
    drawn = found.run.signals[:MOST_DRAWN]
    return sum(1_500 + _BYTES_A_POINT * min(len(found.run[name]), 2 * pixels) for name in drawn)


def _render(found: Examined, pixels: int, budget: int) -> str:
    environment = _environment()
    signals = view_signals(found, pixels=pixels)
    by_name = dict(zip((view.signal for view in signals), signals, strict=True))
    script, style = _source("report.js"), _source("report.css")
    return environment.get_template("report.html.j2").render(
        found=found,
        signals=by_name,
        key=_key_signals(found, by_name),
        families=families(signals),
        alerts=_ordered(found),
        accepted=any(event.name == ACCEPTED for event in found.events),
        not_drawn=max(len(found.run.signals) - MOST_DRAWN, 0),
        ruler=_ruler(found),
        times=_time_parts(found),
        evidence=view_evidence(found.evidence, budget=budget),
        data={view.id: view.data for view in signals if not view.constant},
        runbooks=_runbooks(found.told),
        script=Markup(script),
        style=Markup(style),
        script_hash=_sha256(script),
        style_hash=_sha256(style),
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("grpo_lightning.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {"short": short, "plain": _plain, "prose": _prose, "numbers": _numbers}
    environment.filters.update(filters)
    return environment


def _plain(text: object) -> str:
    """Controls written out; a text that is no page's is cut."""
    said = str(text)
    return plain(said) if len(said) <= _LONGEST else f"{plain(said[:_LONGEST])}… ({len(said):,} characters)"


def _prose(text: object) -> Markup:
    """Our own sentences: what stands between backticks is code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(_plain(text)))))


@lru_cache(maxsize=4)
def _source(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    """As a content security policy names a script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# ---- views


def _key_signals(found: Examined, by_name: Mapping[str, SignalView]) -> list[SignalView]:
    """What the first page shows: what the alerts that matter most are about, and the signals that tell most."""
    about = [name for one in _ordered(found)[:3] for name in one.alert.signal.split(",")]
    names = dict.fromkeys(name for name in (*about, *_KEY) if name in by_name)
    return [by_name[name] for name in names][:_KEYS_SHOWN]


def _ordered(found: Examined) -> list[Told]:
    """Open alerts first, the most severe first, as they fired."""
    return sorted(found.told, key=lambda one: (not one.open, one.alert.severity != "critical", one.alert.step))


def _ruler(found: Examined) -> str:
    if found.baseline is not None:
        return f"the baseline of {', '.join(map(plain, found.baseline.runs))}: level ± 2 robust deviations"
    return "the run's own first 20 steps: median ± 2 robust deviations"


def _time_parts(found: Examined) -> dict[str, Any] | None:
    """Where a step's time goes: medians over the run."""
    parts = []
    for name in _TIMES:
        values = sorted(found.run[name].values)
        if values and values[len(values) // 2] > 0:
            parts.append((name.removesuffix("_seconds"), values[len(values) // 2]))
    if len(parts) < 2:
        return None
    total = sum(seconds for _, seconds in parts)
    return {"bar": time_bar(parts), "parts": [(n, s, s / total) for n, s in parts], "total": total}


def _numbers(finding: Finding, drawn: Mapping[str, SignalView]) -> list[dict[str, str]]:
    """A finding's numbers, as text, each with its chart."""
    return [_number(number, drawn.get(number.signal)) for number in finding.numbers]


def _number(number: Number, view: SignalView | None) -> dict[str, str]:
    return {
        "signal": _plain(number.signal),
        "id": view.id if view is not None and not view.constant else "",
        "before": short(number.before),
        "after": short(number.after),
        "times": times(number.before, number.after),
        "step": f"step {number.step}" if number.step is not None else "",
    }


def _runbooks(told: Sequence[Told]) -> Mapping[str, Markup]:
    """The shipped runbooks of the alerts, by name. Markdown without HTML."""
    made: dict[str, Markup] = {}
    folder = shipped_path().parent
    for name in {one.alert.runbook for one in told if one.alert.runbook}:
        text = _runbook(folder, name)
        if text:
            made[name] = Markup(MarkdownIt("commonmark", {"html": False}).enable("table").disable("image").render(text))
    return made


def _runbook(folder: Path, name: str) -> str:
    """Its text; "" where there is none, and for a name that leaves the folder."""
    try:
        path = (folder / name).resolve()
        return path.read_text(encoding="utf-8") if path.is_relative_to(folder.resolve()) else ""
    except (OSError, ValueError):
        return ""
