"""`fit` and `validate` as a user types them."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
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
    "typo in a reward": (["--model.rewards", '[{"path": "exact_match", "wieght": 1}]'], "weight"),
    "reward without its keys": (["--model.rewards", '["exact_match"]'], "[{path: exact_match"),
    "reward with escape codes": (["--model.rewards", '[{"path": "support.tiny:raises_escapes"}]'], "\\x1b[31mred"),
    "infinite learning rate": (["--model.optimizer.lr", ".inf"], "finite"),
    "betas of 1.5": (["--model.optimizer.betas", "[1.5, 0.9]"], "1.5"),
    "LoRA of rank 0": (["--model.lora.r", "0"], "lora.r is 0"),
    "Adam's eps is 0 in float16": (["--model.dtype", "float16"], "float16"),
    "Lightning's accumulation": (["--trainer.accumulate_grad_batches", "2"], "model.micro_batch_groups"),
    "Lightning's clipping": (["--trainer.gradient_clip_val", "1.0"], "model.optimizer.max_grad_norm"),
    "no such strategy": (["--trainer.strategy", "dpp"], "dpp"),
    "no such precision": (["--trainer.precision", "bf17"], "trainer.precision"),
    "no devices": (["--trainer.devices", "0"], "not a valid input"),
    "evaluation every 0 steps": (["--trainer.val_check_interval", "0"], "val_check_interval is 0"),
    "a schedule without an end": (
        ["--trainer.max_steps", "-1", "--trainer.max_time", "00:00:01:00", "--model.optimizer.schedule", "cosine"],
        "trainer.max_steps",
    ),
    "no such model": (["--model.model", "no/such/model"], "no/such/model"),
    "no such config": (["--config", "nowhere.yaml"], "nowhere.yaml"),
    "a column that the reward asks for": (["--data.prompt_column", "answer"], "'answer'"),
    "an overlong cache beyond the limit": (["--model.advantages.overlong_cache_tokens", "9"], "give 1 to 4"),
    "a seed of the order below 0": (["--data.seed", "-1"], "data.seed is -1"),
    "a seed below 0": (["--seed_everything", "-1"], "seed_everything"),
    "nothing to train": (["--trainer.max_steps", "0"], "trainer.max_steps is 0"),
    "no epochs to train": (["--trainer.max_epochs", "0"], "trainer.max_epochs is 0"),
    "more ranks than prompts": (["--trainer.devices", "99"], "99 ranks"),
    "an accelerator without its library": (["--trainer.accelerator", "tpu"], "torch_xla"),
    "a template without end": (["--data.prompt_template", "{prompt:>99999999999999}"], "data.prompt_template"),
    "null": (["--model.group_size", "null"], "model.group_size is 'None': give a whole number"),
    "a near miss of a choice": (
        ["--model.kl.use", "lss"],
        "did you mean 'loss'? It takes off, measure, loss or reward.",
    ),
    "neither a number nor null": (["--model.optimizer.max_grad_norm", "x"], "is 'x': give a number or null."),
    "no mapping": (["--data.source_kwargs", "3"], "is '3': give a mapping such as {name: value} or null."),
    "a reward's weight that is null": (["--model.rewards", '[{"path": "exact_match", "weight": null}]'], "is null"),
    "no such checkpoint": (["--ckpt_path", "nowhere.ckpt"], "nowhere.ckpt"),
    "no such shipped file": (["--model.model", "shipped:nothing"], "shipped:nothing"),
}


SEEN_BY_TRAINING = {"reward of the wrong count", "reward with escape codes"}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_sentence_and_exit_code_2(
    files: Path, here: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, case: str
) -> None:
    extra, named = BAD_INPUT[case]
    extra = [str(files / "empty.jsonl") if a == "EMPTY" else a for a in extra]
    argv = extra if extra[0] == "fti" else ["fit", "--config", str(files / "config.yaml"), *extra]
    assert main(argv) == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert named in err
    assert "Traceback" not in err
    assert (here / "runs").exists() == (case in SEEN_BY_TRAINING)
    assert "report" not in caplog.text  # of a run that ended before its first step


BOMB = "".join(f"k{i}: &k{i} [{', '.join(['1' if i == 0 else f'*k{i - 1}'] * 9)}]\n" for i in range(9))
BAD_CONFIGS: dict[str, tuple[str | bytes, str]] = {
    "a key without a value": ("model:\n  group_size:\n", "model.group_size is null, as a key without a value is"),
    "a nested key without a value": ("model: {sampling: {temperature: }}", "model.sampling.temperature is null"),
    "a key twice": ("model:\n  group_size: 4\n  group_size: 8\n", "line 3: model.group_size stands there twice"),
    "a section twice": ("model: {group_size: 4}\ndata: {}\nmodel: {seed: 1}\n", "line 3: model stands there twice"),
    "a billion by aliases": (BOMB, "over 100,000 values when its aliases are written out"),
    "an alias of itself": ("model: {rewards: &all [*all]}", "over 100,000 values"),
    "a list": ("- model\n", "is a list: it must be a mapping of settings"),
    "a text": ("model", "is a single value (model): it must be a mapping"),
    "nothing": ("# only a comment\n", "is empty: write settings into it"),
    "a section that is a number": ("run: 3\n", "line 1: run is a single value (3): it must hold settings"),
    "a section that is a list": ("data: []\n", "line 1: data is a list: it must hold settings"),
    "a section without a value": ("model:\n", "line 1: model is a single value"),
    "an open bracket": ("model: [\n", "is not YAML"),
    "a tab": ("model:\n\tseed: 1\n", "line 2 is not YAML"),
    "two documents": ("model: {}\n---\ndata: {}\n", "is not YAML"),
    "code": ("model: {model: !!python/object/apply:os.getcwd []}", "python/object/apply"),
    "no UTF-8": ('run: {name: "é"}'.encode("latin-1"), "is not UTF-8 text (byte 13)"),
    "NUL": ("model: {seed: 1}\n\0", "is not YAML"),
    "a float for a count": ("model: {group_size: 4.0}", "model.group_size is '4.0': give a whole number."),
    "not a number": ("model: {kl: {use: loss, adaptive_bound: .nan}}", "bound"),
    "infinite": ("model: {sampling: {temperature: .inf}}", "temperature is inf"),
}


@pytest.mark.parametrize(("text", "named"), BAD_CONFIGS.values(), ids=BAD_CONFIGS.keys())
def test_a_bad_config_file_is_one_sentence_and_exit_code_2(
    files: Path, here: Path, capsys: pytest.CaptureFixture[str], text: str | bytes, named: str
) -> None:
    (here / "bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert fit(files, "--config", "bad.yaml") == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert named in err
    assert not (here / "runs").exists()


def test_anchors_and_merge_keys_are_no_fault(files: Path, here: Path) -> None:
    (here / "good.yaml").write_text(
        "run: {mlflow: false}\nmodel: {optimizer: &o {lr: 1.0e-3}}\ndata: {limit_train: &n 8, limit_val: 2}\n"
    )
    assert fit(files, "--config", "good.yaml", "--trainer.max_steps", "1") == 0


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ({"trainer": {"max_step": 3}}, "trainer.max_steps"),
        ({"modle": {"group_size": 3}}, "model.group_size"),
        ({"model": {"sampling": {"temprature": 1.0}}}, "model.sampling.temperature"),
        ({"run": {"nme": "x"}}, "run.name"),
    ],
    ids=["trainer", "section", "nested", "run"],
)
def test_a_typo_in_a_config_file_is_answered_with_what_was_meant(
    files: Path, here: Path, capsys: pytest.CaptureFixture[str], typo: dict[str, Any], meant: str
) -> None:
    (here / "typo.yaml").write_text(yaml.safe_dump(typo))
    assert fit(files, "--config", "typo.yaml") == 2
    assert meant in capsys.readouterr().err


def test_evaluation_every_n_steps_counts_over_short_epochs(files: Path, here: Path) -> None:
    """Three batches an epoch, and an evaluation every four steps: Lightning refuses that on its own."""
    extra = ["--trainer.val_check_interval", "4", "--trainer.max_steps", "8", "--run.mlflow", "false"]
    assert fit(files, *extra) == 0
    with sqlite3.connect(only_run(here) / "journal.sqlite") as db:
        assert [s for (s,) in db.execute("SELECT step FROM evaluations ORDER BY step")] == [0, 4, 8]


def test_a_home_folder_is_found(files: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(files))
    (here / "my.yaml").write_text(
        yaml.safe_dump(
            {
                "model": {"model": "~/tiny-llama", "rewards": [{"path": "~/own.py:own"}]},
                "data": {"train": "~/train.jsonl", "val": None},
                "run": {"dir": "~/the-runs", "mlflow": False},
            }
        )
    )
    (files / "own.py").write_text("def own(completions, **_):\n    return [float(len(c) % 2) for c in completions]\n")
    assert fit(files, "--config", "my.yaml") == 0
    assert not (here / "~").exists()
    assert (files / "the-runs").is_dir()


def _truncated(checkpoint: Path) -> None:
    checkpoint.write_bytes(checkpoint.read_bytes()[:20_000])


def _one_bit_flipped(checkpoint: Path) -> None:
    data = bytearray(checkpoint.read_bytes())
    data[len(data) // 2] ^= 1
    checkpoint.write_bytes(bytes(data))


def _not_a_run(checkpoint: Path) -> None:
    torch.save({"weights": torch.zeros(2)}, checkpoint)


def _a_program(checkpoint: Path) -> None:
    torch.save({"state_dict": {}, "run": Path.cwd}, checkpoint)


BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "truncated": (_truncated, [], "damaged"),
    "empty": (lambda c: c.write_bytes(b""), [], "damaged"),
    "not a checkpoint": (lambda c: c.write_bytes(b"hello" * 1000), [], "damaged"),
    "one bit flipped": (_one_bit_flipped, [], "damaged"),
    "pickled code": (_a_program, [], "damaged"),
    "of nothing that was trained": (_not_a_run, [], "no checkpoint of a run"),
    "of another model": (lambda _: None, ["--model.model", "OTHER"], "another model"),
    "without LoRA": (lambda _: None, ["--model.lora.r", "2"], "another model"),
    "of other data": (lambda _: None, ["--data.limit_train", "5"], "rows"),
    "with nothing left to train": (lambda _: None, ["--trainer.max_steps", "2"], "--trainer.max_steps 4"),
}


@pytest.fixture(scope="module")
def trained(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run of two steps."""
    root = tmp_path_factory.mktemp("trained")
    assert fit(files, "--trainer.max_steps", "2", "--run.mlflow", "false", "--run.dir", str(root)) == 0
    make_tiny_model(files / "other", hidden=64)
    (run,) = root.iterdir()
    return run


