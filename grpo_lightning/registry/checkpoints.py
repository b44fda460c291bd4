"""Checkpoints of a run: there, with the weights that they were saved with, and with their judgement."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_lightning.registry.records import AuditFinding, Verdict

__all__ = ["check_checkpoints", "check_one"]

_STATES = ("grpo_run", "grpo_health")
_LATEST_TAG = "grpo.checkpoint.latest"
_SUFFIX = ".health.json"


def check_checkpoints(
    run: Path, tags: Mapping[str, str], *, quick: bool, remapped: Callable[[str], str]
) -> Iterator[AuditFinding]:
    """Every checkpoint of a run directory, and those that should be there."""
    folder = run / "checkpoints"
    found = sorted(folder.glob("*.ckpt"))
    names = {path.stem for path in found}
    judged = {path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}")}
    for name in sorted(judged - names):
        yield _finding("weights", f"{name}.ckpt", "missing", "its judgement is there, the checkpoint is gone")
    latest = tags.get(_LATEST_TAG)
    if latest and Path(latest).stem not in names | judged and not Path(remapped(latest)).exists():
        yield _finding(
            "weights", Path(latest).name, "missing", f"{latest} is the newest that was recorded, and is gone"
        )
    if not found and not judged and not latest:
        yield _finding("weights", "checkpoints", "not checked", "the run saved none")
    for path in found:
        yield from check_one(path, run.name, quick=quick)


def check_one(path: Path, run_id: str, *, quick: bool = False) -> Iterator[AuditFinding]:
    """A checkpoint of a run: the judgement beside it, and its weights, each tensor that changed by name."""
    if not path.is_file():
        yield _finding("weights", path.name, "missing", f"{path} is gone")
        return
    yield from _judgement(path, run_id)
    if quick:
        yield _finding("weights", path.name, "not checked", "weights are not read again (--quick)")
    else:
        yield from _weights(path)


def _weights(path: Path) -> Iterator[AuditFinding]:
    """The weights by tensor, against what the checkpoint and the file beside it say."""
    if find_spec("run_snapshot") is None:
        yield _finding("weights", path.name, "unknown", "pip install lightning-run-snapshot to check them")
        return
    module = import_module("run_snapshot.checkpoints")
    health = _health(path)
    if _is_as_saved(path, health.get("file")):
        root = health.get("weights_root") or "not recorded"
        yield _finding("weights", path.name, "ok", f"the same file as saved, root {root}")
        return
    loaded, findings = module.read_checkpoint(path)
    resaved = "re-saved, tensors same: " if "file" in health else ""
    for f in findings:
        detail = f"{resaved}{f.detail}" if f.verdict == "ok" else f.detail
        yield _finding(f.level, _short(f.name, path), f.verdict, detail)
    if loaded is None:
        return
    state = [key for key in _STATES if key not in loaded]
    if state:
        yield _finding("monitoring", path.name, "missing", f"no monitoring state: {', '.join(state)}")
    own = str((loaded.get("grpo_run") or {}).get("run_id", ""))
    if own and own != path.parent.parent.name:
        yield _finding("weights", path.name, "changed", f"it is a checkpoint of the run {own}")
    record = loaded.get(module.KEY)
    root = record.get("weights", {}).get("root") if isinstance(record, Mapping) else None
    said = health.get("weights_root")
    if root and said and root != said:
        yield _finding("weights", path.name, "changed", f"its weights' root is {root}, recorded beside it is {said}")


def _is_as_saved(path: Path, record: Any) -> bool:
    """Whether the file has the bytes that were recorded beside it; its tensors need not be read then."""
    if not isinstance(record, Mapping) or record.get("bytes") != path.stat().st_size:
        return False
    digest: str = import_module("run_snapshot.digests.files").xxh3_of_file(path)
    return digest == record.get("xxh3_128")


def _judgement(path: Path, run_id: str) -> Iterator[AuditFinding]:
    beside = path.with_name(f"{path.stem}{_SUFFIX}")
    if not beside.is_file():
        yield _finding("monitoring", beside.name, "missing", "the judgement beside the checkpoint is gone")
        return
    health = _health(path)
    if health.get("run_id") != run_id:
        detail = f"it is of the run {health['run_id']}" if "run_id" in health else "it can't be read"
        yield _finding("monitoring", beside.name, "changed", detail)
    else:
        yield _finding("monitoring", beside.name, "ok", f"verdict {health.get('verdict', 'none')}")


def _health(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.with_name(f"{path.stem}{_SUFFIX}").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _short(name: str, path: Path) -> str:
    return path.name if name == str(path) else name


def _finding(level: str, name: str, verdict: Verdict, detail: str) -> AuditFinding:
    return AuditFinding(level=level, name=name, verdict=verdict, detail=detail)
