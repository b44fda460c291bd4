"""Which store, and making it once however many ask."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest

from grpo_lightning.errors import UsageError
from grpo_lightning.tracking import MLflowRun, make_client, prepare_store, resolve_tracking_uri
from grpo_lightning.tracking.http import brief_requests, reachable
from grpo_lightning.tracking.store import TRACKING_VARIABLE


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.delenv(TRACKING_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_default_is_absolute_and_the_variable_is_read_now(here, monkeypatch):
    assert resolve_tracking_uri() == f"sqlite:///{here}/mlflow.db"
    assert resolve_tracking_uri(recorded="sqlite:////old/m.db") == "sqlite:////old/m.db"
    assert resolve_tracking_uri(recorded="postgresql://***@h/d") == f"sqlite:///{here}/mlflow.db"
    monkeypatch.setenv(TRACKING_VARIABLE, "http://h:5000")
    assert resolve_tracking_uri() == "http://h:5000"
    assert resolve_tracking_uri(recorded="sqlite:////old/m.db") == "http://h:5000"
    assert resolve_tracking_uri("sqlite:///x.db?timeout=5") == f"sqlite:///{here}/x.db?timeout=5"


@pytest.mark.parametrize("uri", ["file:./mlruns", "./mlruns", "/tmp/mlruns"])
def test_the_file_store_is_refused_with_the_way_out(here, uri):
    with pytest.raises(UsageError, match=r"no longer writes to the file store.*sqlite:///mlflow.db"):
        resolve_tracking_uri(uri)


def test_a_place_that_can_not_be_written(here):
    (here / "file").write_text("")
    with pytest.raises(UsageError, match=r"Can't make the MLflow store .*writable"):
        make_client("sqlite:///file/mlflow.db")


@pytest.mark.parametrize("service", ["databricks", "databricks-uc", "databricks://profile"])
def test_a_service_is_no_folder(here, service):
    assert resolve_tracking_uri(service) == service


def test_a_file_that_is_no_store_is_named(here):
    (here / "mlflow.db").write_text("nonsense " * 100)
    with pytest.raises(UsageError, match=r"mlflow.db can't be used \(.*not a database\): set MLFLOW") as caught:
        make_client(resolve_tracking_uri())
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limit of file sizes here")
def test_a_disk_that_is_full_is_one_sentence(here):
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from grpo_lightning.errors import UsageError; from grpo_lightning.tracking import prepare_store\n"
        "try: prepare_store('sqlite:///mlflow.db')\n"
        "except UsageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Can't make the MLflow store ")
    assert len(done.stdout.strip().splitlines()) == 1


def test_a_server_that_is_away_is_said_in_seconds_and_without_its_password(here):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        uri = f"http://ada:secret@127.0.0.1:{taken.getsockname()[1]}"
        assert not reachable(uri)
        with pytest.raises(UsageError, match=r"No MLflow server answers at http://\*\*\*@127") as caught:
            MLflowRun.create(experiment="e", tracking_uri=uri)
    assert "secret" not in str(caught.value)


def _open_store(uri: str, barrier, results) -> None:
    barrier.wait()
    try:
        run = MLflowRun.create(experiment="shared", tracking_uri=uri)
        results.put(run.experiment_id)
    except BaseException as error:
        results.put(error)
        raise


def test_four_processes_open_one_new_store_at_once(here):
    uri = f"sqlite:///{here}/new/mlflow.db"
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_open_store, args=(uri, barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    ids = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert len(set(ids)) == 1
    assert isinstance(ids[0], str), ids
    client = make_client(uri)
    runs = client.search_runs([ids[0]])
    assert len(runs) == 4
    assert sqlite3.connect(here / "new" / "mlflow.db").execute("PRAGMA journal_mode").fetchone() == ("wal",)
    left = {path.name for path in (here / "new").iterdir()}
    assert left <= {"mlflow.db", "mlflow.db-wal", "mlflow.db-shm", "mlflow.db.lock", "mlartifacts"}


def test_a_store_that_was_cut_short_while_it_was_made_is_made_again(here, template_store):
    """Killed in the middle, our half-made file has another name; an empty one may be left by `touch`."""
    (here / "mlflow.db").touch()
    (here / ".mlflow.db.partial").write_bytes(template_store.read_bytes()[:5000])
    prepare_store(resolve_tracking_uri())
    assert make_client(resolve_tracking_uri()).search_experiments()


def test_an_existing_store_is_left_as_it_is(workdir):
    run = MLflowRun.create(experiment="e")
    prepare_store(run.tracking_uri)
    assert make_client(run.tracking_uri).get_run(run.run_id).info.run_id == run.run_id


def test_the_process_wide_uri_is_not_touched(workdir):
    before = mlflow.get_tracking_uri()
    MLflowRun.create(experiment="e", tracking_uri=f"sqlite:///{workdir}/mlflow.db")
    assert mlflow.get_tracking_uri() == before
    assert TRACKING_VARIABLE not in os.environ


def test_importing_tracking_does_not_import_mlflow():
    code = "import sys, grpo_lightning.tracking; print({'torch', 'mlflow', 'sqlalchemy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_only_tracking_imports_mlflow():
    package = Path(__file__).parents[2] / "grpo_lightning"
    guilty = [
        path
        for path in package.rglob("*.py")
        if path.parent.name != "tracking" and ("import mlflow" in path.read_text() or "from mlflow" in path.read_text())
    ]
    assert guilty == []


def test_requests_are_brief_only_while_ours_are_made(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    with brief_requests(), brief_requests():
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7", "what the user set stays"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7"
