"""Capture of everything, of parts that fail, and of a run full of secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_snapshot
import torch
from run_snapshot import (
    Rows,
    SnapshotError,
    capture,
    check,
    check_checkpoint,
    check_weights_file,
    checkpoint_record,
    checks,
    verify,
)
from run_snapshot.manifest import load_snapshot
from snapshot_support import git, install, make_wheel, only_installed

Make = Callable[..., Path]


class Dying:
    """Rows whose making fails."""

    def __iter__(self) -> Any:
        yield {"q": 1 / 0}


@pytest.fixture
def project(make_repository: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    root = make_repository(files={"reward.py": "def score(): return 1\n", "data.jsonl": '{"q": 1}\n{"q": 2}\n'})
    monkeypatch.chdir(root)
    install(tmp_path / "site", make_wheel(tmp_path, "peach", "1.0", {"peach.py": ""}))
    with only_installed(tmp_path / "site"):
        yield root


def test_a_whole_snapshot(project: Path, tmp_path: Path) -> None:
    (project / "new.py").write_text("x = 1\n")
    (project / "uv.lock").write_text('[[package]]\nname = "peach"\nversion = "1.0"\n')
    snapshot = capture(
        tmp_path / "s",
        config={"lr": 1e-4, "path": Path("a"), "api_key": "hunter2"},
        data_files=["data.jsonl", Rows(name="generated", rows=[{"q": 3}])],
        reward_paths=["reward.py:score"],
        model_state={"w": torch.ones(2)},
        seeds={"torch": 7},
    )
    assert (snapshot.partial, snapshot.reasons) == (False, ())
    stored = load_snapshot(snapshot.path)
    assert set(stored.members) == {
        "environment.json", "freeze.txt", "locks.json", "locks/uv.lock", "data.json", "rows/0.bin", "rows/1.bin", "weights.json",
        "rewards.json", "rewards/000.py.txt", "code.json", "code/0.patch", "config.json", "seeds.json", "stat.json",
    }  # fmt: skip
    assert stored.json("config.json") == {"lr": 1e-4, "path": "a", "api_key": "***"}
    assert stored.json("seeds.json") == {"torch": 7}
    assert stored.json("locks.json") == {
        "status": "copied",
        "locks": [{"name": "uv.lock", "hashed": False, "mismatches": []}],
    }
    assert stored.content("freeze.txt").decode().startswith("peach @ file://")
    report = verify(snapshot.path)
    assert report.ok
    verdicts = {(f.level, f.name): f.verdict for f in report.findings}
    assert verdicts["data", "generated"] == "not checked"
    assert verdicts["data", "data.jsonl"] == "ok"
    assert verdicts["weights", "initial weights"] == "not checked"


@pytest.mark.parametrize(
    ("settings", "why", "kept"),
    [
        ({"data_files": ["gone.jsonl", "data.jsonl"]}, "gone.jsonl' does not exist", "data.json"),
        ({"data_files": ["bad.jsonl"]}, "line 1 is not JSON", "data.json"),
        ({"reward_paths": ["nowhere:f", "reward.py:score"]}, "rewards: nowhere:f", "rewards.json"),
        (
            {"model_state": {"w": torch.eye(2).to_sparse()}},
            "'w' is a torch.sparse_coo tensor",
            "config.json",
        ),
        ({"model_state": "gone.safetensors"}, "weights: DigestError", "config.json"),
        ({"data_files": [Rows(name="odd", rows=[{"x": object()}])]}, "no canonical form", "data.json"),
        ({"data_files": [Rows(name="dies", rows=Dying())]}, "dies: ZeroDivisionError", "data.json"),
    ],
    ids=["no data", "bad data", "no reward", "sparse", "no weights", "odd rows", "rows that raise"],
)
def test_what_fails_leaves_the_rest_and_a_reason(
    project: Path, tmp_path: Path, settings: dict[str, Any], why: str, kept: str
) -> None:
    (project / "bad.jsonl").write_text("oops\n")
    snapshot = capture(tmp_path / "s", config={"lr": 1}, **settings)
    assert snapshot.partial
    assert why in "; ".join(snapshot.reasons)
    assert load_snapshot(snapshot.path).has(kept)
    finding = next(f for f in verify(snapshot.path).findings if f.name == "capture")
    assert finding.verdict == "missing"
    with pytest.raises(SnapshotError, match="partial"):
        capture(tmp_path / "s", config={"lr": 1}, on_error="raise", **settings)


def test_a_folder_that_cant_be_written_does_not_end_the_run(project: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    snapshot = capture(tmp_path / "file" / "s")
    assert (snapshot.partial, snapshot.digest) == (True, "")
    assert "can't be written" in snapshot.reasons[0]


def test_a_full_disk_leaves_no_manifest(project: Path, tmp_path: Path) -> None:
    capture(tmp_path / "s")
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
from run_snapshot import capture
snapshot = capture({str(tmp_path / "s")!r})
print(snapshot.partial, repr(snapshot.digest))
"""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True ''"
    assert not (tmp_path / "s" / "manifest.json").exists()
    assert verify(tmp_path / "s").findings[0].verdict == "missing"


def test_outside_of_a_repository_the_code_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    with only_installed(tmp_path / "site"):
        snapshot = capture(tmp_path / "s")
        assert not snapshot.partial
        assert [f.verdict for f in verify(snapshot.path).findings if f.level == "code"] == ["not checked"]


