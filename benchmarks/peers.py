"""Our rules and three other packages on the same generated series, side by side.

    python benchmarks/peers.py [--held-out [--draw 0]] [--seeds 10] [--healthy 5] [--only ours,rldoctor]
        [--faults "declining reward,NaN loss"] [--details ours] [--jobs 2]

`series.py` makes healthy runs of 20 families and 10 kinds of fault; `series_held_out.py` makes others of other shapes, on
which no rule was tuned. Each package reads every series row by row (see `peer_adapters.py`). A fault counts as found at the
first alarm at or after its onset whose rule has not spoken, at that level and by that step, on the same series without the
fault; the delay is counted in optimizer steps from the onset. Two levels: what would pause or halt the run, and any warning.
A package that is not installed is not measured, and the command that installs it is printed.

The last line is JSON, per tool: `pause_detected`, `pause_delay` (median), `healthy_paused`, `warn_detected`, `healthy_warned`,
`injected`, `healthy`; null for a tool that was not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import series
import series_held_out
from peer_adapters import TOOLS, Alarm, Tool
from series import Pair, Series

__all__ = ["Found", "Measured", "detection", "main", "measure", "table"]

LEVELS = ("pausing", "warning")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """How a fault fared with a tool."""

    fault: str
    name: str
    seed: int
    onset: int
    pause: Alarm | None
    warn: Alarm | None

    def at(self, level: str) -> Alarm | None:
        """The alarm that found it."""
        return self.pause if level == "pausing" else self.warn

    def delay(self, level: str) -> int | None:
        """Optimizer steps from the onset to the alarm."""
        alarm = self.at(level)
        return None if alarm is None else alarm.step - self.onset


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A tool on all series."""

    tool: str
    found: list[Found]
    healthy: list[tuple[Series, list[Alarm]]]

    def disturbed(self, level: str) -> int:
        """Healthy series with an alarm of the level."""
        return sum(any(_at(alarm, level) for alarm in alarms) for _, alarms in self.healthy)

    def delays(self, level: str, fault: str | None = None) -> list[int]:
        """Of the faults that were found."""
        chosen = [one for one in self.found if fault is None or one.fault == fault]
        return [delay for one in chosen if (delay := one.delay(level)) is not None]

    def to_dict(self) -> dict[str, Any]:
        """The last line's numbers."""
        pause, warn = self.delays("pausing"), self.delays("warning")
        return {
            "pause_detected": len(pause),
            "pause_delay": median(pause) if pause else None,
            "healthy_paused": self.disturbed("pausing"),
            "warn_detected": len(warn),
            "healthy_warned": self.disturbed("warning"),
            "injected": len(self.found),
            "healthy": len(self.healthy),
        }


def _at(alarm: Alarm, level: str) -> bool:
    return alarm.pause or level == "warning"


def detection(alarms: Iterable[Alarm], twin: Sequence[Alarm], onset: int, level: str) -> Alarm | None:
    """The first alarm of a level from the onset on that the twin has not raised by then."""
    for alarm in sorted(alarms, key=lambda one: one.step):
        raised = any(other.rule == alarm.rule and other.step <= alarm.step and _at(other, level) for other in twin)
        if alarm.step >= onset and _at(alarm, level) and not raised:
            return alarm
    return None


# ---- measuring


def measure(
    tools: Sequence[Tool], healthy: Sequence[Series], pairs: Sequence[Pair], *, jobs: int = 1
) -> list[Measured]:
    """Every tool on every series."""
    every = [*healthy, *(one for pair in pairs for one in (pair.series, pair.twin))]
    tasks = [(tool.name, one) for one in every for tool in tools]
    if jobs == 1:
        alarms = list(map(_alarms, tasks))
    else:
        with ProcessPoolExecutor(jobs) as pool:
            alarms = list(pool.map(_alarms, tasks, chunksize=8))
    return [_measured(tool.name, alarms[i :: len(tools)], healthy, pairs) for i, tool in enumerate(tools)]


def _alarms(task: tuple[str, Series]) -> list[Alarm]:
    name, one = task
    return next(tool for tool in TOOLS if tool.name == name).alarms(one)


def _measured(tool: str, alarms: list[list[Alarm]], healthy: Sequence[Series], pairs: Sequence[Pair]) -> Measured:
    rest = alarms[len(healthy) :]
    found = [_found(pair, rest[2 * i], rest[2 * i + 1]) for i, pair in enumerate(pairs)]
    return Measured(tool=tool, found=found, healthy=list(zip(healthy, alarms, strict=False)))


def _found(pair: Pair, alarms: list[Alarm], twin: list[Alarm]) -> Found:
    onset = pair.series.onset or 0
    return Found(
        fault=pair.fault,
        name=pair.series.name,
        seed=pair.series.seed,
        onset=onset,
        pause=detection(alarms, twin, onset, "pausing"),
        warn=detection(alarms, twin, onset, "warning"),
    )


# ---- telling


