"""An environment and a working tree in which the run can be repeated, and a list of what could not be brought back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from run_snapshot.distributions import Installed, find_installed
from run_snapshot.environment import installed_of
from run_snapshot.errors import GitError, SnapshotError, UsageError
from run_snapshot.files import pretty_json, write_atomically
from run_snapshot.git import Git
from run_snapshot.manifest import Stored, check_integrity, load_snapshot
from run_snapshot.placing import code_folder, place_config, place_data, place_rewards, working_folder
from run_snapshot.records import LEVELS, Finding, Level, Report, Verdict
from run_snapshot.redact import redact_text

__all__ = ["restore"]


def restore(
    path: str | Path,
    into: str | Path,
    *,
    search: Sequence[str | Path] = (),
    install: bool = True,
    seconds: float = 1800.0,
) -> Report:
    """Rebuild what a snapshot describes under `into`, then hold it against the snapshot.

    ``into/code`` is a worktree at the revision with the recorded patch; ``into/venv`` the environment; ``into/data`` links
    to data and weights, found by digest where they were or under `search`; ``into/config.yaml`` the settings. What the
    config names by a relative path is linked there from the folder that stands for the one that the run was started in:
    `working_folder` tells it.
    """
    stored, target = load_snapshot(path), Path(into).absolute()
    if target.exists() and any(target.iterdir()):
        raise UsageError(f"{str(target)!r} is not empty: restore into a new folder.")
    target.mkdir(parents=True, exist_ok=True)
    findings = [f for f in check_integrity(stored) if f.is_problem]
    parts: dict[Level, Callable[[], Iterator[Finding]]] = {
        "code": lambda: _code(stored, target, seconds),
        "environment": lambda: _environment(stored, target, install, seconds),
        "reward": lambda: place_rewards(stored, target),
        "data": lambda: place_data(stored, target, [Path(folder) for folder in search]),
        "config": lambda: place_config(stored, target),
    }
    for level, part in parts.items():
        findings += _guarded(level, part)
    working_folder(stored, target).mkdir(parents=True, exist_ok=True)
    ordered = sorted(findings, key=lambda finding: LEVELS.index(finding.level))
    report = Report(path=str(target), digest=stored.digest, findings=tuple(ordered))
    write_atomically(target / "restored.json", pretty_json(report.to_json()))
    return report


def _guarded(level: Level, part: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A part that can't be brought back leaves the others, and what it had found by then."""
    findings = []
    try:
        for finding in part():
            findings.append(finding)
    except (SnapshotError, OSError, KeyError, TypeError, ValueError, subprocess.SubprocessError) as error:
        detail = (
            f"not restored: {error}"
            if isinstance(error, SnapshotError)
            else f"not restored: {type(error).__name__}: {error}"
        )
        findings.append(_finding(level, level, "missing", detail))
    return findings


def _finding(level: Level, name: str, verdict: Verdict, detail: str) -> Finding:
    return Finding(level=level, name=name, verdict=verdict, detail=detail)


def _code(stored: Stored, target: Path, seconds: float) -> Iterator[Finding]:
    member = stored.json("code.json") or {"repositories": []}
    for index, entry in enumerate(member["repositories"]):
        folder = code_folder(target, index, entry["root"])
        try:
            yield from _worktree(stored, entry, folder, seconds)
        except (GitError, OSError) as error:
            yield _finding("code", entry["root"], "missing", f"not restored: {error}")
    if not member["repositories"]:
        yield _finding(
            "code", "repository", "missing", "the run was in no git repository: its code can't be checked out"
        )


def _worktree(stored: Stored, entry: Mapping[str, Any], folder: Path, seconds: float) -> Iterator[Finding]:
    if not entry["revision"]:
        yield _finding("code", entry["root"], "missing", "no revision was recorded")
        return
    _checked_out(entry, folder, seconds)
    git = Git(folder, seconds=seconds)
    patch = entry.get("patch") or {}
    if patch.get("member"):
        # What secrets were taken out of still applies, with *** in their place.
        git.run("apply", "--binary", "--whitespace=nowarn", str(stored.path / patch["member"]))
    recorded = [(name, blob) for name, _, blob in entry["changed"]] + [
        (name, blob) for name, blob in entry["untracked"]
    ]
    bad = [name for name, blob in recorded if _blob(git, folder, name) != blob]
    for name in bad:
        why = "secrets were taken out of the patch" if patch.get("is_redacted") else "it was kept by digest only"
        yield _finding("code", name, "changed", f"not as it was: {why}")
    for name, revision, _, _ in entry["submodules"]:
        yield _finding("code", name, "missing", f"run `git submodule update --init`: revision {revision[:12]}")
    detail = (
        f"revision {entry['revision'][:12]}, {len(recorded) - len(bad)} of {len(recorded)} edited files, in {folder}"
    )
    yield _finding("code", entry["root"], "ok", detail)


