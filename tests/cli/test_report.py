"""`report` and `check --report` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_diagnose import run_with, write_log

from grpo_lightning.cli.main import main
from grpo_lightning.tracking import MLflowRun, make_client


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_store: str) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    return tmp_path


def test_the_report_lies_in_the_run_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_with(here / "runs", paused=True)
    assert main(["report", "a-run"]) == 0
    assert directory.report.read_text().startswith("<!doctype html>")
    assert (
        capsys.readouterr().out == f"{directory.report} ({directory.report.stat().st_size / 1e6:.1f} MB, unhealthy)\n"
    )


def test_it_is_written_where_asked(here: Path) -> None:
    directory = run_with(here / "runs", paused=True)
    assert main(["report", "a-run", "-o", "review.html", "--step", "20"]) == 0
    assert "step 20, as asked" in (here / "review.html").read_text()
    assert not directory.report.exists()


def test_mlflow_gets_it_as_an_artifact(here: Path, mlflow_store: str) -> None:
    run = MLflowRun.create(experiment="x", name="a-run", description="", config=None)
    directory = run_with(here / "runs", paused=True)
    moved = directory.path.rename(here / "runs" / run.run_id)
    from grpo_lightning.sinks import RunDirectory

    with RunDirectory.open(moved).journal() as journal:
        journal.set_meta(run_id=run.run_id, tracking_uri=run.tracking_uri)
    assert main(["report", run.run_id]) == 0
    names = [artifact.path for artifact in make_client(mlflow_store).list_artifacts(run.run_id)]
    assert "report.html" in names


def test_mlflow_may_be_away(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    directory = run_with(here / "runs", paused=True)
    with directory.journal() as journal:
        journal.set_meta(tracking_uri="http://127.0.0.1:9")
    assert main(["report", "a-run"]) == 0
    assert "MLflow did not take it" in capsys.readouterr().out
    assert directory.report.exists()


def test_a_log_needs_a_place(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(here / "train.jsonl", collapse=True)
    assert main(["report", str(log)]) == 2
    assert "say where with -o FILE" in capsys.readouterr().err
    assert main(["report", str(log), "-o", "r.html"]) == 0
    assert "train.jsonl: unhealthy" in (here / "r.html").read_text()


def test_check_writes_the_report_of_what_it_judged(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(here / "train.jsonl", collapse=True)
    (here / "mine.yaml").write_text("[{name: my_rule, signal: reward_mean, below: 0.1, summary: 'mine: {value}'}]")
    assert main(["check", str(log), "--report", "r.html", "--rules", "mine.yaml", "--json"]) == 0  # a warning
    assert [a["rule"] for a in json.loads(capsys.readouterr().out)["alerts"]] == ["my_rule"]
    text = (here / "r.html").read_text()
    assert "mine: 0" in text
    assert "loss_not_finite" not in text


def test_check_writes_one_report_of_one_log(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(write_log(here / "train.jsonl", collapse=False))
    assert main(["check", log, log, "--report", "r.html"]) == 2
    assert "--report is of one log" in capsys.readouterr().err
    assert not (here / "r.html").exists()


def test_a_file_that_cannot_be_written_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(here / "runs", paused=True)
    assert main(["report", "a-run", "-o", "no/such/folder/r.html"]) == 2
    assert "Can't write the report" in capsys.readouterr().err
