"""What was captured, held against what is there now, part by part.

Each function takes what the snapshot holds and gives findings, the good ones too. `quick` believes a file whose size and
time stand; without it every data file and repository is read again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from run_snapshot.digests import (
    RowsDigest,
    WeightsTree,
    compare_weights,
    digest_file,
    digest_weights_file,
    explain_rows,
    read_source,
)
from run_snapshot.digests.data import data_files
from run_snapshot.digests.files import sha256_of, xxh3_of_file
from run_snapshot.digests.spec import ROWS_SPEC
from run_snapshot.distributions import Installed, edited_files, find_installed, stat_digest
from run_snapshot.environment import describe_machine, path_files_now
from run_snapshot.errors import DigestError, GitError, SnapshotError
from run_snapshot.git import Git
from run_snapshot.manifest import Stored
from run_snapshot.records import Finding, Verdict
from run_snapshot.repository import Repository, outputs_of, read_repository, untracked_code

__all__ = [
    "check_code",
    "check_data",
    "check_environment",
    "check_rewards",
    "check_weights",
    "compare_tree",
    "reward_and_data_files",
]

_NAMED = 20  # tensors or files that get a finding of their own


def check_environment(stored: Stored, *, quick: bool = True, full: bool = False) -> list[Finding]:
    """Distributions, their files, Python and .pth files. Installed files are hashed when their size or time changed.

    `quick` looks at the files that a run can load, and `full` hashes all.
    """
    member = stored.json("environment.json")
    if member is None:
        return [_gone("environment", "environment.json")]
    stats = (stored.json("stat.json") or {}).get("distributions", {})
    recorded = [Installed(**entry) for entry in member["distributions"]]
    findings = list(_machine(member))
    if full or _infos_now() != _infos(recorded) or not all(_untouched(d, stats, quick) for d in recorded):
        findings += _distributions(recorded, stats, member["edited"], full)
    detail = f"{len(recorded)} distributions as recorded" + (
        "" if full else "; files not read again where size and time stand"
    )
    return findings or [Finding(level="environment", name="distributions", verdict="ok", detail=detail)]


def check_data(stored: Stored, *, quick: bool = True) -> list[Finding]:
    """Every source: its files, and by row what became of it."""
    member = stored.json("data.json")
    if member is None:
        return [_gone("data", "data.json")]
    stats = (stored.json("stat.json") or {}).get("files", {})
    return [_source(stored, entry, stats, quick) for entry in member["sources"]]


def check_rewards(stored: Stored) -> list[Finding]:
    """Every source file of the reward functions; they are few, and always read."""
    member = stored.json("rewards.json")
    if member is None:
        return [_gone("reward", "rewards.json")]
    findings = []
    for file in member["files"]:
        path = Path(file["path"])
        if not path.is_file():
            findings.append(_finding("reward", file["module"], "missing", f"{path} is gone"))
        elif sha256_of(path.read_bytes()) != file["sha256"]:
            findings.append(_finding("reward", file["module"], "changed", f"{path} is not as captured"))
    for why in member["unresolved"]:
        findings.append(_finding("reward", why.split(":")[0], "unknown", f"its source was not captured: {why}"))
    if findings or not member["files"]:
        return findings
    return [_finding("reward", "sources", "ok", f"{len(member['files'])} files as captured")]


def check_code(stored: Stored, *, quick: bool = True) -> list[Finding]:
    """Every repository: revision, edited, new and vanished code. Files of rewards and data are those parts' business."""
    member = stored.json("code.json")
    if member is None:
        return [_gone("code", "code.json")]
    stats = (stored.json("stat.json") or {}).get("code", {})
    elsewhere = reward_and_data_files(stored)
    findings = []
    for entry in member["repositories"]:
        known = stats.get(entry["root"]) or {}
        findings += _repository(stored, entry, known, elsewhere, quick)
    if not member["repositories"]:
        findings.append(_finding("code", "repository", "not checked", "the run was in no git repository"))
    return findings


