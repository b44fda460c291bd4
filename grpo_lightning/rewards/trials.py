"""Reward functions tried on responses that should not be worth much, before an hour is spent on training for them.

From a policy's own responses come others that nobody would want: empty ones, the prompt itself, the response four times over,
its first half, another prompt's response. A function that gives these as much as the policy's own can be won without
solving the task; one that gives everything the same teaches nothing; one that changes its mind is noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.runner import RewardRunner

__all__ = ["TRIALS", "FunctionTrial", "Responses", "Values", "try_rewards"]

Values = list[float]  # one per response, NaN where missing
_REPEATS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """P prompts with G responses each, as reward functions get them."""

    prompts: list[Any]  # P·G
    texts: list[str]  # P·G
    chat: list[bool]  # P·G: whether a response is handed over as a chat of one message
    columns: Mapping[str, list[Any]]  # P·G values each
    group_size: int
    encode: Callable[[list[str]], list[list[int]]]

    def completions(self, texts: Sequence[str]) -> list[Any]:
        """Texts in the form that the functions expect."""
        return [
            [{"role": "assistant", "content": text}] if chat else text
            for text, chat in zip(texts, self.chat, strict=True)
        ]


def _prompt_text(prompt: Any) -> str:
    """A prompt, or the last message of a chat."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) if prompt else ""


def _swapped(given: Responses) -> list[str]:
    """Each prompt gets the responses of the next one."""
    return given.texts[given.group_size :] + given.texts[: given.group_size]


TRIALS: dict[str, Callable[[Responses], list[str]]] = {
    "again": lambda given: list(given.texts),
    "empty": lambda given: [""] * len(given.texts),
    "echoed": lambda given: [_prompt_text(prompt) for prompt in given.prompts],
    "repeated": lambda given: [" ".join([text] * _REPEATS) for text in given.texts],
    "truncated": lambda given: [text[: len(text) // 2] for text in given.texts],
    "swapped": _swapped,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionTrial:
    """What one function gave."""

    name: str
    weight: float
    own: Values
    trials: dict[str, Values] = field(default_factory=dict)  # by trial; without those that failed
    failures: dict[str, str] = field(default_factory=dict)  # by trial, what was said


def try_rewards(runner: RewardRunner, given: Responses, own: Sequence[Values]) -> list[FunctionTrial]:
    """Call every function on every kind of response. `own`: for each function, its values of the policy's responses."""
    return [_try(alone, given, values) for alone, values in zip(runner.each_alone(), own, strict=True)]


def _try(runner: RewardRunner, given: Responses, own: Values) -> FunctionTrial:
    found = FunctionTrial(name=runner.names[0], weight=runner.weights[0], own=own)
    for trial, make in TRIALS.items():
        texts = make(given)
        try:
            result = runner.score(
                prompts=given.prompts,
                completions=given.completions(texts),
                columns=given.columns,
                completion_ids=given.encode(texts),
                trainer_state={"global_step": 0, "epoch": 0},
            )
        except RewardError as error:
            found.failures[trial] = str(error)
            continue
        found.trials[trial] = [math.nan if v is None else v for v in result.rewards_NK[:, 0].tolist()]
    return found


# ---- what the values say

_UNWANTED = {
    "empty": "an empty response",
    "echoed": "the prompt itself",
    "repeated": "the response four times over",
    "truncated": "the first half of a response",
}
_CLOSE = 1e-9


def find_faults(trials: Sequence[FunctionTrial]) -> list[str]:
    """What is wrong with the functions, a sentence each; nothing for functions that can teach."""
    return [fault for trial in trials for fault in _of_one(trial)] + _of_total(trials)


def _of_one(trial: FunctionTrial) -> list[str]:
    name = f"The reward {trial.name!r}"
    faults = [f"{name} fails on {kind} responses: {said}" for kind, said in trial.failures.items()]
    scored = _finite(trial.own)
    if not scored:
        return [*faults, f"{name} gave no finite value for any of the policy's {len(trial.own)} responses."]
    everything = {value for values in (trial.own, *trial.trials.values()) for value in _finite(values)}
    if max(everything) - min(everything) <= _CLOSE and len(trial.trials) > 1:
        faults.append(f"{name} gave {scored[0]:g} for every response, the policy's own and all others.")
    changed = sum(not _same(a, b) for a, b in zip(trial.own, trial.trials.get("again", []), strict=False))
    if changed:
        faults.append(f"{name} gave other values for {changed} of {len(trial.own)} responses when called again.")
    return faults


def _of_total(trials: Sequence[FunctionTrial]) -> list[str]:
    """Unwanted responses that pay, by the weighted total that training goes by."""
    own = _totals([(t.weight, t.own) for t in trials])
    if not own:
        return []
    usual, spread = _mean(own), max(own) - min(own)
    faults = []
    for kind, words in _UNWANTED.items():
        found = _totals([(t.weight, t.trials.get(kind, [])) for t in trials])
        level = _mean(found) if found else -math.inf
        if level > usual + _CLOSE or (level > usual - _CLOSE and spread > _CLOSE):
            faults.append(
                f"The reward can be won without the task: {words} gets {level:.3g}, the policy's own responses "
                f"{usual:.3g}."
            )
    return faults


def _totals(weighted: Sequence[tuple[float, Values]]) -> list[float]:
    """Weighted sums of the functions' values; none where a function has no values, and without those not finite."""
    if any(not values for _, values in weighted):
        return []
    sums = [
        sum(w * v for (w, _), v in zip(weighted, row, strict=True))
        for row in zip(*(v for _, v in weighted), strict=True)
    ]
    return _finite(sums)


def _finite(values: Sequence[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
