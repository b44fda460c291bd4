"""Numbers and dicts as trainers print them: strings, ``np.float64(0.5)``, ``nan``, JSON, Python literals."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["STEPS_UP_TO", "flatten", "number", "parse_dict", "whole"]

LITERAL_CHARS = 65_536  # a longer dict that is not JSON is not read
NUMBER_CHARS = 10_000
DEPTH = 4
STEPS_UP_TO = 2**53
EMPTY = frozenset({"", "-", "none", "null", "no log", "n/a"})
_WRAPPED = re.compile(
    r"\b(?:np|numpy|torch|jnp)?\.?(?:float\d*|int\d*|uint\d*|bfloat16|tensor|array|Tensor|Array)\(([^(),]*)(?:,[^()]*)?\)"
)
_PYTHON = re.compile(r"([:\[,]\s*)(-?)(nan|inf|infinity|None|True|False)(?=\s*[,}\]])", re.IGNORECASE)
_JSON = {"nan": "NaN", "inf": "Infinity", "infinity": "Infinity", "none": "null", "true": "true", "false": "false"}
_decode = json.JSONDecoder(parse_int=float).raw_decode


def number(value: Any) -> float | None:
    """The number that a logged value is, or None: ``0.5``, ``"5e-06"``, ``"np.float64(nan)"``, ``"12.5%"`` is 0.125."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value) if isinstance(value, int) else _of_text(value)
    except (ValueError, OverflowError):
        return None


def whole(value: Any) -> int | None:
    """A step number: a whole number up to 2**53, also from ``"5/200"``."""
    if isinstance(value, str):
        value = value.partition("/")[0]
    found = number(value)
    if found is None or not 0 <= found <= STEPS_UP_TO or found != int(found):
        return None
    return int(found)


def parse_dict(text: str) -> dict[str, Any] | None:
    """A dict printed by Python or JSON, or None. Nothing is evaluated."""
    for attempt in _as_json(text.strip()):
        try:
            found, end = _decode(attempt)
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) and end == len(attempt) else None
    return _literal(text)


def flatten(values: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Nested dicts with keys joined by "/"; ``data``, ``metrics`` and ``logs`` are wrappers whose name is dropped."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(value, dict):
            found[prefix + str(key)] = value
        elif depth < DEPTH:
            inner = prefix if key in ("data", "metrics", "logs") else f"{prefix}{key}/"
            found.update(flatten(value, inner, depth + 1))
    return found


def _of_text(value: Any) -> float | None:
    if not isinstance(value, str) or len(value) > NUMBER_CHARS:
        return None
    text = value.strip()
    if text.startswith("np.float64(") and text.endswith(")"):  # most of verl's
        return float(text[11:-1])
    if text.lower() in EMPTY:
        return None
    if "(" in text:
        text = _WRAPPED.sub(r"\1", text)
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def _as_json(text: str) -> Iterator[str]:
    if '"' in text:
        yield text
    if '"' not in text and "\\" not in text:
        text = text.replace("'", '"')
        yield text
    if len(text) <= LITERAL_CHARS:
        yield _PYTHON.sub(_json_word, _WRAPPED.sub(r"\1", text))


def _json_word(match: re.Match[str]) -> str:
    return match[1] + match[2] + _JSON[match[3].lower()]


def _literal(text: str) -> dict[str, Any] | None:
    if len(text) > LITERAL_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # 1or 2
            found = ast.literal_eval(_WRAPPED.sub(r"\1", text))
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
    return found if isinstance(found, dict) and all(isinstance(key, str) for key in found) else None
