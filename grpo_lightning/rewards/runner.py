"""Runs reward functions in TRL's calling convention and holds them to it.

A function gets the keywords `prompts`, `completions`, every dataset column, `completion_ids`, `trainer_state`, `log_extra` and
`log_metric` (those it names, or all with `**kwargs`), may be async, and gives one number, or None, for each completion.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.calling import Answer, OutOfTime, call_all
from grpo_lightning.rewards.function import RewardFunction, load_function
from grpo_lightning.rewards.loading import RewardSpec
from grpo_lightning.rewards.values import BadValues

__all__ = ["RewardResult", "RewardRunner"]

_NOT_COLUMNS = ("prompt", "completion")  # what TRL keeps back, too
_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardResult:
    """What K functions said of N completions."""

    rewards_NK: Tensor
    missing: dict[str, int]  # values that are missing, per function
    errors: dict[str, int]  # calls that failed, per function
    seconds: dict[str, float]  # of the call, per function
    metrics: dict[str, float] = field(default_factory=dict)  # what functions gave `log_metric`, averaged per name
    extras: dict[str, list[Any]] = field(default_factory=dict)  # what functions gave `log_extra`, N values each


class RewardRunner:
    """The reward functions of a run.

    Args:
        specs: at least one; names must differ.
    """

    def __init__(self, specs: Sequence[RewardSpec]) -> None:
        if not specs:
            raise RewardError("There are no rewards: name at least one reward function.")
        self._take([load_function(spec) for spec in specs])
        twice = sorted({n for n in self.names if self.names.count(n) > 1})
        if twice:
            raise RewardError(f"Two rewards are called {twice[0]!r}: give each a `name` of its own.")

    def each_alone(self) -> list[RewardRunner]:
        """A runner for each function by itself; none is loaded again."""
        runners = [copy(self) for _ in self._functions]
        for runner, function in zip(runners, self._functions, strict=True):
            runner._take([function])
        return runners

    def _take(self, functions: list[RewardFunction]) -> None:
        self._functions = functions
        self.names = [f.name for f in functions]
        self.paths = [f.spec.path for f in functions]
        self.weights = [float(f.spec.weight) for f in functions]

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise `RewardError` when a function asks for what rows of these columns don't give it."""
        given = dict.fromkeys(c for c in columns if c not in _NOT_COLUMNS) | dict.fromkeys(_GIVEN)
        for function in self._functions:
            function.keywords(given)

    def score(
        self,
        *,
        prompts: list[Any],
        completions: list[Any],
        columns: Mapping[str, list[Any]],
        completion_ids: list[list[int]] | None = None,
        trainer_state: Any = None,
        **extra: Any,
    ) -> RewardResult:
        """Rewards of N completions, and further keywords for the functions in `extra`.

        Raises `RewardError` for a function that breaks its contract with `on_error: raise`.
        """
        log = _Log()
        given: dict[str, Any] = {k: v for k, v in columns.items() if k not in _NOT_COLUMNS}
        given |= {"log_metric": log.metric, "log_extra": log.extra} | extra
        given |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        given |= {"trainer_state": _with_attributes(trainer_state)}
        answers = call_all(self._functions, given, len(completions))
        values = [_values(f, a, len(completions)) for f, a in zip(self._functions, answers, strict=True)]
        rewards_NK = torch.tensor(values, dtype=torch.float64).T.contiguous()
        return RewardResult(
            rewards_NK=rewards_NK,
            missing={n: int(torch.isnan(rewards_NK[:, k]).sum()) for k, n in enumerate(self.names)},
            errors={n: int(isinstance(a.found, BaseException)) for n, a in zip(self.names, answers, strict=True)},
            seconds={n: a.seconds for n, a in zip(self.names, answers, strict=True)},
            metrics=log.means(),
            extras=dict(log.extras),
        )


class _Log:
    """Takes what functions log, as TRL's `log_metric` and `log_extra` do."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = {}
        self.extras: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        self.metrics.setdefault(name, []).append(float(value))

    def extra(self, column: str, values: list[Any]) -> None:
        self.extras[column] = list(values)

    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self.metrics.items()}


def _with_attributes(state: Any) -> Any:
    """`trainer_state.global_step`, as functions written for TRL read it, for a plain dict."""
    return SimpleNamespace(**state) if isinstance(state, Mapping) else state


def _values(function: RewardFunction, answer: Answer, count: int) -> list[float]:
    if not isinstance(answer.found, BaseException):
        return answer.found
    if function.spec.on_error == "missing":
        return [math.nan] * count
    raise RewardError(
        f"{_problem(function, answer.found)} Repair it, or set on_error: missing to count it and go on."
    ) from answer.found


def _problem(function: RewardFunction, error: BaseException) -> str:
    begin = f"The reward {function.name!r}"
    if isinstance(error, BadValues):
        return f"{begin} {error}"
    if isinstance(error, OutOfTime):
        blocks = f" ({error} the event loop: await instead)" if str(error) else ""
        return f"{begin} took longer than its timeout_seconds of {function.spec.timeout_seconds:g}{blocks}."
    said = " ".join(_text(error).split()) or "no message"
    hint = " (Set timeout_seconds: null to run it on the main thread.)" if _wants_main_thread(said) else ""
    return f"{begin} raised {type(error).__name__}: {said.rstrip('.')}.{hint}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a hostile exception's own text may raise
        return ""


def _wants_main_thread(said: str) -> bool:
    return "main thread" in said or "threaded environment" in said
