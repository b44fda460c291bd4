"""What a diagnosis says: findings in four levels of suspicion, each with its numbers and steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "LEVELS",
    "TITLES",
    "Diagnosis",
    "Drift",
    "Finding",
    "Level",
    "LevelName",
    "Moved",
    "Number",
    "Span",
    "Strength",
]

LevelName = Literal["environment", "data", "reward", "algorithm"]
Strength = Literal["strong", "hint"]
LEVELS: tuple[LevelName, ...] = ("environment", "data", "reward", "algorithm")  # in order of suspicion
TITLES: Mapping[LevelName, str] = {
    "environment": "environment",
    "data": "data",
    "reward": "reward and sampling",
    "algorithm": "algorithm",
}


_LATE = 3  # steps
_TELLING = (
    "reward_mean", "group_reward_std", "dead_group_fraction", "entropy", "kl", "response_length_mean", "truncated_fraction",
    "grad_norm", "advantage_std", "prompt_length_mean", "rollout_mismatch_kl",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """What a check of the run's snapshot says about one part; `level` and `verdict` in the snapshot's words."""

    level: str  # snapshot | environment | data | reward | code | config | weights
    name: str
    verdict: str  # ok | changed | missing | unknown | not checked
    detail: str = ""

    @property
    def is_problem(self) -> bool:
        """Unknown is never ok."""
        return self.verdict in ("changed", "missing", "unknown")


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Steps `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A signal before and after: medians of the windows, or the value at one step."""

    signal: str
    before: float | None
    after: float | None
    step: int | None = None  # where `after` is a single step's

    @property
    def ratio(self) -> float | None:
        """after / before, None where that says nothing."""
        if self.before is None or self.after is None or not math.isfinite(self.after) or self.before == 0.0:
            return None
        return self.after / self.before if self.after / self.before > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"signal": self.signal, "before": self.before, "after": self.after, "step": self.step}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is not as it was, or not as it should be."""

    name: str  # of the pattern, e.g. `template_hacking`
    level: LevelName
    strength: Strength
    what: str
    numbers: tuple[Number, ...] = ()
    steps: Span | None = None
    why: str  # why it matters
    first: str  # what to do first

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "name": self.name,
            "strength": self.strength,
            "what": self.what,
            "numbers": [number.to_dict() for number in self.numbers],
            "steps": [self.steps.first, self.steps.last] if self.steps is not None else None,
            "why": self.why,
            "first": self.first,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One level of suspicion."""

    name: LevelName
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]  # what was looked at
    unchecked: tuple[str, ...]  # what could not be, and why

    @property
    def title(self) -> str:
        """For people."""
        return TITLES[self.name]

    @property
    def said(self) -> str:
        """The level in a sentence; that nothing was found is said too."""
        strong = sum(finding.strength == "strong" for finding in self.findings)
        hints = len(self.findings) - strong
        words = [f"{n} {word}{'s' if n > 1 else ''}" for n, word in ((strong, "finding"), (hints, "hint")) if n]
        if words:
            return " and ".join(words)
        if not self.checked:
            return "not checked"
        return "nothing found" + (", but not all of it was checked" if self.unchecked else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "level": self.name,
            "said": self.said,
            "findings": [finding.to_dict() for finding in self.findings],
            "checked": list(self.checked),
            "not_checked": list(self.unchecked),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """A signal that left its level around the onset, and when."""

    step: int
    number: Number


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Findings in order of suspicion, and what they are measured by."""

    onset: int | None  # None: nothing marks one, and the run's start is held against its end
    chosen: str  # why this onset
    before: Span | None
    after: Span | None
    levels: tuple[Level, ...]
    moved: tuple[Moved, ...] = field(default_factory=tuple)  # what moved first, in order

    @property
    def look_first(self) -> Finding | None:
        """The first strong finding in order of suspicion; without one, the first hint."""
        found = [finding for level in self.levels for finding in level.findings]
        return next((f for f in found if f.strength == "strong"), found[0] if found else None)

    @property
    def earlier(self) -> Moved | None:
        """What had moved well before the onset, if anything: the alert may have come late."""
        onset = self.onset
        known = [moved for moved in self.moved if moved.number.signal in _TELLING]
        return next((moved for moved in known if onset is not None and moved.step < onset - _LATE), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; numbers that JSON lacks are kept as they are."""
        first = self.look_first
        return {
            "onset_step": self.onset,
            "onset_chosen": self.chosen,
            "before": [self.before.first, self.before.last] if self.before else None,
            "after": [self.after.first, self.after.last] if self.after else None,
            "look_first": {"level": first.level} | first.to_dict() if first is not None else None,
            "moved_earlier": self.earlier.step if self.earlier is not None else None,
            "moved_first": [{"at": moved.step} | moved.number.to_dict() for moved in self.moved],
            "levels": [level.to_dict() for level in self.levels],
        }