@pytest.mark.parametrize(("spoil", "extra", "named"), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS.keys())
def test_a_bad_checkpoint_is_one_sentence_and_exit_code_2(
    files: Path,
    here: Path,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], Any],
    extra: list[str],
    named: str,
) -> None:
    shutil.copytree(trained, here / "runs" / trained.name)
    checkpoint = here / "runs" / trained.name / "checkpoints" / "last.ckpt"
    spoil(checkpoint)
    extra = [str(files / "other" / "tiny-llama") if a == "OTHER" else a for a in extra]
    assert main(["fit", "--ckpt_path", str(checkpoint), "--trainer.max_steps", "4", *extra]) == 2
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1
    assert named in err
    assert "Traceback" not in err


SIGNALS = {"Ctrl-C": (signal.SIGINT, 130), "SIGTERM": (signal.SIGTERM, 143)}


@pytest.mark.parametrize(("number", "code"), SIGNALS.values(), ids=SIGNALS.keys())
def test_a_run_that_a_signal_ends_says_so_in_its_exit_code(
    files: Path, here: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    monkeypatch.setenv("TEST_SIGNAL", str(int(number)))
    reward = '[{"path": "support.tiny:signals_itself", "timeout_seconds": null}]'
    try:
        assert fit(files, "--model.rewards", reward, "--data.val", "null", "--run.mlflow", "false") == code
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    with sqlite3.connect(only_run(here) / "journal.sqlite") as db:
        assert list(db.execute("SELECT status FROM segments")) == [("killed",)]


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
