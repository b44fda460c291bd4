"""A sink that can't stop training."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from grpo_lightning.sinks.base import EventRow, Sink, StepRow

__all__ = ["GuardedSink"]

_log = logging.getLogger(__name__)


class GuardedSink:
    """Pass rows on to `sink`; when it raises, say so once, keep the rows and try again later.

    The wait doubles from `first_wait` to `longest_wait` seconds. Up to `capacity` rows are kept, in order;
    beyond it the oldest are let go and counted in `lost`. On a thread of its own, `faults` may be `BaseException`: a
    SystemExit of the sink would end the thread, and nothing else.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        name: str = "",
        first_wait: float = 1.0,
        longest_wait: float = 300.0,
        capacity: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
        faults: type[BaseException] = Exception,
    ) -> None:
        self.sink = sink
        self.name = name or type(sink).__name__
        self.lost = 0
        self._faults = faults
        self._first_wait, self._longest_wait, self._clock = first_wait, longest_wait, clock
        self._waiting: deque[StepRow | EventRow] = deque(maxlen=capacity)
        self._wait = 0.0  # 0 while the sink works
        self._retry_at = 0.0

    @property
    def waiting(self) -> int:
        """Rows that the sink has not taken yet."""
        return len(self._waiting)

    def write_step(self, row: StepRow) -> None:
        """Pass on one step, now or later."""
        self._put(row)

    def write_event(self, row: EventRow) -> None:
        """Pass on one event, now or later."""
        self._put(row)

    def close(self) -> None:
        """Try the waiting rows a last time and close the sink."""
        self._retry_at = 0.0
        self._drain()
        if self._waiting or self.lost:
            _log.warning("The sink %s did not get %d rows.", self.name, len(self._waiting) + self.lost)
        try:
            self.sink.close()
        except self._faults as error:
            _log.warning("The sink %s could not be closed: %s", self.name, error)

    def _put(self, row: StepRow | EventRow) -> None:
        if len(self._waiting) == self._waiting.maxlen:
            self.lost += 1
        self._waiting.append(row)
        if self._clock() >= self._retry_at:
            self._drain()

    def _drain(self) -> None:
        while self._waiting:
            row = self._waiting[0]
            try:
                self.sink.write_step(row) if isinstance(row, StepRow) else self.sink.write_event(row)
            except self._faults as error:
                self._fail(error)
                return
            self._waiting.popleft()
        if self._wait:
            _log.warning("The sink %s works again.", self.name)
        self._wait = self._retry_at = 0.0

    def _fail(self, error: BaseException) -> None:
        if not self._wait:
            _log.warning(
                "The sink %s failed: %s. Training goes on; its rows are kept and tried again.",
                self.name,
                error if str(error) else type(error).__name__,
            )
        self._wait = min(self._wait * 2, self._longest_wait) or self._first_wait
        self._retry_at = self._clock() + self._wait
