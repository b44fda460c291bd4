"""A real Prometheus scrapes two runs at once; a query by run_id separates them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from grpo_prometheus import PrometheusSink
from grpo_prometheus.rules import export_rules
from prometheus_server import needs_prometheus, prometheus
from support.tiny import make_tiny_model, write_prompts

from grpo_lightning.sinks import EventRow, StepRow

ALERT = {"rule": "variance_collapse", "severity": "critical", "action": "pause"}


@needs_prometheus
def test_two_runs_on_one_prometheus_stay_apart(tmp_path: Path) -> None:
    targets = tmp_path / "targets"
    rules = tmp_path / "rules.yml"
    rules.write_text(export_rules().yaml)
    runs = {
        name: PrometheusSink(port="auto", targets_dir=targets, run_id=name, run_name="same name")
        for name in ("r1", "r2")
    }
    try:
        for number, (name, sink) in enumerate(runs.items(), 1):
            row = StepRow(run_id=name, segment=1, step=number, time=time.time(), values={"kl": float(number)})
            sink.write_step(row)
        alert = EventRow(run_id="r2", segment=1, step=2, time=1.0, kind="alert", name=ALERT["rule"], payload=ALERT)
        runs["r2"].write_event(alert)
        with prometheus(tmp_path / "prometheus", targets, rules) as server:
            server.wait_for("grpo_kl", 2)
            for number, name in enumerate(runs, 1):
                (series,) = server.query(f'grpo_kl{{run_id="{name}"}}')
                assert series["metric"]["run_name"] == "same name"
                assert float(series["value"][1]) == number
            (fired,) = server.wait_for('ALERTS{alertname="variance_collapse"}', 1)
            assert fired["metric"]["run_id"] == "r2"
            assert fired["metric"]["judged_by"] == "run"
            assert float(fired["value"][1]) == 1
            health = [target["health"] for target in server.get("targets")["activeTargets"]]
            assert health == ["up", "up"]
            runs["r1"].close()
            server.wait_for("grpo_kl", 1)
    finally:
        for sink in runs.values():
            sink.close()


@needs_prometheus
@pytest.mark.slow
def test_two_live_trainings_are_scraped_and_pass_promtool(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    targets = tmp_path / "targets"
    runs = [train(tmp_path, config, name) for name in ("one", "two")]
    try:
        with prometheus(tmp_path / "prometheus", targets) as server:
            found = server.wait_for("grpo_step", 2, seconds=180)
            assert {s["metric"]["run_name"] for s in found} == {"one", "two"}
            ids = {s["metric"]["run_name"]: s["metric"]["run_id"] for s in found}
            (series,) = server.wait_for(f'grpo_reward_mean{{run_id="{ids["one"]}"}}', 1)
            assert series["metric"]["run_name"] == "one"
            for path in targets.glob("*.json"):
                text = fetch(json.loads(path.read_text())[0]["targets"][0])
                done = subprocess.run(
                    ["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False
                )
                assert (done.returncode, done.stderr) == (0, "")
    finally:
        for run in runs:
            run.send_signal(signal.SIGTERM)  # SIGINT is ignored in children of a shell's background job
        assert [run.wait(120) for run in runs] != []
    assert list(targets.glob("*.json")) == [], "a run that ends takes its target away"


def fetch(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def write_config(folder: Path) -> Path:
    make_tiny_model(folder)
    write_prompts(folder / "train.jsonl")
    settings = {
        "model": {
            "model": str(folder / "tiny-llama"),
            "rewards": [{"path": "support.tiny:dense"}],
            "group_size": 4,
            "sampling": {"max_new_tokens": 4},
        },
        "data": {"train": str(folder / "train.jsonl"), "prompts_per_step": 4},
        "trainer": {"max_steps": 100000, "accelerator": "cpu"},
        "run": {"mlflow": False, "sinks": {"prometheus": {"port": "auto", "targets_dir": str(folder / "targets")}}},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def train(folder: Path, config: Path, name: str) -> subprocess.Popen[bytes]:
    tests = Path(__file__).parents[3] / "tests"
    env = {**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "grpo_lightning", "fit", "--config", str(config), "--run.name", name]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
