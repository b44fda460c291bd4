"""What a person may type for a run."""

from __future__ import annotations

import re

import pytest

from grpo_lightning.errors import UsageError
from grpo_lightning.sinks import RunDirectory
from grpo_lightning.tracking import MLflowRun, resolve_run


def local(run_id: str, name: str) -> RunDirectory:
    made = RunDirectory.create("runs", run_id)
    with made.journal() as journal:
        journal.set_meta(name=name)
    return made


@pytest.fixture
def runs(workdir):
    local("aaaa1111", "apple")
    local("aaaa2222", "banana")
    local("bbbb3333", "cherry")
    local("cccc4444", "cherry")
    return workdir


@pytest.mark.parametrize(
    ("text", "run_id"),
    [
        ("aaaa1111", "aaaa1111"),
        ("aaaa1", "aaaa1111"),
        ("bbbb", "bbbb3333"),
        ("apple", "aaaa1111"),
        ("runs/aaaa2222", "aaaa2222"),
    ],
    ids=["id", "prefix", "short-prefix", "name", "directory"],
)
def test_a_run_here(runs, text, run_id):
    found = resolve_run(text)
    assert (found.run_id, found.path) == (run_id, runs / "runs" / run_id)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("aaaa", r"means 2 runs: aaaa1111 \(apple\), aaaa2222 \(banana\)"),
        ("cherry", r"means 2 runs: bbbb3333 \(cherry\), cccc4444 \(cherry\)"),
        ("bbb", r"no run 'bbb' .* A prefix has 4 characters or more"),
        ("durian", r"no run 'durian' in runs/ and sqlite:.*Give a run id, a unique name or a run directory"),
        ("it's", "no run"),
        ("a%", "no run"),
    ],
)
def test_no_run_or_several(runs, text, said):
    with pytest.raises(UsageError, match=said):
        resolve_run(text)


def test_an_id_wins_over_a_prefix_of_a_longer_one(runs):
    local("aaaa11112", "longer")
    assert resolve_run("aaaa1111").name == "apple"


def test_a_run_that_is_only_in_mlflow(workdir):
    one = MLflowRun.create(experiment="e1", name="same")
    other = MLflowRun.create(experiment="e2", name="same")
    only = MLflowRun.create(experiment="e2", name="only")
    for text in (only.run_id, only.run_id[:10], "only"):
        found = resolve_run(text)
        assert (found.run_id, found.path, found.experiment_id) == (only.run_id, None, only.experiment_id)
    with pytest.raises(UsageError, match="means 2 runs"):
        resolve_run("same")
    assert resolve_run("same", experiment="e1").run_id == one.run_id
    assert resolve_run("same", experiment="e2").run_id == other.run_id
    with pytest.raises(UsageError, match="no experiment 'e3'"):
        resolve_run("same", experiment="e3")


def test_mlflow_tells_where_the_run_directory_is(run, directory):
    run.set_tags({"grpo.run_dir": str(directory.path)})
    assert resolve_run("first", root="elsewhere").path == directory.path
    assert resolve_run("first", experiment="exp").path == directory.path


def test_looking_makes_no_store(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(f"sqlite:///{tmp_path}/mlflow.db")):
        resolve_run("nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_away_does_not_hide_local_runs(runs, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://u:p@127.0.0.1:1")
    assert resolve_run("apple").run_id == "aaaa1111"
    with pytest.raises(UsageError, match=r"http://\*\*\*@127.0.0.1:1\. That server does not answer"):
        resolve_run("durian")
