"""A helper process for verifiers that can hang on hostile text: unlike a thread, a process can be killed.

`9^{9^{9^{9}}}` makes a verifier compute for hours inside one C call that holds Python's lock, where no alarm or
thread of the same process gets a turn.
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import IO, Any, cast

__all__ = ["Patience", "UnknownVerifier", "Verifier", "VerifierFailed", "shared_verifier"]

_WORKER = Path(__file__).with_name("verifier_worker.py")
_START_SECONDS = 60.0  # importing the verifiers, on a busy machine
_GRACE_SECONDS = 1.0  # after the helper's own alarm


class Patience:
    """How long each text of one call may take, so that many hostile ones don't add up to the limit of the whole call.

    Args:
        most: seconds of one text; less, a tenth of what is left, after many slow ones.
        least: seconds of one text when little is left. Quicker texts are free.
        total: seconds that the slow texts of the call may take together.
    """

    def __init__(self, *, most: float, least: float = 0.2, total: float = 30.0) -> None:
        self.left = total
        self._most, self._least = most, min(least, most)
        self._known: dict[str, float | None] = {}

    def limit(self) -> float:
        """Seconds that the next text may take."""
        return min(self._most, max(self._least, self.left / 10))

    def spend(self, seconds: float) -> None:
        """Count what a text took."""
        if seconds > self._least:
            self.left -= seconds

    def ask(self, verifier: Verifier, kind: str, *arguments: Any) -> float | None:
        """The verifier's value, 0.0 where it is late; None when patience is spent.

        Equal questions are asked once: a policy that found a hostile text tends to repeat it.
        """
        key = repr((kind, arguments))
        if key in self._known or self.left <= 0:
            return self._known.get(key)
        begin = perf_counter()
        try:
            self._known[key] = verifier.ask(kind, *arguments, seconds=self.limit())
        except TimeoutError:
            self._known[key] = 0.0
        self.spend(perf_counter() - begin)
        return self._known[key]


class VerifierFailed(Exception):  # noqa: N818 - becomes a RewardError
    """The verifier raised on an input that should work."""


class UnknownVerifier(VerifierFailed):
    """The helper has no verifier of this name."""


class Verifier:
    """Asks a helper process, which starts at the first question, and anew after one that had to be killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._ready: set[str] = set()  # the kinds whose imports are done
        self._lock = threading.Lock()

    def ask(self, kind: str, *arguments: Any, seconds: float) -> float | None:
        """The verifier's value, or None where it has none. Raises TimeoutError, `VerifierFailed`, `UnknownVerifier`."""
        with self._lock:
            self._pipe()  # a helper that has died is replaced, and must import anew
            line = ("" if kind in self._ready else self._warm(kind)) or self._exchange(kind, arguments, seconds)
        if line == "late":
            raise TimeoutError(f"{kind} took longer than {seconds:g} seconds.")
        if line == "unknown":
            raise UnknownVerifier(f"{kind} has no verifier for {arguments[0]!r}.")
        if line.startswith("error "):
            raise VerifierFailed(line.removeprefix("error "))
        return None if line == "none" else float(line)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        self._ready.clear()
        if process is not None:
            process.kill()
            process.wait()

    def _warm(self, kind: str) -> str:
        """Import what answers the kind, so that the time of the first text is the text's alone. An error's line, or ""."""
        line = self._exchange("import", (kind,), _START_SECONDS)
        if line != "none":
            return "error it did not start" if line == "late" else line
        self._ready.add(kind)
        return ""

    def _exchange(self, kind: str, arguments: tuple[Any, ...], seconds: float) -> str:
        pipe, frame = self._pipe(), pickle.dumps((kind, arguments, seconds))
        try:
            pipe.write(len(frame).to_bytes(8, "little") + frame)
            pipe.flush()
            line = self._lines.get(timeout=seconds + _GRACE_SECONDS)
        except (queue.Empty, OSError):
            line = b""
        if not line:  # it hangs where no alarm reaches it, or died of the question
            self.close()
            return "late"
        return line.decode().strip()

    def _pipe(self) -> IO[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            # -P: the script's folder must not come first on the path, where its text.py would hide others
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
            self._lines = queue.SimpleQueue()
            threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        return cast("IO[bytes]", self._process.stdin)


def _read(pipe: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(b"")


def shared_verifier() -> Verifier:
    """This process's helper."""
    return _verifier_of(os.getpid())


@cache
def _verifier_of(pid: int) -> Verifier:  # by process, since a fork must not share the pipe
    verifier = Verifier()
    atexit.register(verifier.close)
    return verifier
