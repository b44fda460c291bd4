"""The catalogue's rows: one line for what a signal is, one for how to read it. No torch, so that rules load fast.

A row: name, unit, formula, which direction is bad, how partial values merge, reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FAMILIES", "PATTERNS", "SIGNALS", "Family", "Merge", "Page", "Sense", "Signal"]

Page = Literal["1_overview", "2_health", "3_diagnosis"]
Sense = Literal["low", "high", "both", "none"]  # which direction is bad
Family = Literal["overview", "reward", "advantage", "policy", "response", "optimizer", "data", "evaluation", "probe"]
Merge = Literal["shared", "sum", "mean", "moments", "max", "histogram", "sample", "ranks", "run"]
# shared: one number for all ranks; ranks: compares the ranks; run: derived from the steps before
FAMILIES: tuple[Family, ...] = ("overview", "reward", "advantage", "policy", "response", "optimizer", "data")
Row = tuple[str, str, str, Sense, Merge, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """One named number per optimizer step."""

    name: str
    page: Page
    family: Family
    unit: str  # "" for a plain number
    formula: str
    sense: Sense
    merge: Merge
    reading: str  # what healthy looks like and what each direction means


def _table(page: Page, family: Family, *rows: Row) -> list[Signal]:
    return [
        Signal(name=n, page=page, family=family, unit=u, formula=f, sense=s, merge=m, reading=r)
        for n, u, f, s, m, r in rows
    ]


# fmt: off
# ruff: noqa: E501
_OVERVIEW: tuple[Row, ...] = (
    ("loss", "", "policy loss + KL coefficient x KL loss - entropy bonus", "none", "shared", "About 0 at the first update on a batch: no health signal. NaN: the update was skipped."),
    ("policy_loss", "", "the loss's policy term", "none", "shared", "About 0 on-policy: no health signal."),
    ("kl_loss", "nats", "the loss's KL term before its coefficient", "high", "shared", "Grows as the policy leaves the reference."),
    ("lr", "", "learning rate of the update", "none", "shared", "Follows the schedule."),
    ("reward_mean", "", "mean of the weighted total over all rollouts scored", "low", "moments", "Rises. A fall that lasts is a collapse, one that recovers a dip."),
    ("reward_min", "", "least weighted total", "none", "moments", "Steady."),
    ("reward_max", "", "greatest weighted total", "none", "moments", "At the reachable top now and then; above it the reward is wrong."),
    ("reward_std", "", "sample std of the weighted total over all rollouts", "low", "moments", "Near 0 is solved or collapsed: the level of reward_mean tells which."),
    ("grad_norm", "", "L2 norm of the gradient before clipping", "high", "shared", "Levels differ a thousandfold between viable runs; judge it against the run's own."),
    ("tokens_per_second", "1/s", "completion tokens of all ranks over the slowest rank's step", "low", "sum", "Steady; falls with longer responses and with a slower machine."),
    ("step_seconds", "s", "one optimizer step, of the slowest rank", "high", "max", "The sum of its parts; the part that grows is the one to look at."),
    ("rollout_seconds", "s", "sampling, of the slowest rank", "high", "max", "Grows with response length."),
    ("reward_seconds", "s", "reward functions, of the slowest rank", "high", "max", "A jump: a reward service slows down."),
    ("score_seconds", "s", "old and reference log-probs, of the slowest rank", "high", "max", "Grows with response length."),
    ("update_seconds", "s", "forward, backward and optimizer, of the slowest rank", "high", "max", "Grows with response length."),
    ("monitor_seconds", "s", "measuring and recording the signals", "high", "max", "A few hundredths of a step."),
)
_REWARD_HEALTH: tuple[Row, ...] = (
    ("group_reward_std", "", "mean over scorable groups of the sample std of rewards", "low", "moments", "What the advantage is made of: near 0 there is nothing to learn from."),
    ("group_reward_std_max", "", "greatest group std", "none", "moments", "High with a low mean: a few groups carry the signal."),
    ("group_reward_range", "", "mean over scorable groups of max - min", "low", "moments", "As group_reward_std."),
    ("dead_group_fraction", "", "groups whose rewards are all equal, of all groups", "high", "mean", "0.3 to 0.6 is ordinary; near 1 nothing is learned. Its split says whether prompts are too hard or solved."),
    ("dead_group_fraction_unscorable", "", "groups with fewer than two rewards, of all groups", "high", "mean", "0. Above: a reward function fails or is missing."),
    ("reward_conflict_fraction", "", "pairs of equal completions in a group whose rewards differ, of the neighbouring equal pairs", "high", "mean", "0 with a reward that depends on the response alone. Near 1: the reward is noise, or depends on something else."),
    ("reward_outlier_fraction", "", "rewards beyond 3 interquartile ranges (at least 3 reachable spans) from the quartiles", "high", "histogram", "0. Above: a reward function gives values out of its scale."),
)
_REWARD_DIAGNOSIS: tuple[Row, ...] = (
    ("group_reward_std_p10", "", "10th percentile of the groups' std", "none", "histogram", "0 with dead groups."),
    ("group_reward_std_p50", "", "median of the groups' std", "low", "histogram", "0: more than half of the groups are dead."),
    ("group_reward_std_p90", "", "90th percentile of the groups' std", "low", "histogram", "Falls last."),
    ("dead_group_fraction_all_low", "", "dead groups in the lowest tenth of the rewards' span (reachable or seen), of all groups", "high", "histogram", "Prompts too hard, completions cut, or a reward that gives nothing."),
    ("dead_group_fraction_all_high", "", "dead groups in the highest tenth of the rewards' span, of all groups", "none", "histogram", "Solved prompts: replace them by harder ones."),
    ("dead_group_fraction_mid", "", "dead groups elsewhere, of all groups", "high", "histogram", "Completions that are all alike, or a reward that is constant."),
)
_ADVANTAGE_HEALTH: tuple[Row, ...] = (
    ("advantage_mean", "", "mean advantage over all rollouts", "both", "moments", "0 by construction; elsewhere rewards are missing."),
    ("advantage_std", "", "sample std of advantages", "both", "moments", "Near 1 with group scaling and few dead groups; falls with them."),
    ("advantage_tail_fraction", "", "share of abs(advantage) > 1.0 (configurable)", "high", "mean", "0.2 to 0.4 for mixed groups; a rise with a falling std: a few rollouts carry the update."),
    ("advantage_flat_fraction", "", "share of abs(advantage) < 0.02", "high", "mean", "As dead_group_fraction."),
    ("reward_rank_agreement", "", "pairs of different rewards in a group whose advantages have the same order, of all such pairs", "low", "mean", "1. Below: rewards and advantages have come apart, which is a bug."),
    ("signal_token_fraction", "", "loss tokens with an advantage other than 0, of all loss tokens", "low", "mean", "1 less the dead groups' tokens. At 0 only KL and entropy pull."),
)
_ADVANTAGE_DIAGNOSIS: tuple[Row, ...] = (
    ("advantage_skew", "", "third standardised moment", "both", "moments", "Positive: rare successes; negative: rare failures."),
    ("advantage_p01", "", "1st percentile", "none", "histogram", "Far below -2: rare failures, strongly punished."),
    ("advantage_p99", "", "99th percentile", "none", "histogram", "Far above 2: rare successes, strongly rewarded."),
    ("advantage_abs_max", "", "greatest abs(advantage)", "high", "moments", "With group scaling never above (G - 1) / sqrt(G): beyond it is a bug."),
    ("advantage_top_group_share", "", "share of the squared advantages that the largest group carries", "high", "sum", "About 1 over the live groups; near 1: one prompt makes the update."),
)
_POLICY_HEALTH: tuple[Row, ...] = (
    ("kl", "nats", "k3 to the reference, mean over loss tokens", "high", "mean", "Levels differ a thousandfold between viable runs; its speed and stairs say more."),
    ("kl_k1", "nats", "k1 to the reference, mean over loss tokens", "high", "mean", "Unbiased; may be negative."),
    ("kl_k2", "nats", "k2 to the reference, mean over loss tokens", "high", "mean", "Biased, never negative."),
    ("kl_max", "nats", "greatest k3 of a loss token", "high", "max", "Spikes can be survived; a level that stays is a drift of rare tokens."),
    ("kl_coef", "", "the KL coefficient", "none", "shared", "Constant, or what the controller sets."),
    ("kl_speed", "nats/step", "slope of kl over the last 10 steps (least squares)", "high", "run", "About 0 or slowly up; fast: the policy runs away."),
    ("kl_stairs", "", "median kl of the last 5 steps less that of the 5 before, over the spread inside both", "high", "run", "Below 3; above: kl rose in a step, after one update."),
    ("entropy", "nats", "exact entropy after temperature, mean over completion tokens", "both", "mean", "Drifts slowly. Towards 0: collapse to one answer; several times the start: the policy falls apart."),
    ("ratio_mean", "", "importance ratio policy / old policy, mean over loss tokens", "both", "mean", "1, exactly so at the first update on a batch."),
    ("ratio_max", "", "greatest importance ratio", "high", "max", "Far above the clip: old log-probs and policy have come apart."),
    ("clip_low_fraction", "", "loss tokens where the lower clip binds (ratio low, advantage negative)", "high", "mean", "0 at the first update on a batch; a few percent later."),
    ("clip_high_fraction", "", "loss tokens where the upper clip binds (ratio high, advantage positive)", "high", "mean", "0 at the first update on a batch; a few percent later."),
    ("rollout_mismatch_kl", "nats", "mean log-prob of the sampler less the trainer's, over completion tokens", "high", "mean", "About 0. Above 0.01 the sampler's weights, precision or settings differ from the trainer's."),
)
_POLICY_DIAGNOSIS: tuple[Row, ...] = (
    ("kl_acceleration", "nats/step^2", "kl_speed less that of 10 steps ago, over 10", "high", "run", "About 0; positive for long: a runaway."),
    ("kl_clamped_fraction", "", "loss tokens whose k3 was clamped (log-ratio beyond 20)", "high", "mean", "0. Above: kl is understated."),
    ("entropy_p10", "nats", "10th percentile of the tokens' entropies", "low", "histogram", "Small in any confident model; at 0 with a falling entropy: collapse."),
    ("rollout_mismatch_max", "nats", "greatest abs log-prob difference of sampler and trainer", "high", "max", "Below 1; more: some tokens were sampled from another distribution."),
    ("logprob_correct", "nats", "mean log-prob of the tokens of completions with full marks from the first reward function", "low", "mean", "Rises as right answers become likelier."),
    ("logprob_wrong", "nats", "mean log-prob of the tokens of the other completions", "none", "mean", "Below logprob_correct; above it the policy prefers wrong answers."),
)
_RESPONSE_HEALTH: tuple[Row, ...] = (
    ("response_length_mean", "tokens", "mean completion length, EOS included", "both", "moments", "Drifts slowly. Towards the limit: rambling; towards 1: giving up."),
    ("response_length_max", "tokens", "longest completion", "high", "moments", "Below the generation limit most of the time."),
    ("truncated_fraction", "", "completions without EOS at the generation limit", "high", "mean", "Near 0. Its rise often leads the fall of the reward."),
    ("empty_fraction", "", "completions of EOS alone", "high", "mean", "0."),
    ("ngram_repetition", "", "mean over completions of 1 - distinct / total 4-grams", "high", "mean", "Below 0.2 for prose; near 1: loops."),
    ("distinct_response_fraction", "", "mean over groups of different completions / completions", "low", "mean", "Near 1 for long answers; a fall: the policy repeats one answer."),
)
_RESPONSE_DIAGNOSIS: tuple[Row, ...] = (
    ("response_length_std", "tokens", "sample std of completion lengths", "none", "moments", "Near 0: every completion ends at the same place."),
    ("response_length_min", "tokens", "shortest completion", "none", "moments", "1 is an empty completion."),
    ("response_length_correct", "tokens", "mean length of completions with full marks from the first reward function", "none", "mean", "Compare with response_length_wrong."),
    ("response_length_wrong", "tokens", "mean length of the other completions", "none", "mean", "Far above response_length_correct: wrong answers ramble."),
    ("prefix_repetition", "", "mean over groups of the pairs' mean longest common prefix / mean length", "high", "mean", "Rises as completions of one prompt start alike; 1: they are the same."),
    ("length_growth_per_hour", "tokens/h", "slope of response_length_mean over training time, last 20 steps (least squares)", "both", "run", "About 0; fast growth reaches the limit soon."),
)
_OPTIMIZER_HEALTH: tuple[Row, ...] = (
    ("grad_norm_clipped", "", "L2 norm of the gradient after clipping", "none", "shared", "At most the clipping threshold."),
    ("grad_norm_ratio", "", "grad_norm over the median of up to 50 steps before", "high", "run", "About 1; ten times and more is a spike."),
    ("update_norm", "", "L2 norm of the change of the trained weights, exact or from a sample of coordinates", "both", "shared", "Follows the learning rate; 0 where the update was skipped."),
    ("update_to_weight", "", "update_norm over the norm of the trained weights", "both", "shared", "1e-6 to 1e-3; above, the policy moves in jumps."),
    ("updates_skipped", "", "1 where the update was skipped", "high", "shared", "0."),
    ("rollouts_resampled", "", "groups dropped and sampled again", "high", "sum", "0."),
    ("rollouts_unrepaired", "", "groups still broken after every try", "high", "sum", "0. Above: the sampler, or a reward function, is broken for these prompts."),
    ("nonfinite_count", "", "values that are not finite, over all sources", "high", "sum", "0."),
)
_OPTIMIZER_DIAGNOSIS: tuple[Row, ...] = (
    ("update_norm_rolling", "", "mean update_norm of the last 20 steps", "both", "run", "Smooth; follows the learning rate."),
    *((f"nonfinite_count_{source}", "", f"{what} that are not finite", "high", "sum", "0.") for source, what in (
        ("loss", "losses"), ("grad_norm", "gradient norms"), ("rewards", "rewards that are infinite (missing ones don't count), of those"),
        ("advantages", "advantages"), ("logprobs", "log-probs"), ("old_logprobs", "log-probs when the rollouts were made"),
        ("ref_logprobs", "the reference's log-probs"), ("sampler_logprobs", "the sampler's log-probs"), ("entropies", "entropies"),
    )),
)
_DATA_HEALTH: tuple[Row, ...] = (
    ("source_shift", "", "Jensen-Shannon distance (base 2) of the recent mix of prompt sources to the ruler's", "high", "run", "Below 0.2; above: the data changed, or its order is not shuffled."),
    ("duplicate_prompt_fraction", "", "1 - different / all prompts of the step, by their tokens", "high", "sample", "0, or the data's own share of duplicates."),
    ("rank_overlap_fraction", "", "rows that more than one rank holds, of all rows of the step", "high", "ranks", "0. Above: the sampler gives ranks the same prompts."),
)
_DATA_DIAGNOSIS: tuple[Row, ...] = (
    ("environment_drift", "", "installed distributions that changed since the snapshot, at the checkpoint before", "high", "run", "Absent. Above 0: the run can't be repeated with what is installed now."),
    ("data_drift", "", "data sources that changed since the snapshot, at the checkpoint before", "high", "run", "Absent. Above 0: files were edited or appended to while the run used them."),
    ("reward_drift", "", "source files of reward functions that changed since the snapshot, at the checkpoint before", "high", "run", "Absent. Above 0: a resumed run would be rewarded by other code."),
    ("prompt_length_mean", "tokens", "mean prompt length", "both", "moments", "Steady; a jump: other data."),
    ("prompt_length_min", "tokens", "shortest prompt", "none", "moments", "Steady."),
    ("prompt_length_max", "tokens", "longest prompt", "both", "moments", "Steady."),
    ("prompt_length_p95", "tokens", "95th percentile of prompt lengths", "both", "histogram", "Steady."),
    ("prompt_length_spread", "tokens", "sample std of prompt lengths", "none", "moments", "Steady; 0: all alike."),
    ("prompt_tokens_total", "tokens", "tokens of the step's prompts, each counted once", "none", "moments", "Steady."),
    ("rank_advantage_gap", "", "greatest less least rank's mean abs(advantage)", "high", "ranks", "Small; a rank that stays apart has other data."),
)
# patterned names: those of a run's own reward functions
PATTERNS: tuple[Row, ...] = (
    ("reward/<name>_mean", "", "mean of the function's rewards, before its weight", "low", "moments", "Which function the total's change comes from."),
    ("reward/<name>_std", "", "sample std of the function's rewards, before its weight", "low", "moments", "Near 0: it tells rollouts apart no more."),
    ("reward/<name>_missing", "", "rollouts without a finite reward from the function", "high", "moments", "0, or the prompts that the function is not for."),
    ("reward/<name>_errors", "", "calls of the function that failed", "high", "sum", "0."),
    ("reward/<name>_seconds", "s", "the function's call, of the slowest rank", "high", "max", "A jump: a service slows down."),
)
# fmt: on

SIGNALS: tuple[Signal, ...] = (
    *_table("1_overview", "overview", *_OVERVIEW),
    *_table("2_health", "reward", *_REWARD_HEALTH),
    *_table("2_health", "advantage", *_ADVANTAGE_HEALTH),
    *_table("2_health", "policy", *_POLICY_HEALTH),
    *_table("2_health", "response", *_RESPONSE_HEALTH),
    *_table("2_health", "optimizer", *_OPTIMIZER_HEALTH),
    *_table("2_health", "data", *_DATA_HEALTH),
    *_table("3_diagnosis", "reward", *_REWARD_DIAGNOSIS),
    *_table("3_diagnosis", "advantage", *_ADVANTAGE_DIAGNOSIS),
    *_table("3_diagnosis", "policy", *_POLICY_DIAGNOSIS),
    *_table("3_diagnosis", "response", *_RESPONSE_DIAGNOSIS),
    *_table("3_diagnosis", "optimizer", *_OPTIMIZER_DIAGNOSIS),
    *_table("3_diagnosis", "data", *_DATA_DIAGNOSIS),
    *_table(
        "3_diagnosis",
        "probe",
        (
            "probe_seconds",
            "s",
            "the probe: sampling, rewarding and scoring the frozen prompts",
            "high",
            "shared",
            "About a step's sampling.",
        ),
    ),
    *_table(
        "1_overview",
        "evaluation",
        (
            "eval_accuracy",
            "",
            "share of held-out prompts whose greedy answer gets full marks",
            "low",
            "mean",
            "Rises with reward_mean; falls while it rises: the reward is being gamed.",
        ),
    ),
)
