"""The catalogue: every signal's name, page, unit, formula and which direction is bad, beside nothing else.

A short name is the same everywhere: rules and journal ``group_reward_std``, MLflow ``2_health/group_reward_std``.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from grpo_lightning.errors import ConfigError

__all__ = ["CATALOGUE", "Page", "Sense", "Signal", "page_of", "signal"]

Page = Literal["1_overview", "2_health", "3_diagnosis"]
Sense = Literal["low", "high", "both", "none"]  # which direction is bad


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """One named number per optimizer step."""

    name: str
    page: Page
    unit: str
    formula: str
    bad: Sense


def _table(page: Page, *rows: tuple[str, str, str, Sense]) -> list[Signal]:
    return [Signal(name=n, page=page, unit=u, formula=f, bad=b) for n, u, f, b in rows]


_ALL = [
    *_table(
        "1_overview",
        ("loss", "", "policy loss + KL coefficient x KL loss - entropy bonus; about 0 on-policy: no health signal", "none"),
        ("policy_loss", "", "the loss's policy term", "none"),
        ("kl_loss", "nats", "the loss's KL term before its coefficient", "high"),
        ("lr", "", "learning rate of the update", "none"),
        ("reward_mean", "", "mean of the weighted total over all rollouts scored", "low"),
        ("reward_min", "", "least weighted total", "none"),
        ("reward_max", "", "greatest weighted total", "none"),
        ("reward_std", "", "sample std of the weighted total over all rollouts", "low"),
        ("grad_norm", "", "L2 norm of the gradient before clipping", "high"),
        ("tokens_per_second", "1/s", "completion tokens of all ranks over the slowest rank's step", "low"),
        ("step_seconds", "s", "one optimizer step, of the slowest rank", "high"),
        ("rollout_seconds", "s", "sampling", "high"),
        ("reward_seconds", "s", "reward functions", "high"),
        ("update_seconds", "s", "forward, backward and optimizer", "high"),
        ("monitor_seconds", "s", "measuring and recording the signals", "high"),
        ("eval_accuracy", "", "share of held-out prompts whose greedy answer gets full marks", "low"),
    ),
    *_table(
        "2_health",
        ("group_reward_std", "", "mean over scorable groups of the sample std of rewards", "low"),
        ("group_reward_std_max", "", "greatest group std", "none"),
        ("group_reward_range", "", "mean over scorable groups of max - min", "low"),
        ("dead_group_fraction", "", "groups whose rewards are all equal, of all groups", "high"),
        ("dead_group_fraction_unscorable", "", "groups with fewer than two rewards, of all groups", "high"),
        ("advantage_mean", "", "mean advantage", "both"),
        ("advantage_std", "", "sample std of advantages", "both"),
        ("advantage_tail_fraction", "", "share of abs(advantage) > 1", "high"),
        ("advantage_flat_fraction", "", "share of abs(advantage) < 0.02", "high"),
        ("signal_token_fraction", "", "loss tokens with an advantage other than 0, of all loss tokens", "low"),
        ("kl", "nats", "k3 to the reference, mean over loss tokens", "high"),
        ("kl_k1", "nats", "k1 to the reference, mean over loss tokens", "high"),
        ("kl_k2", "nats", "k2 to the reference, mean over loss tokens", "high"),
        ("kl_max", "nats", "greatest k3 of a token", "high"),
        ("kl_coef", "", "the KL coefficient", "none"),
        ("entropy", "nats", "exact entropy after temperature, mean over completion tokens", "both"),
        ("ratio_mean", "", "importance ratio policy / old policy, mean over loss tokens", "both"),
        ("ratio_max", "", "greatest importance ratio", "high"),
        ("clip_low_fraction", "", "loss tokens where the lower clip binds (ratio low and advantage negative)", "high"),
        ("clip_high_fraction", "", "loss tokens where the upper clip binds (ratio high and advantage positive)", "high"),
        ("rollout_mismatch_kl", "nats", "k1 of the sampler to the trainer when the rollouts were made", "high"),
        ("response_length_mean", "tokens", "mean completion length, EOS included", "both"),
        ("response_length_max", "tokens", "longest completion", "high"),
        ("truncated_fraction", "", "completions without EOS at the generation limit", "high"),
        ("empty_fraction", "", "completions of EOS alone", "high"),
        ("grad_norm_clipped", "", "L2 norm of the gradient after clipping", "none"),
        ("updates_skipped", "", "1 where the update was skipped", "high"),
        ("nonfinite_count", "", "values that are not finite: rewards, log-probs, entropies, loss, gradient norm", "high"),
    ),
    *_table(
        "3_diagnosis",
        ("prompt_length_mean", "tokens", "mean prompt length", "both"),
        ("prompt_length_max", "tokens", "longest prompt", "both"),
    ),
]
CATALOGUE: dict[str, Signal] = {s.name: s for s in _ALL}


def page_of(name: str) -> Page:
    """The MLflow page of a signal, patterned names included; unknown ones belong to health."""
    if name in CATALOGUE:
        return CATALOGUE[name].page
    if name.startswith(("eval_", "reward/")):
        return "1_overview"
    return "3_diagnosis" if name.startswith("probe_") else "2_health"


def signal(name: str) -> Signal:
    """The catalogue's entry; an unknown name raises with the nearest ones."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    near = get_close_matches(name, CATALOGUE, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "see the list of signals."
    raise ConfigError(f"{name!r} is not a signal: {hint}")
