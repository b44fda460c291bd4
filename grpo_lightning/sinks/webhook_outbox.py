"""Messages that are sent from a thread, in order, and tried again with growing waits until they are taken or too old."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from grpo_lightning.sinks.webhook_post import PostError

__all__ = ["Outbox"]

_log = logging.getLogger(__name__)

_CAPACITY = 1000  # messages; beyond it the oldest is let go
_SHORTEST_TRY = 0.5  # seconds that are left for a last try at the end

Send = Callable[[bytes, float], None]


@dataclass(frozen=True, slots=True)
class _Letter:
    body: bytes
    until: float  # of `monotonic`: when it is given up
    again: bool = False  # says only what was said before


class Outbox:
    """Sends messages in the background.

    Args:
        send: takes a body and the most seconds that it may take; raises `PostError`.
        name: what a warning calls the other side; no secret.
        timeout: seconds for one try.
        give_up_after: seconds after which a message is let go.
        refresh: what is sent when there is nothing else, every `refresh_seconds`; tried once each time.
        refresh_seconds: see `refresh`.
        first_wait: seconds before the second try; the wait doubles.
        longest_wait: the most seconds between two tries.
    """

    def __init__(
        self,
        send: Send,
        *,
        name: str,
        timeout: float,
        give_up_after: float,
        refresh: Callable[[], bytes | None] | None = None,
        refresh_seconds: float = 60.0,
        first_wait: float = 0.5,
        longest_wait: float = 60.0,
    ) -> None:
        self._send, self._name, self._timeout, self._give_up_after = send, name, timeout, give_up_after
        self._refresh, self._refresh_seconds = refresh, refresh_seconds
        self._first_wait, self._longest_wait = first_wait, longest_wait
        self._letters: deque[_Letter] = deque()
        self._state = threading.Condition()
        self._closing: float | None = None  # of `monotonic`: when the end stops waiting
        self._failing = False
        self._lost = 0
        self._thread: threading.Thread | None = None

    def put(self, body: bytes) -> None:
        """Have a message sent; returns at once."""
        with self._state:
            if len(self._letters) >= _CAPACITY:
                self._letters.popleft()
                self._lost += 1
            self._letters.append(_Letter(body, monotonic() + self._give_up_after))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
                self._thread.start()
            self._state.notify_all()

    def close(self, within: float) -> None:
        """Wait at most `within` seconds for what is left."""
        with self._state:
            self._closing = monotonic() + within
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join(within + _SHORTEST_TRY)
        left = len(self._letters) + self._lost
        if left:
            _log.warning("The webhook at %s did not get %d alerts; the journal has them.", self._name, left)

    # ---- the thread

    def _work(self) -> None:
        while True:
            letter = self._next()
            if letter is None:
                return
            try:
                self._deliver(letter)
            except Exception as error:  # noqa: BLE001 - the text may hold the address: its kind is said only
                self._lose(f"{type(error).__name__}")

    def _next(self) -> _Letter | None:
        """The oldest message, which stays until it is delivered; a refresh when it is time; None at the end."""
        due = monotonic() + self._refresh_seconds
        with self._state:
            while not self._letters:
                if self._closing is not None:
                    return None
                self._state.wait(max(due - monotonic(), 0.0) if self._refresh else None)
                if self._refresh and not self._letters and monotonic() >= due:
                    due = monotonic() + self._refresh_seconds
                    body = self._refresh()
                    if body is not None:
                        self._letters.append(_Letter(body, monotonic(), again=True))
            return self._letters[0]

    def _deliver(self, letter: _Letter) -> None:
        wait = self._first_wait
        while True:
            try:
                self._send(letter.body, self._seconds())
            except PostError as error:
                if not error.passing or monotonic() + wait >= self._until(letter):
                    self._lose(str(error), again=letter.again)
                    return
                self._say_failing(str(error))
                self._pause(max(wait, error.retry_after or 0.0), letter)
                wait = min(2 * wait, self._longest_wait)
            else:
                self._done()
                return

    def _seconds(self) -> float:
        if self._closing is None:
            return self._timeout
        return max(min(self._timeout, self._closing - monotonic()), _SHORTEST_TRY)

    def _until(self, letter: _Letter) -> float:
        return letter.until if self._closing is None else min(letter.until, self._closing)

    def _pause(self, seconds: float, letter: _Letter) -> None:
        """Wait, but try again at once when the run ends."""
        with self._state:
            if self._closing is None:
                self._state.wait_for(lambda: self._closing is not None, min(seconds, self._longest_wait))
                return
        left = self._until(letter) - monotonic()
        threading.Event().wait(max(min(seconds, left), 0.0))

    def _say_failing(self, why: str) -> None:
        if not self._failing:
            _log.warning(
                "The webhook at %s does not take alerts: %s. Training goes on; it is tried again.", self._name, why
            )
        self._failing = True

    def _done(self) -> None:
        with self._state:
            self._letters.popleft()
        if self._failing:
            _log.warning("The webhook at %s works again.", self._name)
        self._failing = False

    def _lose(self, why: str, *, again: bool = False) -> None:
        with self._state:
            self._letters.popleft()
        if again:
            self._say_failing(why)
            return
        _log.warning("The webhook at %s did not get an alert: %s. The journal has it.", self._name, why)