def check_weights(stored: Stored) -> list[Finding]:
    """The weights that the run started from, where they came from a file."""
    member = stored.json("weights.json")
    if member is None:
        return []
    if member["source"] is None:
        return [_finding("weights", "initial weights", "not checked", "they were in memory: there is no file to read")]
    return compare_tree(WeightsTree.from_json(member["tree"]), Path(member["source"]), member["files"])


def compare_tree(tree: WeightsTree, path: Path, files: Mapping[str, Mapping[str, Any]] | None = None) -> list[Finding]:
    """A file or folder of weights against a recorded tree; `files` are the recorded files' digests, by relative path."""
    name = str(path)
    if not path.exists():
        return [_finding("weights", name, "missing", "the file is gone")]
    if files and all(_same_file(path / rel if rel else path, entry) for rel, entry in files.items()):
        return [_finding("weights", name, "ok", f"the same file, root {tree.root}")]
    try:
        found = digest_weights_file(path)
    except DigestError as error:
        return [_finding("weights", name, "unknown", str(error))]
    changes = compare_weights(tree, found)
    if not changes:
        detail = "re-saved, tensors same" if files else f"{len(tree.tensors)} tensors as recorded, root {tree.root}"
        return [_finding("weights", name, "ok", detail)]
    findings = [
        _finding("weights", c.name, "missing" if c.kind == "missing" else "changed", c.kind) for c in changes[:_NAMED]
    ]
    if len(changes) > _NAMED:
        findings.append(_finding("weights", name, "changed", f"{len(changes) - _NAMED} more tensors"))
    return findings


def _finding(level: Any, name: str, verdict: Verdict, detail: str) -> Finding:
    return Finding(level=level, name=name, verdict=verdict, detail=detail)


def _gone(level: Any, member: str) -> Finding:
    return _finding(level, member, "unknown", "this part was not captured")


def _machine(member: Mapping[str, Any]) -> Iterator[Finding]:
    now = describe_machine()
    recorded, found = member["python"]["version"], now["python"]["version"]
    if recorded != found:
        yield _finding("environment", "python", "changed", f"{recorded} -> {found}")
    if "torch" in sys.modules and member["accelerator"] and member["accelerator"] != now["accelerator"]:
        keys = [k for k, v in member["accelerator"].items() if now["accelerator"].get(k) != v]
        told = ", ".join(f"{k} {member['accelerator'][k]} -> {now['accelerator'].get(k)}" for k in keys)
        yield _finding("environment", "accelerator", "changed", told)
    before, after = member["path_files"], path_files_now()
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            verdict: Verdict = "missing" if name not in after else "changed"
            yield _finding("environment", name, verdict, "a .pth file, which can run code at every start")


def _distributions(
    recorded: list[Installed], stats: Mapping[str, list[str]], edited: Mapping[str, list[str]], full: bool
) -> Iterator[Finding]:
    before = {d.name: d for d in recorded if not d.shadowed}
    installed = find_installed()
    after = {d.name: d for d in installed if not d.shadowed}
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if new is None:
            yield _finding("environment", name, "missing", f"{old.version if old else ''} was installed")
        elif old is None:
            yield _finding("environment", name, "changed", f"{new.version} was installed since")
        elif told := _other_build(old, new):
            yield _finding("environment", name, "changed", told)
        elif new.record_sha256 and (full or not _untouched(new, stats, quick=False)):
            files = sorted(set(edited_files(new, full=full)) ^ set(edited.get(name, ())))
            if files:
                yield _finding("environment", name, "changed", f"edited files: {', '.join(files[:_NAMED])}")
    known = {_key(d) for d in recorded}
    for dist in installed:
        if dist.shadowed and _key(dist) not in known:
            yield _finding(
                "environment", dist.name, "changed", f"a second copy, {dist.version}, lies in {dist.location}"
            )


def _other_build(old: Installed, new: Installed) -> str:
    if old.version != new.version:
        return f"{old.version} -> {new.version}"
    if (old.url, old.commit) != (new.url, new.commit):
        return f"from {old.url or 'an index'} {old.commit} -> {new.url or 'an index'} {new.commit}"
    if old.record_sha256 != new.record_sha256:
        return f"{new.version}: same version, different build"
    return ""


