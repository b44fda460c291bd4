"""`doctor`: what stands in the way of a run is said before it begins."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.tiny import make_tiny_model, write_prompts

from grpo_lightning.cli.main import main

Settings = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    make_tiny_model(folder)
    write_prompts(folder / "train.jsonl")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def look(
    files: Path, capsys: pytest.CaptureFixture[str], change: Settings | None = None
) -> tuple[int, dict[str, list[dict[str, str]]]]:
    settings: Settings = {
        "model": {
            "model": str(files / "tiny-llama"),
            "rewards": [{"path": "exact_match"}],
            "group_size": 4,
            "sampling": {"max_new_tokens": 4},
        },
        "data": {"train": str(files / "train.jsonl"), "prompts_per_step": 4},
        "trainer": {"max_steps": 3, "accelerator": "cpu"},
    }
    for part, values in (change or {}).items():
        settings[part] = settings.get(part, {}) | values
    path = files / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    code = main(["doctor", "--config", str(path), "--json"])
    found: dict[str, list[dict[str, str]]] = {}
    for entry in json.loads(capsys.readouterr().out):
        found.setdefault(entry["about"], []).append(entry)
    return code, found


def test_a_config_that_can_run(files: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = look(files, capsys)
    assert code == 0
    assert set(found) == {"versions", "accelerator", "MLflow", "data", "rewards", "memory", "disk"}
    assert {e["verdict"] for entries in found.values() for e in entries} == {"ok"}
    assert "12 prompts of 4 to 6 tokens" in found["data"][0]["said"]
    assert list(here.iterdir()) == []  # nothing is made, MLflow's store included


@pytest.mark.parametrize(
    ("change", "about", "verdict", "said"),
    [
        ({"data": {"prompts_per_step": 64}}, "data", "warning", "fewer than data.prompts_per_step (64)"),
        ({"model": {"sampling": {"max_new_tokens": 60}}}, "data", "problem", "need 66 positions, the model has 64"),
        ({"data": {"train": "missing.jsonl"}}, "data", "problem", "missing.jsonl"),
        ({"model": {"rewards": [{"path": "no_such"}]}}, "rewards", "problem", "no_such"),
        ({"model": {"group_size": 10**9}}, "memory", "problem", "GB free on this machine"),
        ({"run": {"dir": "/proc/runs"}}, "disk", "problem", "/proc"),
        ({"run": {"mlflow": False}}, "MLflow", "ok", "switched off"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_stands_in_the_way(
    files: Path,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    change: Settings,
    about: str,
    verdict: str,
    said: str,
) -> None:
    code, found = look(files, capsys, change)
    assert any(e["verdict"] == verdict and said in e["said"] for e in found[about]), found[about]
    assert code == int(verdict == "problem")


def test_a_server_that_is_away(
    files: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    code, found = look(files, capsys)
    assert code == 1
    assert "No MLflow server answers" in found["MLflow"][0]["said"]
    assert "secret" not in json.dumps(found)


def test_a_distribution_that_is_too_old(
    files: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version
    monkeypatch.setattr(
        "grpo_lightning.cli.doctoring.version", lambda name: "2.5.0" if name == "lightning" else real(name)
    )
    code, found = look(files, capsys)
    assert code == 1
    assert "lightning is 2.5.0, >=2.6.4 is asked for" in found["versions"][0]["said"]


def test_the_shipped_example_on_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "nothing stands in the way" in capsys.readouterr().out


def test_a_setting_that_does_not_exist_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model.group_sizee", "3"]) == 2
    assert "did you mean" in capsys.readouterr().err
