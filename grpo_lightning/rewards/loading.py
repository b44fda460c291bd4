"""From a reward's path to its function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from grpo_lightning.errors import RewardError

__all__ = ["BUILT_IN", "RewardSpec", "load_reward"]

BUILT_IN = {
    "exact_match": "grpo_lightning.rewards.matching:exact_match",
    "numeric_match": "grpo_lightning.rewards.matching:numeric_match",
    "math_verify": "grpo_lightning.rewards.matching:math_verify",
    "regex_format": "grpo_lightning.rewards.matching:RegexFormat",
    "length_penalty": "grpo_lightning.rewards.penalties:LengthPenalty",
    "repetition_penalty": "grpo_lightning.rewards.penalties:RepetitionPenalty",
    "reasoning_gym_score": "grpo_lightning.rewards.reasoning:reasoning_gym_score",
    "reward_model": "grpo_lightning.rewards.reward_model:RewardModel",
}


@dataclass(kw_only=True)
class RewardSpec:
    """One reward function and how it is run.

    Args:
        path: ``package.module:function``, ``file.py:function``, or a built-in's name.
        weight: its share in the total.
        name: what its signals are called; the function's name when not given.
        timeout_seconds: how long one call may take; null: for ever.
        on_error: what an exception or a wrong count does: `raise` ends the run, `missing` counts it.
        kwargs: settings of a class (given to its constructor) or of a function (given at every call).
    """

    path: str
    weight: float = 1.0
    name: str | None = None
    timeout_seconds: float | None = 60.0
    on_error: Literal["raise", "missing"] = "raise"
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_reward(spec: RewardSpec) -> Callable[..., Any]:
    """The function behind a spec; a class is instantiated with the spec's kwargs."""
    target = BUILT_IN.get(spec.path, spec.path)
    module_name, colon, attribute = target.rpartition(":")
    if not colon:
        module_name, _, attribute = target.rpartition(".")
    if not module_name or not attribute:
        raise RewardError(f"The reward {spec.path!r} is not known: {_hint(spec.path)}")
    function = _attribute(_module(module_name, spec.path), attribute, spec.path)
    if inspect.isclass(function):
        return _instance(function, spec)
    if not callable(function):
        raise RewardError(f"The reward {spec.path!r} is a {type(function).__name__}: name a function.")
    loaded: Callable[..., Any] = function
    return loaded


def _instance(cls: type, spec: RewardSpec) -> Callable[..., Any]:
    try:
        made: Callable[..., Any] = cls(**spec.kwargs)
    except TypeError as error:
        raise RewardError(f"The reward {spec.path!r} does not take these kwargs: {error}.") from error
    return made


def _module(name: str, path: str) -> ModuleType:
    if name.endswith(".py"):
        return _file_module(Path(name), path)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise RewardError(f"The reward {path!r} names the module {name!r}, which does not exist: {_hint(path)}") from error
        raise RewardError(f"The reward {path!r} needs the module {error.name!r}: install it.") from error
    except Exception as error:
        raise RewardError(f"The reward module {name!r} failed to import: {type(error).__name__}: {error}") from error


def _file_module(file: Path, path: str) -> ModuleType:
    if not file.is_file():
        raise RewardError(f"The reward {path!r} names the file {str(file)!r}, which does not exist in {Path.cwd()}.")
    name = f"grpo_reward_{file.stem}_{abs(hash(str(file.resolve())))}"
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise RewardError(f"The reward file {str(file)!r} is not a Python file: give one ending in .py.")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"The reward file {str(file)!r} failed to load: {type(error).__name__}: {error}") from error
    return module


def _attribute(module: ModuleType, name: str, path: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    near = get_close_matches(name, dir(module), n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "check its name."
    raise RewardError(f"The reward {path!r} names {name!r}, which its module does not have: {hint}")


def _hint(path: str) -> str:
    near = get_close_matches(path, BUILT_IN, n=1)
    begin = f"did you mean {near[0]!r}? " if near else ""
    return f"{begin}Give package.module:function, file.py:function, or one of {', '.join(BUILT_IN)}."
