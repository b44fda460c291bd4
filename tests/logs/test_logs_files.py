"""JSON, tables, notebooks; what is refused; following; names."""

import json
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from log_renderers import read, trainer_state

from grpo_lightning.errors import DataError
from grpo_lightning.logs import FORMATS, NAMES, LogStep, follow, from_rows, open_log
from grpo_lightning.logs.tape import Tape
from grpo_lightning.signals.catalogue import signal
from grpo_lightning.signals.entries import SIGNALS


def log(tmp_path: Path, text: str, name: str = "log") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def rewards(reader) -> list[tuple[int, float | None]]:
    return [(step.step, step.values.get("reward_mean")) for step in reader]


def test_every_target_is_a_signal():
    targets = {target for table in NAMES.values() for target, _ in table.values()}
    assert len(targets) > 60
    for target in targets:
        assert signal(target.replace("<fn>", "name")).name


def test_our_own_names_are_those_of_the_catalogue():
    assert {entry.name for entry in SIGNALS} <= set(NAMES["grpo-lightning"])


def test_opening_a_log_imports_no_framework(tmp_path):
    path = log(tmp_path, "step,reward,kl\n1,0.5,0.1\n")
    code = (
        "import sys; from grpo_lightning.logs import open_log; list(open_log(sys.argv[1]));"
        "print([m for m in ('torch', 'lightning', 'mlflow', 'transformers', 'pandas', 'numpy') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


@pytest.mark.parametrize(
    ("text", "format", "found"),
    [
        ("step,reward,kl\n1,0.5,0.1\n2,nan,\n", "csv", [(1, 0.5), (2, None)]),
        ("Step;reward;kl\n1;0.5;0.1\n", "csv", [(1, 0.5)]),
        ("step\treward\n1\t0.5\n", "csv", [(1, 0.5)]),
        (
            '"Step","run-a - train/reward","run-a - train/reward__MIN","run-a - train/reward__MAX"\n"5","0.5","0.1","0.9"\n',
            "wandb-csv",
            [(5, 0.5)],
        ),
        ("Step,a - train/reward,b - train/reward\n1,0.5,0.7\n", "wandb-csv", [(1, 0.5)]),
        (
            '{"history": [{"_step": 1, "train/reward": 0.5}, {"_step": 2, "train/reward": "NaN", "x": {"_type": "histogram"}}]}',
            "wandb-json",
            None,
        ),
        ('{"_step": 1, "train/global_step": 7, "train/reward": 0.5}\n', "wandb-json", [(7, 0.5)]),
        ('{"global_step": 3, "metrics": {"reward": 0.5}}\n', "jsonl", [(3, 0.5)]),
        ('[\n {"step": 1, "reward": 0.5},\n {"step": 2, "reward": 0.6}\n]', "json", [(1, 0.5), (2, 0.6)]),
        ('{"log_history": [{"step": 1, "reward": 0.5}, {"step": 2, "rew', "trainer-state", [(1, 0.5)]),
        ('{"step": 2, "reward_mean": 0.2, "dead_group_fraction": 0.5}\n', "jsonl", [(2, 0.2)]),
    ],
    ids=[
        "csv",
        "semicolons",
        "tabs",
        "chart",
        "chart of two runs",
        "history",
        "W&B lines",
        "nested",
        "list",
        "cut state",
        "ours",
    ],
)
def test_forms_of_a_table(text, format, found, tmp_path):
    reader = open_log(log(tmp_path, text))
    assert reader.format == format
    steps = rewards(reader)
    if found is None:
        assert [step for step, _ in steps] == [1, 2]
    else:
        assert steps == [
            (s, pytest.approx(v, nan_ok=True)) if v is not None else (s, steps[i][1]) for i, (s, v) in enumerate(found)
        ]


def test_the_second_run_of_a_chart(tmp_path):
    reader = open_log(log(tmp_path, "Step,a - train/reward,b - train/reward\n1,0.5,0.7\n"), run=2)
    assert rewards(reader) == [(1, 0.7)]
    assert any("2 runs in this export" in note for note in reader.notes)


def test_rows_of_one_step_are_merged(tmp_path):
    text = '{"step": 1, "reward": 0.5}\n{"step": 1, "eval_reward": 0.7}\n{"step": 2, "reward": 0.6}\n{"step": 2, "reward": 0.9}\n'
    steps = list(open_log(log(tmp_path, text)))
    assert [step.values for step in steps] == [{"reward_mean": 0.5, "eval_reward_mean": 0.7}, {"reward_mean": 0.9}]


def test_printed_steps_repeated_after_a_restart(tmp_path):
    steps = [*range(1, 11), *range(6, 13)]
    text = "".join(json.dumps({"step": step, "reward": place}) + "\n" for place, step in enumerate(steps))
    reader = open_log(log(tmp_path, text))
    assert rewards(reader) == [(s, s - 1.0) for s in range(1, 6)] + [(s, s + 4.0) for s in range(6, 13)]
    assert any("restarted once" in note for note in reader.notes)


@pytest.mark.parametrize("order", [reversed, lambda rows: rows[::2] + rows[1::2]], ids=["backwards", "interleaved"])
def test_rows_out_of_order_are_sorted_or_restarts(order, tmp_path):
    rows = [json.dumps({"step": step, "reward": step}) for step in range(1, 41)]
    found = rewards(open_log(log(tmp_path, "\n".join(order(rows)) + "\n")))
    assert found[-1] == (40, 40.0)
    assert [step for step, _ in found] == sorted({step for step, _ in found})


def test_a_table_that_is_twice_in_a_notebook_is_read_once(tmp_path):
    page = "<table><tr><th>Step</th><th>reward</th></tr><tr><td>1</td><td>nan</td></tr><tr><td>2</td><td>0.5</td></tr></table>"
    shown = {"output_type": "display_data", "data": {"text/html": page}}
    book = {"cells": [{"cell_type": "code", "outputs": [shown, shown]}], "nbformat": 4}
    reader = open_log(log(tmp_path, json.dumps(book)))
    assert [step.step for step in reader] == [1, 2]
    assert reader.runs == 1


def test_unknown_keys_are_named_with_what_they_might_be(tmp_path):
    text = '{"step": 1, "reward": 0.5, "mean_kl_divergnce": 0.1, "xyzzy": 3, "completions/clipped-ratio": 0.5, "note": "text"}\n'
    unknown = open_log(log(tmp_path, text)).unknown_keys
    assert unknown == {"mean_kl_divergnce": "kl", "xyzzy": None, "completions/clipped-ratio": "truncated_fraction"}


@pytest.mark.parametrize(
    "content",
    ["", "\n\n", "hello\nworld\n", '{"a": 1}', "[]", "{}", "SQLite format 3\x00", "\x00" * 1000, "x,y\n1,2\n"],
)
def test_what_is_no_log_is_refused_in_one_sentence(content, tmp_path):
    with pytest.raises(DataError) as caught:
        open_log(log(tmp_path, content))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("format", FORMATS)
def test_a_wrong_format_is_refused_or_empty_never_a_traceback(format, tmp_path):
    path = log(tmp_path, "hello, world\n{'a': 1}\n<html>")
    with pytest.raises(DataError):
        open_log(path, format=format)


def test_missing_files_folders_and_names_are_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            open_log(path)
    with pytest.raises(DataError, match="not a log format"):
        open_log(log(tmp_path, "step,reward\n1,2\n"), format="xml")
    with pytest.raises(DataError, match="logging_steps"):
        open_log(log(tmp_path, "step,reward\n1,2\n"), logging_steps=0)


def test_rows_from_elsewhere():
    reader = from_rows([(1, {"reward_mean": 0.5, "1_overview/kl": 0.1}), (2, {"reward_mean": 0.6})])
    assert list(reader) == [
        LogStep(step=1, values={"reward_mean": 0.5, "kl": 0.1}, groups=None),
        LogStep(step=2, values={"reward_mean": 0.6}, groups=None),
    ]
    assert (reader.format, reader.trainer) == ("journal", "grpo-lightning")


def test_a_journals_reward_std_stays_the_batchs():
    values = {"reward_mean": 0.5, "reward_std": 0.4, "reward/f_mean": 0.5, "reward/f_std": 0.9}
    assert [step.values for step in from_rows((step, values) for step in range(9))] == [values] * 9


def test_a_log_past_the_memory_budget_is_parsed_again(tmp_path, monkeypatch):
    path = log(tmp_path, trainer_state(read("35")))
    kept = list(open_log(path))
    monkeypatch.setattr("grpo_lightning.logs.reader.Tape", partial(Tape, 1000))
    assert list(open_log(path)) == kept


def test_following_a_log_that_grows(tmp_path):
    path, done = tmp_path / "log", threading.Event()
    lines = [str({"loss": 0.0, "reward": float(step)}) + "\n" for step in range(1, 31)]

    def write() -> None:
        for line in lines:
            with path.open("a") as file:
                file.write(line[:10])
                file.flush()
                time.sleep(0.01)
                file.write(line[10:])
        time.sleep(0.2)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    found = [(step.step, step.values["reward_mean"]) for step in follow(path, poll_seconds=0.02, until=done.is_set)]
    writer.join()
    assert found == [(step, float(step)) for step in range(1, 31)]


def test_following_tells_the_steps_after_a_restart_again(tmp_path):
    path = log(tmp_path, "".join(json.dumps({"step": step, "reward": step}) + "\n" for step in range(1, 11)))
    told: list[int] = []
    for step in follow(path, poll_seconds=0.01, until=lambda: len(told) >= 16):
        told.append(step.step)
        if len(told) == 10:
            with path.open("a") as file:
                file.writelines(json.dumps({"step": step, "reward": step}) + "\n" for step in range(8, 14))
    assert told == [*range(1, 11), *range(8, 14)]


def test_hostile_names_stay_plain(tmp_path):
    text = (
        json.dumps({"step": 1, "reward": 1.0, "rewards/<script>\x1b[31m/mean": 0.5, "\x1b]0;x\x07" + "k" * 500: 2.0})
        + "\n"
    )
    reader = open_log(log(tmp_path, text))
    names = next(iter(reader)).values
    assert all(re.fullmatch(r"[\w./\- ]+", name) for name in names)
    assert all(len(key) <= 120 and key.isprintable() for key in reader.unknown_keys)
