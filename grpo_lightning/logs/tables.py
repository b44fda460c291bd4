"""What each trainer calls our signals, and what its number really is.

Read from the trainers' sources: TRL 0.14 to 1.16, verl 0.1 to 0.6, ms-swift 3, OpenRLHF 0.9, NeMo-RL 0.4. ``<fn>`` stands for a
reward function's name, ``<data>`` for a data set's. Where a row has two names of one signal, the one that stands first here counts.
"""

from __future__ import annotations

__all__ = ["IGNORED", "NAMES", "OWN", "SCALES"]

Table = dict[str, tuple[str, str]]  # their key -> our signal, what their number really is ("" if the same as ours)

# fmt: off
# ruff: noqa: E501
_COMMON: Table = {
    "loss": ("loss", "about 0 at the first update on a batch; TRL prints a NaN or infinite loss as the running mean"),
    "grad_norm": ("grad_norm", ""),
    "learning_rate": ("lr", ""),
    "lr": ("lr", ""),
    "reward": ("reward_mean", ""),
    "reward_mean": ("reward_mean", ""),
    "mean_reward": ("reward_mean", ""),
    "reward_std": ("reward_std", ""),
    "reward_max": ("reward_max", ""),
    "reward_min": ("reward_min", ""),
    "entropy": ("entropy", ""),
    "kl": ("kl", ""),
    "kl_divergence": ("kl", "a callback's name for kl"),
    "mean_kl": ("kl", "a callback's name for kl"),
    "kl_loss": ("kl_loss", ""),
    "policy_loss": ("policy_loss", ""),
    "kl_coef": ("kl_coef", ""),
    "step_time": ("step_seconds", ""),
    "response_length": ("response_length_mean", ""),
    "completion_length": ("response_length_mean", "TRL before 0.17"),
    "eval_accuracy": ("eval_accuracy", ""),
    "eval_reward": ("eval_reward_mean", "on sampled answers, not greedy ones"),
}
_TRL: Table = {
    "completions/mean_length": ("response_length_mean", "the model's tokens only: tool tokens are left out"),
    "reward": ("reward_mean", "mean of the weighted sum; rows where every function returned None are left out"),
    "reward_std": ("reward_std", "over the whole batch since 1.0; before that the mean of the groups' std, read as group_reward_std"),
    "frac_reward_zero_std": ("dead_group_fraction", "samples whose group's std is about 0; with scale_rewards='batch' it is only ever 0 or 1"),
    "rewards/<fn>/mean": ("reward/<fn>_mean", "before its weight"),
    "rewards/<fn>/std": ("reward/<fn>_std", "before its weight"),
    "rewards/<fn>": ("reward/<fn>_mean", "before its weight (TRL before 0.17)"),
    "kl": ("kl", "k3, unclamped; since 1.0 already multiplied by the importance ratio, so not comparable with older runs; with beta = 0 it is not logged"),
    "entropy": ("entropy", "exact, after temperature"),
    "clip_ratio/low_mean": ("clip_low_fraction", ""),
    "clip_ratio/high_mean": ("clip_high_fraction", ""),
    "completions/clipped_ratio": ("truncated_fraction", "completions whose last token is neither EOS nor padding"),
    "completions/max_length": ("response_length_max", "over several steps: the mean of their greatest"),
    "completions/min_length": ("response_length_min", "over several steps: the mean of their least"),
    "sampling/sampling_logp_difference/max": ("rollout_mismatch_max", "with vLLM only; NaN tokens are left out"),
    "eval_rewards/<fn>/mean": ("eval_reward/<fn>_mean", "on sampled answers"),
    "eval_rewards/<fn>": ("eval_reward/<fn>_mean", "on sampled answers"),
    "eval_completions/mean_length": ("eval_response_length_mean", "of sampled answers"),
    "eval_completions/clipped_ratio": ("eval_truncated_fraction", "of sampled answers"),
}
_SWIFT: Table = {
    **_TRL,
    "entropy/mean": ("entropy", ""),
    "reward_std": ("reward_std", "the mean of the groups' std, read as group_reward_std, where it differs from the batch's"),
    "rollout_correction/kl": ("rollout_mismatch_kl", ""),
    "actor/kl_loss": ("kl", ""),
}
_VERL: Table = {
    "critic/score/mean": ("reward_mean", "before a KL penalty in the reward"),
    "critic/score/max": ("reward_max", ""),
    "critic/score/min": ("reward_min", ""),
    "critic/rewards/mean": ("reward_mean", "after a KL penalty in the reward: used where there is no score"),
    "critic/rewards/max": ("reward_max", "after a KL penalty in the reward"),
    "critic/rewards/min": ("reward_min", "after a KL penalty in the reward"),
    "critic/advantages/mean": ("advantage_mean", "over tokens; with rollout.n = 1 it equals the score: no group baseline"),
    "critic/advantages/max": ("advantage_abs_max", "the greater of abs(max) and abs(min)"),
    "critic/advantages/min": ("advantage_abs_max", "the greater of abs(max) and abs(min)"),
    "response_length/mean": ("response_length_mean", ""),
    "response_length/max": ("response_length_max", ""),
    "response_length/min": ("response_length_min", ""),
    "response_length/clip_ratio": ("truncated_fraction", "responses as long as the tensor is wide, finished or not"),
    "prompt_length/mean": ("prompt_length_mean", ""),
    "prompt_length/max": ("prompt_length_max", ""),
    "prompt_length/min": ("prompt_length_min", ""),
    "actor/entropy": ("entropy", ""),
    "actor/entropy_loss": ("entropy", "the name before 0.4: the entropy itself, not times a coefficient"),
    "actor/kl_loss": ("kl", "with use_kl_loss; the estimator that kl_loss_type names"),
    "actor/reward_kl_penalty": ("kl", "with use_kl_in_reward"),
    "critic/kl": ("kl", "the old name, with the KL in the reward"),
    "actor/kl_coef": ("kl_coef", ""),
    "actor/reward_kl_penalty_coeff": ("kl_coef", ""),
    "critic/kl_coeff": ("kl_coef", ""),
    "actor/grad_norm": ("grad_norm", ""),
    "actor/lr": ("lr", ""),
    "actor/loss": ("loss", ""),
    "actor/pg_loss": ("policy_loss", ""),
    "rollout_corr/kl": ("rollout_mismatch_kl", ""),
    "timing_s/step": ("step_seconds", ""),
    "perf/time_per_step": ("step_seconds", ""),
    "timing_s/gen": ("rollout_seconds", ""),
    "timing/gen": ("rollout_seconds", ""),
    "timing_s/reward": ("reward_seconds", ""),
    "timing_s/update_actor": ("update_seconds", ""),
    "timing/update_actor": ("update_seconds", ""),
    "val-core/<data>/acc/mean@<n>": ("eval_accuracy", "mean over samples and data sets"),
    "val/test_score/<data>": ("eval_accuracy", "the score of the rule: accuracy where it is 0 or 1; the mean of the data sets"),
    "val-core/<data>/reward/mean@<n>": ("eval_reward_mean", "the mean of the data sets"),
}
_OPENRLHF: Table = {
    "reward": ("reward_mean", ""),
    "rollout/reward_mean": ("reward_mean", ""),
    "rollout/reward_std": ("reward_std", "over the samples of the step"),
    "group_reward_std": ("group_reward_std", ""),
    "policy_loss": ("policy_loss", ""),
    "act_loss": ("policy_loss", ""),
    "entropy_loss": ("entropy", "the entropy itself; a coefficient of 0 only logs it"),
    "actor_lr": ("lr", ""),
    "actor_grad_norm": ("grad_norm", ""),
    "kl": ("kl", "to the reference; the estimator of the settings, clamped to 10"),
    "vllm_kl": ("rollout_mismatch_kl", "k1 between vLLM and the trainer"),
    "response_length": ("response_length_mean", ""),
    "rollout/response_length_mean": ("response_length_mean", ""),
    "response_clip_ratio": ("truncated_fraction", "responses as long as the limit"),
    "rollout/truncated_rate": ("truncated_fraction", ""),
    "timing/step_total": ("step_seconds", ""),
    "timing/make_experience": ("rollout_seconds", ""),
    "timing/ppo_train": ("update_seconds", ""),
    "eval_<data>_pass1": ("eval_accuracy", "the mean of the data sets"),
}
_NEMO: Table = {
    "reward": ("reward_mean", ""),
    "filtered_reward": ("reward_mean", "after dynamic sampling: used where there is no other"),
    "advantages/mean": ("advantage_mean", ""),
    "advantages/max": ("advantage_abs_max", "the greater of abs(max) and abs(min)"),
    "advantages/min": ("advantage_abs_max", "the greater of abs(max) and abs(min)"),
    "baseline_reward/pct_0": ("dead_group_fraction_all_low", "samples whose baseline is exactly 0: dead groups only for rewards of 0 or 1"),
    "baseline_reward/pct_1": ("dead_group_fraction_all_high", "samples whose baseline is exactly 1: dead groups only for rewards of 0 or 1"),
    "approx_entropy": ("entropy", "a Monte Carlo estimate on the sampled tokens, not exact"),
    "kl_penalty": ("kl", "the KL to the reference, before its coefficient"),
    "gen_kl_error": ("rollout_mismatch_kl", "KL of the sampler to the trainer; below 1e-3 is fine"),
    "probs_ratio": ("ratio_mean", ""),
    "probs_ratio_max": ("ratio_max", "infinite ones are left out"),
    "mean_gen_tokens_per_sample": ("response_length_mean", ""),
    "max_gen_tokens_per_sample": ("response_length_max", ""),
    "truncation_rate": ("truncated_fraction", ""),
    "timing/train/total_step_time": ("step_seconds", ""),
    "total_step_time": ("step_seconds", ""),
    "timing/train/generation": ("rollout_seconds", ""),
    "validation/accuracy": ("eval_accuracy", ""),
}
OWN: tuple[str, ...] = tuple("""
loss policy_loss kl_loss lr reward_mean reward_min reward_max reward_std grad_norm tokens_per_second
step_seconds rollout_seconds reward_seconds score_seconds update_seconds monitor_seconds group_reward_std
group_reward_std_max group_reward_range dead_group_fraction dead_group_fraction_unscorable
reward_outlier_fraction advantage_mean advantage_std advantage_tail_fraction advantage_flat_fraction
reward_rank_agreement signal_token_fraction kl kl_k1 kl_k2 kl_max kl_coef kl_speed kl_stairs entropy
ratio_mean ratio_max clip_low_fraction clip_high_fraction rollout_mismatch_kl response_length_mean
response_length_max truncated_fraction empty_fraction ngram_repetition distinct_response_fraction
grad_norm_clipped grad_norm_ratio update_norm update_to_weight updates_skipped rollouts_resampled rollouts_unrepaired reward_conflict_fraction
environment_drift data_drift reward_drift
nonfinite_count source_shift duplicate_prompt_fraction rank_overlap_fraction group_reward_std_p10
group_reward_std_p50 group_reward_std_p90 dead_group_fraction_all_low dead_group_fraction_all_high
dead_group_fraction_mid advantage_skew advantage_p01 advantage_p99 advantage_abs_max advantage_top_group_share
kl_acceleration kl_clamped_fraction entropy_p10 rollout_mismatch_max logprob_correct logprob_wrong
response_length_std response_length_min response_length_correct response_length_wrong prefix_repetition
length_growth_per_hour update_norm_rolling nonfinite_count_loss nonfinite_count_grad_norm
nonfinite_count_rewards nonfinite_count_advantages nonfinite_count_logprobs nonfinite_count_old_logprobs
nonfinite_count_ref_logprobs nonfinite_count_sampler_logprobs nonfinite_count_entropies prompt_length_mean
prompt_length_min prompt_length_max prompt_length_p95 prompt_length_spread prompt_tokens_total
rank_advantage_gap eval_accuracy probe_seconds rollouts_unrepaired
""".split())  # noqa: SIM905
_OURS: Table = {
    **{name: (name, "") for name in OWN},
    **{f"reward/<fn>_{kind}": (f"reward/<fn>_{kind}", "") for kind in ("mean", "std", "missing", "errors", "seconds")},
    "eval_reward/<fn>_mean": ("eval_reward/<fn>_mean", ""),
    **{f"probe_{name}": (f"probe_{name}", "") for name in OWN if not name.startswith(("probe", "eval"))},
    "eval_response_length_mean": ("eval_response_length_mean", ""),
    "eval_truncated_fraction": ("eval_truncated_fraction", ""),
}
NAMES: dict[str, Table] = {
    "trl": {**_TRL, **{k: v for k, v in _COMMON.items() if k not in _TRL}},
    "verl": _VERL,
    "ms-swift": {**_SWIFT, **{k: v for k, v in _COMMON.items() if k not in _SWIFT}},
    "openrlhf": {**_OPENRLHF, **{k: v for k, v in _COMMON.items() if k not in _OPENRLHF}},
    "nemo-rl": {**_NEMO, **{k: v for k, v in _COMMON.items() if k not in _NEMO}},
    "grpo-lightning": _OURS,
}
SCALES: dict[str, float] = {"baseline_reward/pct_0": 0.01, "baseline_reward/pct_1": 0.01}  # percent to a share

