"""What every test shares: two threads would fight over two cores, and a fresh MLflow store costs seconds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# The machines that run these are shared and slow at times: how long an example takes to draw says nothing about the code.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow store, made once."""
    from grpo_lightning.tracking import prepare_store

    path = tmp_path_factory.mktemp("mlflow-template") / "mlflow.db"
    prepare_store(f"sqlite:///{path}")
    return path


@pytest.fixture
def mlflow_store(tmp_path: Path, mlflow_template: Path) -> str:
    """The URI of an empty store of this test's own."""
    shutil.copy(mlflow_template, tmp_path / "store.db")
    return f"sqlite:///{tmp_path / 'store.db'}"
