"""What checks and comparisons say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["LEVELS", "Difference", "Finding", "Level", "Report", "Verdict"]

Verdict = Literal["ok", "changed", "missing", "unknown", "not checked"]
Level = Literal["snapshot", "environment", "data", "reward", "code", "config", "weights"]

LEVELS: tuple[Level, ...] = (
    "snapshot",
    "environment",
    "data",
    "reward",
    "code",
    "config",
    "weights",
)  # in order of suspicion


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at, and what became of it."""

    level: Level
    name: str  # which file, distribution, repository or tensor
    verdict: Verdict
    detail: str = ""

    @property
    def is_problem(self) -> bool:
        """Whether this must be looked at: unknown is never ok."""
        return self.verdict in ("changed", "missing", "unknown")

    def to_json(self) -> dict[str, Any]:
        """As plain types."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One thing that two snapshots do not share."""

    level: Level
    name: str
    kind: Literal["added", "removed", "changed", "reordered", "unknown"]
    a: str = ""
    b: str = ""
    detail: str = ""  # longer: a diff of sources, the rows by number

    def to_json(self) -> dict[str, Any]:
        """As plain types."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All findings of a verification, in order of suspicion."""

    path: str
    digest: str
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What is changed, missing or unknown."""
        return tuple(finding for finding in self.findings if finding.is_problem)

    @property
    def ok(self) -> bool:
        """Whether nothing is changed, missing or unknown. What was not checked is listed, and does not count."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As plain types."""
        return {
            "path": self.path,
            "digest": self.digest,
            "ok": self.ok,
            "findings": [finding.to_json() for finding in self.findings],
        }
