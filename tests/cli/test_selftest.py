"""`check --selftest`, and runs that only MLflow has."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from cli_runs import calm, collapsing
from mlflow import MlflowClient
from mlflow.entities import Metric

from grpo_lightning.cli.main import main
from grpo_lightning.logs import FORMATS, dressing, names

TRL_NAMES = {
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "dead_group_fraction": "frac_reward_zero_std",
    "kl": "kl",
    "entropy": "entropy",
}


def test_every_reader_gives_what_the_numbers_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--selftest"]) == 0
    said = capsys.readouterr().out
    assert "wrong:" not in said


def test_there_is_a_dress_for_every_format_and_it_is_recognised(tmp_path: Path) -> None:
    from grpo_lightning.logs import open_log

    assert set(dressing.DRESSES) == set(FORMATS)
    for name, dress in dressing.DRESSES.items():
        signals = [s for s in ("loss", "reward_mean", "response_length_mean", "policy_loss") if s in dress.keys]
        rows = [(i, {dress.keys[s]: i / 10 for s in signals}) for i in range(1, 9)]
        path = tmp_path / f"log{dress.suffix}"
        path.write_text(dress.write(rows))
        log = open_log(path)
        read = list(log)
        assert log.format == name
        assert [row.step for row in read] == list(range(1, 9))
        assert read[4].values["reward_mean"] == 0.5


def test_a_reader_that_misreads_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = names.Translator.parse

    def wrong(self: names.Translator, row: names.Row, tally: names.Tally) -> names.Parsed | None:
        parsed = real(self, row, tally)
        if parsed is None or self.trainer != "verl":
            return parsed
        return parsed._replace(values=dict.fromkeys(parsed.values, 0.5))

    monkeypatch.setattr(names.Translator, "parse", wrong)
    assert main(["check", "--selftest"]) == 1
    assert "wrong: verl-console" in capsys.readouterr().out


def write_metrics(store: str, columns: dict[str, list[float]], prefix: str = "") -> str:
    """A run of another trainer, as its MLflow integration writes it."""
    client = MlflowClient(store)
    run = client.create_run(client.create_experiment("theirs"), run_name="their-run")
    rows = [
        Metric(prefix + TRL_NAMES[name], value, 1000 + step, step)
        for name, values in columns.items()
        if name in TRL_NAMES
        for step, value in enumerate(values, 1)
        if math.isfinite(value)
    ]
    for start in range(0, len(rows), 1000):
        client.log_batch(run.info.run_id, metrics=rows[start : start + 1000])
    run_id: str = run.info.run_id
    return run_id


@pytest.mark.parametrize("prefix", ["", "train/"])
def test_another_trainers_run_is_judged_from_mlflow(
    mlflow_store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, prefix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    run_id = write_metrics(mlflow_store, collapsing(), prefix)
    for text in ("their-run", run_id, f"mlflow:{run_id[:12]}", f"runs:/{run_id}"):
        assert main(["check", text, "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["verdict"] == "unhealthy"
        assert found["steps"] == 90
        assert min(alert["onset_step"] for alert in found["alerts"]) == pytest.approx(61, abs=3)
        assert "read from MLflow, by trl's names" in found["notes"]


def test_baselines_and_replays_take_them_too(
    mlflow_store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    run_id = write_metrics(mlflow_store, calm())
    assert main(["check", run_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "healthy"
    assert main(["rules", "replay", "shipped", f"mlflow:{run_id}", "--json"]) == 0
    capsys.readouterr()
    assert main(["baseline", "build", f"mlflow:{run_id}", "-o", str(tmp_path / "ruler.json")]) == 0
    assert (tmp_path / "ruler.json").is_file()


def test_a_run_without_metrics_is_said(
    mlflow_store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    run_id = write_metrics(mlflow_store, {})
    assert main(["check", f"mlflow:{run_id}"]) == 2
    assert "has no metrics in MLflow" in capsys.readouterr().err


def test_check_needs_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 2
    assert "no LOG is named" in capsys.readouterr().err
