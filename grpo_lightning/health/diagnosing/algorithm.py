"""The last level: numbers that are none, the update, and what entropy and KL say together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_lightning.health.diagnosing.checks import Case, Check, alert_findings, fixed, level_of, numbers_of, percent
from grpo_lightning.health.diagnosing.comparing import Compared
from grpo_lightning.health.diagnosing.hacking import learning
from grpo_lightning.health.diagnosing.records import Finding, Level, Number, Span

__all__ = ["QUADRANTS", "Quadrant", "algorithm"]

_SPIKE = 8.0
_FROZEN = 1e-6  # of the largest update so far


@dataclass(frozen=True, kw_only=True, slots=True)
class Quadrant:
    """What entropy and KL mean together."""

    means: str
    first: str


QUADRANTS: dict[tuple[str, str], Quadrant] = {
    ("low", "rising"): Quadrant(
        means="the policy narrows onto something far from the reference: over-optimisation, on the way to one answer",
        first="Check the reward for what it rewards now; then raise the KL coefficient or lower the learning rate.",
    ),
    ("low", "stalled"): Quadrant(
        means="the policy has settled on few answers and no longer moves: solved, or stuck",
        first="The reward's level tells which; if stuck, raise the temperature or the group size, or go back.",
    ),
    ("high", "rising"): Quadrant(
        means="the policy falls apart: it leaves the reference and its answers become noise",
        first="Go back before the onset; lower the learning rate; look for a batch or a reward out of scale at the onset.",
    ),
    ("high", "stalled"): Quadrant(
        means="the policy is pushed about without a direction: the reward is noise to it",
        first="Score the same responses twice; look at groups with equal responses and different rewards.",
    ),
}


def algorithm(case: Case) -> Level:
    """Numbers that are none, rewards against advantages, the update, entropy and KL."""
    return level_of(
        "algorithm",
        case,
        [
            Check(said="values that are not finite", run=_not_finite),
            Check(said="order of rewards and advantages", run=_disagree, needs=("reward_rank_agreement",)),
            Check(said="whether the weights move", run=_frozen, needs=("update_norm",)),
            Check(said="gradient spikes, and what came with them", run=_spike, needs=("grad_norm",)),
            Check(said="settings that changed", run=_settings),
            Check(said="importance ratios", run=_ratios, needs=("ratio_max",)),
            Check(said="entropy and KL together", run=_quadrant, needs=("entropy", "kl")),
            Check(said="entropy", run=_entropy_alone, needs=("entropy",)),
            Check(said="alerts of this cause", run=lambda c: alert_findings(c, "algorithm", "algorithm")),
        ],
    )


def _not_finite(case: Case) -> Iterator[Finding]:
    """Where the first number that is none comes from."""
    first: list[tuple[int, int, str, float]] = []
    for signal in case.compare.run.signals:
        column = case.compare.run[signal]
        counted = signal.startswith("nonfinite_count_")
        if max(column.values) <= 0 if counted else math.isfinite(sum(column.values)):
            continue
        for step, value in zip(column.steps, column.values, strict=True):
            if (counted and value > 0) or (not counted and not math.isfinite(value)):
                first.append((step, 0 if counted else 1, signal, value))
                break
    if not first:
        return
    first.sort()
    step, _, signal, value = first[0]
    same = ", ".join(name for at, _, name, _ in first[1:9] if at - step <= 1)
    source = signal.removeprefix("nonfinite_count_").replace("_", " ")
    yield Finding(
        name="not_finite",
        level="algorithm",
        strength="strong",
        what=f"The first value that is not finite is at step {step}, in {source}"
        + (f"; with it: {same}." if same else "."),
        numbers=(Number(signal=signal, before=None, after=value, step=step),),
        steps=Span(first=step, last=max(at for at, *_ in first)),
        why="From there on it spreads: one such value makes loss, gradient and weights of its kind.",
        first="Look at the source named here at that step; rewards and log-probs come before loss and gradient.",
    )


def _disagree(case: Case) -> Iterator[Finding]:
    it = case.compare["reward_rank_agreement"]
    if it is not None and it.after < 0.99:
        yield Finding(
            name="rewards_and_advantages_apart",
            level="algorithm",
            strength="strong",
            what=f"In {percent(it.after)} of the pairs only, the better reward has the better advantage.",
            numbers=numbers_of(case, "reward_rank_agreement", "advantage_mean", "advantage_std"),
            steps=case.span,
            why="This is 1 by construction: the update pushes the wrong way, which is a bug.",
            first="Follow one group of the evidence by hand from rewards to advantages.",
        )


def _frozen(case: Case) -> Iterator[Finding]:
    column, it = case.compare.run["update_norm"], case.compare["update_norm"]
    largest = max((value for value in column.values if math.isfinite(value)), default=0.0)
    if it is None or it.after > _FROZEN * largest:
        return
    rate, skipped = case.compare["lr"], case.compare["updates_skipped"]
    grad = case.compare["grad_norm"]
    if rate is not None and rate.after == 0:
        reason = "the learning rate is 0"
    elif skipped is not None and skipped.after > 0:
        reason = "every update is skipped"
    elif grad is not None and grad.after == 0:
        reason = "the gradient is 0"
    else:
        reason = "although there is a gradient: the optimizer does not hold the weights that are trained"
    yield Finding(
        name="policy_frozen",
        level="algorithm",
        strength="strong",
        what=f"The weights do not move: {reason}.",
        numbers=numbers_of(case, "update_norm", "grad_norm", "lr", "updates_skipped", "signal_token_fraction"),
        steps=case.span,
        why="Rewards change by chance only; hours pass without training.",
        first="Check requires_grad, the optimizer's parameter groups and the schedule.",
    )


def _spike(case: Case) -> Iterator[Finding]:
    it = case.compare["grad_norm"]
    if it is None or not it.before or not case.acute or it.extreme < _SPIKE * it.before:
        return
    near = Span(first=it.extreme_step - 1, last=it.extreme_step + 1)
    names = ("reward_outlier_fraction", "advantage_tail_fraction", "advantage_abs_max", "advantage_top_group_share",
             "prompt_length_mean", "response_length_max", "ratio_max", "kl_max", "kl")  # fmt: skip
    beside = [number for name in names if (number := _beside(case, name, near)) is not None]
    groups = sorted(
        {str(row.get("row_id")) for row in case.evidence if str(row.get("why")).endswith("outlier") and _at(row, near)}
    )
    with_it = ", ".join(f"{n.signal} {fixed(n.before)} to {fixed(n.after)}" for n in beside)
    yield Finding(
        name="gradient_spike",
        level="algorithm",
        strength="strong" if it.after >= _SPIKE * it.before or beside else "hint",
        what=(
            f"The gradient norm is {fixed(it.extreme)} at step {it.extreme_step}, {it.extreme / it.before:.0f} times the"
            f" steps before"
            + (f"; in the same step: {with_it}" if with_it else "; nothing else stands out in that step")
            + (f"; groups of rows {', '.join(groups[:6])}." if groups else ".")
        ),
        numbers=(it.at_extreme, *beside),
        steps=near,
        why="With clipping a single spike is survived; what came with it says whether a batch or the policy is to blame.",
        first="Read the groups named here; if a batch is to blame, skip it, else lower the learning rate.",
    )


def _beside(case: Case, signal: str, near: Span) -> Number | None:
    """The signal's value in these steps, where it stands out."""
    it = case.compare[signal]
    if it is None or it.before is None:
        return None
    rows = case.compare.run[signal].pairs(near.first, near.last)
    step, value = max(rows, key=lambda row: abs(row[1] - it.before), default=(0, it.before))  # type: ignore[operator]
    out = abs(value - it.before) > max(5.0 * it.spread, 0.3 * abs(it.before), 1e-9)
    return Number(signal=signal, before=it.before, after=value, step=step) if out else None


