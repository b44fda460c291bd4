"""The recorded runs, and each of them dressed as the log of a trainer, with the quirks of real ones.

A renderer takes rows (their trainer's names, numbers only) and returns the file's text. `expected` is what a reader must make of
the same rows, by rules written here and not taken from the readers.
"""

from __future__ import annotations

import csv
import gzip
import html
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

DATA = Path(__file__).parent / "data"
RUNS = sorted(path.name[:2] for path in DATA.glob("*.csv.gz"))
Rows = list[dict[str, float]]

# the signals compared, by the names that the recorded runs have (spaces around "/" taken out)
SIGNALS = {
    "loss": "loss",
    "Training Loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "reward": "reward_mean",
    "reward_mean": "reward_mean",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "dead_group_fraction",
    "entropy": "entropy",
    "kl": "kl",
    "kl_divergence": "kl",
    "completion_length": "response_length_mean",
    "completions/mean_length": "response_length_mean",
    "completions/max_length": "response_length_max",
    "completions/min_length": "response_length_min",
    "completions/clipped_ratio": "truncated_fraction",
    "clip_ratio/low_mean": "clip_low_fraction",
    "clip_ratio/high_mean": "clip_high_fraction",
    "step_time": "step_seconds",
    "eval_reward": "eval_reward_mean",
    "eval_completions/clipped_ratio": "eval_truncated_fraction",
    "critic/score/mean": "reward_mean",
    "critic/score/max": "reward_max",
    "critic/score/min": "reward_min",
    "critic/advantages/mean": "advantage_mean",
    "response_length/mean": "response_length_mean",
    "response_length/max": "response_length_max",
    "response_length/clip_ratio": "truncated_fraction",
    "actor/entropy": "entropy",
    "actor/entropy_loss": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "lr",
    "actor/pg_loss": "policy_loss",
    "critic/kl": "kl",
    "timing_s/gen": "rollout_seconds",
    "val/test_score/openai/gsm8k": "eval_accuracy",
    "val-core/econ_agent/reward/mean@1": "eval_reward_mean",
}
OF_GROUPS = {"10", "13", "15", "17", "30", "31", "35", "39", "42", "47", "48", "49", "50"}
# by hand: reward_std differs from the only function's std (39, 47), or the names are those of TRL before 0.17


def read(run: str) -> Rows:
    """A recorded run: its rows without empty cells."""
    with gzip.open(DATA / f"{run}.csv.gz", "rt", newline="") as file:
        return [
            {name: float(cell) for name, cell in row.items() if name != "row" and cell} for row in csv.DictReader(file)
        ]


def expected(
    run: str, rows: Rows, *, printed: bool, digits: Callable[[float], float]
) -> list[tuple[int, dict[str, float]]]:
    """Steps and values that a reader must find. `printed`: the log prints steps; `digits`: what its number format keeps."""
    steps: list[tuple[int, dict[str, float]]] = []
    for row in rows:
        if "train_runtime" in row:
            continue
        values = {
            SIGNALS[name]: digits(value) for key, value in row.items() if (name := key.replace(" / ", "/")) in SIGNALS
        }
        values |= _advantage_bound(row, digits)
        if run in OF_GROUPS and "reward_std" in values:
            values["group_reward_std"] = values.pop("reward_std")
        evaluation = all(name.startswith("eval_") for name in values)
        step = int(row["step"]) if printed and "step" in row else len(steps) + 1
        if steps and (evaluation or step == steps[-1][0]):
            steps[-1][1].update(values)
        else:
            steps.append((step, values))
    return steps


def _advantage_bound(row: dict[str, float], digits: Callable[[float], float]) -> dict[str, float]:
    ends = [digits(row[key]) for key in ("critic/advantages/max", "critic/advantages/min") if key in row]
    return {"advantage_abs_max": max(map(abs, ends))} if ends else {}


