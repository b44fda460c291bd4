"""Snapshots of many runs, checked part by part; equal parts are checked once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_lightning.registry.records import AuditFinding

__all__ = ["SnapshotChecks"]

_PARTS = {"environment": "environment.json", "data": "data.json", "reward": "rewards.json", "code": "code.json"}


class SnapshotChecks:
    """Checks snapshots, and remembers what it has found about parts that several of them hold.

    Args:
        quick: believe files whose size and time stand.
        remap: beginnings of recorded paths and where these lie now.
    """

    def __init__(self, *, quick: bool, remap: Mapping[str, str]) -> None:
        self._quick, self._remap = quick, dict(remap)
        self._lock = threading.Lock()
        self._done: dict[tuple[str, str, str], Future[list[Any]]] = {}

    def check(self, folder: Path) -> Iterator[AuditFinding]:
        """All findings about one snapshot."""
        if find_spec("run_snapshot") is None:
            yield _finding("snapshot", "snapshot", "unknown", "pip install lightning-run-snapshot to check it")
            return
        if not (folder / "manifest.json").is_file():
            yield _finding("snapshot", "snapshot", "missing", f"{folder} holds no manifest: no snapshot, or cut off")
            return
        manifest = import_module("run_snapshot.manifest")
        try:
            stored = _Moved.of(manifest.load_snapshot(folder), self.remapped)
        except import_module("run_snapshot").SnapshotError as error:
            yield _finding("snapshot", "manifest.json", "unknown", str(error))
            return
        yield from _ours(manifest.check_integrity(stored))
        found = [f for level, member in _PARTS.items() for f in _ours(self._part(level, member, stored))]
        yield from committed_since(found, stored)
        yield from _ours(self._part("weights", "weights.json", stored))

    def remapped(self, path: str) -> str:
        """Where a recorded path lies now."""
        for old, new in self._remap.items():
            if path == old or path.startswith(old.rstrip("/") + "/"):
                return new + path[len(old) :]
        return path

    def _part(self, level: str, member: str, stored: Any) -> list[Any]:
        """One part's findings, from another run's check where it holds the same."""
        check = self._check(level)
        if member not in stored.members:
            return check(stored)
        key = (level, stored.members[member], stored.members.get("stat.json", "") if self._quick else "")
        with self._lock:
            waiting = self._done.get(key)
            if waiting is None:
                own: Future[list[Any]] = Future()
                self._done[key] = own
        if waiting is not None:
            return waiting.result()
        try:
            own.set_result(check(stored))
        except BaseException as error:
            own.set_exception(error)
            raise
        return own.result()

    def _check(self, level: str) -> Callable[[Any], list[Any]]:
        checks, quick = import_module("run_snapshot.checks"), self._quick
        parts: dict[str, Callable[[Any], list[Any]]] = {
            "environment": lambda stored: checks.check_environment(stored, quick=quick),
            "data": lambda stored: checks.check_data(stored, quick=quick),
            "reward": checks.check_rewards,
            "code": lambda stored: checks.check_code(stored, quick=quick),
            "weights": checks.check_weights,
        }
        return parts[level]


class _Moved:
    """A stored snapshot whose recorded paths are where they lie now."""

    def __init__(self, stored: Any, remapped: Callable[[str], str]) -> None:
        self._stored, self._remapped = stored, remapped

    @classmethod
    def of(cls, stored: Any, remapped: Callable[[str], str]) -> Any:
        """The snapshot, wrapped."""
        return cls(stored, remapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def json(self, name: str) -> Any:
        """A member with its paths where they lie now."""
        return self._moved(self._stored.json(name))

    def _moved(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._remapped(value)
        if isinstance(value, dict):
            return {self._moved(key): self._moved(item) for key, item in value.items()}
        return [self._moved(item) for item in value] if isinstance(value, list) else value


def committed_since(findings: list[AuditFinding], stored: Any) -> Iterator[AuditFinding]:
    """Findings, less what a repository's later commits explain: the recorded revision is there and has what the run had.

    Uncommitted edits of a reward's files stay findings, as does everything in a repository that stands where it stood.
    """
    moved = {
        f.name: f.detail
        for f in findings
        if f.level == "code" and f.detail.startswith("revision ") and " -> " in f.detail
    }
    kept: set[str] = set()
    for found in findings:
        root = next((root for root in moved if found.name == root or f"{root}/" in found.detail), None)
        if root is None:
            yield found
        elif found.level == "code":
            if root not in kept:
                kept.add(root)
                detail = f"the repository has moved on ({moved[root]}); the recorded revision is there"
                yield _finding("code", root, "ok", detail)
        elif found.level == "reward" and _is_committed(stored, found):
            yield _finding(
                "reward", found.name, "ok", f"{found.detail}, by commits since; the recorded revision has it"
            )
        else:
            yield found


def _is_committed(stored: Any, found: AuditFinding) -> bool:
    """Whether a reward's file was clean when captured and is now as its repository's HEAD has it."""
    git_module = import_module("run_snapshot.git")
    file = next((f for f in (stored.json("rewards.json") or {"files": []})["files"] if f["module"] == found.name), None)
    if file is None or file["state"] != "clean" or not file["repository"]:
        return False
    root, path = Path(file["repository"]), Path(file["path"])
    try:
        git = git_module.Git(root)
        name = path.relative_to(root).as_posix()
        return bool(git.run("rev-parse", f"HEAD:{name}") == git.hash_objects([name])[0])
    except (import_module("run_snapshot").GitError, ValueError, OSError):
        return False


def _ours(findings: list[Any]) -> Iterator[AuditFinding]:
    for found in findings:
        yield _finding(found.level, found.name, found.verdict, found.detail)


def _finding(level: str, name: str, verdict: Any, detail: str) -> AuditFinding:
    return AuditFinding(level=level, name=name, verdict=verdict, detail=detail)
