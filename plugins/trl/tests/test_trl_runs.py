"""The record of a watched TRL run: pause, resume, sinks, MLflow, ends of every kind."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from grpo_trl import watch
from grpo_trl.state import read_state, write_state
from support.tiny import make_tiny_model
from trl_runs import (
    PAUSE_AT_6,
    AtStep,
    acknowledge,
    alerts_of,
    make_trainer,
    only_run,
    rules,
    steps_of,
    varied,
    watch_run,
)

from grpo_lightning.callbacks import HealthSettings, RunSettings
from grpo_lightning.callbacks.health import judge_of
from grpo_lightning.errors import ConfigError, DataError, RunPaused


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("trl"))


def test_a_pause_waits_for_a_cause_and_the_run_goes_on(tmp_path: Path, model: Path) -> None:
    settings = rules(tmp_path)
    first = watch_run(tmp_path, make_trainer(tmp_path, model, max_steps=8), health=settings, name="wren")
    run, checkpoint = only_run(tmp_path), tmp_path / "trl" / "checkpoint-6"
    assert first.paused is not None
    assert first.directory == run
    state = read_state(checkpoint)
    assert state is not None
    assert (state["run_id"], state["step"], state["health"]["firing"]) == (run.run_id, 6, ["six_steps@6"])

    with pytest.raises(ConfigError, match=r"nobody has said why: .*acknowledge .* six_steps@6 --cause data"):
        watch_run(tmp_path, make_trainer(tmp_path, model, max_steps=8), health=settings, resume=checkpoint)
    acknowledge(run)
    again = make_trainer(tmp_path, model, max_steps=8)
    second = watch_run(tmp_path, again, health=settings, resume=checkpoint)
    assert second.paused is None
    assert [row.step for row in steps_of(run)] == list(range(1, 9))
    assert [(row.event.name, row.event.step) for row in alerts_of(run)] == [("six_steps", 6)], "told once"
    with run.journal(read_only=True) as journal:
        assert [(s.status, s.from_step) for s in journal.segments()] == [("paused", 0), ("finished", 6)]
        assert journal.meta()["name"] == "wren"


def test_a_streak_survives_a_checkpoint(tmp_path: Path, model: Path) -> None:
    settings = rules(tmp_path)
    trainer = make_trainer(tmp_path, model, max_steps=4, save_strategy="steps", save_steps=4)
    assert watch_run(tmp_path, trainer, health=settings).paused is None
    resumed = make_trainer(tmp_path, model, max_steps=8)
    watcher = watch_run(tmp_path, resumed, health=settings, resume=tmp_path / "trl" / "checkpoint-4")
    assert watcher.paused is not None
    assert watcher.paused.startswith("paused by six_steps at step 6")
    assert "go back before it began" not in watcher.paused, "checkpoint-4 was saved after the onset"
    assert [row.step for row in steps_of(only_run(tmp_path))] == [1, 2, 3, 4, 5, 6]


def test_the_state_is_json_and_comes_back_whole(tmp_path: Path, model: Path) -> None:
    """The shipped rules' state of a real run, through the file, into a new judge."""
    watch_run(tmp_path, make_trainer(tmp_path, model, max_steps=5, beta=0.1, save_strategy="steps", save_steps=5))
    state = read_state(tmp_path / "trl" / "checkpoint-5")
    assert state is not None
    judge, _ = judge_of(HealthSettings())
    judge.load_state_dict(state["judge"])
    assert json.loads(json.dumps(judge.state_dict())) == state["judge"]
    assert len(state["temporal"]["kl"]) == 5
    assert state["health"]["verdict"] == "healthy"


@pytest.mark.slow
def test_a_checkpoint_without_a_record_is_judged_from_there(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_trainer(tmp_path, model, max_steps=2, save_strategy="steps", save_steps=2)
    plain.train()
    checkpoint = tmp_path / "trl" / "checkpoint-2"
    assert read_state(checkpoint) is None
    watch_run(tmp_path, make_trainer(tmp_path, model, max_steps=4), resume=checkpoint)
    assert [row.step for row in steps_of(only_run(tmp_path))] == [3, 4]
    assert "has no record of its run" in caplog.text


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 99}', '{"version": 1}'], ids=str)
def test_a_broken_state_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "grpo_health.json").write_text(text)
    with pytest.raises(DataError, match="remove it to judge from the start"):
        read_state(tmp_path)


def test_a_state_is_written_whole(tmp_path: Path) -> None:
    write_state(tmp_path, {"run_id": "r", "root": "/", "judge": {}, "temporal": {}, "evaluation": {}})
    assert [path.name for path in tmp_path.iterdir()] == ["grpo_health.json"]
    assert read_state(tmp_path) is not None


@pytest.mark.slow
def test_a_pause_can_be_raised(tmp_path: Path, model: Path) -> None:
    trainer = make_trainer(tmp_path, model, max_steps=8)
    with pytest.raises(RunPaused, match="paused by six_steps at step 6"):
        watch_run(tmp_path, trainer, health=rules(tmp_path), raise_on_pause=True)
    assert (tmp_path / "trl" / "checkpoint-6" / "trainer_state.json").is_file()