def _checked_out(entry: Mapping[str, Any], folder: Path, seconds: float) -> None:
    """A worktree of the local repository, or a clone of its remote when that is gone."""
    root = Path(entry["root"])
    if root.is_dir():
        local = Git(root, seconds=seconds)
        if local.succeeds("cat-file", "-e", f"{entry['revision']}^{{commit}}"):
            local.run("worktree", "add", "--detach", str(folder), entry["revision"])
            return
    if not entry["remote"]:
        raise GitError(f"revision {entry['revision'][:12]} is in no repository here, and no remote was recorded")
    Git(folder.parent, seconds=seconds).run("clone", "--no-checkout", "--", entry["remote"], str(folder))
    Git(folder, seconds=seconds).run("checkout", "--detach", entry["revision"])


def _blob(git: Git, folder: Path, name: str) -> str:
    return git.hash_objects([name])[0] if (folder / name).is_file() else ""


def _environment(stored: Stored, target: Path, install: bool, seconds: float) -> Iterator[Finding]:
    member = stored.json("environment.json")
    if member is None:
        yield _finding("environment", "environment.json", "unknown", "this part was not captured")
        return
    if not install:
        yield _finding("environment", "venv", "not checked", "not installed, as asked")
        return
    yield from _python(member)
    venv = target / "venv"
    _run([sys.executable, "-m", "venv", str(venv)], seconds)
    python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
    recorded = [dist for dist in installed_of(member) if not dist.shadowed]
    for words, told in _installs(stored, recorded, target):
        code, message = _run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words], seconds
        )
        if code:
            yield _finding("environment", told, "missing", message)
    yield from _compared(recorded, find_installed([_site_packages(python, seconds)]))


def _python(member: Mapping[str, Any]) -> Iterator[Finding]:
    wanted, now = member["python"]["version"], ".".join(map(str, sys.version_info[:3]))
    if wanted != now:
        yield _finding(
            "environment", "python", "changed", f"{wanted} is wanted and this is {now}: run restore with that Python"
        )


def _installs(stored: Stored, recorded: list[Installed], target: Path) -> Iterator[tuple[list[str], str]]:
    """pip's arguments: a lock with hashes where one fits the environment, then whatever it does not cover."""
    locks = (stored.json("locks.json") or {"locks": []})["locks"]
    fitting = [k for k in locks if k["hashed"] and not k["mismatches"] and k["name"].endswith(".txt")]
    if fitting:
        name = str(fitting[0]["name"]).replace("/", "__")
        yield ["--require-hashes", "--no-deps", "-r", str(stored.path / "locks" / name)], f"lock {fitting[0]['name']}"
    pins = target / "freeze.txt"
    lines = [line for line in stored.content("freeze.txt").decode().splitlines() if line and not line.startswith("#")]
    own = {"pip", "setuptools", "wheel"}
    kept = [line for line in lines if re.split(r"[ =@]", line)[0] not in own]
    write_atomically(pins, ("\n".join(kept) + "\n").encode())
    if kept:
        yield ["--no-deps", "-r", str(pins)], "freeze.txt"
    for dist in recorded:
        folder = _restored_source(stored, dist, target) if dist.editable else None
        if folder is not None:
            yield ["--no-deps", "--no-build-isolation", "-e", str(folder)], dist.name


def _restored_source(stored: Stored, dist: Installed, target: Path) -> Path | None:
    """Where an editable install's project lies in the restored code."""
    project = Path(dist.url.removeprefix("file://"))
    for index, entry in enumerate((stored.json("code.json") or {"repositories": []})["repositories"]):
        root = Path(entry["root"])
        if project.is_relative_to(root):
            return code_folder(target, index, entry["root"]) / project.relative_to(root)
    return None


def _compared(recorded: list[Installed], now: Iterable[Installed]) -> Iterator[Finding]:
    found = {dist.name: dist for dist in now}
    same = 0
    for dist in recorded:
        new = found.get(dist.name)
        if new is None:
            origin = f" from {dist.url}" if dist.url else ""
            yield _finding("environment", dist.name, "missing", f"{dist.version}{origin} was not installed")
        elif new.version != dist.version:
            yield _finding("environment", dist.name, "changed", f"{dist.version} -> {new.version}")
        elif not dist.editable and new.record_sha256 != dist.record_sha256:
            yield _finding("environment", dist.name, "changed", f"{dist.version}: same version, different build")
        else:
            same += 1
    yield _finding("environment", "venv", "ok", f"{same} of {len(recorded)} distributions as recorded")


def _run(words: list[str], seconds: float) -> tuple[int, str]:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return 1, f"not finished within {seconds:g} s"
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return done.returncode, redact_text("; ".join(errors))[:500]


def _site_packages(python: Path, seconds: float) -> str:
    words = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    return done.stdout.strip()
