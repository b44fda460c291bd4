"""What an audit knows of a run beforehand, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["LEVELS", "AuditFinding", "Candidate", "RunAudit", "Verdict"]

Verdict = Literal["ok", "changed", "missing", "unknown", "not checked"]
LEVELS = (
    "run",
    "snapshot",
    "environment",
    "data",
    "reward",
    "code",
    "config",
    "weights",
    "monitoring",
    "alerts",
)  # in order of suspicion, after the run itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A run to be audited, as a store or a folder lists it."""

    run_id: str
    name: str
    path: Path | None  # its run directory, None where there is none on this machine
    status: str | None = None  # MLflow's word; None for a run that only a folder has
    experiment: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether grpo-lightning or the snapshot plug-in recorded it."""
        return self.path is not None or any(tag.startswith(("grpo.", "run_snapshot.")) for tag in self.tags)


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditFinding:
    """One thing that was looked at."""

    level: str
    name: str
    verdict: Verdict
    detail: str = ""

    @property
    def is_problem(self) -> bool:
        """Whether somebody must look: unknown is never ok."""
        return self.verdict in ("changed", "missing", "unknown")

    def to_dict(self) -> dict[str, Any]:
        """As plain types."""
        return {"level": self.level, "name": self.name, "verdict": self.verdict, "detail": self.detail}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAudit:
    """A run and all that was found, in order of suspicion."""

    run: Candidate
    findings: Sequence[AuditFinding]

    @property
    def problems(self) -> list[AuditFinding]:
        """What somebody must look at."""
        return [finding for finding in self.findings if finding.is_problem]

    def verdict_of(self, level: str) -> str:
        """The worst verdict of a level; `-` where nothing was looked at."""
        order = ("changed", "missing", "unknown", "not checked", "ok")
        found = {finding.verdict for finding in self.findings if finding.level == level}
        return next((verdict for verdict in order if verdict in found), "-")

    def to_dict(self) -> dict[str, Any]:
        """As plain types."""
        return {
            "run_id": self.run.run_id,
            "name": self.run.name,
            "experiment": self.run.experiment,
            "directory": str(self.run.path) if self.run.path is not None else None,
            "ok": not self.problems,
            "findings": [finding.to_dict() for finding in self.findings],
        }
