"""Health signals: from a step's tensors to named numbers, and the catalogue that says what each means.

The catalogue loads without torch; what measures loads when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from grpo_lightning.signals.catalogue import CATALOGUE, Signal, page_of, signal, signal_names

if TYPE_CHECKING:
    from grpo_lightning.signals.measuring import Joined, finish, join, measure
    from grpo_lightning.signals.temporal import TemporalState
    from grpo_lightning.signals.update_norm import UpdateNorm, UpdateSize

__all__ = [
    "CATALOGUE",
    "Joined",
    "Signal",
    "TemporalState",
    "UpdateNorm",
    "UpdateSize",
    "finish",
    "join",
    "measure",
    "page_of",
    "signal",
    "signal_names",
]

_HOMES = {
    "Joined": "measuring",
    "TemporalState": "temporal",
    "UpdateNorm": "update_norm",
    "UpdateSize": "update_norm",
    "finish": "measuring",
    "join": "measuring",
    "measure": "measuring",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
