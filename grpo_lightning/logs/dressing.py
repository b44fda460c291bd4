"""Steps of signals dressed as the log of a trainer: what a reader must read back as it was.

`check --selftest` puts the shipped faults through every reader with it. A format shows what its trainer has a name for.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Callable, Sequence

from grpo_lightning.logs.tables import NAMES, SCALES

__all__ = ["DRESSES", "Dress", "Rows", "keys_of"]

Rows = Sequence[tuple[int, dict[str, float]]]  # (step, values by the trainer's names)


def keys_of(trainer: str) -> dict[str, str]:
    """A trainer's name for each of our signals; the one that its table lists first."""
    found: dict[str, str] = {}
    for key, (signal, _) in NAMES[trainer].items():
        if "<" not in key and "<" not in signal and key not in SCALES:
            found.setdefault(signal, key)
    return found


class Dress:
    """One format, as one trainer writes it."""

    def __init__(
        self,
        trainer: str,
        write: Callable[[Rows], str],
        *,
        suffix: str,
        prefix: str = "",
        only: frozenset[str] | None = None,
    ) -> None:
        self.trainer, self.write, self.suffix = trainer, write, suffix
        names = {signal: prefix + key for signal, key in keys_of(trainer).items()}
        self.keys = {s: k for s, k in names.items() if only is None or s in only}


def _trl_console(rows: Rows) -> str:
    """Python dicts between progress bars."""
    total = rows[-1][0]
    return "\n".join(f"{_bar(step, total)}\r{values!r}" for step, values in rows) + f"\n{_bar(total, total)}\n"


def _bar(done: int, total: int) -> str:
    return f"\r{100 * done // total:3d}%|{'#' * (10 * done // total):<10}| {done}/{total} [{done * 3:02d}:00<00:10,  3.21s/it]"


def _openrlhf(rows: Rows) -> str:
    return "".join(f"Global step {step}: {values!r}\n" for step, values in rows)


def _verl_console(rows: Rows) -> str:
    pre = "\x1b[36m(TaskRunner pid=4242)\x1b[0m "
    return "".join(
        f"{pre}step:{step} - " + " - ".join(f"{k}:{v!r}" for k, v in values.items()) + "\n" for step, values in rows
    )


def _verl_jsonl(rows: Rows) -> str:
    return "".join(json.dumps({"step": step, "data": values}) + "\n" for step, values in rows)


_NEMO_WORDS = {
    "loss": "Loss",
    "reward": "Avg Reward",
    "mean_gen_tokens_per_sample": "Mean Generation Length",
    "gen_kl_error": "Generation KL Error",
}


def _nemo(rows: Rows) -> str:
    total = rows[-1][0]
    parts = []
    for step, values in rows:
        parts.append(f"\n========================= Step {step}/{total} =========================\n")
        parts += [f"  • {_NEMO_WORDS[key]}: {value!r}\n" for key, value in values.items()]
    return "".join(parts)


def _trainer_state(rows: Rows) -> str:
    return json.dumps(
        {"log_history": [{**values, "step": step} for step, values in rows], "logging_steps": 1}, indent=1
    )


def _json(rows: Rows) -> str:
    return json.dumps([{**values, "step": step} for step, values in rows])


def _jsonl(rows: Rows) -> str:
    return "".join(json.dumps({"step": step, **values}) + "\n" for step, values in rows)


def _swift(rows: Rows) -> str:
    total = rows[-1][0]
    return "".join(json.dumps({**values, "global_step/max_steps": f"{step}/{total}"}) + "\n" for step, values in rows)


def _wandb_json(rows: Rows) -> str:
    return json.dumps([{"_step": step, "_runtime": 3.0 * step, **values} for step, values in rows])


def _csv(rows: Rows, head: str = "step") -> str:
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([head, *names])
    writer.writerows([step, *(values.get(name, "") for name in names)] for step, values in rows)
    return out.getvalue()


def _notebook(rows: Rows) -> str:
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ["Step", *names])
    body = "".join(
        f"<tr><td>{step}</td>" + "".join(f"<td>{_cell(values.get(name))}</td>" for name in names) + "</tr>"
        for step, values in rows
    )
    table = f"<table border='1'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    output = {"output_type": "display_data", "data": {"text/html": [table]}, "metadata": {}}
    cell = {"cell_type": "code", "source": ["trainer.train()"], "outputs": [output]}
    return json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def _cell(value: float | None) -> str:
    if value is None:
        return "No log"
    return repr(value) if math.isfinite(value) else str(value)


_IN_NEMO = frozenset({"loss", "reward_mean", "response_length_mean", "rollout_mismatch_kl"})
DRESSES: dict[str, Dress] = {
    "trl-console": Dress("trl", _trl_console, suffix=".log"),
    "openrlhf": Dress("openrlhf", _openrlhf, suffix=".log"),
    "verl-console": Dress("verl", _verl_console, suffix=".log"),
    "nemo-rl": Dress("nemo-rl", _nemo, suffix=".log", only=_IN_NEMO),
    "trainer-state": Dress("trl", _trainer_state, suffix=".json"),
    "json": Dress("trl", _json, suffix=".json"),
    "wandb-json": Dress("trl", _wandb_json, suffix=".json", prefix="train/"),
    "jsonl": Dress("grpo-lightning", _jsonl, suffix=".jsonl", prefix="2_health/"),
    "swift-jsonl": Dress("ms-swift", _swift, suffix=".jsonl"),
    "verl-jsonl": Dress("verl", _verl_jsonl, suffix=".jsonl"),
    "notebook": Dress("trl", _notebook, suffix=".ipynb"),
    "csv": Dress("trl", _csv, suffix=".csv"),
    "wandb-csv": Dress("trl", lambda rows: _csv(rows, "_step"), suffix=".csv", prefix="train/"),
}
