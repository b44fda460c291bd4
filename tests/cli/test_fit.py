"""`fit` and `validate` as a user types them."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.tiny import make_tiny_model, write_prompts

from grpo_lightning.cli.main import main


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_tiny_model(folder)
    write_prompts(folder / "train.jsonl")
    write_prompts(folder / "val.jsonl", 5)
    (folder / "empty.jsonl").write_text("")
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            {
                "seed_everything": 0,
                "model": {
                    "model": str(folder / "tiny-llama"),
                    "rewards": [{"path": "support.tiny:dense"}],
                    "eval_rewards": [{"path": "exact_match"}],
                    "group_size": 4,
                    "sampling": {"max_new_tokens": 4},
                    "optimizer": {"lr": 1e-3},
                },
                "data": {"train": str(folder / "train.jsonl"), "val": str(folder / "val.jsonl"), "prompts_per_step": 4},
                "trainer": {"max_steps": 3, "accelerator": "cpu"},
                "checkpoint": {"every_n_steps": 2},
            }
        )
    )
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_store: str) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    return tmp_path


def fit(files: Path, *extra: str) -> int:
    return main(["fit", "--config", str(files / "config.yaml"), *extra])


def only_run(here: Path) -> Path:
    (run,) = (here / "runs").iterdir()
    return run


def test_a_run_leaves_journal_mlflow_checkpoint_and_config(
    files: Path, here: Path, mlflow_store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(files, "--run.name", "first", "--run.description", "what for") == 0
    run = only_run(here)
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["group_size"] == 4
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 3
    health = json.loads((run / "checkpoints" / "last.health.json").read_text())
    assert health["run_id"] == run.name
    with sqlite3.connect(run / "journal.sqlite") as db:
        assert [s for (s,) in db.execute("SELECT step FROM steps ORDER BY step")] == [1, 2, 3]

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=mlflow_store)
    recorded = client.get_run(run.name)
    assert recorded.info.run_name == "first"
    assert recorded.info.status == "FINISHED"
    history = client.get_metric_history(run.name, "1_overview/reward_mean")
    assert [m.step for m in history] == [1, 2, 3]
    assert client.get_metric_history(run.name, "1_overview/eval_accuracy")
    out = capsys.readouterr().out
    assert run.name in out
    assert "mlflow ui" in out
    assert "--ckpt_path" in out


def test_a_continued_run_is_the_same_run(files: Path, here: Path, mlflow_store: str) -> None:
    assert fit(files) == 0
    run = only_run(here)
    last = str(run / "checkpoints" / "last.ckpt")
    assert main(["fit", "--ckpt_path", last, "--trainer.max_steps", "5", "--model.optimizer.lr", "0.002"]) == 0
    assert only_run(here) == run
    with sqlite3.connect(run / "journal.sqlite") as db:
        assert list(db.execute("SELECT segment, step FROM steps ORDER BY 1, 2")) == [
            (1, 1),
            (1, 2),
            (1, 3),
            (2, 4),
            (2, 5),
        ]

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=mlflow_store)
    assert client.get_run(run.name).info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.name, "1_overview/reward_mean")] == [1, 2, 3, 4, 5]


def test_validate_reads_a_checkpoint(files: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit(files) == 0
    capsys.readouterr()
    last = str(only_run(here) / "checkpoints" / "last.ckpt")
    assert main(["validate", "--ckpt_path", last]) == 0
    assert "eval_accuracy" in capsys.readouterr().out


BAD_INPUT: dict[str, tuple[list[str], str]] = {
    "unknown command": (["fti"], "fit"),
    "config typo": (["--model.group_sise", "4"], "group_size"),
    "unknown loss": (["--model.loss.loss", "grop"], "grpo"),
    "wrong type": (["--model.group_size", "many"], "group_size"),
    "G=1": (["--model.group_size", "1"], "at least 2"),
    "missing data file": (["--data.train", "nowhere.jsonl"], "nowhere.jsonl"),
    "empty dataset": (["--data.train", "EMPTY"], "empty"),
    "missing column": (["--data.prompt_column", "question"], "question"),
    "unknown reward module": (["--model.rewards", '[{"path": "no_such_module:f"}]'], "no_such_module"),
    "unknown reward function": (["--model.rewards", '[{"path": "support.tiny:densse"}]'], "dense"),
    "reward of the wrong count": (["--model.rewards", '[{"path": "support.tiny:one_short"}]'], "15"),
    "prompt over the context": (["--model.sampling.max_new_tokens", "500"], "64"),
    "no such model": (["--model.model", "no/such/model"], "no/such/model"),
    "no such config": (["--config", "nowhere.yaml"], "nowhere.yaml"),
    "no such checkpoint": (["--ckpt_path", "nowhere.ckpt"], "nowhere.ckpt"),
    "no such shipped file": (["--model.model", "shipped:nothing"], "shipped:nothing"),
}


@pytest.mark.parametrize(("extra", "named"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_is_one_sentence_and_exit_code_2(
    files: Path, here: Path, capsys: pytest.CaptureFixture[str], extra: list[str], named: str
) -> None:
    extra = [str(files / "empty.jsonl") if a == "EMPTY" else a for a in extra]
    argv = extra if extra[0] == "fti" else ["fit", "--config", str(files / "config.yaml"), *extra]
    assert main(argv) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert named in err
    assert "Traceback" not in err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "fit" in out
    assert "validate" in out


def test_importing_the_package_is_cheap() -> None:
    heavy = "('torch', 'lightning', 'mlflow', 'transformers')"
    code = f"import sys, grpo_lightning, grpo_lightning.cli.main; print([m for m in {heavy} if m in sys.modules])"
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