def bar(done: int, total: int) -> str:
    return f"\r{100 * done // total:3d}%|{'█' * (10 * done // total):<10}| {done}/{total} [{done * 3:02d}:00<00:10,  3.21s/it]"


def training(rows: Rows) -> Rows:
    """Rows of training, without the summary at the end."""
    return [row for row in rows if "train_runtime" not in row]


def step_less(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key != "step"}


def numbered(rows: Rows) -> list[tuple[int, dict[str, float]]]:
    return [(int(row.get("step", place)), row) for place, row in enumerate(rows, 1)]


def trl_console(rows: Rows, form: Callable[[float], object] = float, every: int = 1) -> str:
    """Bars on stderr in between, some several times on a line, and the summary at the end."""
    lines, done, last = [], 0, training(rows)
    total = every * sum(not _evaluation(row) for row in last)
    for row in last:
        if not _evaluation(row):
            done += every
        bars = "".join(bar(step, total) for step in range(max(0, done - every), done + 1))
        lines.append(f"{bars}{' ' * 20}\r{ {key: form(value) for key, value in step_less(row).items()} }")
    lines.append(str({"train_runtime": 601.2, "train_samples_per_second": 2.1, "train_loss": 0.003, "epoch": 1.0}))
    return "\n".join(lines) + "\n"


def _evaluation(row: dict[str, float]) -> bool:
    return "eval_reward" in row and "reward" not in row


def trl_strings(rows: Rows) -> str:
    return trl_console(rows, lambda value: f"{value:.4g}")


def trl_wrapped(rows: Rows) -> str:
    """np.float64 wrappers, as callbacks print them."""
    text = trl_console(rows, lambda value: f"<{value!r}>")
    return text.replace("'<", "np.float64(").replace(">'", ")")


def trl_every_5(rows: Rows) -> str:
    return trl_console(rows, every=5)


def trainer_state(rows: Rows) -> str:
    history = [{**step_less(row), "step": step} for step, row in numbered(rows)]
    arguments = {"TrainerControl": {"args": {"should_log": False}, "attributes": {}}}
    return json.dumps(
        {"best_metric": None, "log_history": history, "logging_steps": 1, "stateful_callbacks": arguments}, indent=2
    )


def json_list(rows: Rows) -> str:
    return json.dumps([{**step_less(row), "step": step} for step, row in numbered(rows)])


def swift_jsonl(rows: Rows) -> str:
    total = numbered(rows)[-1][0]
    extra = {"percentage": "1.00%", "elapsed_time": "1m 2s", "memory(GiB)": 20.1, "train_speed(iter/s)": 0.02}
    lines = [{**step_less(row), "global_step/max_steps": f"{step}/{total}", **extra} for step, row in numbered(rows)]
    return "\n".join(map(json.dumps, lines)) + "\n"


def jsonl(rows: Rows) -> str:
    return "\n".join(json.dumps({"step": step, **step_less(row)}) for step, row in numbered(rows)) + "\n"


def verl_jsonl(rows: Rows) -> str:
    return "\n".join(json.dumps({"step": step, "data": step_less(row)}) for step, row in numbered(rows)) + "\n"


def verl_console(rows: Rows) -> str:
    """Ray's colours and process prefix, wrapped numbers, the step twice, noise; the last line is cut off."""
    pre = "\x1b[36m(TaskRunner pid=4242)\x1b[0m "
    lines = [pre + "{'trainer': {'total_epochs': 1, 'resume_mode': 'auto'}}"]
    for step, row in numbered(training(rows)):
        parts = " - ".join(f"{key}:np.float64({value})" for key, value in step_less(row).items())
        lines.append(
            f"{pre}step:{step} - training/global_step:{step} - {parts}\x1b[32m [repeated 2x across cluster]\x1b[0m"
        )
        lines.append(f"{pre}Training Progress:  {step}%|█         | {step}/700 [1:02<2:00,  9.1s/it]")
    return "\n".join(lines) + f"\n{pre}step:{step + 1} - actor/entropy:np.float64(0.1"


