"""A run in a real SQLite store: made, resumed, ended, with its settings whole and its secrets out."""

from __future__ import annotations

import json
import logging
import random
import shutil
import socket
import sys
from pathlib import Path

import pytest
import yaml

from grpo_lightning.errors import UsageError
from grpo_lightning.tracking import MLflowRun, TrackingError, make_client, ui_command, ui_link
from grpo_lightning.tracking.run import pick_color


def data(run: MLflowRun):
    return make_client(run.tracking_uri).get_run(run.run_id)


def artifact(run: MLflowRun, name: str) -> str:
    folder = data(run).info.artifact_uri.removeprefix("file://")
    return (Path(folder) / name).read_text()


def test_a_new_run(workdir):
    run = MLflowRun.create(
        experiment="my/exp @ 1",
        name="n",
        description="**Why** we run",
        tags={"team": "a", "db": "http://u:p@h"},
    )
    made = data(run)
    assert (made.info.run_name, made.info.status) == ("n", "RUNNING")
    assert made.data.tags["mlflow.note.content"] == "**Why** we run"
    assert made.data.tags["mlflow.user"], "the context providers are asked, as mlflow.start_run does"
    assert (made.data.tags["team"], made.data.tags["db"]) == ("a", "http://***@h")
    experiment = make_client(run.tracking_uri).get_experiment(run.experiment_id)
    assert experiment.name == "my/exp @ 1"
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert experiment.artifact_location.startswith(f"file://{workdir}/mlartifacts/")


def test_an_older_experiment_gets_its_kind(workdir):
    client = make_client(f"sqlite:///{workdir}/mlflow.db")
    client.create_experiment("old")
    MLflowRun.create(experiment="old")
    assert client.get_experiment_by_name("old").tags["mlflow.experimentKind"] == "custom_model_development"


def test_a_deleted_experiment_is_named(run):
    make_client(run.tracking_uri).delete_experiment(run.experiment_id)
    with pytest.raises(UsageError, match=r"'exp' is deleted.*mlflow experiments restore --experiment-id"):
        MLflowRun.create(experiment="exp")


def test_runs_of_one_seed_differ_in_name(workdir):
    """MLflow makes names up with `random`, which a run's seed has set; and it must not move the run's random numbers."""
    names, next_numbers = [], []
    for _ in range(3):
        random.seed(0)
        names.append(MLflowRun.create(experiment="e").name)
        next_numbers.append(random.random())
    assert len(set(names)) == 3
    random.seed(0)
    assert set(next_numbers) == {random.random()}


def test_runs_side_by_side_differ_in_colour(workdir):
    colors = [data(MLflowRun.create(experiment="e")).data.tags["mlflow.runColor"] for _ in range(4)]
    assert len(set(colors)) == 4


def test_the_colour_is_the_farthest_from_the_others():
    red, cyan = "#ff0000", "#00ffff"
    chosen = pick_color("x", [red, cyan])
    parts = sorted(zip((int(chosen[i : i + 2], 16) for i in (1, 3, 5)), "rgb", strict=True))
    assert {parts[-1][1], parts[-2][1]} in ({"r", "g"}, {"r", "b"}, {"g", "r"}, {"b", "r"}, {"b", "g"}), parts
    assert chosen not in (red, cyan)
    assert pick_color("x", ["none", "", "#zzzzzz"]).startswith("#")


# ---------------------------------------------------------------- settings


CONFIG = {"model": {"lr": 1e-6, "api_key": "abc"}, "prompt": "x" * 7000, "short": "y" * 5999, "bad@name": 1}


def test_settings_are_parameters_and_nothing_is_cut(run):
    run.log_config(CONFIG, segment=1)
    params = data(run).data.params
    assert params["model.lr"] == "1e-06"
    assert params["model.api_key"] == "***"
    assert params["short"] == "y" * 5999
    assert params["prompt"].startswith("sha256:")
    assert any(key.startswith("bad_name-") for key in params)
    whole = yaml.safe_load(artifact(run, "config.yaml"))
    assert whole["prompt"] == "x" * 7000
    assert whole["model"]["api_key"] == "***"


def test_a_resumed_run_with_other_settings_does_not_crash(run):
    run.log_config(CONFIG, segment=1)
    run.set_status("finished")
    changed = {**CONFIG, "model": {"lr": 2e-6}, "prompt": "z" * 7000, "new": 3}
    again = MLflowRun.resume(run.run_id, segment=2, from_step=8, config=changed)
    resumed = data(again)
    assert resumed.info.status == "RUNNING"
    assert resumed.info.end_time is None or resumed.data.tags["grpo.status"] == "running"
    assert resumed.data.params["model.lr"] == "1e-06", "parameters can't change"
    assert resumed.data.params["new"] == "3"
    assert json.loads(resumed.data.tags["grpo.segment.2"])["from_step"] == 8
    told = json.loads(resumed.data.tags["grpo.segment.2.changed"])
    assert told["model.lr"] == ["1e-06", "2e-06"]
    assert set(told) == {"model.lr", "prompt"}
    assert yaml.safe_load(artifact(run, "config.segment-2.yaml"))["prompt"] == "z" * 7000


