"""Runs reward functions in TRL's calling convention and holds them to it.

A function gets the keywords `prompts`, `completions`, every dataset column, `completion_ids` and `trainer_state` (those it
names, or all with `**kwargs`), may be async, and gives one number, or None, for each completion.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.loading import RewardSpec, load_reward

__all__ = ["RewardResult", "RewardRunner"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """What K functions said of N completions."""

    rewards_NK: Tensor  # float64, unweighted; NaN where missing, infinities as given
    missing: dict[str, int]  # values that are missing, per function
    errors: dict[str, int]  # calls that failed, per function
    seconds: dict[str, float]  # of the call, per function


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reward:
    name: str
    spec: RewardSpec
    function: Callable[..., Any]


class RewardRunner:
    """The reward functions of a run.

    Args:
        specs: at least one; names must differ.
    """

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        self._rewards = [_load(spec) for spec in specs]
        self.names = [r.name for r in self._rewards]
        self.weights = [float(r.spec.weight) for r in self._rewards]
        twice = sorted({n for n in self.names if self.names.count(n) > 1})
        if twice:
            raise RewardError(f"Two rewards are called {twice[0]!r}: give each a `name` of its own.")

    def score(
        self,
        *,
        prompts: list[Any],
        completions: list[Any],
        columns: dict[str, list[Any]],
        completion_ids: list[list[int]] | None = None,
        trainer_state: Any = None,
    ) -> RewardResult:
        """Rewards of N completions; raises `RewardError` for a function that breaks its contract with `on_error: raise`."""
        given = {**columns, "prompts": prompts, "completions": completions}
        given |= {"completion_ids": completion_ids, "trainer_state": trainer_state}
        outcomes = _run_all(self._rewards, given, len(completions))
        rewards_NK = torch.tensor([o.values for o in outcomes], dtype=torch.float64).T.contiguous()
        return RewardResult(
            rewards_NK=rewards_NK,
            missing={n: int(torch.isnan(rewards_NK[:, k]).sum()) for k, n in enumerate(self.names)},
            errors={n: int(o.failed) for n, o in zip(self.names, outcomes, strict=True)},
            seconds={n: o.seconds for n, o in zip(self.names, outcomes, strict=True)},
        )


def _load(spec: RewardSpec) -> _Reward:
    function = load_reward(spec)
    named = getattr(function, "__name__", None) or type(function).__name__
    if not math.isfinite(spec.weight):
        raise RewardError(f"The weight of the reward {spec.path!r} is {spec.weight}: give a finite number.")
    return _Reward(name=spec.name or named, spec=spec, function=function)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    values: list[float]
    failed: bool
    seconds: float


def _run_all(rewards: list[_Reward], given: dict[str, Any], count: int) -> list[_Outcome]:
    """Sync functions one after the other, async ones together on a loop of their own thread."""
    together = [r for r in rewards if _is_async(r.function)]
    done = _run_async(together, given, count) if together else {}
    return [done[r.name] if r.name in done else _run_sync(r, given, count) for r in rewards]


def _is_async(function: Callable[..., Any]) -> bool:
    called = function if inspect.isroutine(function) else type(function).__call__
    return inspect.iscoroutinefunction(called)


def _run_sync(reward: _Reward, given: dict[str, Any], count: int) -> _Outcome:
    started = perf_counter()
    result = _in_thread(lambda: reward.function(**_keywords(reward, given)), reward.spec.timeout_seconds)
    return _judge(reward, result, count, perf_counter() - started)


def _run_async(rewards: list[_Reward], given: dict[str, Any], count: int) -> dict[str, _Outcome]:
    async def one(reward: _Reward) -> _Outcome:
        started = perf_counter()
        try:
            call = reward.function(**_keywords(reward, given))
            result: Any = await asyncio.wait_for(call, reward.spec.timeout_seconds)
        except Exception as error:  # noqa: BLE001 - a user's function raises what it likes
            result = error
        return _judge(reward, result, count, perf_counter() - started)

    async def every() -> list[_Outcome]:
        return list(await asyncio.gather(*(one(r) for r in rewards)))

    found = _in_thread(lambda: asyncio.run(every()), None)
    if isinstance(found, BaseException):
        raise found
    return {r.name: o for r, o in zip(rewards, found, strict=True)}


def _in_thread(call: Callable[[], Any], timeout: float | None) -> Any:
    """What `call` gives or raises, or a TimeoutError. Python can't kill a thread: one that hangs is left behind."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            box.append(error)

    thread = threading.Thread(target=run, daemon=True, name="reward")
    thread.start()
    thread.join(timeout)
    return box[0] if box else TimeoutError()


def _keywords(reward: _Reward, given: dict[str, Any]) -> dict[str, Any]:
    """What the function names, or everything where it takes `**kwargs`; settings from the config on top."""
    is_instance = not inspect.isroutine(reward.function)
    settings = {} if is_instance else reward.spec.kwargs
    parameters = inspect.signature(reward.function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return given | settings
    named = {p.name for p in parameters}
    return {k: v for k, v in (given | settings).items() if k in named}


def _judge(reward: _Reward, result: Any, count: int, seconds: float) -> _Outcome:
    if isinstance(result, KeyboardInterrupt | SystemExit):
        raise result
    problem = _problem(reward, result)
    values: list[float] | None = None
    if problem is None:
        values, problem = _numbers(reward, result, count)
    if problem is None and values is not None:
        return _Outcome(values=values, failed=False, seconds=seconds)
    if reward.spec.on_error == "missing":
        return _Outcome(values=[math.nan] * count, failed=True, seconds=seconds)
    cause = result if isinstance(result, BaseException) else None
    raise RewardError(f"{problem} Repair it, or set on_error: missing to count it and go on.") from cause


def _problem(reward: _Reward, result: Any) -> str | None:
    if isinstance(result, TimeoutError) and not result.args:
        return f"The reward {reward.name!r} took longer than its timeout_seconds of {reward.spec.timeout_seconds}."
    if isinstance(result, BaseException):
        text = " ".join(str(result).split())
        return f"The reward {reward.name!r} raised {type(result).__name__}: {text}."
    return None


def _numbers(reward: _Reward, result: Any, count: int) -> tuple[list[float] | None, str | None]:
    """The values as floats, or what is wrong with them."""
    if hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
        return None, f"The reward {reward.name!r} gave a {type(result).__name__}: it must give a list of numbers."
    items = list(result)
    if len(items) != count:
        return None, f"The reward {reward.name!r} gave {len(items)} values for {count} completions: it must give one for each."
    values = []
    for item in items:
        value = _number(item)
        if value is None:
            return None, f"The reward {reward.name!r} gave {item!r} ({type(item).__name__}): values must be numbers or None."
        values.append(value)
    return values, None


def _number(item: Any) -> float | None:
    if item is None:
        return math.nan
    if isinstance(item, str | bytes) or not hasattr(item, "__float__"):
        return None
    try:
        return float(item)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
