"""The third level: the reward functions, and the sampler that makes what they judge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from grpo_lightning.health.diagnosing.checks import (
    Case,
    Check,
    alert_findings,
    drift_findings,
    fixed,
    level_of,
    numbers_of,
    percent,
)
from grpo_lightning.health.diagnosing.comparing import level_changes
from grpo_lightning.health.diagnosing.evidence import evidence_findings
from grpo_lightning.health.diagnosing.hacking import hacking, learning
from grpo_lightning.health.diagnosing.records import Finding, Level, Number, Span

__all__ = ["rewards"]

_FUNCTION = re.compile(r"reward/(.+)_mean")
_STAIRS = 1.5  # times the level before
_LAG = 12  # steps that kl may need to follow a reward's scale
_MISMATCH = 0.01  # nats a token


def rewards(case: Case) -> Level:
    """Reward code, each reward function, their scale, hacking, groups and responses, the sampler."""
    level = level_of(
        "reward",
        case,
        [
            Check(said="reward code against the snapshot", run=lambda c: drift_findings(c, "reward", "reward")),
            Check(said="reward functions that fail or give nothing", run=_failing),
            Check(said="reward scale at the steps where KL rises", run=_scale_stairs, needs=("reward_std", "kl")),
            Check(said="the scale of the rewards", run=_scale, needs=("reward_std",)),
            Check(said="reward hacking", run=hacking, needs=("reward_mean",)),
            Check(said="which reward function moved", run=_which_moved),
            Check(said="the spread inside groups", run=_no_spread, needs=("group_reward_std",)),
            Check(said="responses cut, empty or too long", run=_cut),
            Check(said="sampler against trainer", run=_mismatch, needs=("rollout_mismatch_kl",)),
            Check(said="the sampler's balance from step to step", run=_imbalance, needs=("prompt_length_mean",)),
            Check(said="groups and responses in the evidence", run=lambda c: evidence_findings(c.evidence)),
            Check(said="alerts of this cause", run=lambda c: alert_findings(c, "reward", "reward", "sampling")),
        ],
    )
    checked, unchecked = list(level.checked), list(level.unchecked)
    if case.drifts is None:
        unchecked.insert(0, f"{checked.pop(0)}: {case.why_no_drifts}")
    if not case.evidence:
        checked.remove("groups and responses in the evidence")
        unchecked.append("groups and responses: no evidence was kept around the onset")
    return replace(level, checked=tuple(checked), unchecked=tuple(unchecked))


# ---- reward functions


def _functions(case: Case) -> list[str]:
    return [m[1] for signal in case.compare.run.signals if (m := _FUNCTION.fullmatch(signal))]


def _failing(case: Case) -> Iterator[Finding]:
    for name in _functions(case):
        yield from _fails(case, name)


def _fails(case: Case, name: str) -> Iterator[Finding]:
    errors, missing = case.compare[f"reward/{name}_errors"], case.compare[f"reward/{name}_missing"]
    failed = errors is not None and max(errors.after, errors.extreme) > 0
    absent = missing is not None and (
        missing.rose(times=1.5, z=4.0, least=1.0) or (missing.before is None and missing.after > 0)
    )
    if failed or absent:
        rows = f"{fixed(missing.after)} rollouts a step without a reward" if missing is not None and absent else ""
        calls = f"{fixed(max(errors.after, errors.extreme))} calls failed" if errors is not None and failed else ""
        yield Finding(
            name="reward_function_fails",
            level="reward",
            strength="strong",
            what=f"The reward function {name}: {' and '.join(filter(None, (calls, rows)))}.",
            numbers=numbers_of(case, f"reward/{name}_errors", f"reward/{name}_missing", f"reward/{name}_mean"),
            steps=case.span,
            why="Where it gives nothing the total is made of the other functions: the policy learns those alone.",
            first=f"Call {name} on the evidence's responses; look for a time-out, a service that is away, an odd format.",
        )


def _which_moved(case: Case) -> Iterator[Finding]:
    found = {name: it for name in _functions(case) if (it := case.compare[f"reward/{name}_mean"]) is not None}
    moved = {name: it for name, it in found.items() if it.rose(times=1.15, z=4.0) or it.fell(times=0.85, z=4.0)}
    if not moved or not case.acute:
        return
    top = max(moved, key=lambda name: abs(moved[name].z))
    still = [name for name in found if name not in moved]
    others = f"; {', '.join(still)} stayed" if still else ""
    shown = [f"reward/{name}_{part}" for name in (*moved, *still) for part in ("mean", "std")]
    changes = ", ".join(f"{name} {fixed(it.before)} to {fixed(it.after)}" for name, it in moved.items())
    yield Finding(
        name="reward_function_moved",
        level="reward",
        strength="strong" if still else "hint",
        what=f"Of the reward functions, {top} moved most ({changes}{others}).",
        numbers=numbers_of(case, *shown[:8]),
        steps=case.span,
        why="The total is a sum: the function that moves says what the policy is learning, or what broke.",
        first=f"Read responses that {top} rewards in the evidence: are they what you want?",
    )


def _scale_stairs(case: Case) -> Iterator[Finding]:
    """The scale of the rewards goes up in steps, and KL with it."""
    if case.span is None:
        return
    run, last = case.compare.run, case.span.last
    rises = [m for m in level_changes(run["reward_std"], times=_STAIRS, first=0, last=last) if _up(m.number)]
    climbs = [m for m in level_changes(run["kl"], times=_STAIRS, first=0, last=last) if _up(m.number)]
    pairs = [(r, k) for r in rises for k in climbs if -2 <= k.step - r.step <= _LAG]
    if len({r.step for r, _ in pairs}) < 2 and not (pairs and _both_rose(case)):
        return
    told = "; ".join(
        f"at step {r.step} reward_std {fixed(r.number.before)} to {fixed(r.number.after)}, then kl at {k.step}"
        f" {fixed(k.number.before)} to {fixed(k.number.after)}"
        for r, k in pairs[:4]
    )
    yield Finding(
        name="reward_scale_stairs",
        level="reward",
        strength="strong",
        what=f"KL rises where the scale of the rewards does: {told}.",
        numbers=tuple(
            replace(moved.number, signal=signal)
            for pair in pairs[:4]
            for signal, moved in zip(("reward_std", "kl"), pair, strict=True)
        ),
        steps=Span(first=pairs[0][0].step, last=max(k.step for _, k in pairs)),
        why="A larger reward against the same KL coefficient is a weaker leash: each rise lets the policy go farther.",
        first="Find who changes the scale (a weight, a curriculum, a reward model), and scale the KL coefficient with it.",
    )


def _both_rose(case: Case) -> bool:
    spread, kl = case.compare["reward_std"], case.compare["kl"]
    rose = spread is not None and spread.rose(times=_STAIRS) and kl is not None and kl.rose(times=_STAIRS)
    return case.acute and rose


def _up(number: Number) -> bool:
    return (number.after or 0.0) > (number.before or 0.0)


def _scale(case: Case) -> Iterator[Finding]:
    it, top = case.compare["reward_std"], case.compare["reward_max"]
    wide = it is not None and case.acute and it.rose(times=1.8, z=5.0)
    out = case.compare["reward_outlier_fraction"]
    outliers = out is not None and case.acute and max(out.after, out.extreme) > max(0.005, 3 * (out.before or 0.0))
    if not (wide or outliers) or it is None:
        return
    said = (
        f"Rewards spread {fixed(it.after)} instead of {fixed(it.before)}" if wide else "Single rewards are out of scale"
    )
    if outliers and out is not None:
        said += f"; at step {out.extreme_step} {out.extreme:.1%} of them lie far outside"
    yield Finding(
        name="reward_scale",
        level="reward",
        strength="strong" if wide or (top is not None and abs(top.extreme_z) > 10) else "hint",
        what=f"{said}.",
        numbers=numbers_of(case, "reward_std", "reward_max", "reward_min", "reward_outlier_fraction", "advantage_std"),
        steps=case.span,
        why="A few values out of scale make the whole update; a larger scale outweighs the KL term.",
        first="Look which function gives them (reward/<name>_std), and bound it.",
    )


def _no_spread(case: Case) -> Iterator[Finding]:
    """No spread left in the groups: solved, too hard, or one answer."""
    it, dead = case.compare["group_reward_std"], case.compare["dead_group_fraction"]
    if it is None or not (it.fell(times=0.4, z=2.5) or it.fell(times=0.4, z=2.5, since_start=True)):
        return
    low, high, mid = (case.compare[f"dead_group_fraction_{part}"] for part in ("all_low", "all_high", "mid"))
    named = {"too hard (all lowest)": low, "solved (all highest)": high, "all alike": mid}
    shares = {name: part.after for name, part in named.items() if part is not None}
    kind = max(shares, key=lambda name: shares[name]) if shares else None
    reward = case.compare["reward_mean"]
    risen = reward is not None and reward.rose(times=1.1, since_start=True) and learning(case)
    solved = risen or (kind is not None and kind.startswith("solved"))
    split = f"; most of the dead ones are {kind} ({percent(shares[kind])} of all groups)" if kind else ""
    yield Finding(
        name="spread_gone",
        level="reward",
        strength="hint" if solved or not case.acute else "strong",
        what=f"The spread of the rewards inside groups is {fixed(it.after)}, {fixed(it.before or it.start)} before{split}"
        + ("; the reward has risen." if risen else "."),
        numbers=numbers_of(
            case, "group_reward_std", "dead_group_fraction", "reward_mean", "distinct_response_fraction", "entropy"
        ),
        steps=case.span,
        why=f"The advantage is made of this spread; with {percent(dead.after if dead else None)} dead groups little is learned.",
        first="Look at groups of the smallest spread in the evidence: equal responses, or a reward that sees no difference?",
    )


# ---- the sampler


def _cut(case: Case) -> Iterator[Finding]:
    cut, empty = case.compare["truncated_fraction"], case.compare["empty_fraction"]
    if empty is not None and (empty.rose(z=4.0, least=0.05) or empty.after >= 0.3):
        yield _responses(case, "empty_responses", f"{percent(empty.after)} of the responses are empty.", "strong")
    if cut is None:
        return
    saturated = cut.after >= 0.9 and (cut.rose(least=0.1) or cut.rose(least=0.1, since_start=True) or not case.acute)
    if saturated or cut.rose(z=4.0, least=0.2) or (cut.before is None and cut.after >= 0.9):
        told = f"{percent(cut.after)} of the responses are cut at the length limit"
        told += f", {percent(cut.before)} before." if cut.before is not None else "."
        yield _responses(case, "cut_responses", told, "strong" if cut.after >= 0.5 and case.acute else "hint")


def _responses(case: Case, name: str, what: str, strength: str) -> Finding:
    return Finding(
        name=name,
        level="reward",
        strength="strong" if strength == "strong" else "hint",
        what=what,
        numbers=numbers_of(
            case, "truncated_fraction", "empty_fraction", "response_length_mean", "response_length_max", "reward_mean"
        ),
        steps=case.span,
        why="A response that is cut or empty gets the reward of a failure, whatever it was about to say.",
        first="Read such responses in the evidence; check the limit, the stop tokens and the chat template.",
    )


def _mismatch(case: Case) -> Iterator[Finding]:
    it = case.compare["rollout_mismatch_kl"]
    if it is None or not (it.after >= _MISMATCH or (case.acute and it.extreme >= 3 * _MISMATCH)):
        return
    yield Finding(
        name="rollout_mismatch",
        level="reward",
        strength="strong" if it.after >= 3 * _MISMATCH else "hint",
        what=f"Sampler and trainer disagree by {fixed(it.after)} nats a token (healthy: below {_MISMATCH}).",
        numbers=numbers_of(case, "rollout_mismatch_kl", "rollout_mismatch_max", "ratio_max", "ratio_mean", "kl"),
        steps=case.span,
        why="The responses come from another policy than the one that is trained: importance ratios are wrong.",
        first="Compare temperature, top-p, precision and weights of sampler and trainer; score one response with both.",
    )


def _imbalance(case: Case) -> Iterator[Finding]:
    """Batches differ from one step to the next more than they did, and the update with them."""
    if case.compare.before is None or case.span is None or not case.acute:
        return
    it = case.compare["prompt_length_mean"]
    ahead, now = (_restless(case, "prompt_length_mean", span) for span in (case.compare.before, case.span))
    if it is not None and it.before and now > max(3.0 * ahead, 0.1 * it.before):
        grad = case.compare["grad_norm"]
        with_it = f"; the gradient norm reaches {fixed(grad.extreme)} at step {grad.extreme_step}" if grad else ""
        yield Finding(
            name="sampler_imbalance",
            level="reward",
            strength="hint",
            what=f"From step to step batches differ by {fixed(now)} tokens a prompt, {fixed(ahead)} before{with_it}.",
            numbers=(
                Number(signal="prompt_length_mean, step to step", before=ahead, after=now),
                *numbers_of(case, "advantage_std", "advantage_tail_fraction", "grad_norm", "rank_advantage_gap"),
            ),
            steps=case.span,
            why="Each batch pulls another way: the update follows the sampler's order rather than the task.",
            first="Shuffle across lengths and sources, or balance each batch.",
        )


def _restless(case: Case, signal: str, span: Span) -> float:
    """The mean difference from one row to the next."""
    values = [value for _, value in case.compare.run[signal].pairs(span.first, span.last)]
    steps = [abs(b - a) for a, b in pairwise(values)]
    return sum(steps) / len(steps) if steps else 0.0
