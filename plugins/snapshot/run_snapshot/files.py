"""Writing so that a reader never meets half a file, and one way to write JSON."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["canonical_json", "pretty_json", "printable", "read_json", "write_atomically"]


def canonical_json(value: Any) -> bytes:
    """The one spelling of `value` that digests are taken of: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def pretty_json(value: Any) -> bytes:
    """For people: sorted keys, indented."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True) + "\n").encode("ascii")


def read_json(path: Path) -> Any:
    """The JSON in a file."""
    return json.loads(path.read_bytes())


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, flush it to disk, then take the name: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def printable(text: str) -> str:
    """`text` with control characters spelled out, so that a file's name can't drive a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
