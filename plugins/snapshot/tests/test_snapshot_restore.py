"""Restoring what can be, and saying what can't: real worktrees, a real environment, data found by digest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from run_snapshot import UsageError, capture, restore
from run_snapshot.records import Report
from snapshot_support import commit, git, install, make_wheel, only_installed

Make = Callable[..., Path]


@pytest.fixture
def project(make_repository: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    files = {"train.py": "lr = 1\n", "reward.py": "def score(): return 1\n", ".gitignore": "data/\n"}
    root = make_repository(files=files)
    (root / "train.py").write_text("lr = 2\n")
    (root / "fresh.py").write_text("y = 1\n")
    (root / "data").mkdir()
    (root / "data" / "a.jsonl").write_text('{"q": 1}\n')
    monkeypatch.chdir(root)
    install(tmp_path / "site", make_wheel(tmp_path / "wheels", "peach", "1.0", {"peach.py": "x = 1\n"}))
    with only_installed(tmp_path / "site"):
        yield root


def take(tmp_path: Path, **settings: Any) -> Path:
    given: dict[str, Any] = {"config": {"lr": 0.1}, "data_files": ["data/a.jsonl"], "reward_paths": ["reward.py:score"]}
    return capture(tmp_path / "snapshot", **(given | settings)).path


def told(report: Report) -> dict[tuple[str, str], tuple[str, str]]:
    return {(f.level, Path(f.name).name): (f.verdict, f.detail) for f in report.findings}


def test_code_data_and_config_come_back(project: Path, tmp_path: Path) -> None:
    path = take(tmp_path)
    revision = git(project, "rev-parse", "HEAD")
    commit(project, {"train.py": "lr = 3\n"})
    (project / "data" / "a.jsonl").rename(tmp_path / "elsewhere.jsonl")
    report = restore(path, tmp_path / "again", search=[tmp_path], install=False)
    code = tmp_path / "again" / "code"
    assert git(code, "rev-parse", "HEAD") == revision
    assert {f.name: f.read_text() for f in code.glob("*.py")} == {
        "train.py": "lr = 2\n", "reward.py": "def score(): return 1\n", "fresh.py": "y = 1\n",
    }  # fmt: skip
    link = tmp_path / "again" / "data" / "0-a.jsonl"
    assert link.resolve() == tmp_path / "elsewhere.jsonl"
    assert (tmp_path / "again" / "config.yaml").read_text() == "lr: 0.1\n"
    found = told(report)
    assert found["code", "project"][0] == "ok"
    assert "2 of 2 edited files" in found["code", "project"][1]
    assert found["data", "a.jsonl"][0] == "ok"
    assert found["environment", "venv"][0] == "not checked"
    assert report.ok
    assert json.loads((tmp_path / "again" / "restored.json").read_text())["ok"]


def test_a_repository_that_is_gone_is_cloned_from_its_remote(project: Path, tmp_path: Path) -> None:
    bare = tmp_path / "remote.git"
    git(tmp_path, "clone", "-q", "--bare", str(project), str(bare))
    git(project, "remote", "add", "origin", str(bare))
    path = take(tmp_path)
    shutil.rmtree(project / ".git")
    report = restore(path, tmp_path / "again", install=False)
    assert told(report)["code", "project"][0] == "ok"
    assert (tmp_path / "again" / "code" / "train.py").read_text() == "lr = 2\n"


def test_what_cant_be_restored_is_said(project: Path, tmp_path: Path) -> None:
    (project / "train.py").write_text('API_KEY = "hunter2hunter2"\n')
    path = take(tmp_path, config={"api_key": "hunter2"})
    (project / "data" / "a.jsonl").write_text('{"q": 2}\n')
    found = told(restore(path, tmp_path / "again", search=[tmp_path], install=False))
    assert found["data", "a.jsonl"][0] == "missing"
    assert found["code", "train.py"] == ("changed", "not as it was: secrets were taken out of the patch")
    assert found["config", "config.yaml"][0] == "changed"
    assert (tmp_path / "again" / "code" / "train.py").read_text() == 'API_KEY = "***"\n'


def test_without_repository_and_remote_there_is_no_code(project: Path, tmp_path: Path) -> None:
    path = take(tmp_path)
    shutil.rmtree(project / ".git")
    verdict, detail = told(restore(path, tmp_path / "again", install=False))["code", "project"]
    assert verdict == "missing"
    assert "no remote was recorded" in detail


def test_a_folder_in_use_is_refused(project: Path, tmp_path: Path) -> None:
    path = take(tmp_path)
    with pytest.raises(UsageError, match="is not empty"):
        restore(path, project, install=False)


def test_the_environment_comes_back(project: Path, tmp_path: Path) -> None:
    report = restore(take(tmp_path), tmp_path / "again")
    assert told(report)["environment", "venv"] == ("ok", "1 of 1 distributions as recorded")
    assert report.ok
    (module,) = (tmp_path / "again" / "venv").rglob("peach.py")
    assert module.read_text() == "x = 1\n"


@pytest.mark.slow
def test_another_build_of_a_distribution_is_named(project: Path, tmp_path: Path) -> None:
    path = take(tmp_path)
    make_wheel(tmp_path / "wheels", "peach", "1.0", {"peach.py": "tampered = 1\n"})
    found = told(restore(path, tmp_path / "again"))
    assert found["environment", "peach"] == ("changed", "1.0: same version, different build")


def test_a_distribution_that_cant_be_had_is_named(project: Path, tmp_path: Path) -> None:
    path = take(tmp_path)
    (tmp_path / "wheels" / "peach-1.0-py3-none-any.whl").unlink()
    found = told(restore(path, tmp_path / "again"))
    assert found["environment", "peach"][0] == "missing"
    assert "peach-1.0-py3-none-any.whl" in found["environment", "freeze.txt"][1]  # pip's message


@pytest.mark.slow
def test_a_lock_with_hashes_is_installed_first(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    wheel = tmp_path / "wheels" / "peach-1.0-py3-none-any.whl"
    (tmp_path / "site" / "peach-1.0.dist-info" / "direct_url.json").unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for digest, verdict in ((right, "ok"), ("0" * 64, "missing")):
        (project / "requirements.txt").write_text(f"peach==1.0 --hash=sha256:{digest}\n")
        path = take(tmp_path)
        found = told(restore(path, tmp_path / f"again-{verdict}"))
        assert (("environment", "lock requirements.txt") in found) is (verdict == "missing")


def test_what_the_config_names_lies_where_the_run_looks_for_it(project: Path, tmp_path: Path) -> None:
    """Data by digest; other files as they are, said to be unchecked; the folder that runs are written to is not linked."""
    (project / "data" / "vocab.txt").write_text("a b c\n")
    config = {
        "train": "data/a.jsonl",
        "vocab": "data/vocab.txt",
        "out": "runs",
        "word": "adam",
        "whole": str(project / "data/a.jsonl"),
    }
    path = capture(
        project / "runs" / "1" / "snapshot",
        config=config,
        data_files=["data/a.jsonl"],
        reward_paths=["reward.py:score"],
    ).path
    shutil.move(project / "data" / "a.jsonl", tmp_path / "b.jsonl")
    report = restore(path, tmp_path / "again", search=[tmp_path], install=False)
    code = tmp_path / "again" / "code"
    assert (code / "data" / "a.jsonl").resolve() == tmp_path / "b.jsonl"
    assert (code / "data" / "vocab.txt").resolve() == project / "data" / "vocab.txt"
    assert not (code / "runs").exists()
    found = told(report)
    assert found["config", "vocab.txt"][0] == "not checked"
    again = yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())
    assert again == config | {"whole": str(tmp_path / "again" / "data" / "0-a.jsonl")}


def test_reward_code_of_no_repository_comes_from_the_snapshot(project: Path, tmp_path: Path) -> None:
    path = take(tmp_path)
    shutil.rmtree(project / ".git")
    (project / "reward.py").unlink()
    found = told(restore(path, tmp_path / "again", install=False))
    assert found["code", "project"][0] == "missing"
    assert found["reward", "sources"] == ("ok", "1 of 1 files as captured")
    assert (tmp_path / "again" / "code" / "reward.py").read_text() == "def score(): return 1\n"


def test_a_part_that_cant_be_read_leaves_the_others(project: Path, tmp_path: Path) -> None:
    path = take(tmp_path)
    (path / "data.json").write_text("{")
    report = restore(path, tmp_path / "again", install=False)
    assert told(report)["data", "data"][0] == "missing"
    assert (tmp_path / "again" / "code" / "train.py").is_file()
    assert json.loads((tmp_path / "again" / "restored.json").read_text())["ok"] is False
