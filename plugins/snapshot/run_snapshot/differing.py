"""What two snapshots do not share: environment, then data, then reward code, then code, config and weights."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from run_snapshot.checks import recorded_rows
from run_snapshot.code_differences import code_differences
from run_snapshot.digests import WeightsTree, compare_weights, explain_rows
from run_snapshot.errors import SnapshotError
from run_snapshot.manifest import Stored, load_snapshot
from run_snapshot.records import LEVELS, Difference, Level

__all__ = ["PARTS", "diff"]

PARTS: dict[Level, str] = {
    "environment": "environment.json",
    "data": "data.json",
    "reward": "rewards.json",
    "code": "code.json",
    "config": "config.json",
    "weights": "weights.json",
}
_LEVEL_OF: dict[str, Level] = {
    "environment": "environment",
    "data": "data",
    "rewards": "reward",
    "code": "code",
    "config": "config",
    "seeds": "config",
    "weights": "weights",
}  # of a capture's part, as reasons name it
_MOST_DIFF = 20_000  # characters of a source diff
_NAMED = 10
_Absent = "(absent)"


def diff(a: str | Path, b: str | Path) -> list[Difference]:
    """All differences, in order of suspicion; a part that one side lacks is `unknown`."""
    first, second = load_snapshot(a), load_snapshot(b)
    compare: dict[Level, Callable[[Stored, Stored], Iterator[Difference]]] = {
        "environment": _environment,
        "data": _data,
        "reward": _rewards,
        "code": code_differences,
        "config": _config,
        "weights": _weights,
    }
    differences: list[Difference] = []
    for level, part in compare.items():
        has = first.has(PARTS[level]), second.has(PARTS[level])
        if all(has):
            differences += _guarded(level, part, first, second)
        elif any(has):
            told = [("captured" if there else "not captured") for there in has]
            differences.append(Difference(level=level, name=PARTS[level], kind="unknown", a=told[0], b=told[1]))
    differences += _partial(first, second)
    return sorted(differences, key=lambda difference: LEVELS.index(difference.level))


def _partial(a: Stored, b: Stored) -> Iterator[Difference]:
    """What could not be captured is not known to be equal, whatever was."""
    reasons = [dict.fromkeys(side.reasons) for side in (a, b)]
    for reason in reasons[0] | reasons[1]:
        part, _, why = reason.partition(": ")
        told = ["not captured" if reason in side else "" for side in reasons]
        yield Difference(
            level=_LEVEL_OF.get(part, "snapshot"), name=part, kind="unknown", a=told[0], b=told[1], detail=why
        )


def _guarded(
    level: Level, part: Callable[[Stored, Stored], Iterator[Difference]], a: Stored, b: Stored
) -> list[Difference]:
    try:
        return list(part(a, b))
    except (SnapshotError, KeyError, TypeError, ValueError, AttributeError) as error:
        return [Difference(level=level, name=PARTS[level], kind="unknown", detail=f"{type(error).__name__}: {error}")]


def _environment(a: Stored, b: Stored) -> Iterator[Difference]:
    one, two = a.json("environment.json"), b.json("environment.json")
    yield from _mappings("environment", _flat({k: one[k] for k in _MACHINE}), _flat({k: two[k] for k in _MACHINE}))
    builds = [{d["name"]: _build(d) for d in side["distributions"] if not d["shadowed"]} for side in (one, two)]
    yield from _mappings("environment", *builds)
    same = {name for name, build in builds[0].items() if builds[1].get(name) == build}
    records = [
        {d["name"]: d["record_sha256"] for d in side["distributions"] if d["name"] in same} for side in (one, two)
    ]
    for name in sorted(same):
        if records[0][name] != records[1][name]:
            detail = "same version, different build"
            yield Difference(
                level="environment", name=name, kind="changed", a=builds[0][name], b=builds[1][name], detail=detail
            )
    edited = [{f"{n}: edited files": ", ".join(files) for n, files in side["edited"].items()} for side in (one, two)]
    yield from _mappings("environment", *edited)


_MACHINE = ("python", "platform", "accelerator", "variables", "path_files")


def _build(dist: Mapping[str, Any]) -> str:
    origin = f" from {dist['url']}{'@' + dist['commit'] if dist['commit'] else ''}" if dist["url"] else ""
    return f"{dist['version']}{' (editable)' if dist['editable'] else ''}{origin}"


def _data(a: Stored, b: Stored) -> Iterator[Difference]:
    ours, theirs = (list(side.json("data.json")["sources"]) for side in (a, b))
    for one, two in _paired(ours, theirs):
        if two is None:
            yield Difference(level="data", name=one["name"], kind="removed", a=_told_rows(one))
        elif one is None:
            yield Difference(level="data", name=two["name"], kind="added", b=_told_rows(two))
        else:
            yield from _source(a, b, one, two)


def _paired(ours: list[Any], theirs: list[Any]) -> list[tuple[Any, Any]]:
    """Sources of one name, then of one content, then what is left in order."""
    pairs: list[tuple[Any, Any]] = []
    for same in (lambda x, y: x["name"] == y["name"], lambda x, y: _identity(x) == _identity(y), lambda x, y: True):
        for one in list(ours):
            two = next((other for other in theirs if same(one, other)), None)
            if two is not None:
                pairs.append((one, two))
                ours.remove(one)
                theirs.remove(two)
    return pairs + [(one, None) for one in ours] + [(None, two) for two in theirs]


def _identity(source: Mapping[str, Any]) -> Any:
    return source["rows"]["ordered"] if source["rows"] else sorted(f["sha256"] for f in source["files"].values())


def _source(a: Stored, b: Stored, one: Any, two: Any) -> Iterator[Difference]:
    if _identity(one) == _identity(two):
        return
    kind: Literal["changed", "reordered"] = "changed"
    detail = "the files' bytes differ"
    if one["rows"] and two["rows"]:
        detail = explain_rows(recorded_rows(a, one["rows"]), recorded_rows(b, two["rows"]))
        kind = "reordered" if one["rows"]["unordered"] == two["rows"]["unordered"] else "changed"
    yield Difference(level="data", name=one["name"], kind=kind, a=_told_rows(one), b=_told_rows(two), detail=detail)
    if one["rows"] and two["rows"]:
        schemas = [{f"{one['name']}: {k}": " or ".join(v) for k, v in s["rows"]["schema"].items()} for s in (one, two)]
        yield from _mappings("data", *schemas)


def _told_rows(source: Mapping[str, Any]) -> str:
    rows = source["rows"]
    return f"{rows['count']} rows, {rows['ordered'][:12]}" if rows else f"{len(source['files'])} files"


def _rewards(a: Stored, b: Stored) -> Iterator[Difference]:
    one, two = a.json("rewards.json"), b.json("rewards.json")
    yield from _mappings("reward", _functions(one), _functions(two))
    files = [{f["module"]: f for f in side["files"]} for side in (one, two)]
    for name in sorted(files[0].keys() | files[1].keys()):
        old, new = files[0].get(name), files[1].get(name)
        if old is None or new is None:
            kind: Literal["added", "removed"] = "added" if old is None else "removed"
            yield Difference(level="reward", name=name, kind=kind, a=_short(old), b=_short(new))
        elif old["sha256"] != new["sha256"]:
            detail = _source_diff(a, b, old, new)
            yield Difference(level="reward", name=name, kind="changed", a=_short(old), b=_short(new), detail=detail)
    external = [{f"{name} (imported)": version for name, version in side["external"].items()} for side in (one, two)]
    yield from _mappings("reward", *external)


def _functions(rewards: Mapping[str, Any]) -> dict[str, str]:
    """Each function, and each of its settings, by name."""
    told = {}
    for function in rewards["functions"]:
        told[function["path"]] = function["qualname"]
        told |= {f"{function['path']}, {key}": str(value) for key, value in function["settings"].items()}
    return told


def _short(file: Mapping[str, Any] | None) -> str:
    return f"{file['blob'][:12]} ({file['state']})" if file else ""


def _source_diff(a: Stored, b: Stored, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if not old["source"] or not new["source"]:
        return "the sources were not kept"
    before = a.content(old["source"]).decode("utf-8", "replace").splitlines()
    after = b.content(new["source"]).decode("utf-8", "replace").splitlines()
    lines = difflib.unified_diff(before, after, f"a/{old['module']}", f"b/{new['module']}", lineterm="")
    return "\n".join(lines)[:_MOST_DIFF] or "only redacted values differ"


def _config(a: Stored, b: Stored) -> Iterator[Difference]:
    yield from _mappings("config", _flat(a.json("config.json")), _flat(b.json("config.json")))
    seeds = [_flat({"seeds": side.json("seeds.json") or {}}) for side in (a, b)]
    yield from _mappings("config", *seeds)


def _weights(a: Stored, b: Stored) -> Iterator[Difference]:
    one, two = (WeightsTree.from_json(side.json("weights.json")["tree"]) for side in (a, b))
    changes = compare_weights(one, two)
    if changes:
        named = ", ".join(f"{change.name} ({change.kind})" for change in changes[:_NAMED])
        more = f" and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
        yield Difference(
            level="weights",
            name="initial weights",
            kind="changed",
            a=one.root[:12],
            b=two.root[:12],
            detail=named + more,
        )


def _flat(value: Any, name: str = "") -> dict[str, str]:
    """Nested settings by dotted name."""
    if isinstance(value, dict) and value:
        return {
            k: v for key, item in value.items() for k, v in _flat(item, f"{name}.{key}" if name else str(key)).items()
        }
    if isinstance(value, list) and value:
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{name}[{i}]").items()}
    return {name: value if isinstance(value, str) else repr(value)} if name else {}


def _mappings(level: Level, a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    for name in sorted(a.keys() | b.keys()):
        if name not in b:
            yield Difference(level=level, name=name, kind="removed", a=a[name], b=_Absent)
        elif name not in a:
            yield Difference(level=level, name=name, kind="added", a=_Absent, b=b[name])
        elif a[name] != b[name]:
            yield Difference(level=level, name=name, kind="changed", a=a[name], b=b[name])