def verl_old(rows: Rows) -> str:
    return "".join(
        f"step:{step} - " + " - ".join(f"{key}:{value:.3f}" for key, value in step_less(row).items()) + "\n"
        for step, row in numbered(training(rows))
    )


def table_csv(rows: Rows, head: str = "step", prefix: str = "") -> str:
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([head, *(prefix + name for name in names)])
    writer.writerows([step, *(row.get(name, "") for name in names)] for step, row in numbered(rows))
    return out.getvalue()


def wandb_csv(rows: Rows) -> str:
    return table_csv([_wandb_names(row) for row in rows], "_step")


def wandb_json(rows: Rows) -> str:
    history = [{"_step": step, "_runtime": 3.0 * step, **_wandb_names(step_less(row))} for step, row in numbered(rows)]
    return json.dumps(history)


def _wandb_names(row: dict[str, float]) -> dict[str, float]:
    """As the Hugging Face integration writes them: train/ before all, eval_ as eval/; verl writes its own."""
    if any(key.startswith("actor/") for key in row):
        return row
    names = {key: "eval/" + key[5:] if key.startswith("eval_") else f"train/{key}" for key in row if key != "step"}
    return {names.get(key, key): value for key, value in row.items()}


def notebook(rows: Rows) -> str:
    """Six decimals; a column that is empty in a row says "No log"."""
    names = list(dict.fromkeys(name for row in training(rows) for name in row if name != "step"))
    head = "".join(
        f"<th>{html.escape(' / '.join(name.replace(' / ', '/').split('/')))}</th>" for name in ["Step", *names]
    )
    body = ""
    for step, row in numbered(training(rows)):
        cells = "".join(f"<td>{f'{row[name]:.6f}' if name in row else 'No log'}</td>" for name in names)
        body += f"<tr>\n<td>{step}</td>{cells}\n</tr>"
    bar_shown = "<div><progress value='9'></progress>[9/9 00:10, Epoch 1/1]</div>"
    page = f"{bar_shown}<table border='1'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    shown = {"output_type": "display_data", "data": {"text/html": [page], "text/plain": ["<HTML>"]}, "metadata": {}}
    cells = [
        {"cell_type": "markdown", "source": ["# GRPO"]},
        {
            "cell_type": "code",
            "source": ["train()"],
            "outputs": [{"output_type": "stream", "text": ["Step 1\n"]}, shown],
        },
    ]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def significant(value: float) -> float:
    return float(f"{value:.4g}")


def three(value: float) -> float:
    return float(f"{value:.3f}")


def six(value: float) -> float:
    return float(f"{value:.6f}")


def same(value: float) -> float:
    return value


# name: renderer, the format that must be recognised, whether it prints steps, what its number format keeps
FORMATS: dict[str, tuple[Callable[[Rows], str], str, bool, Callable[[float], float]]] = {
    "trl-console": (trl_console, "trl-console", False, same),
    "trl-strings": (trl_strings, "trl-console", False, significant),
    "trl-wrapped": (trl_wrapped, "trl-console", False, same),
    "trainer-state": (trainer_state, "trainer-state", True, same),
    "json-list": (json_list, "json", True, same),
    "swift-jsonl": (swift_jsonl, "swift-jsonl", True, same),
    "jsonl": (jsonl, "jsonl", True, same),
    "verl-jsonl": (verl_jsonl, "verl-jsonl", True, same),
    "verl-console": (verl_console, "verl-console", True, same),
    "verl-old": (verl_old, "verl-console", True, three),
    "csv": (table_csv, "csv", True, same),
    "wandb-csv": (wandb_csv, "wandb-csv", True, same),
    "wandb-json": (wandb_json, "wandb-json", True, same),
    "notebook": (notebook, "notebook", True, six),
}


def agree(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
