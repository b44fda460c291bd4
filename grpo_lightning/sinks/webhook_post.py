"""One POST: within its time whatever the other side does, without following redirects, and with no secret in what it says."""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Timer
from types import TracebackType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    Request,
    build_opener,
)

from grpo_lightning.errors import ConfigError, GrpoError
from grpo_lightning.sinks.redact import REDACTED, redact_text
from grpo_lightning.sinks.terminal import plain

__all__ = ["PostError", "Target"]

_PASSING = {408, 425, 429, 500, 502, 503, 504}  # asking again may help
_REDIRECTS = range(300, 400)
_SHOWN = 200  # characters of an answer
_LEAST_SECRET = 5  # characters of a path's part that is taken out of texts
_OPEN_PARTS = {"alerts", "services", "webhooks", "webhook", "hooks"}


class PostError(GrpoError):
    """What was posted was not taken.

    Attributes:
        passing: whether to try again.
        retry_after: seconds that the other side asks to wait.
    """

    def __init__(self, message: str, *, passing: bool, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.passing, self.retry_after = passing, retry_after


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where to post. `shown` alone may be printed."""

    url: str = field(repr=False)  # without user and password
    headers: Mapping[str, str] = field(repr=False)
    shown: str  # scheme, host and port
    secrets: Sequence[str] = field(repr=False)  # never in a message

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str], *, path: str = "") -> Target:
        """The target at `url`; `path` is added where the URL does not end in it. A bad URL is a `ConfigError`."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError("run.sinks.webhook.url has no host or a wrong port: give http://HOST:PORT/…") from error
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError("run.sinks.webhook.url is not an address: give one with http:// or https:// and a host.")
        place = f"[{host}]" if ":" in host else host
        place += f":{port}" if port else ""
        full = parts.path.rstrip("/") + path if path and not parts.path.rstrip("/").endswith(path) else parts.path
        sent = {"Content-Type": "application/json", "User-Agent": "grpo-lightning"} | _authorization(parts)
        sent |= headers
        for name, value in sent.items():
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not re.fullmatch(
                r"[\t\x20-\x7e\x80-\xff]*", value
            ):
                raise ConfigError(f"run.sinks.webhook.headers has {name!r}, which can't be sent: no line breaks in it.")
        return cls(
            url=urlunsplit((parts.scheme, place, full, parts.query, "")),
            headers=sent,
            shown=f"{parts.scheme}://{place}",
            secrets=_secrets(parts, [*headers.values()]),
        )

    def post(self, body: bytes, timeout: float) -> None:
        """Post JSON; raises `PostError` for whatever is not an answer of success, at the latest after `timeout`."""
        request = Request(self.url, data=body, headers=dict(self.headers), method="POST")
        with _Deadline(timeout) as deadline:
            try:
                _opener(deadline).open(request, timeout=timeout).close()
            except HTTPError as error:
                raise self._refused(error) from None  # its text and context hold the address
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise PostError(self._reason(error, deadline, timeout), passing=True) from None
            if deadline.passed:  # headers that were cut off count as whole ones
                raise PostError(self._reason(TimeoutError(), deadline, timeout), passing=True)

    def _refused(self, error: HTTPError) -> PostError:
        code = error.code
        if code in _REDIRECTS:
            return PostError(f"it answers {code} and sends elsewhere: give the address it leads to", passing=False)
        try:
            said = error.read(4 * _SHOWN).decode("utf-8", errors="replace").strip()
        except (OSError, http.client.HTTPException, ValueError):
            said = ""
        finally:
            error.close()
        text = f"it answers {code}" + (f": {self.scrub(said)}" if said else "")
        return PostError(text, passing=code in _PASSING, retry_after=_seconds(error.headers.get("Retry-After")))

    def _reason(self, error: Exception, deadline: _Deadline, timeout: float) -> str:
        reason = error.reason if isinstance(error, URLError) else error
        if deadline.passed or isinstance(reason, TimeoutError):
            return f"no answer within {timeout:.3g} seconds"
        return self.scrub(f"{type(reason).__name__}: {reason}")

    def scrub(self, text: str) -> str:
        """`text` without this target's secrets, safe to print."""
        for secret in self.secrets:
            text = text.replace(secret, REDACTED)
        return plain(redact_text(text))[:_SHOWN]


def _authorization(parts: Any) -> dict[str, str]:
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _secrets(parts: Any, headers: Sequence[str]) -> list[str]:
    """The longest first, so that none is cut by a shorter one."""
    found = [parts.path, parts.query, parts.username or "", parts.password or "", *headers]
    found += [part for part in parts.path.split("/") if len(part) >= _LEAST_SECRET and part not in _OPEN_PARTS]
    found += [pair.partition("=")[2] for pair in parts.query.split("&")]
    found += [word for value in headers for word in value.split() if len(word) >= _LEAST_SECRET]
    found += _authorization(parts).values()
    every = {text for text in (*found, *map(unquote, found)) if len(text) > 2}
    return sorted(every, key=len, reverse=True)


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and re.fullmatch(r"\d{1,6}", text.strip()) else None


# ---------------------------------------------------------------- time


class _Deadline:
    """Shuts sockets down when the time is up: a socket's own limit starts anew with each byte that drips in."""

    def __init__(self, seconds: float) -> None:
        self.passed = False
        self._sockets: list[socket.socket] = []
        self._timer = Timer(seconds, self._end)
        self._timer.daemon = True

    def watch(self, connection: socket.socket | None) -> None:
        """Hold a socket to the deadline."""
        if connection is not None:
            self._sockets.append(connection)
            if self.passed:
                self._end()

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self.passed = True
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is closed already
                continue


def _opener(deadline: _Deadline) -> OpenerDirector:
    """Honours the proxies of the environment."""

    class Plain(http.client.HTTPConnection):
        def connect(self) -> None:
            super().connect()
            deadline.watch(self.sock)

    class Secure(http.client.HTTPSConnection):
        def connect(self) -> None:
            super().connect()
            deadline.watch(self.sock)

    class OverHttp(HTTPHandler):
        def http_open(self, request: Request) -> Any:
            return self.do_open(Plain, request)

    class OverHttps(HTTPSHandler):
        def https_open(self, request: Request) -> Any:
            return self.do_open(Secure, request, context=ssl.create_default_context())

    return build_opener(OverHttp, OverHttps, _NoRedirect)


class _NoRedirect(HTTPRedirectHandler):
    """A redirect may lead the headers' secrets elsewhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Not followed: the answer itself is what comes back."""
