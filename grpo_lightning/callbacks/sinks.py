"""The extra sinks of a run (``run.sinks``): made from their entry points, each on a thread of its own."""

from __future__ import annotations

import inspect
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from grpo_lightning.errors import ConfigError
from grpo_lightning.sinks import EventRow, GuardedSink, Sink, StepRow, available_sinks, load_sink

__all__ = ["BackgroundSink", "check_sinks", "open_sinks"]

_log = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_CAPACITY = 10_000  # rows that wait for a slow sink


class BackgroundSink:
    """Hands rows to a sink from a thread, so that a slow or hanging one holds up nothing.

    One that raises is said once, and tried again with growing waits: see `GuardedSink`.
    """

    def __init__(self, sink: Sink, *, name: str, capacity: int = _CAPACITY) -> None:
        self.name = name
        self._sink = GuardedSink(sink, name=name, faults=BaseException)
        # Not queue.Queue: a Ctrl-C inside its put can leave its lock taken or its reader asleep for good.
        self._rows: queue.SimpleQueue[StepRow | EventRow | None] = queue.SimpleQueue()
        self._capacity = capacity
        self._full = False
        self._offered = self._handed = 0  # each counted by one thread only
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def write_step(self, row: StepRow) -> None:
        """Take one step; never waits."""
        self._put(row)

    def write_event(self, row: EventRow) -> None:
        """Take one event; never waits."""
        self._put(row)

    def close(self, timeout: float = _CLOSE_SECONDS) -> None:
        """Hand over what is left and close the sink; one that needs longer than `timeout` seconds is left behind."""
        self._rows.put(None)
        self._thread.join(timeout)
        lost = self._offered - self._handed
        if self._thread.is_alive():
            _log.warning("The sink %s is too slow: %d rows did not reach it.", self.name, lost)
        elif lost:
            _log.warning("The sink %s did not get %d rows. The journal has them.", self.name, lost)

    def _put(self, row: StepRow | EventRow) -> None:
        self._offered += 1
        if self._rows.qsize() < self._capacity:
            self._rows.put(row)
            return
        if not self._full:
            _log.warning("The sink %s is too slow: rows are left out. The journal has all of them.", self.name)
        self._full = True

    def _work(self) -> None:
        while (row := self._rows.get()) is not None:
            self._sink.write_step(row) if isinstance(row, StepRow) else self._sink.write_event(row)
            self._handed += 1
        self._sink.close()


def check_sinks(wanted: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Raise a `ConfigError` for sinks that do not exist or do not take their settings; nothing is opened."""
    for name, settings in wanted.items():
        known = available_sinks()
        if name not in known:
            raise ConfigError(
                f"run.sinks names {name!r}, which is not an installed sink: there are {', '.join(sorted(known))}."
            )
        factory = known[name].load()
        try:
            inspect.signature(factory).bind(**{**_offered(factory, dict.fromkeys(_IDENTITY, "")), **(settings or {})})
        except TypeError as error:
            takes = ", ".join(p for p in inspect.signature(factory).parameters if p not in _IDENTITY)
            raise ConfigError(f"run.sinks.{name}: {error}; the sink's settings are {takes or 'none'}.") from error


def open_sinks(
    wanted: Mapping[str, Mapping[str, Any] | None], *, run_id: str, run_name: str, description: str
) -> list[BackgroundSink]:
    """Make the sinks; those that take `run_id`, `run_name` or `description` are told. Settings come first.

    One that can't be made is an error, and those before it are closed again.
    """
    identity = dict(zip(_IDENTITY, (run_id, run_name, description), strict=True))
    opened: list[BackgroundSink] = []
    try:
        for name, settings in wanted.items():
            told = _offered(available_sinks()[name].load(), identity)
            opened.append(BackgroundSink(load_sink(name, **{**told, **(settings or {})}), name=name))
    except BaseException:
        for sink in opened:
            sink.close()
        raise
    return opened


_IDENTITY = ("run_id", "run_name", "description")


def _offered(factory: Callable[..., Any], identity: Mapping[str, str]) -> dict[str, str]:
    """Those of the run's words that the sink's constructor names."""
    named = inspect.signature(factory).parameters
    return {word: value for word, value in identity.items() if word in named}