def test_resuming_unchanged_says_nothing(run):
    run.log_config(CONFIG, segment=1)
    MLflowRun.resume(run.run_id, segment=2, from_step=1, config=CONFIG)
    MLflowRun.resume(run.run_id, segment=2, from_step=1, config=CONFIG)
    assert "grpo.segment.2.changed" not in data(run).data.tags


def test_many_changes_go_to_an_artifact(run):
    run.log_config({f"k{i}": "a" * 100 for i in range(150)}, segment=1)
    run.log_config({f"k{i}": "b" * 100 for i in range(150)}, segment=2)
    assert json.loads(data(run).data.tags["grpo.segment.2.changed"])["count"] == 150
    assert len(json.loads(artifact(run, "changed.segment-2.json"))) == 150


def test_long_words_are_kept_whole_somewhere(run):
    run.describe("d" * 9000)
    run.set_tags({"why": "w" * 8001})
    tags = data(run).data.tags
    assert len(tags["mlflow.note.content"]) == 8000
    assert tags["mlflow.note.content"].endswith("the whole text is in the artifact description.md.")
    assert artifact(run, "description.md") == "d" * 9000
    assert artifact(run, "tags/why.txt") == "w" * 8001


# ---------------------------------------------------------------- status, files


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ("finished", "FINISHED"),
        ("failed", "FAILED"),
        ("killed", "KILLED"),
        ("paused", "KILLED"),
        ("interrupted", "KILLED"),
        ("running", "RUNNING"),
    ],
)
def test_every_end_has_its_status(run, status, shown):
    run.set_status(status, reason="because of http://u:p@h")
    made = data(run)
    assert (made.info.status, made.data.tags["grpo.status"]) == (shown, status)
    assert made.data.tags["grpo.status_reason"] == "because of http://***@h"
    assert (made.info.end_time is None) == (status == "running")


def test_a_checkpoint_is_recorded_by_reference(run, workdir):
    (workdir / "ckpt").mkdir()
    (workdir / "ckpt" / "last.ckpt").write_bytes(b"12345")
    run.log_reference("ckpt/last.ckpt", sha256="ab")
    record = json.loads(artifact(run, "references/checkpoint/last.ckpt.json"))
    assert record == {
        "kind": "checkpoint",
        "absolute": str(workdir / "ckpt" / "last.ckpt"),
        "relative": "ckpt/last.ckpt",
        "bytes": 5,
        "sha256": "ab",
    }
    assert data(run).data.tags["grpo.checkpoint.latest"] == str(workdir / "ckpt" / "last.ckpt")


def test_a_file_is_copied(run, workdir):
    (workdir / "report.html").write_text("<p>")
    run.log_artifact("report.html", "reports")
    assert artifact(run, "reports/report.html") == "<p>"


# ---------------------------------------------------------------- what can be wrong


def test_a_run_of_another_store_is_named(run):
    with pytest.raises(UsageError, match=r"no run 'deadbeef'.*MLFLOW_TRACKING_URI"):
        MLflowRun.resume("deadbeef", segment=2, from_step=0)


def test_a_deleted_run_is_named(run):
    make_client(run.tracking_uri).delete_run(run.run_id)
    with pytest.raises(UsageError, match="mlflow runs restore --run-id"):
        MLflowRun.open(run.run_id)
    with pytest.raises(TrackingError, match="was deleted"):
        run.log_points(_points())


def _points():
    from grpo_lightning.tracking import Point

    return [Point(key="kl", value=1.0, time_ms=1, step=1)]


def test_resuming_does_not_wait_for_a_server_that_is_away(caplog):
    caplog.set_level(logging.WARNING)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        run = MLflowRun.resume("abc123", segment=2, from_step=8, tracking_uri=uri)
        assert "Training goes on" in caplog.text
        ((_, begin),) = run.deferred
        with pytest.raises(TrackingError, match="No MLflow server answers"):
            begin()


def test_the_way_to_the_ui():
    program, _, rest = ui_command("sqlite:////a b/m.db").partition(" ui ")
    assert Path(shutil.which(program) or "").absolute() == Path(sys.executable).with_name("mlflow").absolute(), (
        "the one of this environment"
    )
    assert rest == "--backend-store-uri 'sqlite:////a b/m.db'"
    assert ui_command("postgresql://u:p@h/d").endswith("mlflow ui --backend-store-uri postgresql://***@h/d")
    assert ui_command("https://u:p@h/") == "https://***@h/"
    charts = "/#/experiments/7/runs?workflowType=machine_learning&compareRunsMode=CHART"
    assert ui_link("7") == f"http://127.0.0.1:5000{charts}"
    assert ui_link("7", tracking_uri="https://u:p@h/") == f"https://***@h{charts}"
    assert ui_link("7", run_id="ab") == "http://127.0.0.1:5000/#/experiments/7/runs/ab/model-metrics"