def _at(row: Mapping[str, Any], near: Span) -> bool:
    step = row.get("step")
    return isinstance(step, int) and near.first <= step <= near.last


def _settings(case: Case) -> Iterator[Finding]:
    """Learning rate and KL coefficient at the onset."""
    for signal, what in (("lr", "learning rate"), ("kl_coef", "KL coefficient")):
        it = case.compare[signal]
        if it is None or it.before is None or not case.acute:
            continue
        if it.rose(times=2.0, z=6.0) or it.fell(times=0.5, z=6.0):
            yield Finding(
                name=f"{signal}_changed",
                level="algorithm",
                strength="strong" if signal == "lr" and it.after > it.before else "hint",
                what=f"The {what} went from {fixed(it.before)} to {fixed(it.after)} around the onset.",
                numbers=numbers_of(case, signal, "update_norm", "kl"),
                steps=case.span,
                why="What changes at the onset by our own hand is the first thing to take back.",
                first="Check the schedule and what was changed at the last restart.",
            )
    size = case.compare["update_to_weight"]
    if size is not None and case.acute and size.rose(times=8.0, z=5.0):
        yield Finding(
            name="update_too_large",
            level="algorithm",
            strength="strong",
            what=f"Updates are {size.after / (size.before or 1.0):.0f} times as large as before.",
            numbers=numbers_of(case, "update_to_weight", "update_norm", "lr", "grad_norm"),
            steps=case.span,
            why="The policy moves in jumps: the rollouts of one step say little about the next policy.",
            first="Lower the learning rate, or clip the gradient.",
        )


