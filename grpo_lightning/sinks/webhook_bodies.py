"""What a webhook is told of an alert: Alertmanager's records, or JSON by a template.

Source: Alertmanager's API v2 (``postableAlerts``): an alert is its set of labels; one without ``endsAt`` ends by itself after
minutes, one whose ``endsAt`` is past is resolved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from string import Template
from time import time
from typing import Any, Protocol

from grpo_lightning.errors import ConfigError
from grpo_lightning.sinks.base import EventRow

__all__ = ["FIELDS", "AlertmanagerBodies", "Bodies", "JsonBodies", "fields_of", "text_of"]

_OF_PAYLOAD = (
    "state",
    "severity",
    "action",
    "cause",
    "onset_step",
    "signal",
    "value",
    "bound",
    "expected",
    "values",
    "summary",
    "first",
    "runbook",
    "message",
    "evidence",
    "checkpoint_before_onset",
)
_OF_ROW = ("run_id", "run_name", "description", "rule", "alert", "step", "segment", "time")
FIELDS = (*_OF_ROW, *_OF_PAYLOAD, "text")  # the words of a template

_LABELS = ("run_id", "run_name", "severity", "cause", "action")
_ANNOTATIONS = (
    "summary",
    "first",
    "runbook",
    "alert",
    "step",
    "onset_step",
    "signal",
    "value",
    "bound",
    "expected",
    "values",
    "evidence",
    "checkpoint_before_onset",
)

Fields = dict[str, Any]
PostedAlert = dict[str, Any]


class Bodies(Protocol):
    """Makes what is posted."""

    def of(self, row: EventRow) -> bytes:
        """The body that tells of an alert."""

    def refresh(self) -> bytes | None:
        """The body that says what still holds; None where nothing does."""


def fields_of(row: EventRow, identity: Mapping[str, str]) -> Fields:
    """Every word of an alert, JSON types; what is not known is None."""
    found: Fields = {
        "run_id": identity.get("run_id") or row.run_id,
        "run_name": identity.get("run_name") or identity.get("run_id") or row.run_id,
        "description": identity.get("description", ""),
        "rule": row.name,
        "alert": row.key,
        "step": row.step,
        "segment": row.segment,
        "time": _moment(row.time),
    }
    found |= {name: row.payload.get(name) for name in _OF_PAYLOAD}
    found["state"] = found["state"] or "firing"
    found["text"] = text_of(found)
    plain: Fields = json.loads(json.dumps(found, default=str), parse_constant=str)  # NaN as a word
    return plain


def text_of(fields: Mapping[str, Any]) -> str:
    """The alert in a few lines: run, what for, what happened, numbers, ruler, action, what to do first."""
    named = f"{fields['run_name']} ({fields['run_id']})"
    began = f", began about step {fields['onset_step']}" if fields["onset_step"] is not None else ""
    lines = [
        f"{fields['rule']} {fields['state']} at step {fields['step']}{began}: run {named}",
        str(fields["description"] or ""),
        str(fields["summary"] or fields["message"] or ""),
        _numbers(fields),
        f"action: {fields['action']}; most likely cause: {fields['cause']}; severity: {fields['severity']}",
        f"first: {fields['first']}" if fields["first"] else "",
        f"runbook: {fields['runbook']}" if fields["runbook"] else "",
    ]
    return "\n".join(line for line in lines if line)


def _numbers(fields: Mapping[str, Any]) -> str:
    if fields["signal"] is None:
        return ""
    ruler = f", ruler {_short(fields['expected'])}" if fields["expected"] is not None else ""
    shown = f"{fields['signal']}: value {_short(fields['value'])}, bound {_short(fields['bound'])}{ruler}"
    values = fields["values"]
    others = {k: v for k, v in values.items() if k != fields["signal"]} if isinstance(values, Mapping) else {}
    return "; ".join([shown, *(f"{name} {_short(value)}" for name, value in others.items())])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", errors="replace")


# ---------------------------------------------------------------- Alertmanager


class AlertmanagerBodies:
    """Alerts as Alertmanager knows them.

    One that rises in severity has other labels, so it is another alert there: the milder one is resolved with it.
    """

    def __init__(self, identity: Mapping[str, str], *, keep_hours: float) -> None:
        self._identity, self._keep = identity, keep_hours * 3600.0
        self._firing: dict[str, PostedAlert] = {}  # by the alert's id

    def of(self, row: EventRow) -> bytes:
        """The alert, and the milder one that it replaces."""
        fields = fields_of(row, self._identity)
        before = self._firing.pop(row.key, None)
        posted: PostedAlert = {"labels": _labels(fields), "annotations": _annotations(fields)}
        if fields["state"] == "resolved":
            known = before or posted
            return _dump([{**known, "annotations": posted["annotations"], "endsAt": _moment(row.time)}])
        if fields["state"] == "escalated" and before is None:  # it began before this process
            before = {**posted, "labels": posted["labels"] | {"severity": "warning", "action": "notify"}}
        posted["startsAt"] = _moment(row.time)
        self._firing[row.key] = posted
        told = [posted | {"endsAt": self._end()}]
        if before is not None and before["labels"] != posted["labels"]:
            told.append({**before, "endsAt": _moment(row.time)})
        return _dump(told)

    def refresh(self) -> bytes | None:
        """All that fire, for another while."""
        firing = list(self._firing.values())
        return _dump([posted | {"endsAt": self._end()} for posted in firing]) if firing else None

    def _end(self) -> str:
        return _moment(time() + self._keep)


def _labels(fields: Fields) -> dict[str, str]:
    labels = {"alertname": str(fields["rule"])} | {name: _word(fields[name]) for name in _LABELS}
    return {name: value for name, value in labels.items() if value}


def _annotations(fields: Fields) -> dict[str, str]:
    found = {name: _word(fields[name]) for name in _ANNOTATIONS}
    found |= {"description": str(fields["text"]), "run_description": _word(fields["description"])}
    return {name: value for name, value in found.items() if value}


def _word(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------- JSON


class _Words(Template):
    """``$rule`` and ``${env.NAME}``: names only, no attributes, no formats."""

    idpattern = r"(?a:[_a-z][_a-z0-9]*(?:\.[_a-z][_a-z0-9]*)?)"
    braceidpattern = idpattern


class JsonBodies:
    """JSON by a template; without one, every word of the alert."""

    def __init__(self, template: Mapping[str, Any] | str | None, identity: Mapping[str, str]) -> None:
        self._identity = identity
        self._template = _parsed(template)
        self._environment: dict[str, str] = {}
        _check(self._template, self._environment)

    def of(self, row: EventRow) -> bytes:
        """The filled template."""
        fields = fields_of(row, self._identity)
        if self._template is None:
            return _dump(fields)
        return _dump(_filled(self._template, fields | self._environment))

    def refresh(self) -> bytes | None:
        """Nothing: who takes plain JSON is told once."""
        return None


def _parsed(template: Mapping[str, Any] | str | None) -> Any:
    if not isinstance(template, str):
        return template
    try:
        return json.loads(template)
    except ValueError as error:
        raise ConfigError(f"run.sinks.webhook.template is not JSON: {error}. Words stand inside texts.") from error


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [text for item in inner for text in _texts(item)]


def _check(template: Any, environment: dict[str, str]) -> None:
    """Refuse words that there are none of; take ``env.`` ones from the environment."""
    for text in _texts(template):
        words = _Words(text)
        if not words.is_valid():
            raise ConfigError(
                "run.sinks.webhook.template has a `$` that begins no word: write `$$` for the sign itself."
            )
        for name in words.get_identifiers():
            place, _, variable = name.partition(".")
            if place == "env" and variable in os.environ:
                environment[name] = os.environ[variable]
            elif place == "env" and variable:
                raise ConfigError(f"run.sinks.webhook.template needs the environment variable {variable}: export it.")
            elif name not in FIELDS:
                raise ConfigError(f"run.sinks.webhook.template has ${name}, which is none of: {', '.join(FIELDS)}.")


def _filled(template: Any, words: Mapping[str, Any]) -> Any:
    if isinstance(template, Mapping):
        return {str(key): _filled(value, words) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [_filled(value, words) for value in template]
    if not isinstance(template, str):
        return template
    alone = template.removeprefix("$").strip("{}")
    if template in (f"${alone}", f"${{{alone}}}") and alone in words:
        return words[alone]
    return _Words(template).substitute({name: _word(value) for name, value in words.items()})
