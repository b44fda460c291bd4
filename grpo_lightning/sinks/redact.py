"""Secrets out of whatever is stored or printed: in URLs, by setting name and by the look of the value."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["REDACTED", "redact_config", "redact_text"]

REDACTED = "***"

_USERINFO = re.compile(r"(?P<scheme>\b[a-zA-Z][\w+.-]*://)(?P<userinfo>[^\s/?#'\"]*)@")
_HOOK = re.compile(  # addresses whose path is the secret
    r"(?i)(?P<place>\bhttps?://(?:hooks\.[^\s/'\"<>]+|[^\s/'\"<>]*\bdiscord(?:app)?\.com/api/webhooks"
    r"|[^\s/'\"<>]*\bwebhook\.office\.com|api\.telegram\.org|[^\s'\"<>]+?/(?:web)?hooks?(?=/[\w-]{16,})))"
    r"/[^\s'\"<>]+"
)
_REFERENCE = re.compile(r"(?:\w+ )?\$(?:\w+|\{[\w.]+\})")  # to the environment, "Bearer" before it
_QUERY_SECRET = re.compile(
    r"(?i)(?P<name>[?&;](?:api_?key|access_?token|auth_?token|token|password|passwd|pwd|secret|sig|signature)=)"
    r"(?P<value>[^&#;\s'\"]+)"
)
_TOKENS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bxox[abprs]-[A-Za-z0-9-]{10,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_SECRET_NAME = re.compile(
    r"(?i)(?:^|[_\-.])(?:api_?key|access_?key|private_?key|secret(?:_?key)?|password|passwd|passphrase|credentials?"
    r"|(?:routing|integration)_key|(?:access|auth|api|hf|bearer|refresh|session|github|gitlab|wandb|secret)_?token)$|^token$"
)


def redact_text(text: str) -> str:
    """`text` without the user and password of its URLs and without known shapes of keys and tokens.

    >>> redact_text("postgresql://ada:pw@db/mlflow")
    'postgresql://***@db/mlflow'
    """
    if (wider := _wider()) is not None:
        text = wider.redact_text(text)
    text = _USERINFO.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _HOOK.sub(rf"\g<place>/{REDACTED}", text)
    text = _QUERY_SECRET.sub(rf"\g<name>{REDACTED}", text)
    return _TOKENS.sub(REDACTED, text)


@cache
def _wider() -> Any:
    """The snapshot plug-in's knowledge of secrets, which is wider, where it is installed."""
    return import_module("run_snapshot.redact") if find_spec("run_snapshot") is not None else None


def redact_config(config: Any, name: str = "") -> Any:
    """A copy of nested settings with secrets replaced: by name (``api_key``, ``hf_token``) and by value.

    ``max_tokens``, ``pad_token`` and ``num_memory_tokens`` are settings of models, and stay. Of a ``webhook`` only the
    place of its URL stays, and what it takes from the environment (``$NAME``).
    """
    if isinstance(config, Mapping) and name == "webhook":
        return {key: _redact_hook(value, str(key)) for key, value in config.items()}
    if isinstance(config, Mapping):
        return {key: redact_config(value, str(key)) for key, value in config.items()}
    if config not in (None, "") and isinstance(config, str | int | float) and _is_secret(name, config):
        return REDACTED
    if isinstance(config, str):
        return redact_text(config)
    if isinstance(config, list | tuple):
        return [redact_config(value, name) for value in config]
    return config


def _is_secret(name: str, value: str | float) -> bool:
    if isinstance(value, bool):
        return False
    wider = _wider()
    return bool(_SECRET_NAME.search(name)) or (wider is not None and wider.redact({name: value})[name] == REDACTED)


def _redact_hook(value: Any, name: str) -> Any:
    """A webhook's setting: its URL and headers are secrets, unless they name environment variables."""
    if isinstance(value, Mapping):
        inside = "header" if name == "headers" else ""
        return {key: _redact_hook(item, inside or str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_hook(item, name) for item in value]
    if not isinstance(value, str) or _REFERENCE.fullmatch(value):
        return value if isinstance(value, str) else redact_config(value, name)
    if name in ("url", "header"):
        return _place_only(value) if name == "url" else REDACTED
    if name == "template":
        with contextlib.suppress(ValueError):
            return json.dumps(_redact_hook(json.loads(value), ""))
    return redact_config(value, name)


def _place_only(url: str) -> str:
    """The URL up to its host and port; whole where there is nothing more but Alertmanager's own path."""
    if re.fullmatch(r"https?://[^/?#@]*(?:/api/v2/alerts)?/?", url):
        return url
    place = re.match(r"(https?://)(?:[^/?#]*@)?([^/?#@]*)", url)
    return f"{place[1]}{place[2]}/{REDACTED}" if place else REDACTED
