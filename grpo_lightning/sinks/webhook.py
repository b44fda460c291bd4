"""The sink `webhook`: alerts to Alertmanager, or as JSON to any address. Training never waits for it.

An address may be a secret (a password, a token in its query or path) and so may headers: they are taken from the
environment where they name a variable (``$NAME``), and never stand in a log, a message or a stored config.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from string import Template
from typing import Any, Literal

from grpo_lightning.errors import ConfigError
from grpo_lightning.sinks.base import EventRow, SinkError, StepRow
from grpo_lightning.sinks.redact import REDACTED
from grpo_lightning.sinks.webhook_bodies import AlertmanagerBodies, Bodies, JsonBodies
from grpo_lightning.sinks.webhook_outbox import Outbox
from grpo_lightning.sinks.webhook_post import Target

__all__ = ["WebhookSink"]

_ALERTS_PATH = "/api/v2/alerts"
_PLACE = "run.sinks.webhook"


class WebhookSink:
    """Send alerts that fire, rise or are resolved; steps and other events stay in the journal.

    Args:
        url: Alertmanager's address (``http://127.0.0.1:9093``), or where JSON is posted to; ``$NAME`` is taken from the
            environment.
        format: ``alertmanager`` (API v2), or ``json``.
        template: of the JSON that is posted: nested like it, its texts with ``$run_name``, ``$rule``, ``$text`` and other
            words of the alert, and ``${env.NAME}``. A text that is one word alone becomes the word's value with its type.
        headers: of the request; ``$NAME`` is taken from the environment.
        timeout: the most seconds that one request may take, from its connection to the answer.
        give_up_after: seconds for which an alert is tried again, with growing waits.
        close_within: the most seconds that the end of a run waits for what is left.
        keep_hours: how long Alertmanager shows an alert without news of it: a run that was paused sends none.
        refresh_seconds: how often Alertmanager is told that an alert still holds (it forgets when it is restarted).
        run_id: the run's id.
        run_name: the run's name; its id when not given.
        description: what the run is for.
    """

    def __init__(
        self,
        *,
        url: str,
        format: Literal["alertmanager", "json"] = "alertmanager",
        template: Mapping[str, Any] | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 10.0,
        give_up_after: float = 900.0,
        close_within: float = 8.0,
        keep_hours: float = 24.0,
        refresh_seconds: float = 60.0,
        run_id: str = "",
        run_name: str = "",
        description: str = "",
    ) -> None:
        limits = {"timeout": timeout, "keep_hours": keep_hours, "refresh_seconds": refresh_seconds}
        for name, value in limits.items():
            if not value > 0:
                raise ConfigError(f"{_PLACE}.{name} is {value}: give more than 0.")
        self._target = _target(url, headers or {}, alertmanager=format == "alertmanager")
        identity = {"run_id": run_id, "run_name": run_name, "description": description}
        self._bodies = _bodies(format, template, identity, keep_hours)
        self._close_within = close_within
        self._closed = False
        self._outbox = Outbox(
            self._target.post,
            name=self._target.shown,
            timeout=timeout,
            give_up_after=give_up_after,
            refresh=self._bodies.refresh if format == "alertmanager" else None,
            refresh_seconds=refresh_seconds,
        )

    def write_step(self, row: StepRow) -> None:
        """Nothing: alerts only are sent."""

    def write_event(self, row: EventRow) -> None:
        """Have an alert sent; returns at once."""
        if self._closed:
            raise SinkError("Can't send alerts: the webhook is closed.")
        if row.kind == "alert":
            self._outbox.put(self._bodies.of(row))

    def close(self) -> None:
        """Wait a while for what is left, and end."""
        self._closed = True
        self._outbox.close(self._close_within)


def _bodies(format: str, template: Any, identity: Mapping[str, str], keep_hours: float) -> Bodies:
    if format == "json":
        return JsonBodies(template, identity)
    if format != "alertmanager":
        raise ConfigError(f"{_PLACE}.format is {format!r}: give 'alertmanager' or 'json'.")
    if template is not None:
        raise ConfigError(f"{_PLACE}.template goes with `format: json`: Alertmanager's body is fixed.")
    return AlertmanagerBodies(identity, keep_hours=keep_hours)


def _target(url: str, headers: Mapping[str, str], *, alertmanager: bool) -> Target:
    address = _from_environment(url, "url").strip()
    if REDACTED in address:
        raise ConfigError(
            f"{_PLACE}.url was taken out of the stored config, as a secret: give it again, or keep it in an environment "
            "variable and write `url: $NAME`."
        )
    given = {name: _from_environment(value, f"headers.{name}") for name, value in headers.items()}
    hidden = [name for name, value in given.items() if REDACTED in value]
    if hidden:
        raise ConfigError(
            f"{_PLACE}.headers.{hidden[0]} was taken out of the stored config, as a secret: keep it in an environment "
            "variable and write `$NAME`."
        )
    return Target.of(address, given, path=_ALERTS_PATH if alertmanager else "")


def _from_environment(text: str, setting: str) -> str:
    """`text` with ``$NAME`` replaced; its value is never part of a message."""
    if not isinstance(text, str):
        raise ConfigError(f"{_PLACE}.{setting} is not a text.")
    template = Template(text)
    if not template.is_valid():
        raise ConfigError(f"{_PLACE}.{setting} has a `$` that begins no name: write `$$` for the sign itself.")
    absent = [name for name in template.get_identifiers() if name not in os.environ]
    if absent:
        raise ConfigError(
            f"{_PLACE}.{setting} needs the environment variable {absent[0]}, which is not set: export it."
        )
    return template.substitute(os.environ)