_EVERYWHERE = (
    r"_?(step|steps|global_step|max_steps|iteration|row|index|rank|pid)", r"Step", r"(train/|trainer/|training/)?global_step(/max_steps)?", r"_(runtime|timestamp|wandb.*|rank)", r"(train/)?epoch",
    r"(train|eval)_(runtime|loss|samples_per_second|steps_per_second|tokens_per_second|jit_compilation_time)", r"total_flos", r"profiling/.*", r"system/.*", r"timing.*", r"perf/.*",
    r"memory.*", r"percentage", r"train_speed.*", r"(elapsed|remaining)_time", r"num_tokens", r"(num_)?input_tokens_seen", r"eval_.*", r"val(idation)?[/-].*", r"(relative_)?time", r"timestamp", r"run(name|_id)?", r"seed", r"aux_loss",
)
IGNORED: dict[str, tuple[str, ...]] = {
    "trl": (
        r"completions/(mean|min|max)_terminated_length", r"clip_ratio(/.*)?", r"cispo_clip_ratio", r"vespo/.*", r"sampling/.*", r"tools/.*", r"entropy_coef", r"frac_.*", r"mean_token_accuracy",
        r"objective/.*",
    ),
    "ms-swift": (
        r"completions/(mean|min|max)_terminated_length", r"clip_ratio(/.*)?", r"entropy/(max|min|threshold)", r"num_turns", r"rollout_correction/.*", r"cispo_clip_ratio", r"sampling/.*", r"token_acc", r"frac_.*",
    ),
    "verl": (
        r"critic/(returns|values|vf_.*|vpred_.*|grad_norm|lr).*", r"actor/(ppo_kl|pg_clipfrac.*|.*coeff?|.*)", r"response(_length_non_aborted|/).*", r"prompt_length/.*", r"training/.*",
        r"rollout(_corr|/)?.*", r"variance_proxy/.*", r"num_turns/.*", r"tool_call_counts/.*", r"global_seqlen/.*", r"batch/.*", r"mfu/.*", r"critic/.*", r"data/.*",
    ),
    "openrlhf": (
        r"return", r"total_length", r"ppo_(kl|clip_ratio)", r"logprobs_diff", r"rollout/.*", r"dynamic_filtering_pass_rate", r"(critic|values?)_.*", r"episode", r"is_filter_ratio", r"ptx_loss", r"score",
        r"num_actions",
    ),
    "nemo-rl": (
        r"probs_ratio.*", r"token_mult_prob_error", r"(policy_kl|js_divergence)_error", r"sampling_importance_ratio", r"is_oob_ratio", r"num_.*", r"positive_nll_loss", r"wd", r"advantages/.*", r"baseline_reward/.*",
        r"dynamic_sampling_.*", r".*_seq_mult_prob_error.*", r"masked_correct_pct", r".*_(rate|pct)", r".*gen_tokens.*", r".*turns.*", r"global_valid_.*", r"(total|mean|max|min)_.*tokens.*", r"filtered_reward", r"performance/.*",
        r"ray/.*", r"moe/.*", r"draft_loss", r"mean_prompt_length",
    ),
    "grpo-lightning": (r"eval_.*", r"segment"),
}
IGNORED = {trainer: (*_EVERYWHERE, *patterns) for trainer, patterns in IGNORED.items()}
# fmt: on
