"""A background thread that fills MLflow from the journal; training never waits for it nor dies of it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_lightning.errors import GrpoError
from grpo_lightning.sinks import Journal
from grpo_lightning.tracking.errors import TrackingError, TrackingRefused
from grpo_lightning.tracking.feed import Feeder
from grpo_lightning.tracking.names import Pages
from grpo_lightning.tracking.run import MLflowRun

__all__ = ["MetricPump"]

_IDLE_INTERVALS = 12  # without news the journal is looked at this seldom

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Task:
    what: str
    action: Callable[[], object]


class MetricPump:
    """Send a run's journal to MLflow, every `interval` seconds, and catch up after MLflow was away.

    Args:
        journal: the journal or its path; the pump opens its own connection.
        run: where to.
        page_of: a signal's page, such as ``1_overview``; None or a KeyError means ``2_health``.
        interval: seconds between two batches.
        longest_wait: the most seconds between two tries while MLflow is away; it starts at 0.5 and doubles.
    """

    def __init__(
        self,
        journal: Journal | str | Path,
        run: MLflowRun,
        *,
        page_of: Pages | None = None,
        interval: float = 5.0,
        longest_wait: float = 60.0,
    ) -> None:
        self._path = journal.path if isinstance(journal, Journal) else Path(journal)
        self._run, self._page_of = run, page_of
        self._interval, self._longest_wait = interval, longest_wait
        self._tasks = deque(_Task(what, action) for what, action in run.deferred)
        self._state = threading.Condition()
        self._asked = self._served = 0  # flushes
        self._news = True  # rows of before may be waiting
        self._stop = False
        self._feeder: Feeder | None = None
        self._failures = 0  # in a row
        self._thread = threading.Thread(target=self._work, name="mlflow-pump", daemon=True)

    def start(self) -> MetricPump:
        """Begin; returns itself."""
        self._thread.start()
        return self

    def notify(self) -> None:
        """Say that rows were recorded. It costs microseconds: they are sent at the end of the interval."""
        self._news = True

    def submit(self, action: Callable[[], object], what: str = "a record") -> None:
        """Have `action`, a call of one of the run's methods, done in the background and in order."""
        with self._state:
            self._tasks.append(_Task(what, action))

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until all that is recorded and submitted by now has arrived; False after `timeout` seconds."""
        with self._state:
            self._asked += 1
            ticket = self._asked
            self._state.notify_all()
            self._state.wait_for(lambda: self._served >= ticket or not self._thread.is_alive(), timeout)
            return self._served >= ticket

    def close(self, timeout: float = 30.0) -> bool:
        """Flush and end the thread. What did not arrive stays in the journal, and a warning says so."""
        done = self.flush(timeout) if self._thread.is_alive() else False
        with self._state:
            self._stop = True
            self._state.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout=1.0 if not done else 10.0)
        if not done:
            _log.warning(
                "MLflow has not got all of the run %s. Nothing is lost: the journal %s has it, and "
                "resuming the run sends it.",
                self._run.run_id,
                self._path,
            )
        return done

    def __enter__(self) -> MetricPump:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- thread

    def _work(self) -> None:
        journal: Journal | None = None
        ticket, wait = 0, 0.0
        while (asked := self._sleep(ticket, wait)) is not None:
            ticket = asked
            try:
                journal = journal or Journal(self._path)
                sent = self._cycle(journal)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                wait = self._fail(error)
                continue
            self._recover(sent)
            wait = self._interval
            with self._state:
                self._served = ticket
                self._state.notify_all()
        if journal is not None:
            journal.close()

    def _sleep(self, ticket: int, wait: float) -> int | None:
        """Sleep until there is something to do; the number of flushes asked for by then, None at the end."""
        with self._state:
            for _ in range(_IDLE_INTERVALS):
                self._state.wait_for(lambda: self._stop or self._asked > ticket, wait)
                if self._stop or self._asked > ticket or self._news or self._tasks:
                    break
            return None if self._stop else self._asked

    def _cycle(self, journal: Journal) -> int:
        self._news = False
        self._feeder = self._feeder or Feeder(journal, self._run.log_points, self._page_of)
        self._do_tasks()
        return self._feeder.drain()

    def _do_tasks(self) -> None:
        while self._tasks:
            task = self._tasks[0]
            try:
                task.action()
            except TrackingError as error:
                if not isinstance(error, TrackingRefused):
                    raise
                _log.warning("MLflow does not take %s: %s", task.what, error)
            except Exception as error:  # noqa: BLE001 - a missing file, say: trying again won't help
                _log.warning("Can't send %s to MLflow: %s", task.what, error)
            self._tasks.popleft()

    def _fail(self, error: Exception) -> float:
        if self._failures == 0:  # one warning an outage
            _log.warning(
                "MLflow can't be filled now: %s Training goes on; the journal keeps everything, and it is "
                "sent when MLflow is back.",
                error,
                exc_info=None if isinstance(error, GrpoError) else error,
            )
        self._failures += 1
        self._news = True
        return float(min(0.5 * 2 ** min(self._failures - 1, 20), self._longest_wait))

    def _recover(self, sent: int) -> None:
        if self._failures:
            _log.warning("MLflow is back: %d steps sent.", sent)
        self._failures = 0
