"""Reward hacking: the reward rises, and what it was meant to measure does not."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_lightning.health.diagnosing.checks import Case, fixed, numbers_of
from grpo_lightning.health.diagnosing.comparing import Compared
from grpo_lightning.health.diagnosing.records import Finding

__all__ = ["hacking", "learning"]

_SIGNALS = (
    "reward_mean",
    "group_reward_std",
    "response_length_mean",
    "ngram_repetition",
    "prefix_repetition",
    "distinct_response_fraction",
)


def hacking(case: Case) -> Iterator[Finding]:
    """A template that the reward likes, or reward and evaluation that come apart."""
    reward = case.compare["reward_mean"]
    if reward is None or not (reward.rose(times=1.1, z=2.0) or reward.rose(times=1.1, z=2.0, since_start=True)):
        return
    marks, evaluation = _marks(case), _evaluation(case)
    better = evaluation is not None and evaluation.rose(least=0.02, z=0.0)
    worse = evaluation is not None and evaluation.fell(times=0.93, z=0.0, least=0.02)
    flat = evaluation is not None and not better
    spread_down = _either(case, "group_reward_std", "reward_std", times=0.7)
    if spread_down and marks and not better and (flat or len(marks) >= 2):
        yield _template(case, reward, marks, evaluation)
    elif worse and evaluation is not None:
        yield _apart(case, reward, evaluation)


def learning(case: Case) -> bool:
    """Whether the reward stands at least where it stood, and no evaluation says otherwise."""
    reward, evaluation = case.compare["reward_mean"], _evaluation(case)
    if reward is None or reward.fell(times=0.95, z=1.5) or reward.fell(times=0.95, z=1.5, since_start=True):
        return False
    return evaluation is None or not evaluation.fell(times=0.95, z=0.0, least=0.02)


def _evaluation(case: Case) -> Compared | None:
    """The held-out accuracy, or the first evaluation that there is."""
    names = ["eval_accuracy", *(s for s in case.compare.run.signals if s.startswith("eval_reward/"))]
    return next((it for name in names if (it := case.compare[name]) is not None), None)


def _marks(case: Case) -> list[str]:
    """What a template looks like."""
    compare = case.compare
    found = []
    length, loops = compare["response_length_mean"], compare["ngram_repetition"]
    starts, distinct = compare["prefix_repetition"], compare["distinct_response_fraction"]
    if length is not None and (length.rose(times=1.25) or length.rose(times=1.25, since_start=True)):
        found.append("responses longer")
    if loops is not None and (loops.rose(times=1.3, least=0.05) or loops.rose(times=1.3, least=0.05, since_start=True)):
        found.append("more repetition")
    if starts is not None and (
        starts.rose(times=1.3, least=0.1) or starts.rose(times=1.3, least=0.1, since_start=True)
    ):
        found.append("responses that start alike")
    if distinct is not None and (distinct.fell(times=0.85, least=0.05) or distinct.fell(times=0.7, since_start=True)):
        found.append("fewer different responses")
    return found


def _either(case: Case, first: str, other: str, *, times: float) -> bool:
    it = case.compare[first] or case.compare[other]
    return it is not None and (it.fell(times=times, z=1.5) or it.fell(times=times, z=1.5, since_start=True))


def _template(case: Case, reward: Compared, marks: list[str], evaluation: Compared | None) -> Finding:
    base = reward.before if reward.rose(times=1.1, z=2.0) else reward.start
    held = (
        f"the evaluation went from {fixed(evaluation.before)} to {fixed(evaluation.after)}"
        if evaluation is not None
        else "no evaluation says otherwise"
    )
    return Finding(
        name="template_hacking",
        level="reward",
        strength="strong",
        what=(
            f"Reward hacking by template: the reward rose from {fixed(base)} to {fixed(reward.after)} while its spread"
            f" inside groups fell, with {', '.join(marks)}; {held}."
        ),
        numbers=numbers_of(case, *_SIGNALS, "eval_accuracy"),
        steps=case.span,
        why="The policy has found a form that the reward likes whatever the question is: more training makes it firmer.",
        first="Read the best rewarded responses in the evidence and make the reward refuse their common form.",
    )


def _apart(case: Case, reward: Compared, evaluation: Compared) -> Finding:
    return Finding(
        name="reward_and_evaluation_apart",
        level="reward",
        strength="strong",
        what=(
            f"The training reward rose to {fixed(reward.after)} while the evaluation ({evaluation.signal}) fell from"
            f" {fixed(evaluation.before)} to {fixed(evaluation.after)}."
        ),
        numbers=numbers_of(case, "reward_mean", evaluation.signal, *_SIGNALS[1:]),
        steps=case.span,
        why="What the reward measures and what is wanted have come apart: the reward is being gamed, or overfitted.",
        first="Read well rewarded training responses in the evidence, and score them as the evaluation would.",
    )
