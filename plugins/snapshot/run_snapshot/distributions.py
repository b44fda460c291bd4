"""The installed distributions, read from their metadata in this process: it works without pip."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from base64 import urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash
from packaging.utils import canonicalize_name

from run_snapshot.digests.files import sha256_of
from run_snapshot.redact import redact_text

__all__ = ["Installed", "edited_files", "find_installed", "freeze", "owners", "stat_digest"]

_SKIPPED = (
    "RECORD",
    "INSTALLER",
    "REQUESTED",
    "direct_url.json",
)  # of a .dist-info: they differ between equal installs
_NOT_LOADED = (
    ".h",
    ".hpp",
    ".cuh",
    ".pyi",
    ".typed",
    ".svg",
    ".png",
    ".md",
    ".rst",
    ".html",
    ".js",
    ".css",
    ".map",
    ".dat",
)
_GRACE_NS = 2 * 10**9  # an installer writes RECORD last


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """One distribution."""

    name: str  # normalised
    version: str
    installer: str
    url: str  # of direct_url.json, without credentials; "" for one from an index
    commit: str  # of a VCS install
    editable: bool
    record_sha256: str  # of RECORD's rows without scripts and .pyc; "" when there is no RECORD
    shadowed: bool  # another of this name comes earlier on the path
    location: str  # the folder that holds it
    info: str  # its .dist-info or .egg-info, relative to `location`

    def to_json(self) -> dict[str, Any]:
        """As plain types."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of RECORD."""

    path: str
    sha256: str  # urlsafe base64 without padding; "" when none is given
    size: int  # -1 when none is given


def find_installed(path: Iterable[str] | None = None) -> tuple[Installed, ...]:
    """Every distribution on the import path (or on `path`), by name; the ones that win first."""
    found: list[Installed] = []
    seen: set[str] = set()
    for dist in metadata.distributions() if path is None else metadata.distributions(path=list(path)):
        about = _metadata(dist)
        if about is None:
            continue
        name = canonicalize_name(about["Name"] or "")
        if name:
            record = _describe(dist, name, str(about["Version"] or ""), name in seen)
            if record not in found:
                found.append(record)
            seen.add(name)
    return tuple(sorted(found, key=lambda record: (record.name, record.shadowed, record.location)))


def edited_files(installed: Installed, *, full: bool = False) -> tuple[str, ...]:
    """Files that are not as their RECORD says: of another size, gone or, when hashed, of another content.

    Hashed are files newer than RECORD (an installer writes it last), or with `full` all of them.
    """
    edited = []
    root = Path(installed.location)
    newest = _mtime(root / installed.info / "RECORD") + _GRACE_NS
    for row in _rows(root / installed.info):
        try:
            stat = os.stat(f"{root}{os.sep}{row.path}")  # noqa: PTH116 - tens of thousands of them
        except OSError:
            edited.append(f"{row.path} (gone)")
            continue
        is_suspect = bool(row.sha256) and (full or stat.st_mtime_ns > newest)
        is_resized = row.size >= 0 and stat.st_size != row.size
        if is_resized or (is_suspect and _sha256_base64(root / row.path) != row.sha256):
            edited.append(row.path)
    return tuple(edited)


def stat_digest(installed: Installed, *, quick: bool = False) -> str:
    """A digest of sizes and times of the distribution's files: while it stands, no file needs to be read.

    `quick` leaves out what no run loads (headers, stubs, pictures, documents): half of the files of a usual environment.
    """
    root = installed.location + os.sep
    seen = xxhash.xxh3_128()
    for path in _stat_paths(Path(installed.location) / installed.info):
        if quick and path.endswith(_NOT_LOADED):
            continue
        try:
            stat = os.stat(root + path)  # noqa: PTH116 - tens of thousands of them
            seen.update(b"%d:%d;" % (stat.st_size, stat.st_mtime_ns))
        except OSError:
            seen.update(b"gone;")
    return seen.hexdigest()


