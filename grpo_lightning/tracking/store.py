"""Which MLflow store, and opening it so that several processes may do so at once.

The default is an absolute ``sqlite:///`` URI under the working directory: MLflow's file store and Lightning's
default logger URI do not work with current MLflow. The process-wide tracking URI is never touched.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from filelock import FileLock

from grpo_lightning.errors import UsageError
from grpo_lightning.sinks.redact import redact_text
from grpo_lightning.tracking.http import brief_requests, reachable

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["TRACKING_VARIABLE", "connect", "make_client", "prepare_store", "resolve_tracking_uri", "sqlite_path"]

TRACKING_VARIABLE = "MLFLOW_TRACKING_URI"
_PREFIX = "sqlite:///"
_SERVICES = ("databricks", "databricks-uc", "uc")  # names that MLflow knows; whatever follows a colon is their profile


def resolve_tracking_uri(uri: str | None = None, *, recorded: str | None = None) -> str:
    """The store to use: `uri`, else ``MLFLOW_TRACKING_URI`` as it is now, else `recorded`, else the default.

    A relative SQLite path is taken from the working directory. A recorded one that lost its password is
    skipped.
    """
    kept = recorded if recorded and "***" not in recorded else None
    chosen = uri or os.environ.get(TRACKING_VARIABLE) or kept or f"{_PREFIX}mlflow.db"
    _refuse_files(chosen)
    path = sqlite_path(chosen)
    return chosen if path is None else f"{_PREFIX}{path.as_posix()}{_query(chosen)}"


def sqlite_path(uri: str) -> Path | None:
    """The absolute path of a SQLite store, None for any other URI."""
    if not uri.startswith(_PREFIX):
        return None
    return Path(unquote(uri.removeprefix(_PREFIX).partition("?")[0])).absolute()


def prepare_store(uri: str) -> None:
    """Make a new SQLite store's tables, once, however many processes ask for it at the same time.

    The tables are made in a file beside it that is then renamed, so a process killed in the middle leaves
    nothing half made. WAL is set once: it stays with the file.
    """
    path = sqlite_path(uri)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=600):
            if not path.exists() or path.stat().st_size == 0:
                _make_store(path)
    except Exception as error:  # OSError, SQLite, SQLAlchemy: whatever a full disk comes out as
        raise UsageError(
            f"Can't make the MLflow store {path}: {_reason(error)}. "
            f"Set {TRACKING_VARIABLE} to a writable {_PREFIX} path or to a server."
        ) from error


def connect(uri: str) -> MlflowClient:
    """A client of `uri`; a SQLite store is made when missing, a server is not asked anything yet."""
    from mlflow import MlflowClient

    prepare_store(uri)
    try:
        return MlflowClient(tracking_uri=uri)
    except Exception as error:  # MLflow passes on what SQLAlchemy says of a file that is no database
        raise UsageError(_explain(uri, redact_text(str(error)))) from error


def make_client(uri: str) -> MlflowClient:
    """A client of `uri` that has answered. What stands in the way is a `UsageError`."""
    if not reachable(uri):
        raise UsageError(
            f"No MLflow server answers at {redact_text(uri)}. Start it, or unset {TRACKING_VARIABLE} to "
            "record in mlflow.db under the working directory."
        )
    client = connect(uri)
    try:
        with brief_requests():
            client.search_experiments(max_results=1)
    except Exception as error:  # requests, SQLAlchemy, OSError: MLflow passes all of them on
        raise UsageError(_explain(uri, redact_text(str(error)))) from error
    return client


def _make_store(path: Path) -> None:
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    partial = path.with_name(f".{path.name}.partial")  # ours alone: the caller holds the lock
    partial.unlink(missing_ok=True)
    chatter = logging.getLogger("mlflow.store.db.utils")
    level = chatter.level
    chatter.setLevel(logging.WARNING)
    try:
        artifacts = (path.parent / "mlartifacts").as_uri()
        store = SqlAlchemyStore(f"{_PREFIX}{partial.as_posix()}", artifacts)
        store.engine.dispose()
        connection = sqlite3.connect(partial)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.close()
        partial.replace(path)
    finally:
        chatter.setLevel(level)
        partial.unlink(missing_ok=True)


def _refuse_files(uri: str) -> None:
    scheme = urlsplit(uri).scheme
    if uri in _SERVICES:
        return
    if (not scheme or scheme == "file") and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() != "true":
        raise UsageError(
            f"MLflow no longer writes to the file store {redact_text(uri)!r}. Give {_PREFIX}mlflow.db, or "
            "a server's address."
        )


def _reason(error: Exception) -> str:
    """SQLAlchemy puts the whole statement behind what the database said."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]


def _query(uri: str) -> str:
    query = uri.partition("?")[2]
    return f"?{query}" if query else ""


def _explain(uri: str, text: str) -> str:
    shown = redact_text(uri)
    if "out-of-date database schema" in text:
        return f"The MLflow store {shown} was made by another MLflow. Upgrade it: mlflow db upgrade '{shown}'."
    reason = (text.strip().splitlines() or ["no reason given"])[0]
    return f"The MLflow store {shown} can't be used ({reason}): set {TRACKING_VARIABLE} to another one."
