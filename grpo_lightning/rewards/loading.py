"""From a reward's path to its function.

A built-in is found by its short name, in a table; other distributions add short names with an entry point in the group
`grpo_lightning.rewards`. Nothing registers itself by being imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import sha256
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from grpo_lightning.errors import RewardError

__all__ = ["BUILT_IN", "ENTRY_POINTS", "RewardSpec", "find_reward", "known_rewards", "load_reward"]

ENTRY_POINTS = "grpo_lightning.rewards"
BUILT_IN = {
    "exact_match": "grpo_lightning.rewards.matching:ExactMatch",
    "numeric_match": "grpo_lightning.rewards.matching:NumericMatch",
    "math_verify": "grpo_lightning.rewards.mathematics:MathVerify",
    "regex_format": "grpo_lightning.rewards.matching:RegexFormat",
    "length_penalty": "grpo_lightning.rewards.penalties:LengthPenalty",
    "repetition_penalty": "grpo_lightning.rewards.penalties:RepetitionPenalty",
    "reasoning_gym_score": "grpo_lightning.rewards.reasoning:ReasoningGymScore",
    "reward_model": "grpo_lightning.rewards.reward_model:RewardModel",
}


@dataclass(kw_only=True)
class RewardSpec:
    """One reward function and how it is run.

    Args:
        path: ``package.module:function``, ``package.module.function``, ``file.py:function`` (from the working
            directory), or a built-in's name.
        weight: its share in the total.
        name: what its signals are called; the function's name when not given.
        timeout_seconds: how long one call may take; null: for ever, and on the calling thread, which functions that
            use signals need. Python can't kill a thread: a function that hangs past the limit is left behind.
        on_error: what an exception, a time-out or wrong values do: `raise` ends the run, `missing` counts it.
        kwargs: settings of a class (given to its constructor) or of a function (given at every call).
    """

    path: str
    weight: float = 1.0
    name: str | None = None
    timeout_seconds: float | None = 60.0
    on_error: Literal["raise", "missing"] = "raise"
    kwargs: dict[str, Any] = field(default_factory=dict)


def known_rewards() -> dict[str, str]:
    """Short names and where they lead: the built-ins, then what other distributions' entry points add."""
    known = dict(BUILT_IN)
    for point in entry_points(group=ENTRY_POINTS):
        if known.setdefault(point.name, point.value) != point.value:
            raise RewardError(
                f"The reward name {point.name!r} is taken twice, by {known[point.name]!r} and {point.value!r}: "
                "uninstall one of the two packages, or give the path of the one that you mean."
            )
    return known


def load_reward(spec: RewardSpec) -> Callable[..., Any]:
    """The function behind a spec; a class is instantiated with the spec's kwargs."""
    function = find_reward(spec.path)
    if inspect.isclass(function):
        function = _instance(function, spec)
    if not callable(function):
        raise RewardError(f"The reward {spec.path!r} is a {type(function).__name__}: name a function.")
    loaded: Callable[..., Any] = function
    return loaded


def find_reward(path: str) -> Any:
    """The function, class or callable object that a path names."""
    return _attribute(*_split(path), path)


def _split(path: str) -> tuple[ModuleType, str]:
    """The module that a path names, and the attribute in it."""
    is_short = ":" not in path and "." not in path
    target = known_rewards().get(path, path) if is_short else path
    if target.endswith(".py"):
        raise RewardError(f"The reward {path!r} names no function: write it as {path}:function.")
    module_name, colon, attribute = target.rpartition(":")
    if not colon:
        module_name, _, attribute = target.rpartition(".")
    if not module_name or not attribute:
        raise RewardError(f"The reward {path!r} is not known: {_hint(path)}")
    return _module(module_name, path), attribute


def _instance(cls: type, spec: RewardSpec) -> Any:
    try:
        return cls(**spec.kwargs)
    except RewardError:
        raise
    except TypeError as error:
        raise RewardError(f"The reward {spec.path!r} does not take the kwargs {spec.kwargs}: {error}.") from error
    except Exception as error:
        raise RewardError(
            f"The reward {spec.path!r} can't be made with the kwargs {spec.kwargs}: {type(error).__name__}: {error}."
        ) from error


def _module(name: str, path: str) -> ModuleType:
    if name.endswith(".py"):
        return _file_module(Path(name).expanduser(), path)
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise RewardError(
                f"The reward {path!r} names the module {name!r}, which does not exist: {_hint(path)}"
            ) from error
        raise RewardError(f"The reward {path!r} needs the module {error.name!r}: install it.") from error
    except (Exception, SystemExit) as error:
        raise RewardError(f"The reward module {name!r} failed to import: {type(error).__name__}: {error}") from error


def _file_module(file: Path, path: str) -> ModuleType:
    """The module of a file; two rewards of one file share it."""
    if not file.is_file():
        raise RewardError(f"The reward {path!r} names the file {str(file)!r}, which does not exist in {Path.cwd()}.")
    name = f"grpo_reward_{file.stem}_{sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise RewardError(f"The reward file {str(file)!r} is not a Python file: give one ending in .py.")
    _look_in(file.resolve().parent)
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RewardError(f"The reward file {str(file)!r} failed to load: {type(error).__name__}: {error}") from error
    return module


def _look_in(folder: Path) -> None:
    """Let imports find modules in `folder`; last, so that a file there never hides an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _attribute(module: ModuleType, name: str, path: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    near = get_close_matches(name, dir(module), n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "check its name."
    raise RewardError(f"The reward {path!r} names {name!r}, which its module does not have: {hint}")


def _hint(path: str) -> str:
    known = known_rewards()
    near = get_close_matches(path, known, n=1)
    begin = f"did you mean {near[0]!r}? " if near else ""
    return f"{begin}Give package.module:function, file.py:function, or one of {', '.join(known)}."
