"""Where what a snapshot describes lies in a restored folder: data, reward code and the paths that a config names.

A run reads its files by the paths in its config, from the folder that it was started in. So they are put at the same paths
in the restored tree; where that can't be, the restored config names the new ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from run_snapshot.digests import WeightsTree, compare_weights, digest_weights_file
from run_snapshot.digests.files import digest_file, sha256_of
from run_snapshot.errors import SnapshotError
from run_snapshot.files import pretty_json, write_atomically
from run_snapshot.manifest import Stored
from run_snapshot.records import Finding, Level, Verdict
from run_snapshot.redact import REDACTED

__all__ = ["code_folder", "place_config", "place_data", "place_rewards", "working_folder"]

_LONGEST = 1024  # characters of a setting that may be a path


def code_folder(target: Path, index: int, root: str) -> Path:
    """Where a repository's worktree goes."""
    return target / ("code" if index == 0 else f"code-{index}-{Path(root).name}")


def working_folder(stored: Stored, target: Path) -> Path:
    """What the folder that the run was started in has become."""
    project = Path((stored.json("code.json") or {}).get("project") or "/")
    return _placed(stored, target, project) or target / "work"


def _placed(stored: Stored, target: Path, path: Path) -> Path | None:
    """Where a path of a recorded repository, or of the project, lies in the restored tree; None for any other."""
    member = stored.json("code.json") or {}
    repositories = list(enumerate(member.get("repositories", ())))
    for index, entry in sorted(repositories, key=lambda item: -len(item[1]["root"])):
        if path.is_relative_to(entry["root"]):
            return code_folder(target, index, entry["root"]) / path.relative_to(entry["root"])
    project = member.get("project")
    return target / "work" / path.relative_to(project) if project and path.is_relative_to(project) else None


# ---- reward code


def place_rewards(stored: Stored, target: Path) -> Iterator[Finding]:
    """Sources that no repository brought back are written from the snapshot."""
    files = (stored.json("rewards.json") or {"files": []})["files"]
    bad = [finding for file in files if (finding := _source_placed(stored, target, file)) is not None]
    yield from bad
    if files:
        yield _finding("reward", "sources", "ok", f"{len(files) - len(bad)} of {len(files)} files as captured")


def _source_placed(stored: Stored, target: Path, file: Mapping[str, Any]) -> Finding | None:
    where = _placed(stored, target, _normal(file["path"]))
    if where is not None and where.is_file() and sha256_of(where.read_bytes()) == file["sha256"]:
        return None
    if not file["source"]:
        return _finding("reward", file["module"], "missing", "its source was not kept")
    content = stored.content(file["source"])
    place = where or target / "rewards" / Path(file["path"]).name
    if not place.exists() or sha256_of(content) == file["sha256"]:
        write_atomically(place, content)
    if sha256_of(content) != file["sha256"]:
        return _finding("reward", file["module"], "changed", f"secrets were taken out of it: see {place}")
    if where is None:
        return _finding("reward", file["module"], "changed", f"it lay outside of the project: it is in {place} now")
    return None


# ---- data


def place_data(stored: Stored, target: Path, search: Sequence[Path]) -> Iterator[Finding]:
    """Links to files of the recorded content: under ``data``, and where the run looked for them."""
    places: dict[str, dict[str, str]] = {}
    for index, source in enumerate(_sources(stored)):
        level: Level = "weights" if source["name"] == "initial weights" else "data"
        if source["path"] is None:
            detail = "its rows were in memory: make them again from the config"
            yield _finding(level, source["name"], "not checked", detail)
            continue
        found = {rel: _locate(Path(source["path"], rel), entry, search) for rel, entry in source["files"].items()}
        places[source["name"]] = {rel: str(file) for rel, file in found.items() if file is not None}
        _link(_data_folder(target, index, source), found)
        where = _placed(stored, target, _normal(source["path"]))
        if where is not None:
            _link(where, found)
        lost = sorted(rel or source["path"] for rel, file in found.items() if file is None)
        if lost:
            detail = f"no file of this content was found: {', '.join(lost[:5])}"
            yield _finding(level, source["name"], "missing", detail)
        else:
            detail = f"found by digest: {', '.join(sorted(places[source['name']].values())[:2])}"
            yield _finding(level, source["name"], "ok", detail)
    write_atomically(target / "data.json", pretty_json(places))


def _sources(stored: Stored) -> list[Mapping[str, Any]]:
    sources = list((stored.json("data.json") or {"sources": []})["sources"])
    weights = stored.json("weights.json")
    if weights is not None and weights["source"] is not None:
        sources.append({"name": "initial weights", "path": weights["source"], "files": weights["files"]})
    return sources


