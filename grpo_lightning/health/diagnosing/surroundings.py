"""The first two levels: the environment that the run stands on, and the data that it is fed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
from grpo_lightning.health.diagnosing.comparing import Compared
from grpo_lightning.health.diagnosing.records import Finding, Level, Span

__all__ = ["data", "environment"]

_NEAR_RESTART = 10  # steps
_FEW = 0.01


def environment(case: Case) -> Level:
    """Distributions, code, restarts, speed."""
    level = level_of(
        "environment",
        case,
        [
            Check(
                said="distributions, code and settings against the snapshot",
                run=lambda c: drift_findings(c, "environment", "snapshot", "environment", "code", "config", "weights"),
            ),
            Check(said="restarts around the onset", run=_restarts),
            Check(said="the machine's speed", run=_slower, needs=("tokens_per_second",)),
            Check(said="alerts of this cause", run=lambda c: alert_findings(c, "environment", "environment")),
        ],
    )
    return _without_snapshot(level, case)


def data(case: Case) -> Level:
    """Data files, the composition of the batches, ranks, difficulty."""
    level = level_of(
        "data",
        case,
        [
            Check(said="data files against the snapshot", run=lambda c: drift_findings(c, "data", "data")),
            Check(said="prompt lengths of the batches against the ruler", run=_lengths, needs=("prompt_length_mean",)),
            Check(said="the mix of sources", run=_sources, needs=("source_shift",)),
            Check(said="prompts twice in a batch", run=_duplicates, needs=("duplicate_prompt_fraction",)),
            Check(said="what the ranks are given", run=_ranks, needs=("rank_overlap_fraction",)),
            Check(said="prompts too hard", run=_too_hard, needs=("dead_group_fraction_all_low",)),
            Check(said="prompts already solved", run=_solved, needs=("dead_group_fraction_all_high",)),
            Check(said="alerts of this cause", run=lambda c: alert_findings(c, "data", "data")),
        ],
    )
    return _without_snapshot(level, case)


def _without_snapshot(level: Level, case: Case) -> Level:
    """Say that the first check was not made."""
    if case.drifts is not None:
        return level
    first, *rest = level.checked
    return replace(level, checked=tuple(rest), unchecked=(f"{first}: {case.why_no_drifts}", *level.unchecked))


# ---- environment


def _restarts(case: Case) -> Iterator[Finding]:
    onset = case.compare.onset
    near = [step for step in case.restarts if onset is not None and 0 <= onset - step <= _NEAR_RESTART]
    if near and onset is not None:
        yield Finding(
            name="restarted",
            level="environment",
            strength="hint",
            what=f"The run was restarted after step {near[-1]}, {onset - near[-1]} steps before it began.",
            steps=Span(first=near[-1], last=onset),
            why="A restart is the moment at which another machine, library, data order or state comes in.",
            first="Compare the settings and snapshots of the two segments; replay the step from the checkpoint.",
        )


def _slower(case: Case) -> Iterator[Finding]:
    it = case.compare["tokens_per_second"]
    if it is None or not case.acute or not it.fell(times=0.6, z=4.0):
        return
    length = case.compare["response_length_mean"]
    if length is not None and length.rose(times=1.3):
        return  # long responses are slow by themselves
    yield Finding(
        name="slower",
        level="environment",
        strength="hint",
        what=f"Tokens per second fell from {fixed(it.before)} to {fixed(it.after)} with responses no longer than before.",
        numbers=numbers_of(case, "tokens_per_second", "step_seconds", "rollout_seconds", "reward_seconds"),
        steps=case.span,
        why="Something else uses the machine, or a service slowed down: its time-outs and errors become rewards.",
        first="See which part of the step grew, and what else ran on the machine at that time.",
    )


# ---- data


def _lengths(case: Case) -> Iterator[Finding]:
    """Long prompts bunched in one batch, or other prompts from a step on."""
    it = case.compare["prompt_length_mean"]
    if it is None or it.before is None or not case.acute:
        return
    lasting = it.rose(times=1.3, z=5.0) or it.fell(times=0.7, z=5.0)
    if lasting:
        yield _other_prompts(case, it)
    elif abs(it.extreme_z) >= 8.0 and abs(it.extreme - it.before) >= 0.3 * it.before:
        yield _bunched(case, it)


def _other_prompts(case: Case, it: Compared) -> Finding:
    spread = case.compare["prompt_length_spread"]
    narrow = spread is not None and it.after > (it.before or 0) and not spread.rose(times=1.5)
    how = "long prompts are bunched" if narrow else "the prompts are others"
    return Finding(
        name="prompts_bunched" if narrow else "prompts_changed",
        level="data",
        strength="strong",
        what=f"Prompts went from {fixed(it.before)} to {fixed(it.after)} tokens in the mean: {how}.",
        numbers=numbers_of(
            case, "prompt_length_mean", "prompt_length_spread", "prompt_length_max", "prompt_length_p95", "source_shift"
        ),
        steps=case.span,
        why="A batch of extremes makes advantages and gradients of extremes, whatever the algorithm.",
        first="Check bucketing and shuffling of the sampler, and read the prompts in the evidence.",
    )


def _bunched(case: Case, it: Compared) -> Finding:
    return Finding(
        name="prompts_bunched",
        level="data",
        strength="strong",
        what=(
            f"The batch of step {it.extreme_step} has prompts of {fixed(it.extreme)} tokens in the mean,"
            f" {it.extreme_z:+.0f} spreads from {fixed(it.before)}."
        ),
        numbers=(it.at_extreme, *numbers_of(case, "prompt_length_spread", "prompt_length_max")),
        steps=Span(first=it.extreme_step, last=it.extreme_step),
        why="One batch of extremes is enough for a step that the policy does not come back from.",
        first="Check bucketing and shuffling of the sampler, and read that batch's prompts in the evidence.",
    )


def _sources(case: Case) -> Iterator[Finding]:
    it = case.compare["source_shift"]
    if it is not None and (it.after >= 0.5 or (it.after >= 0.3 and it.rose(z=4.0, least=0.15))):
        yield Finding(
            name="sources_shifted",
            level="data",
            strength="strong" if it.after >= 0.5 else "hint",
            what=f"The mix of prompt sources is {fixed(it.after)} away from the ruler's (0 equal, 1 disjoint).",
            numbers=(it.number,),
            steps=case.span,
            why="Another mix is another task: reward, length and entropy move with it.",
            first="List the sources of the steps before and after, and check that the data is shuffled.",
        )


def _duplicates(case: Case) -> Iterator[Finding]:
    it = case.compare["duplicate_prompt_fraction"]
    if it is not None and it.rose(z=4.0, least=0.1):
        yield Finding(
            name="duplicates",
            level="data",
            strength="hint",
            what=f"{percent(it.after)} of a batch's prompts are there twice, {percent(it.before)} before.",
            numbers=(it.number,),
            steps=case.span,
            why="Fewer different prompts in a batch make the update depend on each of them more.",
            first="Look for rows that were appended twice, and for a sampler that repeats.",
        )


def _ranks(case: Case) -> Iterator[Finding]:
    it = case.compare["rank_overlap_fraction"]
    if it is not None and max(it.after, it.extreme) > _FEW:
        yield Finding(
            name="ranks_overlap",
            level="data",
            strength="strong",
            what=f"{percent(max(it.after, it.extreme))} of a step's rows are held by more than one rank.",
            numbers=(it.number, *numbers_of(case, "rank_advantage_gap")),
            steps=case.span,
            why="The ranks train on the same prompts: the batch is smaller than it says, and its noise larger.",
            first="Check that each rank's sampler has its own rank and the world size, and that only one party shards.",
        )


def _too_hard(case: Case) -> Iterator[Finding]:
    it = case.compare["dead_group_fraction_all_low"]
    if it is None or not (it.after >= 0.8 or (case.acute and it.rose(z=4.0, least=0.3))):
        return
    yield Finding(
        name="prompts_too_hard",
        level="data",
        strength="hint",
        what=f"{percent(it.after)} of the groups get the lowest reward throughout"
        + (f", {percent(it.before)} before." if it.before is not None else "."),
        numbers=numbers_of(case, "dead_group_fraction_all_low", "truncated_fraction", "reward_mean"),
        steps=case.span,
        why="Nothing can be learned from a group without a success; it is the prompts, the length limit or the reward.",
        first="Read such a group in the evidence: is a right answer there that the reward does not see, or none?",
    )


def _solved(case: Case) -> Iterator[Finding]:
    it = case.compare["dead_group_fraction_all_high"]
    if it is not None and it.after >= 0.7:
        yield Finding(
            name="prompts_solved",
            level="data",
            strength="hint",
            what=f"{percent(it.after)} of the groups get the highest reward throughout: these prompts are solved.",
            numbers=numbers_of(case, "dead_group_fraction_all_high", "dead_group_fraction", "reward_mean"),
            steps=case.span,
            why="Solved prompts cost sampling and teach nothing.",
            first="Replace them by harder ones, or stop here.",
        )