def test_a_run_that_fails_says_so(tmp_path: Path, model: Path) -> None:
    def breaking(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        if trainer_state.global_step == 2:
            raise RuntimeError("out of rewards")
        return varied(completions)

    with pytest.raises(RuntimeError, match="out of rewards"):
        watch_run(tmp_path, make_trainer(tmp_path, model, breaking, max_steps=4))
    with only_run(tmp_path).journal(read_only=True) as journal:
        segment = journal.segments()[-1]
    assert (segment.status, segment.reason) == ("failed", "RuntimeError: out of rewards")
    assert not only_run(tmp_path).is_live()


@pytest.mark.slow
def test_a_fault_of_the_watching_ends_no_training(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(tmp_path, model, max_steps=4)
    watcher = watch(trainer, run=RunSettings(dir=str(tmp_path / "runs"), mlflow=False))

    class Broken:
        def update(self, *_: Any, **__: Any) -> None:
            raise ValueError("a bug")

    trainer.add_callback(AtStep(2, lambda: setattr(watcher, "_temporal", Broken())))
    trainer.train()
    assert trainer.state.global_step == 4
    assert sum("Watching failed at step 3" in record.message for record in caplog.records) == 1


class NoGrpo:
    """Not a trainer."""


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown sink": ({"run": RunSettings(mlflow=False, sinks={"nowhere": None})}, "not an installed sink"),
    "an unknown rule": ({"health": HealthSettings(actions={"no_such": "off"})}, "no_such"),
}


@pytest.mark.parametrize(("settings", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_said_at_once(tmp_path: Path, model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        watch(make_trainer(tmp_path, model), **settings)
    assert not (tmp_path / "runs").exists()


def test_what_is_no_grpo_trainer_is_refused(tmp_path: Path, model: Path) -> None:
    from grpo_trl.hooks import Hooks

    with pytest.raises(
        ConfigError, match=r"A NoGrpo can't be watched: it has no _generate\. Give a GRPOTrainer of TRL"
    ):
        Hooks(NoGrpo())


def test_sinks_mlflow_and_prometheus_get_it_all(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    trainer = make_trainer(tmp_path, model, max_steps=8)
    scraped: list[str] = []

    def scrape() -> None:
        (target,) = (tmp_path / "targets").glob("*.json")
        address = json.loads(target.read_text())[0]["targets"][0]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            scraped.append(answer.read().decode())

    sinks = {
        "jsonl": {"path": str(tmp_path / "rows.jsonl")},
        "prometheus": {"port": "auto", "targets_dir": str(tmp_path / "targets"), "linger": 0.0},
    }
    run_settings = RunSettings(
        dir=str(tmp_path / "runs"), name="wren", description="what for", experiment="trl", sinks=sinks
    )
    watch(trainer, run=run_settings, health=rules(tmp_path, PAUSE_AT_6))
    trainer.add_callback(AtStep(5, scrape))
    trainer.train()
    run = only_run(tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "kind" not in line] == [1, 2, 3, 4, 5, 6]
    (told,) = [line for line in lines if line.get("kind") == "alert"]
    assert {"state", "severity", "action", "cause", "evidence", "first", "message"} <= told["payload"].keys()
    assert f'grpo_reward_mean{{run_id="{run.run_id}",run_name="wren"}}' in scraped[0]

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    found = client.get_run(run.run_id)
    history = client.get_metric_history(run.run_id, "1_overview/reward_mean")
    assert [point.step for point in history] == [1, 2, 3, 4, 5, 6]
    assert (found.data.tags["grpo.status"], found.data.tags["health.verdict"]) == ("paused", "unhealthy")
    assert found.data.params["trl.max_steps"] == "8"
    artifacts = {item.path for item in client.list_artifacts(run.run_id, "evidence")}
    assert "evidence/step-000006-six_steps.jsonl" in artifacts


def test_secrets_of_the_settings_are_not_stored(tmp_path: Path, model: Path) -> None:
    hook = {"webhook": {"url": "http://ada:hunter22@127.0.0.1:9/in/tok3n", "close_within": 0.1}}
    watch_run(tmp_path, make_trainer(tmp_path, model, max_steps=1, hub_token="hf_" + "a" * 30), sinks=hook)
    text = only_run(tmp_path).config.read_text()
    assert "http://127.0.0.1:9/***" in text
    assert not any(secret in text for secret in ("hunter22", "tok3n", "hf_aaa"))


@pytest.mark.slow
def test_a_second_training_is_a_second_run(tmp_path: Path, model: Path) -> None:
    trainer = make_trainer(tmp_path, model, max_steps=2)
    watch_run(tmp_path, trainer)
    trainer.train()
    assert len(list((tmp_path / "runs").glob("*/journal.sqlite"))) == 2
