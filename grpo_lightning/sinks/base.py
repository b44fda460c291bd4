"""What a sink is: two small methods that receive a run's rows, and `close`.

A sink comes from the entry-point group ``grpo_lightning.sinks``; the built-in ones come the same way. Its
entry point names a callable whose keyword arguments are the sink's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, Protocol, runtime_checkable

from grpo_lightning.errors import ConfigError, GrpoError

__all__ = [
    "SINK_GROUP",
    "EventKind",
    "EventRow",
    "Sink",
    "SinkError",
    "StepRow",
    "available_sinks",
    "load_sink",
]

SINK_GROUP = "grpo_lightning.sinks"

EventKind = Literal["alert", "recovery", "evaluation", "note"]


class SinkError(GrpoError):
    """A sink could not take or give a row: a full disk, a locked or broken file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """The signals of one optimizer step."""

    run_id: str
    segment: int  # counted from 1; a run's part between two (re)starts
    step: int  # optimizer step, counted from 1
    time: float  # seconds since the epoch
    values: Mapping[str, float]  # short signal names; not measured is absent, NaN and ±inf are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRow:
    """Something that happened at a step: an alert, a recovery, an evaluation or a note."""

    run_id: str
    segment: int
    step: int
    time: float  # seconds since the epoch
    kind: EventKind
    name: str  # the rule, the recovery, the evaluation's data set
    payload: Mapping[str, Any] = field(default_factory=dict)  # plain JSON types; an evaluation's are numbers
    id: str = ""  # an alert's id; made of name and step when empty

    @property
    def key(self) -> str:
        """What identifies the event inside its segment: its id, or ``name@step``."""
        return self.id or f"{self.name}@{self.step}"


@runtime_checkable
class Sink(Protocol):
    """Receives every row of a run. It may raise: a `GuardedSink` keeps training going."""

    def write_step(self, row: StepRow, /) -> None:
        """Take one optimizer step."""

    def write_event(self, row: EventRow, /) -> None:
        """Take one event."""

    def close(self) -> None:
        """Write what is left and let go. Called once, at the end of a segment."""


def available_sinks() -> dict[str, EntryPoint]:
    """The sinks that installed distributions offer, by name. Two of one name are a `ConfigError`."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=SINK_GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise ConfigError(
                f"Two installed sinks are called {point.name!r}: {other.value} and {point.value}. "
                "Names must be unique: uninstall one of the two distributions."
            )
    return found


def load_sink(name: str, **settings: Any) -> Sink:
    """Make the sink called `name`; `settings` go to its constructor.

    >>> load_sink("jsonl", path="-")  # doctest: +SKIP
    """
    known = available_sinks()
    if name not in known:
        raise ConfigError(
            f"There is no sink called {name!r}; installed are: {', '.join(sorted(known)) or 'none'}. "
            f"A distribution offers one in the entry-point group {SINK_GROUP!r}."
        )
    sink = known[name].load()(**settings)
    if not isinstance(sink, Sink):
        raise ConfigError(
            f"The sink {name!r} ({known[name].value}) made a {type(sink).__name__}, which has no write_step, "
            "write_event and close."
        )
    return sink