def _untouched(dist: Installed, stats: Mapping[str, list[str]], quick: bool) -> bool:
    """Whether sizes and times stand: of the files that a run can load, or of all."""
    of_loaded, of_all = stats.get(_key(dist), ("", ""))
    return stat_digest(dist, quick=quick) == (of_loaded if quick else of_all)


def _key(dist: Installed) -> str:
    return f"{dist.location}/{dist.info}"


def _infos(recorded: Iterable[Installed]) -> set[str]:
    return {_key(dist) for dist in recorded}


def _infos_now() -> set[str]:
    """The metadata folders on the import path, as `importlib.metadata` finds them."""
    found = set()
    for folder in dict.fromkeys(sys.path):
        try:
            with os.scandir(folder or ".") as entries:
                found |= {
                    f"{folder or Path.cwd()}/{e.name}" for e in entries if e.name.endswith((".dist-info", ".egg-info"))
                }
        except OSError:
            continue
    return found


def _source(stored: Stored, entry: Mapping[str, Any], stats: Mapping[str, list[int]], quick: bool) -> Finding:
    name = str(entry["name"])
    if entry["path"] is None:
        return _finding("data", name, "not checked", "its rows were in memory: there is no file to read")
    path = Path(entry["path"])
    if not path.exists():
        return _finding("data", name, "missing", f"{path} is gone")
    there = {"" if f == path else f.relative_to(path).as_posix(): f for f in data_files(path)}
    if quick and there.keys() == entry["files"].keys() and all(_stands(file, stats) for file in there.values()):
        return _finding("data", name, "ok", "not read again: size and time stand")
    changed = [rel for rel in entry["files"].keys() | there.keys() if not _as_recorded(rel, there, entry["files"])]
    if not changed:
        return _finding("data", name, "ok", f"{len(there)} file(s) as captured")
    return _changed_source(stored, entry, path, sorted(changed))


def _changed_source(stored: Stored, entry: Mapping[str, Any], path: Path, changed: list[str]) -> Finding:
    files = ", ".join(str(path / rel) if rel else str(path) for rel in changed[:3])
    if entry["rows"] is None:
        return _finding("data", str(entry["name"]), "changed", f"{files} is not as captured")
    now = read_source(path)
    if now.rows is None:
        return _finding("data", str(entry["name"]), "changed", f"{files} can't be read now: {now.note}")
    told = explain_rows(recorded_rows(stored, entry["rows"]), now.rows)
    if not told:
        return _finding("data", str(entry["name"]), "ok", f"re-saved, rows same: {files}")
    return _finding("data", str(entry["name"]), "changed", told)


def recorded_rows(stored: Stored, rows: Mapping[str, Any]) -> RowsDigest:
    """The rows of a source as they were digested."""
    if rows["spec"] != ROWS_SPEC:
        raise SnapshotError(f"The rows were digested under {rows['spec']!r}; this version knows {ROWS_SPEC!r}.")
    return RowsDigest(
        count=rows["count"],
        ordered=rows["ordered"],
        unordered=rows["unordered"],
        schema=rows["schema"],
        kept=stored.content(rows["kept"]),
        per=rows["per"],
    )


def _stands(file: Path, stats: Mapping[str, list[int]]) -> bool:
    status = file.stat()
    return stats.get(str(file)) == [status.st_size, status.st_mtime_ns]


def _as_recorded(rel: str, there: Mapping[str, Path], recorded: Mapping[str, Mapping[str, Any]]) -> bool:
    return rel in there and rel in recorded and _same_file(there[rel], recorded[rel])


def _same_file(file: Path, entry: Mapping[str, Any]) -> bool:
    return file.is_file() and file.stat().st_size == entry["bytes"] and digest_file(file).sha256 == entry["sha256"]


def reward_and_data_files(stored: Stored) -> set[str]:
    rewards, data = stored.json("rewards.json") or {}, stored.json("data.json") or {}
    files = {file["path"] for file in rewards.get("files", ())}
    for source in data.get("sources", ()):
        if source["path"] is not None:
            files |= {str(Path(source["path"], rel)) if rel else source["path"] for rel in source["files"]}
    return {str(Path(file).resolve()) for file in files}


