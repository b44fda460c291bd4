"""The folder of a snapshot: members first, then `manifest.json` with the sha256 of each, at once.

The digest of a snapshot is the sha256 of the canonical JSON of its format, what is missing from it and its members'
digests. `stat.json` (sizes and times by which checks save reading) is listed and not part of it: the same things captured
twice have the same digest. It gives integrity, not authenticity: who can write the folder can write its digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from run_snapshot.digests.files import digest_file, sha256_of
from run_snapshot.digests.spec import FILE_SPEC, ROWS_SPEC, WEIGHTS_SPEC
from run_snapshot.errors import SnapshotError, UsageError
from run_snapshot.files import canonical_json, pretty_json, write_atomically
from run_snapshot.records import Finding

__all__ = ["FORMAT", "MANIFEST", "Stored", "check_integrity", "find_snapshot", "load_snapshot", "write_snapshot"]

FORMAT = "run-snapshot-v1"
MANIFEST = "manifest.json"
VOLATILE = ("stat.json",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A snapshot on disk."""

    path: Path
    digest: str
    created: str  # ISO 8601, UTC
    reasons: tuple[str, ...]  # why it is partial; empty when it is whole
    members: dict[str, str]  # name -> sha256

    @property
    def partial(self) -> bool:
        """Whether something could not be captured."""
        return bool(self.reasons)

    def has(self, name: str) -> bool:
        """Whether there is such a member."""
        return name in self.members

    def content(self, name: str) -> bytes:
        """A member's bytes."""
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            raise SnapshotError(f"The snapshot's {name!r} can't be read: {error.strerror}.") from error

    def json(self, name: str) -> Any:
        """A member's JSON; None when there is no such member."""
        if not self.has(name):
            return None
        try:
            return json.loads(self.content(name))
        except ValueError as error:
            raise SnapshotError(f"The snapshot's {name!r} is not JSON: {error}.") from error


def write_snapshot(into: Path, members: Mapping[str, bytes], reasons: Iterable[str]) -> Stored:
    """Write all members, then the manifest. While it is being written, the folder holds no manifest."""
    into.mkdir(parents=True, exist_ok=True)
    (into / MANIFEST).unlink(missing_ok=True)
    for name, content in members.items():
        write_atomically(into / name, content)
    digests = {name: sha256_of(content) for name, content in sorted(members.items())}
    why = tuple(reasons)
    manifest = {
        "format": FORMAT,
        "tool": f"lightning-run-snapshot {_version()}",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "partial": bool(why),
        "reasons": list(why),
        "specs": {"weights": WEIGHTS_SPEC, "rows": ROWS_SPEC, "files": FILE_SPEC},
        "members": {name: {"sha256": sha, "bytes": len(members[name])} for name, sha in digests.items()},
        "digest": _digest(digests, why),
    }
    write_atomically(into / MANIFEST, pretty_json(manifest))
    return load_snapshot(into)


def find_snapshot(path: str | Path) -> Path:
    """The snapshot's folder: the path itself, or `snapshot` in it (a run directory)."""
    where = Path(path).absolute()
    if not where.exists():
        raise UsageError(f"{str(where)!r} does not exist: give a snapshot's folder or a run directory.")
    inner = where / "snapshot"
    return inner if inner.is_dir() and not (where / MANIFEST).is_file() else where


def load_snapshot(path: str | Path) -> Stored:
    """Read a manifest; a `SnapshotError` says what is wrong with it."""
    where = find_snapshot(path)
    try:
        manifest = json.loads((where / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            raise SnapshotError(f"{str(where)!r} has the format {manifest['format']!r}; this version reads {FORMAT!r}.")
        members = {str(name): str(entry["sha256"]) for name, entry in manifest["members"].items()}
        stored = Stored(
            path=where,
            digest=str(manifest["digest"]),
            created=str(manifest["created"]),
            reasons=tuple(map(str, manifest["reasons"])),
            members=members,
        )
    except FileNotFoundError:
        raise SnapshotError(f"{str(where)!r} holds no {MANIFEST}: no snapshot, or its capture was cut off.") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise SnapshotError(f"{str(where / MANIFEST)!r} can't be read: {type(error).__name__}: {error}.") from error
    for name in members:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise SnapshotError(f"The manifest lists {name!r}, which is outside of its folder.")
    return stored


def check_integrity(stored: Stored) -> list[Finding]:
    """Whether every member is as listed, and the digest is that of the list."""
    findings = []
    for name, sha256 in stored.members.items():
        file = stored.path / name
        if not file.is_file():
            findings.append(Finding(level="snapshot", name=name, verdict="missing", detail="a listed member is gone"))
        elif digest_file(file).sha256 != sha256:
            findings.append(
                Finding(level="snapshot", name=name, verdict="changed", detail="not as the manifest lists it")
            )
    if _digest(stored.members, stored.reasons) != stored.digest:
        detail = "its digest is not that of what it lists"
        findings.append(Finding(level="snapshot", name=MANIFEST, verdict="changed", detail=detail))
    if stored.partial:
        detail = "partial: " + "; ".join(stored.reasons)
        findings.append(Finding(level="snapshot", name="capture", verdict="missing", detail=detail))
    whole = Finding(level="snapshot", name="members", verdict="ok", detail=f"{len(stored.members)} as listed")
    return findings or [whole]


def _digest(members: Mapping[str, str], reasons: Iterable[str]) -> str:
    covered = {name: sha for name, sha in members.items() if name not in VOLATILE}
    return sha256_of(canonical_json({"format": FORMAT, "reasons": list(reasons), "members": covered}))


def _version() -> str:
    try:
        return metadata.version("lightning-run-snapshot")
    except metadata.PackageNotFoundError:
        return "(not installed)"
