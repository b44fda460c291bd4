"""Locks to restore from: the project's own copied, or one made by pip-tools or pip where an index can be reached."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from run_snapshot.distributions import Installed
from run_snapshot.redact import redact_text

__all__ = ["LockMode", "copy_locks", "lock_mismatches", "make_lock", "pins_of"]

LockMode = Literal["copy", "make", "off"]

_NAMES = ("uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "conda-lock.yml", "pixi.lock")
_PATTERNS = ("pylock*.toml", "requirements*.txt", "requirements/*.txt")
_MOST = 8 * 2**20  # bytes of a lock that is copied


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """One lock and how far the installed environment is from it."""

    name: str
    text: str
    hashed: bool  # its requirements carry hashes
    mismatches: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain types, without the text."""
        return {"name": self.name, "hashed": self.hashed, "mismatches": list(self.mismatches)}


def copy_locks(project: Path, installed: Iterable[Installed]) -> tuple[Lock, ...]:
    """The lock files of a project folder, without credentials."""
    installed = tuple(installed)
    files = [project / name for name in _NAMES] + sorted(f for p in _PATTERNS for f in project.glob(p))
    small = [file for file in files if file.is_file() and file.stat().st_size <= _MOST]
    return tuple(_lock(file.relative_to(project).as_posix(), _read(file), installed) for file in small)


def make_lock(installed: Iterable[Installed], *, seconds: float = 120.0) -> tuple[Lock | None, str]:
    """A lock with hashes of what is installed, and how it was made or why it was not."""
    installed = tuple(installed)
    pins = [f"{d.name}=={d.version}" for d in installed if not d.url and not d.editable and not d.shadowed]
    command = _lock_command()
    if command is None:
        return None, "failed: neither pip-tools nor a pip with `pip lock` is installed (pip install pip-tools)"
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "freeze.in"), Path(folder, "lock.txt")
        source.write_text("\n".join(pins) + "\n")
        words = [word.format(source=source, target=target) for word in command]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False, cwd=folder)
        except subprocess.TimeoutExpired:
            return None, f"failed: no lock within {seconds:g} s"
        if done.returncode or not target.is_file():
            return None, f"failed: {redact_text(_last_line(done.stderr or done.stdout))[:300]}"
        text = target.read_text()
    name = "pylock.toml" if command[3] == "lock" else "requirements.lock.txt"
    return _lock(name, text, installed), "made"


def lock_mismatches(pins: dict[str, str], installed: Iterable[Installed]) -> tuple[str, ...]:
    """Where the installed versions are not the lock's; what a lock has besides is for other platforms or extras."""
    mismatches = []
    for dist in installed:
        pinned = pins.get(dist.name)
        if pinned is not None and dist.version.split("+")[0] != pinned.split("+")[0] and not dist.shadowed:
            mismatches.append(f"{dist.name}: lock {pinned}, installed {dist.version}")
    return tuple(mismatches)


def pins_of(name: str, text: str) -> dict[str, str]:
    """The exact versions in a lock, by normalised name; empty for a format that is only copied."""
    if name.endswith((".lock", ".toml")) and not name.startswith("Pipfile"):
        try:
            loaded = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            return {}
        entries = loaded.get("package") or loaded.get("packages") or []
        return {canonicalize_name(e["name"]): str(e["version"]) for e in entries if "name" in e and "version" in e}
    return dict(_requirement_pins(text)) if name.endswith(".txt") else {}


def _requirement_pins(text: str) -> Iterable[tuple[str, str]]:
    for line in text.replace("\\\n", " ").splitlines():
        bare = re.split(r"\s+(?:--hash|#)", line.strip())[0]
        if not bare or bare.startswith(("#", "-")):
            continue
        try:
            requirement = Requirement(bare)
        except InvalidRequirement:
            continue
        versions = [
            s.version for s in requirement.specifier if s.operator in ("==", "===") and not s.version.endswith("*")
        ]
        if len(versions) == 1 and (requirement.marker is None or requirement.marker.evaluate()):
            yield canonicalize_name(requirement.name), versions[0]


def _lock(name: str, text: str, installed: tuple[Installed, ...]) -> Lock:
    mismatches = lock_mismatches(pins_of(name, text), installed)
    hashed = "--hash=sha256:" in text or 'hash = "sha256:' in text or "sha256 = " in text
    return Lock(name=name, text=redact_text(text, style="settings"), hashed=hashed, mismatches=mismatches)


def _lock_command() -> list[str] | None:
    if importlib.util.find_spec("piptools") is not None:
        quiet = [
            "--no-emit-index-url",
            "--no-emit-find-links",
            "--no-emit-trusted-host",
            "--strip-extras",
            "--allow-unsafe",
        ]
        return [
            sys.executable,
            "-m",
            "piptools",
            "compile",
            "--quiet",
            "--generate-hashes",
            *quiet,
            "-o",
            "{target}",
            "{source}",
        ]
    if importlib.util.find_spec("pip") is None:
        return None
    from importlib.metadata import version

    if tuple(int(part) for part in version("pip").split(".")[:2]) < (25, 1):
        return None
    return [sys.executable, "-m", "pip", "lock", "-r", "{source}", "-o", "{target}"]


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
