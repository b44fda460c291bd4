"""MLflow stores for tests: made once a session, copied for each test (a fresh one costs seconds)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lightning.sinks import RunDirectory, StepRow
from grpo_lightning.tracking import MLflowRun, prepare_store
from grpo_lightning.tracking.store import TRACKING_VARIABLE


@pytest.fixture(scope="session")
def template_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    prepare_store(f"sqlite:///{path}")
    return path


@pytest.fixture
def workdir(tmp_path: Path, template_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an empty default store, and no tracking URI from outside."""
    monkeypatch.delenv(TRACKING_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copy(template_store, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def run(workdir: Path) -> MLflowRun:
    return MLflowRun.create(experiment="exp", name="first")


@pytest.fixture
def directory(run: MLflowRun) -> RunDirectory:
    made = RunDirectory.create("runs", run.run_id)
    with made.journal() as journal:
        journal.set_meta(name=run.name, tracking_uri=run.tracking_uri)
    return made


@pytest.fixture
def row() -> Callable[..., StepRow]:
    def make(step: int, segment: int = 1, time: float | None = None, **values: float) -> StepRow:
        at = 1_700_000_000.0 + 10 * segment + step / 1000 if time is None else time
        return StepRow(run_id="r", segment=segment, step=step, time=at, values=values)

    return make