def _ratios(case: Case) -> Iterator[Finding]:
    it = case.compare["ratio_max"]
    if it is not None and case.acute and it.rose(times=5.0, z=5.0) and it.after > 10.0:
        yield Finding(
            name="ratios_far",
            level="algorithm",
            strength="hint",
            what=f"The greatest importance ratio is {fixed(it.after)}, {fixed(it.before)} before.",
            numbers=numbers_of(case, "ratio_max", "clip_high_fraction", "clip_low_fraction", "rollout_mismatch_kl"),
            steps=case.span,
            why="Old log-probs and policy have come apart: most of such an update is clipped or noise.",
            first="Fewer updates per rollout, a lower learning rate; check the sampler first.",
        )


# ---- entropy and KL


def _quadrant(case: Case) -> Iterator[Finding]:
    entropy, kl = case.compare["entropy"], case.compare["kl"]
    side = _side(entropy, acute_only=learning(case))
    if entropy is None or kl is None or side is None:
        return
    motion = (
        "rising" if kl.rose(times=2.0) or (kl.before is None and kl.rose(times=3.0, since_start=True)) else "stalled"
    )
    if learning(case) and not _suspected(case):
        return
    quadrant = QUADRANTS[side, motion]
    yield Finding(
        name=f"entropy_{side}_kl_{motion}",
        level="algorithm",
        strength="strong" if case.acute else "hint",
        what=(
            f"Entropy {'falls' if side == 'low' else 'rises'} ({fixed(_base(entropy))} to {fixed(entropy.after)} nats) and KL"
            f" {'rises' if motion == 'rising' else 'stands still'} ({fixed(kl.before)} to {fixed(kl.after)}): {quadrant.means}."
        ),
        numbers=numbers_of(case, "entropy", "kl", "reward_mean", "group_reward_std", "update_norm"),
        steps=case.span,
        why="Entropy says how many answers are left, KL how far the policy has gone: together they tell four cases apart.",
        first=quadrant.first,
    )


def _entropy_alone(case: Case) -> Iterator[Finding]:
    """Where no KL is measured."""
    entropy = case.compare["entropy"]
    side = _side(entropy, acute_only=learning(case))
    if entropy is None or side is None or case.compare.measured("kl") or (learning(case) and not _suspected(case)):
        return
    yield Finding(
        name=f"entropy_{side}",
        level="algorithm",
        strength="strong" if case.acute else "hint",
        what=f"Entropy went from {fixed(_base(entropy))} to {fixed(entropy.after)} nats; no KL to the reference is measured.",
        numbers=numbers_of(case, "entropy", "entropy_p10", "reward_mean", "group_reward_std"),
        steps=case.span,
        why="Towards 0 one answer is left; several times the start the answers are noise.",
        first="Look at rewards and responses at the onset; measure the KL to tell drift from noise.",
    )


def _side(entropy: Compared | None, *, acute_only: bool) -> str | None:
    """Against the steps before and the run's own start; the latter moves in learning, too."""
    if entropy is None:
        return None
    chosen = (entropy.before,) if acute_only else (entropy.before, entropy.start)
    bases = [base for base in chosen if base is not None]
    if any(entropy.after >= 1.6 * base for base in bases) and entropy.rose(times=1.25, z=2.0):
        return "high"
    return "low" if any(entropy.after <= 0.5 * base for base in bases) else None


def _base(entropy: Compared) -> float | None:
    return entropy.before if entropy.before is not None else entropy.start


def _suspected(case: Case) -> bool:
    """Whether an alert says that the algorithm is to blame."""
    return any(alert.cause == "algorithm" and alert.severity == "critical" for alert in case.alerts)
