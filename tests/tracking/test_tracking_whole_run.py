"""A whole training whose MLflow server is killed in the middle, stays away for a minute and comes back."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml
from support.tiny import make_tiny_model, write_prompts
from test_tracking_outage import kill, start_server

from grpo_lightning.errors import UsageError
from grpo_lightning.signals import page_of
from grpo_lightning.sinks import RunDirectory, StepRow
from grpo_lightning.tracking import make_client, metric_key

AWAY = 60.0  # seconds
STEPS = 450  # of about a quarter of a second

_REWARD = '''
import time

def steady(completions, **_):
    """A reward of even duration: what a step takes beyond it is the trainer's."""
    time.sleep(0.2)
    return [sum(map(ord, c)) % 17 / 17 for c in completions]
'''


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_does_not_notice_a_minute_without_its_server(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    server = start_server(tmp_path, port)
    training = start_training(tmp_path, uri)
    try:
        wait_for_step(tmp_path, 40)
        killed = time.time()
        kill(server)
        time.sleep(AWAY)
        back = time.time()
        assert training.poll() is None, "the server came back while training went on"
        server = start_server(tmp_path, port)
        assert training.wait(400) == 0, (tmp_path / "fit.log").read_text()[-3000:]
        rows = recorded(tmp_path)
        assert [row.step for row in rows] == list(range(1, STEPS + 1))
        never_paused(rows, killed, back)
        everything_arrived_once(rows, uri)
    finally:
        kill(server)
        training.kill()
    log = (tmp_path / "fit.log").read_text()
    assert log.count("MLflow can't be filled now") == 1
    assert log.count("MLflow is back:") == 1


def never_paused(rows: list[StepRow], killed: float, back: float) -> None:
    """The steps of the outage took as long as the others, each of them."""
    gaps = [(later.time, later.time - row.time) for row, later in pairwise(rows[5:])]
    away = [gap for at, gap in gaps if killed < at < back]
    there = [gap for at, gap in gaps if not killed < at < back]
    print(f"seconds a step: {median(there):.3f} with the server, {median(away):.3f} without, longest {max(away):.3f}")
    assert len(away) > 0.5 * AWAY / median(there)
    assert median(away) < 1.25 * median(there)
    assert max(away) < 5.0, "no step waited for a connection to time out"


def everything_arrived_once(rows: list[StepRow], uri: str) -> None:
    client = make_client(uri)
    run = client.get_run(rows[0].run_id)
    assert run.info.status == "FINISHED"
    names = {name for row in rows for name, value in row.values.items() if math.isfinite(value)}
    assert len(names) > 60
    for name in names:
        expected = {row.step: row.values[name] for row in rows if math.isfinite(row.values.get(name, math.nan))}
        history: Any = client.get_metric_history(run.info.run_id, metric_key(name, page_of))
        assert Counter(point.step for point in history) == Counter(list(expected)), name
        assert {point.step: point.value for point in history} == pytest.approx(expected, rel=1e-9), name


def recorded(folder: Path) -> list[StepRow]:
    (path,) = (folder / "runs").iterdir()
    with RunDirectory.open(path).journal(read_only=True) as journal:
        return list(journal.rows())


def wait_for_step(folder: Path, step: int) -> None:
    until = time.monotonic() + 200
    while time.monotonic() < until:
        for path in (folder / "runs").glob("*/journal.sqlite"):
            with suppress(UsageError), RunDirectory.open(path.parent).journal(read_only=True) as journal:  # being made
                latest = journal.latest()
                if latest is not None and latest.step >= step:
                    return
        time.sleep(0.5)
    raise AssertionError((folder / "fit.log").read_text()[-3000:])


def start_training(folder: Path, uri: str) -> subprocess.Popen[bytes]:
    make_tiny_model(folder)
    write_prompts(folder / "train.jsonl")
    (folder / "steady_reward.py").write_text(_REWARD)
    settings = {
        "model": {
            "model": str(folder / "tiny-llama"),
            "rewards": [{"path": "steady_reward:steady"}],
            "group_size": 4,
            "sampling": {"max_new_tokens": 4},
        },
        "data": {"train": str(folder / "train.jsonl"), "prompts_per_step": 4},
        "trainer": {"max_steps": STEPS, "accelerator": "cpu"},
        "health": {"enabled": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    env = {**os.environ, "MLFLOW_TRACKING_URI": uri, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "grpo_lightning", "fit", "--config", str(folder / "config.yaml")]
    with (folder / "fit.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