def _repository(
    stored: Stored, entry: Mapping[str, Any], known: Mapping[str, list[Any]], elsewhere: set[str], quick: bool
) -> list[Finding]:
    root = Path(entry["root"])
    if entry["status"] != "ok":
        return [_finding("code", entry["root"], "unknown", f"at capture: {entry['status']}")]
    if not root.is_dir():
        where = f"; its revision is at {entry['remote']}" if entry["reachable"] == "yes" else ""
        return [_finding("code", entry["root"], "missing", f"the repository is gone{where}")]
    try:
        git = Git(root)
        head = git.run("rev-parse", "HEAD") if entry["revision"] else ""
        findings = list(_revision(git, entry, head))
        if quick:
            findings += _quick_code(git, root, known, elsewhere, outputs_of(stored.path))
        elif not entry["is_bare"] and entry["revision"] and head == entry["revision"]:
            findings += _full_code(entry, read_repository(root, ignore=[outputs_of(stored.path)]), elsewhere)
        elif not entry["is_bare"] and entry["revision"]:
            findings += _quick_code(git, root, known, elsewhere, outputs_of(stored.path))
    except GitError as error:
        return [_finding("code", entry["root"], "unknown", str(error))]
    return findings or [_finding("code", entry["root"], "ok", _code_detail(entry))]


def _code_detail(entry: Mapping[str, Any]) -> str:
    return f"revision {entry['revision'][:12] or 'none'}, {entry['state']}; on a remote: {entry['reachable']}"


def _revision(git: Git, entry: Mapping[str, Any], head: str) -> Iterator[Finding]:
    if not entry["revision"]:
        return
    if not git.succeeds("cat-file", "-e", f"{entry['revision']}^{{commit}}"):
        yield _finding(
            "code", entry["root"], "missing", f"revision {entry['revision'][:12]} is not in the repository any more"
        )
    elif head != entry["revision"]:
        yield _finding("code", entry["root"], "changed", f"revision {entry['revision'][:12]} -> {head[:12]}")


def _quick_code(
    git: Git, root: Path, known: Mapping[str, list[Any]], elsewhere: set[str], ignore: Path
) -> Iterator[Finding]:
    """Code by size and time first; new code that git does not follow too."""
    for name, (size, mtime, digest) in known.items():
        file = root / name
        try:
            status = file.stat()
        except OSError:
            if str(file.resolve()) not in elsewhere:
                yield _finding("code", name, "missing", f"{file} is gone")
            continue
        stands = status.st_size == size and status.st_mtime_ns == mtime
        if not stands and str(file.resolve()) not in elsewhere and xxh3_of_file(file) != digest:
            yield _finding("code", name, "changed", f"{file} was edited since")
    for name in untracked_code(git, root, [ignore]) if known else ():
        if name not in known and str((root / name).resolve()) not in elsewhere:
            yield _finding("code", name, "changed", f"{root / name} is new, and git does not follow it")


def _full_code(entry: Mapping[str, Any], now: Repository, elsewhere: set[str]) -> Iterator[Finding]:
    """Code by its blobs, those hidden from `git status` included."""
    root = Path(entry["root"])
    if now.status != "ok":
        yield _finding("code", entry["root"], "unknown", now.status)
        return
    before = {name: blob for name, _, blob in entry["changed"]} | dict(entry["untracked"])
    after = {name: blob for name, _, blob in now.changed} | dict(now.untracked)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name) or str((root / name).resolve()) in elsewhere:
            continue
        is_gone = not (root / name).exists()
        new = name in {n for n, _ in now.untracked} and name not in before
        told = "is gone" if is_gone else "is new, and git does not follow it" if new else "was edited since"
        yield _finding("code", name, "missing" if is_gone else "changed", f"{root / name} {told}")
    for old, new_row in zip(entry["submodules"], now.submodules, strict=False):
        if list(old) != list(new_row):
            yield _finding(
                "code", old[0], "changed", f"submodule {old[2][:12]} {old[3]} -> {new_row[2][:12]} {new_row[3]}"
            )
