"""`fit --dry_run`: one batch is sampled and rewarded, nothing is trained and nothing written.

It shows what training would begin with: the spread inside the groups, what each reward function gives, and what it gives
for responses that nobody would want. Exit code 1 when a reward is dead, constant, changes its mind or is won too easily.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo_lightning.objective.batch import PromptBatch, StepRecord
from grpo_lightning.rewards.trials import TRIALS, FunctionTrial, Responses, Values, find_faults, try_rewards
from grpo_lightning.signals import join, measure
from grpo_lightning.sinks.terminal import plain
from grpo_lightning.training.observing import observe
from grpo_lightning.training.window import decode_completions

__all__ = ["dry_run"]

_SHOWN = {
    "reward_mean": "mean reward",
    "group_reward_std": "reward std inside groups",
    "dead_group_fraction": "groups without spread",
    "dead_group_fraction_all_low": "  of these at the lowest reward",
    "dead_group_fraction_all_high": "  of these at the highest reward",
    "response_length_mean": "tokens a response",
    "truncated_fraction": "cut at the length limit",
    "empty_fraction": "empty responses",
    "entropy": "entropy, nats a token",
}
_WIDTH = 70
_ENOUGH_CUT = 0.9


def dry_run(module: Any, datamodule: Any) -> int:
    """Sample, reward and try; 1 when something was found, else 0."""
    datamodule.setup("fit")
    batch = datamodule.frozen_prompts(datamodule.prompts_per_step).to(_device(module))
    started = perf_counter()
    record = observe(module, batch, seed=module.seed)
    seconds = perf_counter() - started
    values = join([(own := measure(record)).pack()], own, record).values
    own_values = [record.rewards_PGK[..., k].flatten().tolist() for k in range(record.rewards_PGK.shape[-1])]
    given = _responses(module, batch, record)
    trials = try_rewards(module.reward_runner, given, own_values)
    faults = [*_of_groups(values), *find_faults(trials)]
    _show(Console(highlight=False), values, trials, given, record, faults, seconds=seconds)
    return 1 if faults else 0


def _device(module: Any) -> torch.device:
    found: torch.device = next(module.policy.parameters()).device
    return found


def _responses(module: Any, batch: PromptBatch, record: StepRecord) -> Responses:
    size = module.group_size
    completions = decode_completions(module.tokenizer, record.rollouts, batch.prompts)
    return Responses(
        prompts=[p for p in batch.prompts for _ in range(size)],
        texts=[c if isinstance(c, str) else str(c[-1]["content"]) for c in completions],
        chat=[not isinstance(c, str) for c in completions],
        columns={k: [v for v in values for _ in range(size)] for k, values in batch.columns.items()},
        group_size=size,
        encode=lambda texts: [list(ids) for ids in module.tokenizer(texts, add_special_tokens=False)["input_ids"]],
    )


def _of_groups(values: dict[str, float]) -> list[str]:
    """What the sampled groups themselves show."""
    dead, cut = values.get("dead_group_fraction", 0.0), values.get("truncated_fraction", 0.0)
    if values.get("dead_group_fraction_unscorable", 0.0) >= 1.0:
        return ["No group could be scored: every reward is missing or not finite."]
    if dead < 1.0:
        return []
    if cut >= _ENOUGH_CUT:
        return [
            f"No group has any spread, and {cut:.0%} of the responses are cut at the length limit: raise "
            "model.sampling.max_new_tokens before anything else."
        ]
    if values.get("dead_group_fraction_all_high", 0.0) >= 1.0:
        return [
            "No group has any spread: every response gets the highest reward. The task is solved; take a harder one."
        ]
    return [
        "No group has any spread, so nothing can be learned: take easier prompts, a reward that gives part marks, a larger "
        "model.group_size or a higher model.sampling.temperature."
    ]


# ---- the terminal


def _show(
    console: Console,
    values: dict[str, float],
    trials: Sequence[FunctionTrial],
    given: Responses,
    record: StepRecord,
    faults: Sequence[str],
    *,
    seconds: float,
) -> None:
    groups, size = record.rewards_PG.shape
    console.print(f"dry run: {groups} prompts x {size} responses in {seconds:.1f} s; nothing is trained or written")
    for name, label in _SHOWN.items():
        if name in values:
            console.print(f"  {label:<34}{values[name]:>10.4g}")
    console.print(_table(trials))
    _examples(console, given, record)
    for fault in faults:
        console.print(Text(f"found: {plain(fault)}", style="yellow"), soft_wrap=True)
    console.print("found: nothing that stands in the way of training" if not faults else f"{len(faults)} findings")
    sys.stdout.flush()


def _table(trials: Sequence[FunctionTrial]) -> Table:
    """The mean that each function gives, by kind of response."""
    table = Table(title="mean reward by kind of response")
    table.add_column("response", no_wrap=True)
    for trial in trials:
        table.add_column(f"{plain(trial.name)} x {trial.weight:g}", justify="right")
    for kind in ("own", *TRIALS):
        cells = [_cell(trial, kind) for trial in trials]
        table.add_row(kind, *cells)
    return table


def _cell(trial: FunctionTrial, kind: str) -> str:
    if kind in trial.failures:
        return "fails"
    return _mean(trial.own if kind == "own" else trial.trials.get(kind, []))


def _mean(values: Values) -> str:
    finite = [v for v in values if math.isfinite(v)]
    return f"{sum(finite) / len(finite):.3f}" if finite else "-"


def _examples(console: Console, given: Responses, record: StepRecord) -> None:
    """The best and the worst response that were sampled."""
    rewards = record.rewards_PG.flatten().tolist()
    scored = [i for i, reward in enumerate(rewards) if math.isfinite(reward)]
    for word, pick in (("best", max), ("worst", min)):
        if scored:
            i = pick(scored, key=rewards.__getitem__)
            prompt = given.prompts[i] if isinstance(given.prompts[i], str) else given.prompts[i][-1].get("content", "")
            text = f"  {word} ({rewards[i]:g}): {_cut(prompt)} -> {_cut(given.texts[i])}"
            console.print(Text(text), soft_wrap=True)


def _cut(text: Any) -> str:
    flat = plain(" ".join(str(text).split()))
    return flat if len(flat) <= _WIDTH else flat[: _WIDTH - 1] + "…"
