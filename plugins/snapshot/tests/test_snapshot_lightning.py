"""The callback in real training with a real MLflow store, and MLflow's plugin from an installed wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parents[1]
EXAMPLE = HERE / "examples" / "classifier.py"
BLOCKED = """
import sys, runpy
sys.modules["grpo_lightning"] = None  # importing it fails
sys.argv = [{script!r}, *{words!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def train(folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the example where grpo_lightning can't be imported."""
    code = BLOCKED.format(script=str(EXAMPLE), words=["--root", str(folder), *words])
    env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder.parent, env=env, capture_output=True, text=True, check=check
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("classifier")
    shutil.copy(EXAMPLE.parent / "points.csv", home / "points.csv")
    done = train(home / "run", "--data", str(home / "points.csv"))
    accuracy = re.search(r"accuracy ([\d.]+)", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    return home


def test_three_lines_add_the_snapshot() -> None:
    assert EXAMPLE.read_text().count("# snapshot\n") == 3


def test_the_run_in_mlflow_carries_the_snapshot(trained: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{trained / 'run' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("points").experiment_id])  # type: ignore[union-attr]
    (folder,) = (trained / "run" / "snapshots").iterdir()
    from run_snapshot.manifest import load_snapshot

    stored = load_snapshot(folder)
    assert run.data.tags["run_snapshot.digest"] == stored.digest
    assert run.data.tags["run_snapshot.partial"] == "false"
    assert "data:" not in run.data.tags.get("run_snapshot.drift", "")  # code of editable installs may change meanwhile
    names = {item.path for item in client.list_artifacts(run.info.run_id, "snapshot")}
    assert {"snapshot/manifest.json", "snapshot/environment.json", "snapshot/data.json"} <= names
    assert load_snapshot(Path(client.download_artifacts(run.info.run_id, "snapshot"))).digest == stored.digest
    (source,) = stored.json("data.json")["sources"]
    assert source["rows"]["count"] == 400
    assert stored.json("seeds.json")["PL_GLOBAL_SEED"] == "0"
    assert set(stored.json("weights.json")["tree"]["tensors"]) == {
        f"net.{i}.{p}" for i in (0, 2, 4) for p in ("weight", "bias")
    }


def test_every_checkpoint_names_its_snapshot_and_weights(trained: Path) -> None:
    from run_snapshot import check_checkpoint
    from run_snapshot.manifest import load_snapshot

    (folder,) = (trained / "run" / "snapshots").iterdir()
    checkpoints = list((trained / "run" / "checkpoints").glob("*.ckpt"))
    assert len(checkpoints) == 2
    for file in checkpoints:
        loaded = torch.load(file, weights_only=True)
        assert loaded["run_snapshot"]["digest"] == load_snapshot(folder).digest
        assert [f.verdict for f in check_checkpoint(file)] == ["ok"]


def test_a_resumed_run_is_told_what_changed(trained: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    home = tmp_path / "classifier"
    shutil.copytree(trained / "run", home / "run")
    data = trained / "points.csv"
    before = data.read_text()
    try:
        data.write_text(before.replace(before.splitlines()[17], "9.0,9.0,1"))
        last = str(home / "run" / "checkpoints" / "last.ckpt")
        done = train(home / "run", "--data", str(data), "--epochs", "21", "--ckpt", last)
    finally:
        data.write_text(before)
    assert "Since the run that this checkpoint is from:" in done.stderr
    assert "row 17 changed, of 400" in done.stderr
    client = MlflowClient(f"sqlite:///{home / 'run' / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("points").experiment_id])  # type: ignore[union-attr]
    resumed = [run.data.tags.get("run_snapshot.resumed_from") for run in runs]
    digest = torch.load(last, weights_only=True)["run_snapshot"]["digest"]
    assert sorted(tag or "" for tag in resumed) == ["", digest]


def fit(tmp_path: Path, callbacks: list[Any], **settings: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=2, limit_train_batches=2, limit_val_batches=0, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, **settings,
    )  # fmt: skip
    trainer.fit(BoringModel())
    return trainer


def tampering(file: Path) -> Any:
    from lightning.pytorch import Callback

    class Tamper(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                file.write_text('{"q": 1}\n{"q": 3}\n')

    return Tamper()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text('{"q": 1}\n{"q": 2}\n')
    return file


def test_a_change_during_training_is_warned_of_once(tmp_path: Path, data: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from run_snapshot.lightning import SnapshotCallback

    saving = ModelCheckpoint(tmp_path / "c", save_top_k=-1, every_n_train_steps=1, save_last=True)
    callback = SnapshotCallback(data_files=[data], lock="off")
    with pytest.warns(UserWarning, match="row 2 changed, of 2") as caught:
        fit(tmp_path, [callback, saving, tampering(data)])
    assert sum("row 2 changed" in str(w.message) for w in caught) == 1


def test_a_change_during_training_can_end_it(tmp_path: Path, data: Path) -> None:
    from run_snapshot import SnapshotError
    from run_snapshot.lightning import SnapshotCallback

    with pytest.raises(SnapshotError, match="row 2 changed"):
        fit(tmp_path, [SnapshotCallback(data_files=[data], on_drift="raise", lock="off"), tampering(data)])


def test_a_capture_that_fails_warns_or_ends_the_run(tmp_path: Path) -> None:
    from run_snapshot import SnapshotError
    from run_snapshot.lightning import SnapshotCallback

    with pytest.warns(UserWarning, match="is partial: data: The data"):
        fit(tmp_path, [SnapshotCallback(data_files=["gone.jsonl"], lock="off", check_drift=False)])
    with pytest.raises(SnapshotError, match="does not exist"):
        fit(tmp_path, [SnapshotCallback(data_files=["gone.jsonl"], lock="off", on_error="raise")])


def test_checkpoints_of_weights_only_are_warned_of(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from run_snapshot.lightning import SnapshotCallback

    with pytest.warns(UserWarning, match="save_weights_only leaves callbacks out"):
        fit(
            tmp_path,
            [SnapshotCallback(lock="off", check_drift=False), ModelCheckpoint(tmp_path / "c", save_weights_only=True)],
        )


def test_nobody_elses_run_is_tagged_after_training(tmp_path: Path) -> None:
    from run_snapshot.context import active_tags
    from run_snapshot.lightning import SnapshotCallback

    fit(tmp_path, [SnapshotCallback(lock="off", check_drift=False)])
    assert active_tags() is None


@pytest.mark.slow
def test_two_ranks_take_one_snapshot(tmp_path: Path, data: Path) -> None:
    from run_snapshot.lightning import SnapshotCallback

    fit(tmp_path, [SnapshotCallback(data_files=[data], lock="off")], devices=2, strategy="ddp_fork")
    assert len(list((tmp_path / "snapshots").iterdir())) == 1


PLUGIN = """
import mlflow
from mlflow.tracking.context.registry import _run_context_provider_registry as registry, resolve_tags
ours = [p for p in registry if type(p).__name__ == "RunSnapshotContext"]
assert len(ours) == 1, list(registry)
assert not [k for k in resolve_tags() if k.startswith("run_snapshot")]
from run_snapshot.context import tagging
with tagging("d1g3st"):
    inside = resolve_tags({"mine": "1"})
assert inside["run_snapshot.digest"] == "d1g3st" and inside["run_snapshot.partial"] == "false" and inside["mine"] == "1"
assert not [k for k in resolve_tags() if k.startswith("run_snapshot")]
print("fine")
"""


def test_mlflow_finds_the_plugin_of_an_installed_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(HERE, source, ignore=shutil.ignore_patterns("tests", "*.egg-info", "build", "__pycache__"))
    words = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([sys.executable, "-m", "pip", "install", *words, str(source)], check=True, capture_output=True)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", PLUGIN], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr
    script = tmp_path / "site" / "bin" / "run-snapshot"
    shown = subprocess.run([sys.executable, str(script), "--help"], env=env, capture_output=True, text=True, check=True)
    assert "capture" in shown.stdout


def test_a_broken_context_cant_break_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    from run_snapshot import mlflow_provider

    source = Path(mlflow_provider.__file__).read_text()
    imports = re.findall(r"^(?:from|import) (\S+)", source, flags=re.M)
    assert imports == ["__future__", "run_snapshot.context"]
    provider = mlflow_provider.RunSnapshotContext()
    assert (provider.in_context(), provider.tags()) == (False, {})


WITHOUT = """
import sys
for name in ("git", "yaml", "xxhash", "pyarrow", "lightning", "torch"):
    sys.modules[name] = None  # importing it fails
from run_snapshot.mlflow_provider import RunSnapshotContext
provider = RunSnapshotContext()
print(provider.in_context(), provider.tags(), sorted(m for m in sys.modules if m.startswith("run_snapshot")))
"""


def test_the_provider_needs_none_of_the_distributions_dependencies() -> None:
    """A broken pyarrow or git must not break `import mlflow` for everybody in the environment."""
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == (
        "False {} ['run_snapshot', 'run_snapshot.context', 'run_snapshot.mlflow_provider']"
    ), done.stderr


def test_the_entry_point_names_the_provider() -> None:
    import tomllib

    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["mlflow.run_context_provider"] == {
        "run_snapshot": "run_snapshot.mlflow_provider:RunSnapshotContext"
    }
