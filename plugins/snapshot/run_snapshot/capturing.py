"""Capture: every part on its own, so that one that fails leaves the others and its reason."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlparse

from run_snapshot.digests import DataSource, digest_file, digest_state, digest_weights_file, read_source
from run_snapshot.digests.data import Rows, data_files, splits
from run_snapshot.digests.files import xxh3_of_file
from run_snapshot.distributions import Installed, freeze, stat_digest
from run_snapshot.environment import describe_environment, installed_of
from run_snapshot.errors import GitError, SnapshotError
from run_snapshot.files import pretty_json
from run_snapshot.git import Git
from run_snapshot.locks import LockMode, copy_locks, make_lock
from run_snapshot.manifest import write_snapshot
from run_snapshot.redact import Scrubber
from run_snapshot.repository import (
    CODE_SUFFIXES,
    Repository,
    find_repository,
    outputs_of,
    read_repository,
    untracked_code,
)
from run_snapshot.rewards import read_rewards

__all__ = ["OnError", "Snapshot", "capture"]

OnError = Literal["partial", "raise"]
_MOST_CODE = 20_000  # files of a repository whose times are kept for quick checks
_NOT_SECRET = ("PWD", "OLDPWD")  # environment variables that only sound like it


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What a capture left."""

    path: Path
    digest: str  # "" when nothing could be written
    partial: bool
    reasons: tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class _Draft:
    """Members and reasons as they come together."""

    scrub: Scrubber
    members: dict[str, bytes] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    stat: dict[str, Any] = field(default_factory=lambda: {"files": {}, "distributions": {}, "code": {}})
    folders: list[Path] = field(default_factory=list)  # where code of the run lies

    def json(self, name: str, value: Any) -> None:
        """Add a member, without secrets."""
        self.members[name] = pretty_json(self.scrub.tree(value))

    def reason(self, part: str, why: object) -> None:
        """Say why something is missing."""
        self.reasons.append(self.scrub.text(f"{part}: {why}"))


def capture(
    into: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    data_files: Iterable[str | Path | Rows] = (),
    reward_paths: Iterable[str | Callable[..., Any]] = (),
    model_state: Mapping[str, Any] | str | Path | None = None,
    seeds: Mapping[str, Any] | None = None,
    project: str | Path | None = None,
    lock: LockMode = "copy",
    git_seconds: float = 30.0,
    full_environment: bool = False,
    on_error: OnError = "partial",
) -> Snapshot:
    """Record what a run is made of in the folder `into`; call it on one rank.

    Args:
        config: the resolved settings.
        data_files: files or folders, or `Rows` for rows in memory.
        reward_paths: import paths or functions.
        model_state: a state dict, or a file or folder of weights.
        seeds: the seeds, by name.
        project: the folder whose repository and lock files count; the working directory when not given.
        lock: `copy` takes the project's lock files; `make` also resolves one with hashes, which needs an index.
        git_seconds: how long one git command may take.
        full_environment: hash every installed file against its RECORD, not only those that look edited.
        on_error: `partial` leaves the reason in the snapshot; `raise` raises it after writing.
    """
    target, home = Path(into).absolute(), Path(project or Path.cwd()).absolute()
    variables = {name: value for name, value in os.environ.items() if name not in _NOT_SECRET}
    draft = _Draft(scrub=Scrubber([variables, config or {}]))
    parts: list[tuple[str, Callable[[], None]]] = [
        ("environment", lambda: _environment(draft, home, lock, full_environment)),
        ("data", lambda: _data(draft, data_files)),
        ("weights", lambda: _weights(draft, model_state)),
        ("rewards", lambda: _rewards(draft, reward_paths, git_seconds)),
        ("code", lambda: _code(draft, home, target, git_seconds)),
        ("config", lambda: draft.json("config.json", config or {})),
        ("seeds", lambda: draft.json("seeds.json", seeds or {})),
    ]
    for name, part in parts:
        try:
            part()
        except Exception as error:  # noqa: BLE001 - a snapshot is partial rather than the end of a run
            draft.reason(name, f"{type(error).__name__}: {error}")
    # By file: a file that is called test_secrets.py holds no secret by its name, and its digest is none.
    draft.members["stat.json"] = pretty_json(draft.scrub.known_in(draft.stat))
    return _written(draft, target, on_error)


def _written(draft: _Draft, target: Path, on_error: OnError) -> Snapshot:
    try:
        stored = write_snapshot(target, draft.members, draft.reasons)
    except OSError as error:
        draft.reason("writing", f"{target} can't be written: {error.strerror}")
        snapshot = Snapshot(path=target, digest="", partial=True, reasons=tuple(draft.reasons))
    else:
        snapshot = Snapshot(path=target, digest=stored.digest, partial=stored.partial, reasons=stored.reasons)
    if on_error == "raise" and snapshot.partial:
        raise SnapshotError(f"The snapshot is partial: {'; '.join(snapshot.reasons)}")
    return snapshot


def _environment(draft: _Draft, home: Path, lock: LockMode, full: bool) -> None:
    environment = describe_environment(full=full)
    installed = installed_of(environment)
    draft.json("environment.json", environment)
    draft.members["freeze.txt"] = draft.scrub.text(freeze(installed)).encode()
    draft.stat["distributions"] = {
        f"{d.location}/{d.info}": [stat_digest(d, quick=True), stat_digest(d)] for d in installed
    }
    draft.folders += [folder for d in installed if (folder := _editable_folder(d))]
    _locks(draft, home, installed, lock)


