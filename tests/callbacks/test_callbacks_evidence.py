"""Evidence in the run directory and in MLflow."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from tiny_runs import make_module, record_run

from grpo_lightning.callbacks import EvidenceWriter, RunRecorder
from grpo_lightning.sinks import RunDirectory
from grpo_lightning.training.data import PromptDataModule

MakeData = Callable[..., PromptDataModule]


class Keeps(L.Callback):
    """The last record and the prompts behind it."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.record, self.prompts, self.tokenizer = pl_module.last_record, batch.prompts, pl_module.tokenizer


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, make_data: MakeData) -> Any:
    keeps = Keeps()
    module = make_module(tiny_model, "support.tiny:telling")
    folder = tmp_path_factory.mktemp("evidence")
    run = record_run(folder, module, make_data(), 5, evidence_every=2, extra=[keeps])
    return run, keeps


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_come_every_two_steps(recorded: Any) -> None:
    assert sorted(p.name for p in recorded[0].evidence.iterdir()) == [
        "step-000002-regular.jsonl",
        "step-000004-regular.jsonl",
    ]


def test_a_row_holds_all_that_is_known_of_a_rollout(recorded: Any, tmp_path: Path) -> None:
    keeps = recorded[1]
    writer = EvidenceWriter(_recorder(tmp_path))
    writer._tokenizer = keeps.tokenizer
    (path,) = writer.capture(keeps.record, "../Reward Variance: too low")
    assert path is not None
    assert path.name == "step-000005-reward-variance-too-low.jsonl"
    rows, record = _lines(path), keeps.record
    assert {r["why"] for r in rows} >= {"smallest spread", "largest spread", "reward outlier", "advantage outlier"}
    for row in rows:
        p = record.row_ids_P.tolist().index(row["row_id"])
        g = row["rollout"]
        mask = record.rollouts.completion_mask_PGL[p, g]
        assert row["prompt"] == keeps.prompts[p]
        assert row["response"] == keeps.tokenizer.decode(
            record.rollouts.completion_ids_PGL[p, g][mask].tolist(), skip_special_tokens=True
        )
        assert row["rewards"] == {"telling": pytest.approx(float(record.rewards_PGK[p, g, 0]))}
        assert (row["reward"], row["advantage"]) == (
            pytest.approx(float(record.rewards_PG[p, g])),
            pytest.approx(float(record.advantages_PG[p, g])),
        )
        assert (row["length"], row["truncated"]) == (int(mask.sum()), not bool(record.rollouts.terminated_PG[p, g]))
        assert row["logprob_mean"] == pytest.approx(float(record.logprobs_PGL[p, g][mask].mean()))
        assert row["entropy_mean"] == pytest.approx(float(record.entropies_PGL[p, g][mask].mean()))
        assert row["extras"] == {"first": row["response"][:1]}
        assert row["source"] in ("a", "b")
        assert (row["step"], row["rank"], row["segment"]) == (5, 0, 1)
    smallest = [r for r in rows if r["why"] == "smallest spread"]
    assert [r["rollout"] for r in smallest] == [0, 1, 2, 3]
    assert not list(path.parent.glob(".*"))


def _recorder(folder: Path) -> Any:
    directory = RunDirectory.create(folder, "run")
    return SimpleNamespace(directory=directory, segment=1, run_id="run", in_mlflow=lambda *_: None)


def test_a_full_disk_ends_nothing(recorded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = _recorder(tmp_path)
    recorder.directory.evidence.rmdir()
    writer = EvidenceWriter(recorder)
    assert writer.capture(recorded[1].record, "alert") == [None]
    assert "Training goes on" in caplog.text


def test_other_ranks_write_nothing(recorded: Any) -> None:
    assert EvidenceWriter(RunRecorder()).capture(recorded[1].record, "alert") == [None]


def test_missing_and_infinite_rewards_are_strict_json(tmp_path: Path) -> None:
    from signals.signal_records import INF, NAN, make_record

    (path,) = EvidenceWriter(_recorder(tmp_path)).capture(make_record([[0.0, INF, NAN], [0.0, 0.0, 1.0]]), "alert")
    assert path is not None
    text = path.read_text()
    assert "NaN" not in text
    rows = _lines(path)
    found = {r["rollout"]: r["rewards"]["f0"] for r in rows if r["row_id"] == 0}
    assert found[1] == "Infinity"
    assert next(r["value"] for r in rows if r["why"] == "reward outlier") == "Infinity"


def test_mlflow_shows_a_table_and_images(
    tmp_path: Path, tiny_model: Path, make_data: MakeData, mlflow_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    monkeypatch.chdir(tmp_path)
    settings = {"mlflow": True, "evidence_every": 2, "histogram_every": 2, "fingerprint_steps": 2}
    run = record_run(tmp_path / "runs", make_module(tiny_model), make_data(), 4, **settings)
    client = MlflowClient(tracking_uri=mlflow_store)
    found = client.get_run(run.run_id)
    assert json.loads(found.data.tags["mlflow.loggedArtifacts"]) == [{"path": "evidence/regular.json", "type": "table"}]
    table = client.load_table(found.info.experiment_id, "evidence/regular.json", run_ids=[run.run_id])
    assert set(table["step"]) == {4}
    assert {"prompt", "response", "reward/dense", "advantage", "logprob_mean"} <= set(table.columns)
    files = {a.path for a in client.list_artifacts(run.run_id, "evidence")}
    assert files >= {f"evidence/step-00000{n}-regular.jsonl" for n in (2, 4)}
    images = [a.path for a in client.list_artifacts(run.run_id, "images")]
    for step in (2, 4):
        assert sum(f"2_health~advantage_histogram+step+{step}+" in p and p.endswith(".png") for p in images) == 1
    assert "fingerprint.json" in {a.path for a in client.list_artifacts(run.run_id)}


def test_a_tokenizer_that_raises_ends_nothing(recorded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other ranks wait for this one's rows."""

    class Broken:
        def decode(self, *_: Any, **__: Any) -> str:
            raise RuntimeError("token 99 is out of range")

    writer = EvidenceWriter(_recorder(tmp_path))
    writer._tokenizer = Broken()
    (path,) = writer.capture(recorded[1].record, "alert")
    assert path is not None
    assert path.read_text() == ""
    assert "RuntimeError: token 99 is out of range. Training goes on." in caplog.text