def owners(packages: Iterable[str]) -> dict[str, str]:
    """The distributions, with versions, whose files lie in these top-level packages or modules."""
    wanted = set(packages)
    found: dict[str, str] = {}
    for dist in metadata.distributions():
        info = Path(str(getattr(dist, "_path", "") or ""))
        tops = {row.path.split("/", 1)[0].removesuffix(".py") for row in _rows(info)}
        if wanted & tops:
            about = _metadata(dist)
            if about is not None:
                found.setdefault(canonicalize_name(about["Name"] or info.name), str(about["Version"] or ""))
    return dict(sorted(found.items()))


def freeze(installed: Iterable[Installed]) -> str:
    """The distributions as requirements that pip reads; what it could not install again is a comment."""
    lines = []
    for dist in installed:
        if dist.shadowed:
            continue
        if dist.editable:
            lines.append(f"# editable: {dist.name}=={dist.version} from {dist.url}")
        elif dist.url:
            pin = f"{dist.url}@{dist.commit}" if dist.commit else dist.url
            lines.append(f"{dist.name} @ {pin}")
        else:
            lines.append(f"{dist.name}=={dist.version}")
    return "\n".join(lines) + "\n"


def _metadata(dist: metadata.Distribution) -> metadata.PackageMetadata | None:
    """A distribution's metadata, parsed once; None when it is no text."""
    try:
        return dist.metadata
    except (UnicodeDecodeError, OSError):
        return None


def _describe(dist: metadata.Distribution, name: str, version: str, shadowed: bool) -> Installed:
    origin = _origin(dist)
    vcs = origin.get("vcs_info") or {}
    url = redact_text(str(origin.get("url", "")))
    info = Path(str(getattr(dist, "_path", "") or ""))
    return Installed(
        name=name,
        version=version,
        installer=(dist.read_text("INSTALLER") or "").strip(),
        url=f"{vcs['vcs']}+{url}" if vcs.get("vcs") and url else url,
        commit=str(vcs.get("commit_id", "")),
        editable=bool((origin.get("dir_info") or {}).get("editable", False)) or info.suffix == ".egg-info",
        record_sha256=_record_digest(info),
        shadowed=shadowed,
        location=str(info.parent),
        info=info.name,
    )


def _origin(dist: metadata.Distribution) -> dict[str, Any]:
    try:
        origin = json.loads(dist.read_text("direct_url.json") or "{}")
    except ValueError:
        return {}
    return origin if isinstance(origin, dict) else {}


def _record_digest(info: Path) -> str:
    rows = [f"{row.path},{row.sha256},{row.size}" for row in _rows(info) if not _is_local(row.path)]
    return sha256_of("\n".join(sorted(rows)).encode("utf-8", "surrogateescape")) if rows else ""


def _is_local(path: str) -> bool:
    """Whether a row differs between equal installs: scripts name their interpreter."""
    return path.startswith("..") or (".dist-info/" in path and path.rsplit("/", 1)[-1] in _SKIPPED)


def _rows(info: Path) -> tuple[_Row, ...]:
    return _read_record(str(info), _mtime(info / "RECORD"))


@lru_cache(maxsize=2048)
def _read_record(info: str, _mtime_ns: int) -> tuple[_Row, ...]:
    """RECORD's rows without .pyc and without RECORD itself; read again only when its time changed."""
    try:
        text = (Path(info) / "RECORD").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ()
    rows = []
    for line in csv.reader(text.splitlines()):
        if len(line) != 3 or line[0].endswith((".pyc", "/RECORD")):
            continue
        path, digest, size = line
        sha256 = digest.removeprefix("sha256=") if digest.startswith("sha256=") else ""
        rows.append(_Row(path, sha256, int(size) if size.isdigit() else -1))
    return tuple(rows)


def _stat_paths(info: Path) -> tuple[str, ...]:
    return _paths_of(str(info), _mtime(info / "RECORD"))


@lru_cache(maxsize=2048)
def _paths_of(info: str, mtime_ns: int) -> tuple[str, ...]:
    name = Path(info).name
    listed = tuple(row.path for row in _read_record(info, mtime_ns))
    return (*listed, f"{name}/RECORD", f"{name}/METADATA")


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _sha256_base64(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return urlsafe_b64encode(digest).rstrip(b"=").decode()
