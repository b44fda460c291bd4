"""Extra sinks of a run: what they get, and that none can hold up or end training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import yaml
from tiny_runs import make_module, record_run, steps_of

from grpo_lightning.callbacks.sinks import BackgroundSink, check_sinks, open_sinks
from grpo_lightning.cli.main import main
from grpo_lightning.errors import ConfigError
from grpo_lightning.sinks import EventRow, StepRow
from grpo_lightning.training.data import PromptDataModule

MakeData = Callable[..., PromptDataModule]


def _row(step: int) -> StepRow:
    return StepRow(run_id="r", segment=1, step=step, time=0.0, values={"loss": float(step)})


def test_a_sink_gets_every_step_and_evaluation(
    tmp_path: Path, tiny_files: Path, tiny_model: Path, make_data: MakeData
) -> None:
    out = tmp_path / "rows.jsonl"
    data = make_data(val=str(tiny_files / "val.jsonl"))
    run = record_run(tmp_path / "runs", make_module(tiny_model), data, 3, sinks={"jsonl": {"path": str(out)}})
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    steps = [r for r in rows if "kind" not in r]
    assert [r["step"] for r in steps] == [1, 2, 3]
    assert {r["run_id"] for r in rows} == {run.run_id}
    assert steps[1]["reward_mean"] == steps_of(run)[1].values["reward_mean"]
    assert "eval_accuracy" in next(r for r in rows if r.get("kind") == "evaluation")["payload"]


def test_a_sink_that_fails_is_said_once_and_training_goes_on(
    tmp_path: Path, tiny_model: Path, make_data: MakeData, caplog: pytest.LogCaptureFixture
) -> None:
    run = record_run(tmp_path, make_module(tiny_model), make_data(), 6, sinks={"jsonl": {"path": "/dev/full"}})
    assert [row.step for row in steps_of(run)] == [1, 2, 3, 4, 5, 6]
    said = [r.getMessage() for r in caplog.records if "jsonl" in r.getMessage()]
    assert sum("failed" in text for text in said) == 1
    assert any("did not get 6 rows" in text for text in said)


class Hanging:
    """Takes the first row and then never comes back until let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.steps: list[int] = []

    def write_step(self, row: StepRow) -> None:
        self.go.wait(30)
        self.steps.append(row.step)

    def write_event(self, row: EventRow) -> None:
        self.steps.append(-row.step)

    def close(self) -> None:
        self.steps.append(0)


def test_a_hanging_sink_holds_up_nothing(caplog: pytest.LogCaptureFixture) -> None:
    inner = Hanging()
    sink = BackgroundSink(inner, name="slow", capacity=4)
    started = perf_counter()
    for step in range(1, 101):
        sink.write_step(_row(step))
    sink.close(timeout=0.1)
    assert perf_counter() - started < 2
    assert sum("rows are left out" in r.getMessage() for r in caplog.records) == 1
    assert any("slow is too slow: 100 rows did not reach it" in r.getMessage() for r in caplog.records)
    inner.go.set()


def test_rows_arrive_in_order_and_the_sink_is_closed_last() -> None:
    inner = Hanging()
    inner.go.set()
    sink = BackgroundSink(inner, name="quick")
    for step in range(1, 50):
        sink.write_step(_row(step))
    sink.write_event(EventRow(run_id="r", segment=1, step=7, time=0.0, kind="note", name="n"))
    sink.close()
    assert inner.steps == [*range(1, 50), -7, 0]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such sink": ({"jsonll": {}}, "'jsonll', which is not an installed sink: there are j"),
    "no such setting": ({"jsonl": {"pth": "-"}}, "pth.*settings are path"),
    "a setting missing": ({"journal": None}, "path"),
}


@pytest.mark.parametrize(("sinks", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_sinks_are_refused_before_anything_is_made(sinks: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sinks(sinks)


def _config(folder: Path, tiny_files: Path, sinks: Any) -> str:
    settings = {
        "model": {
            "model": str(tiny_files / "tiny-llama"),
            "rewards": [{"path": "support.tiny:dense"}],
            "group_size": 2,
            "sampling": {"max_new_tokens": 4},
        },
        "data": {"train": str(tiny_files / "train.jsonl"), "prompts_per_step": 4},
        "trainer": {"max_steps": 2, "accelerator": "cpu"},
        "run": {"mlflow": False, "sinks": sinks},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


@pytest.mark.parametrize(("sinks", "message"), WRONG.values(), ids=WRONG.keys())
def test_the_command_ends_with_one_sentence(
    tmp_path: Path,
    tiny_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sinks: Any,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", _config(tmp_path, tiny_files, sinks)]) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_the_config_file_names_sinks(
    tmp_path: Path, tiny_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", _config(tmp_path, tiny_files, {"jsonl": {"path": "out.jsonl"}})]) == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    (run,) = (tmp_path / "runs").iterdir()
    assert yaml.safe_load((run / "config.yaml").read_text())["run"]["sinks"] == {"jsonl": {"path": "out.jsonl"}}


SINK = """
from pathlib import Path

class Told:
    def __init__(self, path, *, run_id, run_name="", color="red"):
        Path(path).write_text(f"{run_id} {run_name} {color}")
    def write_step(self, row): pass
    def write_event(self, row): pass
    def close(self): pass
"""


def test_a_plugin_is_told_which_run_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real distribution on the path: its sink names `run_id` and `run_name`, and no description."""
    site = tmp_path / "site"
    meta = site / "told-1.0.dist-info"
    meta.mkdir(parents=True)
    (site / "told_sink.py").write_text(SINK)
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: told\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text("[grpo_lightning.sinks]\ntold = told_sink:Told\n")
    monkeypatch.syspath_prepend(str(site))
    wanted = {"told": {"path": str(tmp_path / "said"), "color": "blue"}}
    check_sinks(wanted)
    for sink in open_sinks(wanted, run_id="id1", run_name="first", description="what for"):
        sink.close()
    assert (tmp_path / "said").read_text() == "id1 first blue"


def test_the_log_says_when_a_sink_works_again(caplog: pytest.LogCaptureFixture) -> None:
    class Flaky(Hanging):
        def write_step(self, row: StepRow) -> None:
            if row.step == 1 and not self.go.is_set():
                self.go.set()
                raise OSError("no route")
            self.steps.append(row.step)

    caplog.set_level(logging.WARNING)
    inner = Flaky()
    sink = BackgroundSink(inner, name="flaky")
    sink.write_step(_row(1))
    sink.write_step(_row(2))
    sink.close()
    assert inner.steps == [1, 2, 0]
    assert [("failed" in r.getMessage(), "works again" in r.getMessage()) for r in caplog.records] == [
        (True, False),
        (False, True),
    ]


PAUSES = "- {name: now, signal: lr, above: -1.0, action: pause, cause: data, summary: s, runbook: r.md}\n"


def test_a_run_whose_output_nobody_reads_any_more_goes_on_and_pauses_with_its_own_code(
    tmp_path: Path, tiny_files: Path
) -> None:
    """As behind `| head -1`, or in a closed terminal."""
    (tmp_path / "rules.yaml").write_text(PAUSES)
    config = _config(tmp_path, tiny_files, {"jsonl": {"path": str(tmp_path / "rows.jsonl")}})
    command = [sys.executable, "-m", "grpo_lightning", "fit", "--config", config, "--health.rules", "[rules.yaml]"]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, cwd=tmp_path, env=env, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 75, done.stderr[-3000:]
    assert done.stderr.count("Can't write to the terminal") == 1
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "kind" not in row] == [1]
    assert [row["name"] for row in rows if row.get("kind") == "alert"] == ["now"]