def table(results: Sequence[Measured], level: str) -> str:
    """Found of injected and median delay, per fault and tool, as Markdown."""
    faults = list(dict.fromkeys(one.fault for result in results for one in result.found))
    lines = [
        f"| {level} level | " + " | ".join(one.tool for one in results) + " |",
        "|---|" + "---|" * len(results),
        *(_line(fault, [_cell(one, level, fault) for one in results]) for fault in faults),
        _line("**all faults**", [_cell(one, level, None) for one in results]),
        _line("**healthy, alarmed**", [f"{one.disturbed(level)} of {len(one.healthy)}" for one in results]),
    ]
    return "\n".join(lines)


def _line(head: str, cells: Iterable[str]) -> str:
    return f"| {head} | " + " | ".join(cells) + " |"


def _cell(one: Measured, level: str, fault: str | None) -> str:
    delays = one.delays(level, fault)
    injected = sum(fault is None or found.fault == fault for found in one.found)
    return f"{len(delays)} of {injected}" + (f", {median(delays):g}" if delays else "")


def details(one: Measured) -> str:
    """What was missed, what came late and what was disturbed, with the seeds."""
    lines = [f"{one.tool}: faults not found at the pausing level"]
    for found in one.found:
        if found.pause is None:
            warned = (
                f"warned after {found.delay('warning')} by {found.warn.rule}" if found.warn else "not warned either"
            )
            lines.append(f"  {found.name}, seed {found.seed}, onset {found.onset}: {warned}")
    lines.append(f"{one.tool}: delays and rules at the pausing level")
    for fault in dict.fromkeys(found.fault for found in one.found):
        rules = Counter(found.pause.rule for found in one.found if found.fault == fault and found.pause)
        lines.append(f"  {fault}: {sorted(one.delays('pausing', fault))} {dict(rules)}")
    lines.append(f"{one.tool}: alarms on healthy series")
    for healthy, alarms in one.healthy:
        if alarms:
            told = ", ".join(f"{a.rule} at {a.step}{' (pause)' if a.pause else ''}" for a in alarms)
            lines.append(f"  {healthy.name}, seed {healthy.seed}: {told}")
    return "\n".join(lines)


def disturbances(one: Measured) -> str:
    """Which rules spoke on how many healthy series."""
    rules = Counter(name for _, alarms in one.healthy for name in {_named(alarm) for alarm in alarms})
    told = ", ".join(f"{rule} {count}" for rule, count in rules.most_common())
    return f"{one.tool} on healthy series: {told or 'silent'}"


def together(results: Sequence[Measured]) -> str:
    """What the other packages find when all of them watch, and how often one of them disturbs, at the pausing level."""
    found = sum(any(one.pause for one in same) for same in zip(*(result.found for result in results), strict=True))
    healthy = zip(
        *([any(alarm.pause for alarm in alarms) for _, alarms in result.healthy] for result in results), strict=True
    )
    disturbed = [any(same) for same in healthy]
    names = ", ".join(result.tool for result in results)
    total = len(results[0].found)
    return f"{names} together, pausing: {found} of {total} found, {sum(disturbed)} of {len(disturbed)} healthy alarmed"


def _named(alarm: Alarm) -> str:
    return f"{alarm.rule} ({'pausing' if alarm.pause else 'warning'})"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, end with JSON."""
    args = _arguments(argv)
    wanted = [
        tool
        for tool in TOOLS
        if not args.only or tool.name in args.only or (tool.version is None and "ours" in args.only)
    ]
    tools = [tool for tool in wanted if tool.missing is None]
    if args.held_out:
        healthy = series_held_out.healthy_series(args.healthy, args.draw)
        faulty = series_held_out.pairs(args.seeds, args.draw)
    else:
        healthy, faulty = series.healthy_series(args.healthy), series.pairs(args.seeds)
    chosen = [pair for pair in faulty if not args.faults or pair.fault in args.faults]
    results = measure(tools, healthy, chosen, jobs=args.jobs)
    for tool in wanted:
        if tool.missing is not None:
            print(f"{tool.name} {tool.version}: not measured ({tool.missing})\n")
    for level in LEVELS:
        print(table(results, level), end="\n\n")
    for one in results:
        print(disturbances(one))
        if one.tool in args.details or (one.tool == TOOLS[0].name and "ours" in args.details):
            print(details(one))
    others = [one for one in results if one.tool != TOOLS[0].name]
    if len(others) > 1:
        print(together(others))
    measured = {one.tool: one.to_dict() for one in results}
    names = {tool.name: "ours" if tool.version is None else tool.name for tool in wanted}
    print(json.dumps({names[tool.name]: measured.get(tool.name) for tool in wanted}))
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", action="store_true", help="the series that no rule was tuned on")
    parser.add_argument("--draw", type=int, default=0, help="which of the held-out sets")
    parser.add_argument("--seeds", type=int, default=10, help="faulty series of each kind")
    parser.add_argument("--healthy", type=int, default=5, help="healthy series of each family")
    parser.add_argument("--only", type=_names, default=(), help="tools, comma-separated")
    parser.add_argument("--faults", type=_names, default=(), help="kinds of fault, comma-separated")
    parser.add_argument("--details", type=_names, default=(), help="tools whose misses and false alarms are listed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    return parser.parse_args(argv)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