def test_code_of_a_reward_in_another_repository_is_found(project: Path, make_repository: Make, tmp_path: Path) -> None:
    other = make_repository("other", {"far.py": "def score(): return 2\n"})
    snapshot = capture(tmp_path / "s", reward_paths=[f"{other}/far.py:score"])
    roots = [r["root"] for r in load_snapshot(snapshot.path).json("code.json")["repositories"]]
    assert roots == [str(project), str(other)]


def test_no_secret_is_written_anywhere(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = [f"planted-secret-{i:02}-Zq7Rt9Lm" for i in range(16)]
    s = iter(planted)
    monkeypatch.setenv("HF_TOKEN", value := next(s))
    monkeypatch.setenv("DATABASE_PASSWORD", next(s))
    monkeypatch.setenv("TORCH_HOME", f"https://ada:{next(s)}@example.org/x")
    git(project, "remote", "add", "origin", f"https://ada:{next(s)}@git.example.org/a.git")
    (project / ".env").write_text(f"API_KEY={next(s)}\n")
    (project / "settings.yaml").write_text(
        f"db:\n  password: {next(s)}\n  url: postgres://u:{next(s)}@h/d\nmax_tokens: 7\n"
    )
    (project / "new.py").write_text(f'API_KEY = "{next(s)}"\nopen("x", {value!r})\n')
    (project / "reward.py").write_text(f'client_secret = "{next(s)}"\n\ndef score(): return 2\n')
    (project / "requirements.txt").write_text(
        f"--extra-index-url https://u:{next(s)}@pypi.example.org/simple\npeach==1.0\n"
    )
    (project / "id_rsa.pem").write_text(f"-----BEGIN RSA PRIVATE KEY-----\n{next(s)}\n-----END RSA PRIVATE KEY-----\n")
    (tmp_path / "site" / "peach-1.0.dist-info" / "direct_url.json").write_text(
        json.dumps({"url": f"https://ada:{next(s)}@files.example.org/p.whl", "archive_info": {}})
    )
    config = {"auth": {"token": next(s)}, "url": f"mysql://u:{next(s)}@h/d", "max_tokens": 7, "args": f"--password {next(s)}",
              "note": f"used {planted[1]} once"}  # fmt: skip
    snapshot = capture(tmp_path / "s", config=config, reward_paths=["reward.py:score"], data_files=[f"gone?token={next(s)}"],
                       seeds={"api_key": planted[0]})  # fmt: skip
    assert next(s, None) is None
    everything = b"".join(file.read_bytes() for file in snapshot.path.rglob("*") if file.is_file()).decode()
    assert [secret for secret in planted if secret in everything] == []
    assert '"max_tokens": 7' in everything
    assert "+max_tokens: 7" in everything
    assert not any(secret in reason for secret in planted for reason in snapshot.reasons)


def test_data_that_changes_while_it_is_read_is_said_to(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from run_snapshot import capturing

    original = capturing.read_source

    def reading(source: Any) -> Any:
        read = original(source)
        (project / "data.jsonl").write_text('{"q": 9}\n')
        return read

    monkeypatch.setattr(capturing, "read_source", reading)
    snapshot = capture(tmp_path / "s", data_files=["data.jsonl"])
    assert "data: data.jsonl changed while it was read" in snapshot.reasons


def test_a_checkpoint_knows_its_weights(tmp_path: Path) -> None:
    state = {"layer.w": torch.randn(8, 8), "layer.b": torch.zeros(8)}
    record = checkpoint_record(state, digest="d" * 64)
    file = tmp_path / "a.ckpt"
    torch.save({"state_dict": state, "run_snapshot": record}, file)
    assert [f.verdict for f in check_checkpoint(file)] == ["ok"]
    assert [f.verdict for f in check_weights_file(record["weights"], file)] == ["ok"]
    changed = {name: tensor.clone() for name, tensor in state.items()}
    changed["layer.w"].view(torch.int32)[0, 0] ^= 1
    torch.save({"state_dict": changed, "run_snapshot": record}, file)
    for findings in (check_checkpoint(file), check_weights_file(record["weights"], file)):
        assert [(f.name, f.verdict) for f in findings] == [("layer.w", "changed")]
    torch.save({"state_dict": state}, file)
    assert [f.verdict for f in check_checkpoint(file)] == ["unknown"]
    file.write_bytes(file.read_bytes()[:500])
    assert [f.verdict for f in check_checkpoint(file)] == ["unknown"]
    file.unlink()
    assert [f.verdict for f in check_checkpoint(file)] == ["missing"]


def test_a_quick_check_reads_no_data_that_stands(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = capture(tmp_path / "s", data_files=["data.jsonl"], reward_paths=["reward.py:score"])
    read: list[Path] = []
    original = checks.digest_file
    monkeypatch.setattr(checks, "digest_file", lambda path: read.append(path) or original(path))
    assert check(snapshot.path) == []
    assert read == []
    (project / "data.jsonl").touch()
    assert check(snapshot.path) == []
    assert read == [project / "data.jsonl"]


def test_the_public_names_are_these() -> None:
    assert {name: getattr(run_snapshot, name).__name__ for name in run_snapshot.__all__} == {
        n: n for n in run_snapshot.__all__
    }
    with pytest.raises(AttributeError, match="nothing"):
        run_snapshot.nothing  # noqa: B018


def test_importing_the_package_loads_nothing() -> None:
    heavy = ("torch", "git", "pyarrow", "mlflow", "yaml", "lightning")
    code = f"import sys, run_snapshot, run_snapshot.mlflow_provider; print([m for m in {heavy} if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
