"""Which snapshot the run that is being made belongs to; read by the MLflow plugin, so it imports nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token

__all__ = ["active_tags", "reset_active", "set_active", "snapshot_tags", "tagging"]

_active: ContextVar[dict[str, str] | None] = ContextVar("run_snapshot_active", default=None)


def snapshot_tags(digest: str, *, partial: bool, path: str = "") -> dict[str, str]:
    """The short tags that a run of ours carries."""
    tags = {"run_snapshot.digest": digest, "run_snapshot.partial": str(partial).lower()}
    return tags | ({"run_snapshot.path": path} if path else {})


def active_tags() -> dict[str, str] | None:
    """The tags of the snapshot in force; None outside of our runs."""
    return _active.get()


def set_active(tags: dict[str, str]) -> Token[dict[str, str] | None]:
    """Let runs that are made from now on in this context carry `tags`."""
    return _active.set(dict(tags))


def reset_active(token: Token[dict[str, str] | None]) -> None:
    """Undo `set_active`; in another context there is nothing to undo."""
    try:
        _active.reset(token)
    except ValueError:
        _active.set(None)


@contextmanager
def tagging(digest: str, *, partial: bool = False) -> Iterator[None]:
    """MLflow runs that are made inside carry the snapshot's tags."""
    token = set_active(snapshot_tags(digest, partial=partial))
    try:
        yield
    finally:
        reset_active(token)
