"""A loaded reward function: what it is called, and which keywords it gets."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.loading import RewardSpec, find_reward, load_reward

__all__ = ["RewardFunction", "load_function"]

_NAME = re.compile(r"[\w.\-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A function with what is known of it before its first call."""

    name: str
    spec: RewardSpec
    function: Callable[..., Any]
    is_async: bool
    settings: dict[str, Any]  # of a function, from its spec; empty for a class, whose constructor got them
    named: frozenset[str] | None  # the keywords that it names; None: it takes every one
    required: tuple[str, ...]  # those without a default

    def keywords(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the function names of `given`, or everything where it takes `**kwargs`; its settings on top.

        Lists are copied, so that a function that sorts or empties one spoils nobody else's.
        """
        chosen = {k: v for k, v in (given | self.settings).items() if self.named is None or k in self.named}
        absent = [name for name in self.required if name not in chosen]
        if absent:
            raise RewardError(
                f"The reward {self.name!r} asks for {absent[0]!r}, which is neither a dataset column nor a setting: "
                f"{_near(absent[0], given)}add the column, or give it in kwargs. There are {', '.join(sorted(given))}."
            )
        return {k: list(v) if isinstance(v, list) else v for k, v in chosen.items()}


def load_function(spec: RewardSpec) -> RewardFunction:
    """Load the function behind a spec and check the spec against it."""
    _check_numbers(spec)
    function = load_reward(spec)
    parameters = _parameters(function)
    takes_all = parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_name = [p for p in parameters or [] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = frozenset(p.name for p in by_name)
    settings = {} if inspect.isclass(find_reward(spec.path)) else dict(spec.kwargs)
    unknown = [] if takes_all else [k for k in settings if k not in named]
    if unknown:
        raise RewardError(
            f"The reward {spec.path!r} has no setting {unknown[0]!r}: {_near(unknown[0], named)}"
            f"it takes {', '.join(sorted(named)) or 'none'}."
        )
    return RewardFunction(
        name=_name(spec, function),
        spec=spec,
        function=function,
        is_async=_is_async(function),
        settings=settings,
        named=None if takes_all else named,
        required=tuple(p.name for p in by_name if p.default is p.empty),
    )


def _check_numbers(spec: RewardSpec) -> None:
    for name in ("path", "weight", "on_error", "kwargs"):
        if getattr(spec, name) is None:
            raise RewardError(f"The {name} of the reward {spec.path!r} is null: give it a value, or leave it out.")
    if not math.isfinite(spec.weight):
        raise RewardError(f"The weight of the reward {spec.path!r} is {spec.weight}: give a finite number.")
    if spec.timeout_seconds is not None and not 0 < spec.timeout_seconds < math.inf:
        raise RewardError(
            f"The timeout_seconds of the reward {spec.path!r} is {spec.timeout_seconds}: give seconds above 0, or null."
        )
    if spec.on_error not in ("raise", "missing"):
        raise RewardError(f"The on_error of the reward {spec.path!r} is {spec.on_error!r}: give raise or missing.")


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """None for the few callables, written in C, that don't tell."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _name(spec: RewardSpec, function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = spec.name if spec.name is not None else str(getattr(function, "__name__", type(function).__name__))
    if not _NAME.fullmatch(name):
        raise RewardError(
            f"The reward {spec.path!r} would be called {name!r}: give it a `name` of letters, digits, '_', '.' and '-'."
        )
    return name


def _near(name: str, names: Any) -> str:
    near = get_close_matches(name, list(names), n=1)
    return f"did you mean {near[0]!r}? Else " if near else ""
