"""A run made again: its environment, code, data and settings in a new folder, and the command that repeats it there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from grpo_lightning.registry.plugin import snapshot_plugin

__all__ = ["Restored", "restore_run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What was brought back."""

    into: Path
    command: str  # for a shell, from any folder
    findings: Sequence[Any]  # of the snapshot plug-in

    @property
    def ok(self) -> bool:
        """Whether everything was."""
        return not any(finding.is_problem for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """As plain types."""
        findings = [finding.to_json() for finding in self.findings]
        return {"into": str(self.into), "ok": self.ok, "command": self.command, "findings": findings}


def restore_run(snapshot: Path, into: Path, *, search: Sequence[str] = (), install: bool = True) -> Restored:
    """Make what a snapshot describes again in a new folder, and hold it against the snapshot.

    Raises:
        UsageError: there is no snapshot, or the folder is in use.
    """
    plugin, target = snapshot_plugin(), into.absolute()
    report = plugin.restore(snapshot, target, search=search, install=install)
    placing, manifest = import_module("run_snapshot.placing"), import_module("run_snapshot.manifest")
    folder = placing.working_folder(manifest.load_snapshot(snapshot), target)
    own = target / "venv" / "bin" / "python"
    python = str(own if own.exists() else Path(sys.executable))
    words = [python, "-m", "grpo_lightning", "fit", "--config", str(target / "config.yaml")]
    command = f"cd {shlex.quote(str(folder))} && {shlex.join(words)}"
    return Restored(into=target, command=command, findings=report.findings)