def _data_folder(target: Path, index: int, source: Mapping[str, Any]) -> Path:
    return target / "data" / f"{index}-{Path(source['path']).name}"


def _locate(path: Path, entry: Mapping[str, Any], search: Sequence[Path]) -> Path | None:
    """A file of this content: where it was, else anywhere under `search`."""
    candidates = [path] if path.is_file() else []
    for folder in search:
        candidates += sorted(file for file in folder.rglob("*") if file.is_file())
    for file in candidates:
        if file.stat().st_size == entry["bytes"] and digest_file(file).sha256 == entry["sha256"]:
            return file.absolute()
    return None


def _link(place: Path, found: Mapping[str, Path | None]) -> None:
    """Links; what a worktree brought stays."""
    for rel, file in found.items():
        link = place / rel if rel else place
        if file is None or not link.absolute().is_relative_to(place.parent) or os.path.lexists(link):
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)


# ---- config


def place_config(stored: Stored, target: Path) -> Iterator[Finding]:
    """The config, with its paths led to where things lie now, and links to other local files that it names."""
    config = stored.json("config.json")
    if config is None:
        yield _finding("config", "config.yaml", "missing", "the settings were not captured")
        return
    led: dict[str, str] = {}
    others: dict[str, Path] = {}
    for text in dict.fromkeys(_texts(config)):
        moved = _moved(stored, target, text)
        if moved:
            led[text] = moved
        elif (path := _named_path(stored, target, text)) is not None:
            others[text] = path
    yield from (_linked(stored, target, text, path) for text, path in others.items())
    config = _mapped(config, lambda text: led.get(text, text))
    written = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    write_atomically(target / "config.yaml", written.encode())
    redacted = written.count(REDACTED)
    if redacted:
        detail = f"{redacted} secret(s) were taken out of it: fill them in again"
        yield _finding("config", "config.yaml", "changed", detail)
        return
    told = "".join(f"; {old} is {new} now" for old, new in led.items())
    yield _finding("config", "config.yaml", "ok", f"{target / 'config.yaml'}{told}")


def _moved(stored: Stored, target: Path, text: str) -> str:
    """A new path for data that can't be reached by the recorded one."""
    path = _meant(stored, text)
    for index, source in enumerate(_sources(stored)):
        if path is None or source["path"] is None or _normal(source["path"]) != path:
            continue
        link = _data_folder(target, index, source)
        if not link.exists():
            return ""
        if not Path(text).is_absolute():
            there = _normal(working_folder(stored, target) / text)
            return "" if there.is_relative_to(target) and there.exists() else str(link)
        untouched = all((path / rel if rel else path) == _link_end(link, rel) for rel in source["files"])
        return "" if untouched else str(link)
    return ""


def _link_end(link: Path, rel: str) -> Path | None:
    end = link / rel if rel else link
    return end.readlink() if end.is_symlink() else None


def _named_path(stored: Stored, target: Path, text: str) -> Path | None:
    """A local file or folder that a setting names by a relative path and that the restored tree lacks."""
    path = _meant(stored, text)
    if path is None or Path(text).is_absolute() or not path.exists():
        return None
    if stored.path.is_relative_to(path) or target.is_relative_to(path):  # where runs are written
        return None
    there = _normal(working_folder(stored, target) / text)
    return path if there.is_relative_to(target) and not os.path.lexists(there) else None


def _linked(stored: Stored, target: Path, text: str, path: Path) -> Finding:
    place = working_folder(stored, target) / text
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(path)
    if _has_weights(stored, path):
        return _finding("weights", text, "ok", f"linked to {path}: tensors as recorded")
    return _finding("config", text, "not checked", f"linked to {path} as it is now: its content was not recorded")


def _has_weights(stored: Stored, path: Path) -> bool:
    """Whether a file or folder has just the weights that the run started from."""
    try:
        tree = WeightsTree.from_json(stored.json("weights.json")["tree"])
        return not compare_weights(tree, digest_weights_file(path))
    except (SnapshotError, OSError, TypeError, KeyError, ValueError):
        return False


def _meant(stored: Stored, text: str) -> Path | None:
    """The path that a setting is, if it is one."""
    project = (stored.json("code.json") or {}).get("project")
    if not project or not text.strip("./") or len(text) > _LONGEST or "\n" in text or "\0" in text:
        return None
    return _normal(Path(project) / text)


def _normal(path: str | Path) -> Path:
    return Path(os.path.normpath(path))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list) else value


def _finding(level: Level, name: str, verdict: Verdict, detail: str) -> Finding:
    return Finding(level=level, name=name, verdict=verdict, detail=detail)
