"""Which snapshot the run that is being made belongs to; read by the MLflow plugin, so it imports nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["active_tags", "clear_active", "set_active", "snapshot_tags", "tagging"]

_active: ContextVar[dict[str, str] | None] = ContextVar("run_snapshot_active", default=None)


def snapshot_tags(digest: str, *, partial: bool, path: str = "") -> dict[str, str]:
    """The short tags that a run of ours carries."""
    tags = {"run_snapshot.digest": digest, "run_snapshot.partial": str(partial).lower()}
    return tags | ({"run_snapshot.path": path} if path else {})


def active_tags() -> dict[str, str] | None:
    """The tags of the snapshot in force; None outside of our runs."""
    return _active.get()


def set_active(tags: dict[str, str]) -> None:
    """Let runs that are made from now on in this context carry `tags`."""
    _active.set(dict(tags))


def clear_active() -> None:
    """Runs that are made from now on are not ours."""
    _active.set(None)


@contextmanager
def tagging(digest: str, *, partial: bool = False) -> Iterator[None]:
    """MLflow runs that are made inside carry the snapshot's tags."""
    before = _active.get()
    set_active(snapshot_tags(digest, partial=partial))
    try:
        yield
    finally:
        _active.set(before)
