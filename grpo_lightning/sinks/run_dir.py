"""The run directory ``runs/<run_id>/``: config, journal, snapshot, checkpoints, evidence, evaluations."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from grpo_lightning.errors import UsageError
from grpo_lightning.sinks.journal import Journal
from grpo_lightning.sinks.redact import redact_config

__all__ = ["RunDirectory"]

_RUN_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,255}")
_FOLDERS = ("snapshot", "checkpoints", "evidence", "eval")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where everything of one run lies."""

    path: Path  # absolute; its name is the run id

    @classmethod
    def create(cls, root: str | Path, run_id: str) -> RunDirectory:
        """Make ``root/run_id`` with its folders and an empty journal. It must not exist yet."""
        if not _RUN_ID.fullmatch(run_id):
            raise UsageError(f"{run_id!r} can't name a run directory: use letters, digits, '-', '_' and '.'.")
        run = cls(Path(root).absolute() / run_id)
        if run.journal_path.exists():
            raise UsageError(f"The run directory {run.path} exists. Resume that run, or start one with a new id.")
        try:
            for folder in _FOLDERS:
                (run.path / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"Can't make the run directory {run.path}: {error.strerror}.") from error
        with run.journal() as journal:
            journal.set_meta(run_id=run_id)
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """The run directory at `path`, which must hold a journal."""
        run = cls(Path(path).absolute())
        if not run.journal_path.is_file():
            raise UsageError(f"{run.path} is not a run directory: it has no {run.journal_path.name}.")
        return run

    @property
    def run_id(self) -> str:
        """The run's id: the folder's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def journal_path(self) -> Path:
        """The journal's file."""
        return self.path / "journal.sqlite"

    @property
    def snapshot(self) -> Path:
        """What the run was made of."""
        return self.path / "snapshot"

    @property
    def checkpoints(self) -> Path:
        """Weights and training state."""
        return self.path / "checkpoints"

    @property
    def evidence(self) -> Path:
        """Prompts, responses and rewards behind alerts."""
        return self.path / "evidence"

    @property
    def eval(self) -> Path:
        """Greedy evaluations."""
        return self.path / "eval"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    def journal(self, *, read_only: bool = False) -> Journal:
        """Open the journal."""
        return Journal(self.journal_path, read_only=read_only)

    def write_config(self, config: Mapping[str, Any] | str) -> Path:
        """Store the resolved configuration, secrets redacted; a crash leaves the old file or the new one."""
        settings = yaml.safe_load(config) if isinstance(config, str) else config
        clean = redact_config(settings)
        text = config if isinstance(config, str) and clean == settings else _yaml(clean)
        partial = self.config.with_name(f".config.{os.getpid()}.yaml")
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self.config)
        return self.config

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for writing. A second process is refused; it is free when its process dies, whose drafts are removed."""
        lock = FileLock(self.path / ".writer.lock", timeout=2)  # `is_live` holds it for a moment
        try:
            lock.acquire()
        except Timeout as error:
            raise UsageError(
                f"Another process is training the run {self.run_id} ({self.path}): end it first."
            ) from error
        self._remove_drafts()
        try:
            yield
        finally:
            lock.release()

    def _remove_drafts(self) -> None:
        """Whatever a killed process was writing: half files, which nothing reads."""
        for draft in (*self.path.rglob(".*.part"), *self.path.glob(".config.*.yaml")):
            draft.unlink(missing_ok=True)

    def is_live(self) -> bool:
        """True while a process holds the run's lock."""
        lock = FileLock(self.path / ".writer.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            return True
        lock.release()
        return False


def _yaml(settings: Any) -> str:
    text: str = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    return text
