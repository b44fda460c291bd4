"""Names and values that MLflow takes, without losing what it would refuse, cut or merge."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = [
    "MAX_PARAM",
    "MAX_TAG",
    "Pages",
    "clean_key",
    "flatten",
    "metric_key",
    "nonfinite_key",
    "shorten_param",
]

MAX_KEY = 250
MAX_PARAM = 6000
MAX_TAG = 8000
DEFAULT_PAGE = "2_health"

Pages = Callable[[str], str | None]
"""A signal's page, such as ``1_overview``; None (or a KeyError) means ``2_health``."""

_REFUSED = re.compile(r"[^\w.\- /]")  # ':' would do on Linux and raise on Windows
_LOOKS_CLEANED = re.compile(r"-[0-9a-f]{12}$")
_LONGEST_PREFIX = 40  # room for the page


def clean_key(name: str) -> str:
    """`name` as MLflow takes it. Two different names never give the same key.

    A name that has to change ends with 12 hex digits of its sha256; so does one that looks as if it had been.

    >>> clean_key("reward/format_mean"), clean_key("loss@1")
    ('reward/format_mean', 'loss_1-6e70fa325f41')
    """
    parts = [part if part.strip(".") else "_" for part in _REFUSED.sub("_", name).split("/")]
    clean = "/".join(parts)
    limit = MAX_KEY - _LONGEST_PREFIX
    if clean == name and len(name) <= limit and not _LOOKS_CLEANED.search(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{clean[: limit - 13]}-{digest}"


def metric_key(signal: str, pages: Pages) -> str:
    """The MLflow key of a signal: its page and its name.

    >>> metric_key("kl", {"kl": "1_overview"}.get), metric_key("mine", {}.get)
    ('1_overview/kl', '2_health/mine')
    """
    try:
        page = pages(signal)
    except KeyError:
        page = None
    return f"{page or DEFAULT_PAGE}/{clean_key(signal)}"


def nonfinite_key(signal: str) -> str:
    """The MLflow key that counts the steps at which a signal was NaN or infinite."""
    return f"nonfinite/{clean_key(signal)}"


def flatten(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names and texts; a list of plain values stays one text.

    >>> dict(flatten({"optimizer": {"lr": 1e-6}, "callbacks": [{"n": 1}], "betas": [0.9, 0.95]}))
    {'optimizer.lr': '1e-06', 'callbacks.0.n': '1', 'betas': '[0.9, 0.95]'}
    """
    nested = isinstance(settings, list | tuple) and any(isinstance(item, Mapping) for item in settings)
    if (isinstance(settings, Mapping) and settings) or nested:
        pairs = settings.items() if isinstance(settings, Mapping) else enumerate(settings)
        for key, value in pairs:
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, settings if isinstance(settings, str) else _text(settings)


def shorten_param(key: str, value: str, artifact: str) -> str:
    """`value`, or when MLflow would cut it, its digest and where the whole text is."""
    if len(value) <= MAX_PARAM:
        return value
    digest = hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
    return f"sha256:{digest} ({len(value)} characters; the whole text is at {key!r} in the artifact {artifact})"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple | Mapping):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
