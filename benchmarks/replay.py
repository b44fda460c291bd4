"""Rules over recorded steps, and `check` on a long log.

    python benchmarks/replay.py [--steps 20000] [--rounds 3] [--log-steps 100000] [--rules 30]

Steps carry 50 signals of a healthy run: generated series, a new run's every 300 steps so that nothing has settled, and other
signals of the catalogue that no rule reads. The rules are the first 30 shipped ones whose signals are present; with --rules 99
all of them. Time is that of one CPU, so that other programs on the machine don't count; the best round is taken. `check` runs
in a process of its own on a JSON-lines log of the same steps; its memory is the peak resident size. The last line is JSON:
`steps_per_second`, `check_100k_s`, `check_100k_mb`, and `check_wall_s`, which includes waiting for a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter, process_time

from series import FAMILIES, STEPS, healthy

from grpo_lightning.health import Rule, Step, replay, shipped_rules
from grpo_lightning.signals import signal_names

SIGNALS = 50


def recorded(count: int) -> Iterator[Step]:
    """Steps of `SIGNALS` signals; what isn't measured at a step is absent."""
    fillers = sorted(set(signal_names()) - set(healthy(FAMILIES[0], 0).values) - {"dead_group_fraction_all_low"})
    for start in range(0, count, STEPS):
        family = FAMILIES[start // STEPS % len(FAMILIES)]
        values = {k: v.tolist() for k, v in healthy(family, start).values.items()} | _update(start)
        names = list(values) + [n for n in fillers if "<" not in n and n not in values][: SIGNALS - len(values)]
        for i in range(min(STEPS, count - start)):
            row = {n: values[n][i] if n in values else 0.5 + 0.01 * (i % 7) for n in names}
            kept = {n: v for n, v in row.items() if not math.isnan(v)}
            yield Step(step=start + i + 1, values=kept, groups=float(family.prompts))


def _update(start: int) -> dict[str, list[float]]:
    """Signals of a healthy update, that generated series lack."""
    wave = [1.0 + 0.1 * math.sin(start + i) for i in range(STEPS)]
    return {
        "update_norm": [1e-3 * w for w in wave],
        "update_to_weight": [1e-6 * w for w in wave],
        "rollout_mismatch_kl": [1e-4 * w for w in wave],
        "advantage_mean": [0.0 for _ in wave],
        "advantage_top_group_share": [0.3 * w for w in wave],
        "reward_rank_agreement": [1.0 for _ in wave],
        "nonfinite_count": [0.0 for _ in wave],
        "step_seconds": [5.0 * w for w in wave],
    }


def chosen(rules: Sequence[Rule], steps: Sequence[Step], count: int) -> list[Rule]:
    """The first rules that these steps' signals can answer."""
    present = {name for step in steps[:STEPS] for name in step.values}
    able = [r for r in rules if all(one in present or other in present for one, other in r.needed)]
    return able[:count]


def rate(steps: Sequence[Step], rules: Sequence[Rule], rounds: int) -> float:
    """Steps a second, best of `rounds`."""
    best = math.inf
    for _ in range(rounds):
        began = process_time()
        replay(steps, rules)
        best = min(best, process_time() - began)
    return len(steps) / best


def check_log(count: int, folder: Path) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and peak MB of `check` on a log of `count` steps."""
    log = folder / "train.jsonl"
    with log.open("w", encoding="utf-8") as out:
        for step in recorded(count):
            out.write(json.dumps({"step": step.step} | dict(step.values)) + "\n")
    code = "import sys; from grpo_lightning.cli.main import main; sys.exit(main(['check', sys.argv[1], '--json']))"
    began = perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(log)], stdout=subprocess.DEVNULL, cwd=folder, env=_environment()
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall = perf_counter() - began
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise SystemExit("check failed")
    return usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss / 1024


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parent.parent)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rules", type=int, default=30)
    parser.add_argument("--log-steps", type=int, default=100_000, help="0: no check")
    args = parser.parse_args(argv)
    steps = list(recorded(args.steps))
    rules = chosen(shipped_rules(), steps, args.rules)
    found: dict[str, float | int] = {"steps_per_second": round(rate(steps, rules, args.rounds))}
    print(
        f"{len(rules)} rules, {len(steps[0].values)} signals, {len(steps)} steps: {found['steps_per_second']} steps/s"
    )
    if args.log_steps:
        with tempfile.TemporaryDirectory() as folder:
            seconds, wall, megabytes = check_log(args.log_steps, Path(folder))
        found |= {
            "check_100k_s": round(seconds, 2),
            "check_100k_mb": round(megabytes, 1),
            "check_wall_s": round(wall, 2),
        }
        print(f"check on {args.log_steps} steps: {seconds:.1f} s of CPU, {wall:.1f} s in all, {megabytes:.0f} MB")
    print(json.dumps(found | {"rules": len(rules), "signals": len(steps[0].values)}))


if __name__ == "__main__":
    main()
