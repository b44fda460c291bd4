"""What two repositories do not share, by content: commits that change no code are no difference.

Rewards and data are those parts' business, prose is nobody's, and settings files count as config. Where revisions differ, both
are read from the repository if it is here; if it isn't, the revision itself is the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from run_snapshot.checks import reward_and_data_files
from run_snapshot.errors import GitError
from run_snapshot.git import Git
from run_snapshot.manifest import Stored
from run_snapshot.records import Difference, Level

__all__ = ["code_differences"]

_PROSE = (".md", ".rst")
_SETTINGS = (".yaml", ".yml")
_ABSENT = "(absent)"


def code_differences(a: Stored, b: Stored) -> Iterator[Difference]:
    """Every repository of two snapshots."""
    sides = [{_name(r): r for r in side.json("code.json")["repositories"]} for side in (a, b)]
    elsewhere = reward_and_data_files(a) | reward_and_data_files(b)
    for name in sorted(sides[0].keys() | sides[1].keys()):
        one, two = sides[0].get(name), sides[1].get(name)
        if one is None or two is None:
            kind: Literal["added", "removed"] = "added" if one is None else "removed"
            yield Difference(level="code", name=name, kind=kind)
        elif one["status"] != "ok" or two["status"] != "ok":
            yield Difference(level="code", name=name, kind="unknown", a=one["status"], b=two["status"])
        else:
            yield from _repository(name, one, two, elsewhere)


def _name(repository: Mapping[str, Any]) -> str:
    return str(repository["remote"] or Path(repository["root"]).name)


def _repository(name: str, one: Mapping[str, Any], two: Mapping[str, Any], elsewhere: set[str]) -> Iterator[Difference]:
    if one["revision"] == two["revision"]:
        yield from _files(name, _edits(one), _edits(two), (one, two), elsewhere)
        return
    whole = _both_whole(one, two)
    revisions = {"a": one["revision"][:12], "b": two["revision"][:12]}
    if whole is None:
        detail = "what the commits between them changed is not known: no repository here has both"
        yield Difference(level="code", name=f"{name}: revision", kind="changed", **revisions, detail=detail)
        yield from _files(name, _edits(one), _edits(two), (one, two), elsewhere)
        return
    found = list(_files(name, *whole, (one, two), elsewhere))
    if any(difference.level == "code" for difference in found):
        yield Difference(level="code", name=f"{name}: revision", kind="changed", **revisions)
    yield from found


def _files(
    name: str,
    one: Mapping[str, str],
    two: Mapping[str, str],
    repositories: tuple[Mapping[str, Any], Mapping[str, Any]],
    elsewhere: set[str],
) -> Iterator[Difference]:
    for path in sorted(one.keys() | two.keys()):
        old, new = one.get(path, _ABSENT), two.get(path, _ABSENT)
        suffix = PurePosixPath(path).suffix.lower()
        is_others = any(str(Path(r["root"], path).resolve()) in elsewhere for r in repositories)
        if old == new or suffix in _PROSE or is_others:
            continue
        level: Level = "config" if suffix in _SETTINGS else "code"
        kind: Literal["added", "removed", "changed"] = (
            "added" if old == _ABSENT else "removed" if new == _ABSENT else "changed"
        )
        yield Difference(level=level, name=f"{name}: {path}", kind=kind, a=old, b=new)


def _edits(repository: Mapping[str, Any]) -> dict[str, str]:
    """What is not as in the revision."""
    edits = {path: f"edited {blob[:12]}" if blob else "deleted" for path, _, blob in repository["changed"]}
    edits |= {path: f"untracked {blob[:12]}" for path, blob in repository["untracked"]}
    return edits | _submodules(repository)


def _submodules(repository: Mapping[str, Any]) -> dict[str, str]:
    return {row[0]: f"submodule {row[2][:12]} {row[3]}" for row in repository["submodules"]}


def _both_whole(one: Mapping[str, Any], two: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]] | None:
    """Every file of both sides, edits included, from a repository that has both revisions; None without one."""
    for root in dict.fromkeys((two["root"], one["root"])):
        if not Path(root).is_dir():
            continue
        try:
            git = Git(Path(root))
            return _whole(git, one), _whole(git, two)
        except GitError:
            continue
    return None


def _whole(git: Git, repository: Mapping[str, Any]) -> dict[str, str]:
    files = {}
    for row in git.records("ls-tree", "-r", "-z", repository["revision"]):
        about, _, path = row.partition("\t")
        files[path] = about.split()[2][:12]
    for path, _, blob in repository["changed"]:
        files[path] = blob[:12]
    files |= {path: blob[:12] for path, blob in repository["untracked"]}
    return {path: blob for path, blob in (files | _submodules(repository)).items() if blob}