def _locks(draft: _Draft, home: Path, installed: tuple[Installed, ...], mode: LockMode) -> None:
    locks = list(copy_locks(home, installed)) if mode != "off" else []
    status = "copied" if locks else "none: the project has no lock file"
    if mode == "make":
        made, status = make_lock(installed)
        locks += [made] if made else []
    for lock in locks:
        draft.members[f"locks/{lock.name.replace('/', '__')}"] = draft.scrub.known(lock.text).encode()
    draft.json(
        "locks.json", {"status": "off" if mode == "off" else status, "locks": [lock.to_json() for lock in locks]}
    )


def _data(draft: _Draft, sources: Iterable[str | Path | Rows]) -> None:
    entries: list[dict[str, Any]] = []
    for source in sources:
        for part in [source] if isinstance(source, Rows) else splits(Path(source)):
            try:
                entries.append(_source(draft, part, len(entries)))
            except (SnapshotError, OSError) as error:
                draft.reason("data", error)
            except Exception as error:  # noqa: BLE001 - rows in memory may be a program of the user's
                draft.reason("data", f"{getattr(part, 'name', part)}: {type(error).__name__}: {error}")
    draft.json("data.json", {"sources": entries})


def _source(draft: _Draft, source: Path | Rows, index: int) -> dict[str, Any]:
    before = {} if isinstance(source, Rows) else _stats(data_files(source.absolute()))
    read = read_source(source)
    if not isinstance(source, Rows) and _stats(data_files(source.absolute())) != before:
        draft.reason("data", f"{source} changed while it was read")
    draft.stat["files"] |= before
    if read.failed:
        draft.reason("data", f"{read.name}: {read.note}")
    return _source_entry(draft, read, index)


def _source_entry(draft: _Draft, read: DataSource, index: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": read.name,
        "path": str(read.path) if read.path else None,
        "files": {name: asdict(digest) for name, digest in read.files.items()},
        "note": read.note,
        "rows": None,
    }
    if read.rows is not None:
        kept = f"rows/{index}.bin"
        draft.members[kept] = read.rows.kept
        entry["rows"] = {**read.rows.to_json(), "kept": kept}
    return entry


def _weights(draft: _Draft, state: Mapping[str, Any] | str | Path | None) -> None:
    if state is None:
        return
    if isinstance(state, Mapping):
        draft.json("weights.json", {"source": None, "files": {}, "tree": digest_state(state).to_json()})
        return
    path = Path(state).absolute()
    files = data_files(path)
    digests = {"" if file == path else file.relative_to(path).as_posix(): asdict(digest_file(file)) for file in files}
    draft.stat["files"] |= _stats(files)
    tree = digest_weights_file(path).to_json()
    draft.json("weights.json", {"source": str(path), "files": digests, "tree": tree})


def _rewards(draft: _Draft, paths: Iterable[str | Callable[..., Any]], seconds: float) -> None:
    rewards = read_rewards(paths, seconds=seconds)
    for why in rewards.unresolved:
        draft.reason("rewards", why)
    files = []
    for index, file in enumerate(rewards.files):
        entry = {key: value for key, value in asdict(file).items() if key not in ("source", "patch")}
        for kind, text, suffix in (("source", file.source, "py.txt"), ("patch", file.patch, "patch")):
            entry[kind] = f"rewards/{index:03}.{suffix}" if text else ""
            if text:
                draft.members[entry[kind]] = draft.scrub.known(text).encode()
        files.append(entry)
        draft.folders.append(Path(file.path).parent)
    draft.json(
        "rewards.json",
        {
            "functions": [asdict(function) for function in rewards.functions],
            "files": files,
            "external": rewards.external,
            "notes": rewards.notes,
            "unresolved": rewards.unresolved,
        },
    )


def _code(draft: _Draft, home: Path, target: Path, seconds: float) -> None:
    script = Path(sys.argv[0]).absolute() if sys.argv and sys.argv[0] else home
    folders = [home, *([script] if script.is_file() and "bin" not in script.parts else []), *draft.folders]
    roots = dict.fromkeys(root for folder in folders if (root := find_repository(folder)))
    repositories = []
    for index, root in enumerate(roots):
        repository = read_repository(root, ignore=[outputs_of(target)], seconds=seconds)
        repositories.append(_repository_entry(draft, repository, index))
        draft.stat["code"][str(root)] = _code_stats(root, outputs_of(target), seconds)
        if repository.status != "ok":
            draft.reason("code", f"{root}: {repository.status}")
    draft.json("code.json", {"repositories": repositories, "project": str(home)})


def _repository_entry(draft: _Draft, repository: Repository, index: int) -> dict[str, Any]:
    entry = repository.to_json()
    if repository.patch is not None and repository.patch.text:
        name = f"code/{index}.patch"
        text = draft.scrub.known(repository.patch.text)
        draft.members[name] = text.encode("utf-8", "surrogateescape")
        entry["patch"] |= {
            "member": name,
            "is_redacted": entry["patch"]["is_redacted"] or text != repository.patch.text,
        }
    return entry


def _code_stats(root: Path, ignore: Path, seconds: float) -> dict[str, list[Any]]:
    """Size, time and digest of a repository's code, followed by git or not; none when there is too much of it."""
    try:
        git = Git(root, seconds=seconds)
        names = [name for name in git.records("ls-files", "-z") if Path(name).suffix.lower() in CODE_SUFFIXES]
        names += untracked_code(git, root, [ignore])
    except GitError:
        return {}
    files = {name: root / name for name in names[:_MOST_CODE] if (root / name).is_file()}
    return {name: [*_stat(file), xxh3_of_file(file)] for name, file in files.items()}


def _stats(files: Sequence[Path]) -> dict[str, list[int]]:
    return {str(file): _stat(file) for file in files}


def _stat(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _editable_folder(dist: Installed) -> Path | None:
    if not dist.editable or not dist.url.startswith("file:"):
        return None
    folder = Path(unquote(urlparse(dist.url).path))
    return folder if folder.is_dir() else None
