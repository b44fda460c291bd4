"""Repositories in every state that a run can meet, each made with real git."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from run_snapshot.digests.files import git_blob
from run_snapshot.repository import find_repository, read_repository
from snapshot_support import commit, git

Make = Callable[..., Path]


def test_a_clean_repository(make_repository: Make) -> None:
    repository = read_repository(make_repository())
    assert (repository.status, repository.state, repository.branch) == ("ok", "clean", "main")
    assert repository.revision == git(Path(repository.root), "rev-parse", "HEAD")
    assert (repository.reachable, repository.patch) == ("no", None)
    assert "no remote" in repository.reachable_why


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree", None])
def test_an_edit_shows_whatever_the_index_says(make_repository: Make, flag: str | None) -> None:
    root = make_repository()
    if flag:
        git(root, "update-index", flag, "train.py")
    (root / "train.py").write_text("lr = 2\n")
    if flag:
        assert git(root, "status", "--porcelain") == ""
    repository = read_repository(root)
    old, new = git_blob(b"lr = 1\n"), git_blob(b"lr = 2\n")
    assert (repository.state, repository.changed) == ("dirty", (("train.py", old, new),))
    assert repository.patch is not None
    assert "-lr = 1\n+lr = 2\n" in repository.patch.text
    index = git(root, "ls-files", "-v", "train.py")[0]
    assert index == {"--assume-unchanged": "h", "--skip-worktree": "S", None: "H"}[flag]  # left as it was


def test_an_edit_that_keeps_size_and_time_shows(make_repository: Make) -> None:
    root = make_repository()
    before = (root / "train.py").stat()
    (root / "train.py").write_text("lr = 3\n")
    os.utime(root / "train.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [row[0] for row in read_repository(root).changed] == ["train.py"]


def test_untracked_code_is_named_and_goes_into_the_patch(make_repository: Make) -> None:
    root = make_repository()
    (root / "reward.py").write_text("def score(): return 1\n")
    (root / "notes.txt").write_text("not code\n")
    (root / ".env").write_text("API_KEY=hunter2\n")
    (root / "secrets.yaml").write_text("password: hunter2\n")
    repository = read_repository(root)
    assert repository.untracked == (
        ("reward.py", git_blob(b"def score(): return 1\n")),
        ("secrets.yaml", git_blob(b"password: hunter2\n")),
    )
    assert repository.patch is not None
    assert "+def score(): return 1" in repository.patch.text
    assert "hunter2" not in repository.patch.text
    assert repository.notes == ("secrets.yaml: kept by digest only",)
    assert git(root, "status", "--porcelain", "--", "reward.py") == "?? reward.py"  # the index was not touched


def test_the_patch_brings_the_revision_to_the_files(make_repository: Make, tmp_path: Path) -> None:
    root = make_repository(files={"a.py": "1\n", "gone.py": "2\n", "blob.bin": "x\n"})
    (root / "a.py").write_text("11\n")
    (root / "gone.py").unlink()
    (root / "blob.bin").write_bytes(bytes(range(256)))
    (root / "new.py").write_text("3\n")
    repository = read_repository(root)
    assert repository.patch is not None
    (tmp_path / "p.patch").write_bytes(repository.patch.text.encode("utf-8", "surrogateescape"))
    git(root, "worktree", "add", "-q", "--detach", str(tmp_path / "again"), repository.revision)
    git(tmp_path / "again", "apply", "--binary", str(tmp_path / "p.patch"))
    there = {f.name: f.read_bytes() for f in (tmp_path / "again").iterdir() if f.name != ".git"}
    assert there == {"a.py": b"11\n", "new.py": b"3\n", "blob.bin": bytes(range(256))}


def test_line_endings_under_a_filter_are_no_edit(make_repository: Make) -> None:
    root = make_repository(files={".gitattributes": "*.py text eol=crlf\n", "a.py": "x\n"})
    (root / "a.py").write_bytes(b"x\r\n")
    assert read_repository(root).state == "clean"
    (root / "a.py").write_bytes(b"y\r\n")
    assert [row[0] for row in read_repository(root).changed] == ["a.py"]


def test_a_detached_head(make_repository: Make) -> None:
    root = make_repository()
    first = git(root, "rev-parse", "HEAD")
    commit(root, {"train.py": "lr = 9\n"})
    git(root, "checkout", "-q", first)
    repository = read_repository(root)
    assert (repository.revision, repository.branch, repository.state) == (first, "", "clean")


def test_no_commit_yet(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    repository = read_repository(tmp_path)
    assert (repository.status, repository.revision, repository.state, repository.reachable) == (
        "ok",
        "",
        "unknown",
        "no",
    )


def test_a_bare_clone_has_a_revision_and_no_state(make_repository: Make, tmp_path: Path) -> None:
    root = make_repository()
    git(tmp_path, "clone", "-q", "--bare", str(root), "bare.git")
    found = find_repository(tmp_path / "bare.git")
    assert found == tmp_path / "bare.git"
    repository = read_repository(found)
    assert (repository.is_bare, repository.state, repository.revision) == (
        True,
        "unknown",
        git(root, "rev-parse", "HEAD"),
    )


def test_reachable_by_a_remote_or_not_or_unknown(make_repository: Make, tmp_path: Path) -> None:
    root = make_repository()
    commit(root, {"b.py": "2\n"})
    git(tmp_path, "clone", "-q", str(root), "clone")
    assert read_repository(tmp_path / "clone").reachable == "yes"
    commit(tmp_path / "clone", {"c.py": "3\n"})
    assert read_repository(tmp_path / "clone").reachable == "no"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{root}", "shallow")
    shallow = read_repository(tmp_path / "shallow")
    assert (shallow.is_shallow, shallow.reachable, shallow.reachable_why) == (True, "unknown", "the clone is shallow")


def test_credentials_of_a_remote_are_left_out(make_repository: Make) -> None:
    root = make_repository()
    git(root, "remote", "add", "origin", "https://ada:hunter2@git.example.org/a.git")
    assert read_repository(root).remote == "https://***@git.example.org/a.git"


def test_a_dirty_submodule(make_repository: Make) -> None:
    inner, outer = make_repository("inner"), make_repository("outer")
    git(outer, "submodule", "--quiet", "add", str(inner), "lib")
    git(outer, "commit", "-q", "-m", "Add lib")
    clean = read_repository(outer)
    assert (clean.state, [row[3] for row in clean.submodules]) == ("clean", ["clean"])
    git(outer / "lib", "update-index", "--assume-unchanged", "train.py")
    (outer / "lib" / "train.py").write_text("lr = 7\n")
    dirty = read_repository(outer)
    recorded = git(inner, "rev-parse", "HEAD")
    assert (dirty.state, dirty.submodules) == ("dirty", (("lib", recorded, recorded, "dirty"),))


def test_another_owners_repository_is_unknown(make_repository: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_repository()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    repository = read_repository(root)
    assert "another user owns" in repository.status
    assert (repository.state, repository.reachable, repository.revision) == ("unknown", "unknown", "")


READ = """
from pathlib import Path
from run_snapshot.repository import read_repository
print(read_repository(Path({root!r})).status)
"""


def slow_git(folder: Path, hangs_at: str) -> str:
    """A `git` that hangs at one command, and the PATH with it in front."""
    folder.mkdir()
    real = os.popen("command -v git").read().strip()
    script = f'#!/bin/sh\nfor word in "$@"; do [ "$word" = {hangs_at} ] && sleep 60; done\nexec {real} "$@"\n'
    (folder / "git").write_text(script)
    (folder / "git").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_git_that_hangs_is_stopped(make_repository: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_repository()
    monkeypatch.setenv("PATH", slow_git(tmp_path / "bin", "read-tree"))
    begin = time.monotonic()
    repository = read_repository(root, seconds=1.0)
    assert time.monotonic() - begin < 10
    assert "`git read-tree` took longer than 1 s" in repository.status
    assert (repository.state, len(repository.revision)) == ("unknown", 40)  # what was known by then is kept


def test_a_git_that_hangs_at_its_version_does_not_hang_the_import(tmp_path: Path, make_repository: Make) -> None:
    import subprocess

    root = make_repository()
    code = READ.format(root=str(root))
    path = slow_git(tmp_path / "bin", "version")
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=40, check=True)
    assert "did not answer within 5 s" in done.stdout


def test_no_git_at_all(make_repository: Make, tmp_path: Path) -> None:
    import subprocess

    root = make_repository()
    code = READ.format(root=str(root))
    env = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=40, check=True)
    assert "is not installed" in done.stdout


def test_a_patch_over_the_cap_keeps_its_digest(make_repository: Make) -> None:
    root = make_repository()
    (root / "train.py").write_text("x = 1\n" * 200_000)
    repository = read_repository(root, cap=1000)
    assert repository.patch is not None
    assert (repository.patch.is_whole, repository.patch.text) == (False, "")
    assert repository.patch.bytes > 1_000_000
    assert len(repository.patch.sha256) == 64
    assert [row[0] for row in repository.changed] == ["train.py"]


@pytest.mark.slow
def test_a_patch_of_100_mb_is_not_held_in_memory(make_repository: Make) -> None:
    import tracemalloc

    root = make_repository()
    (root / "train.py").write_text("x = 1234567\n" * 9_000_000)
    tracemalloc.start()
    repository = read_repository(root)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert repository.patch is not None
    assert repository.patch.bytes > 100_000_000
    assert peak < 40_000_000


def test_a_repository_is_found_from_a_file_in_it(make_repository: Make, tmp_path: Path) -> None:
    root = make_repository(files={"a/b/c.py": "1\n"})
    assert find_repository(root / "a" / "b" / "c.py") == root
    assert find_repository(tmp_path) is None


def test_names_with_spaces_and_signs(make_repository: Make) -> None:
    root = make_repository(files={"a b.py": "1\n", "é\t.py": "1\n"})
    (root / "a b.py").write_text("2\n")
    (root / "é\t.py").write_text("2\n")
    (root / "new ü.py").write_text("2\n")
    repository = read_repository(root)
    assert [row[0] for row in repository.changed] == ["a b.py", "é\t.py"]
    assert [row[0] for row in repository.untracked] == ["new ü.py"]
