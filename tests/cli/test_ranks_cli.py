"""`fit --trainer.strategy ddp` as a user types it, on real gloo ranks, with checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.tiny import make_tiny_model, write_prompts

from grpo_lightning.cli.main import main
from grpo_lightning.sinks import RunDirectory

DDP = ["--trainer.strategy", "ddp", "--trainer.accelerator", "cpu"]
COMPARED = ("loss", "grad_norm", "reward_mean", "kl", "entropy", "advantage_std", "response_length_mean")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config whose batches of five prompts split unevenly over two ranks."""
    make_tiny_model(tmp_path)
    write_prompts(tmp_path / "train.jsonl", 10)
    config = {
        "seed_everything": 0,
        "model": {
            "model": "tiny-llama",
            "rewards": [{"path": "support.tiny:dense"}],
            "group_size": 4,
            "micro_batch_groups": 1,
            "sampling": {"max_new_tokens": 4},
            "optimizer": {"lr": 1e-3, "eps": 1e-6},  # Adam magnifies gradients of the size of its eps
            "kl": {"use": "loss"},
        },
        "data": {"train": "train.jsonl", "prompts_per_step": 5},
        "trainer": {"max_steps": 3, "accelerator": "cpu"},
        "checkpoint": {"every_n_steps": 1, "keep": -1},
        "run": {"mlflow": False},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def on_ranks(count: int, *arguments: str) -> None:
    env = os.environ | {
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(__file__).parents[1]}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "grpo_lightning", "fit", *arguments, *DDP, "--trainer.devices", str(count)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def only_run(root: Path) -> Path:
    (run,) = root.iterdir()
    return run


def rows(run: Path) -> dict[int, dict[str, float]]:
    with RunDirectory.open(run).journal(read_only=True) as journal:
        return {row.step: {name: row.values[name] for name in COMPARED} for row in journal.rows()}


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    path = run / "checkpoints" / f"step-{step:07d}.ckpt"
    found: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return found


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_record_the_gradients_and_make_the_updates_of_one(here: Path, count: int) -> None:
    assert main(["fit", "--config", "config.yaml", "--run.dir", "one"]) == 0
    on_ranks(count, "--config", "config.yaml", "--run.dir", "several")
    one, two = only_run(here / "one"), only_run(here / "several")
    want, got = rows(one), rows(two)
    assert want[1]["grad_norm"] > 1e-2
    for step in (1, 2, 3):
        assert got[step] == pytest.approx(want[step], abs=1e-5, rel=1e-4)
    for name, value in weights(one, 1).items():
        torch.testing.assert_close(weights(two, 1)[name], value, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_two_ranks_continue_a_checkpoint_of_theirs_bit_for_bit(here: Path) -> None:
    on_ranks(2, "--config", "config.yaml", "--run.dir", "whole")
    run = only_run(here / "whole")
    whole, last = rows(run), weights(run, 3)
    on_ranks(2, "--ckpt_path", str(run / "checkpoints" / "step-0000001.ckpt"))
    assert rows(run) == whole
    again = weights(run, 3)
    assert all(torch.equal(again[name], value) for name, value in last.items())


def test_a_repair_that_one_rank_needs_holds_up_no_other(here: Path) -> None:
    reward = '[{"path": "support.tiny:infinite_once"}]'
    on_ranks(2, "--config", "config.yaml", "--run.dir", "runs", "--model.rewards", reward)
    with RunDirectory.open(only_run(here / "runs")).journal(read_only=True) as journal:
        steps = [row.values["rollouts_resampled"] for row in journal.rows()]
        assert [event.name for event in journal.recoveries()] == ["resample"]
    assert len(steps) == 3
    assert sum(steps) == 1
