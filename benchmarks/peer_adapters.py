"""Four monitors behind one function: the alarms of each on a series, fed row by row as a run would.

Every package keeps its own defaults and gets every signal of the series that it can take:

* grpo-lightning: the shipped rules. Pausing: a rule whose action is to pause.
* rldoctor: `LiveMonitor`, one row at a time, as its TRL callback does; TRL's names, the group size, and the run's length,
  which makes it milder early in a run. Pausing: CRITICAL.
* rlprobe: its detectors over the rows so far, every 25 steps, as its TRL callback does, with the fields of its manual
  interface. Pausing: what its `HaltPolicy` halts on (critical, confidence 0.7).
* stabilityguard: `RLHFStabilityGuard` on two-token distributions with the series' KL, on rewards with the series' mean
  and spread, and on advantages; its `SpikeDetector` on the gradient norm, as its optimizer does. Pausing: its critical
  issues, and a spike, at which it refuses the update.

Where the loss is NaN, the peers that watch gradients get a NaN gradient too, as a backward pass would leave. An alarm is
the first of its rule at its level.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from series import Series

__all__ = ["TOOLS", "Alarm", "Tool", "reward_samples", "rldoctor_row"]

CHECK_EVERY = 25  # rlprobe's `diagnose_every`
APART = 0.05  # a spread of rewards that one group's rounding does not make
RLDOCTOR_NAMES = {
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "dead_group_fraction": "frac_reward_zero_std",
    "advantage_std": "advantages_std",
    "entropy": "entropy",
    "kl": "kl",
    "grad_norm": "grad_norm",
    "loss": "loss",
    "response_length_mean": "completions/mean_length",
    "truncated_fraction": "completions/clipped_ratio",
    "eval_accuracy": "eval_score",
}
RLPROBE_NAMES = {
    "reward_mean": "reward_mean",
    "reward_std": "reward_std",
    "group_reward_std": "group_reward_std_mean",
    "dead_group_fraction": "zero_variance_group_frac",
    "advantage_std": "adv_std",
    "advantage_flat_fraction": "adv_zero_frac",
    "entropy": "entropy_mean",
    "kl": "kl_mean",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "response_length_mean": "completion_len_mean",
    "truncated_fraction": "truncation_rate",
    "ngram_repetition": "repetition_rate",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """A rule that spoke, for the first time at this level."""

    rule: str
    step: int
    pause: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A monitor."""

    name: str
    version: str | None  # None: ours
    alarms: Callable[[Series], list[Alarm]]

    @property
    def missing(self) -> str | None:
        """Why it can't be measured here: the command that installs it. None where it can."""
        if self.version is None:
            return None
        try:
            found = version(self.name)
        except PackageNotFoundError:
            found = None
        return None if found == self.version else f"pip install {self.name}=={self.version}"


def _first(alarms: Iterable[Alarm]) -> list[Alarm]:
    """The first alarm of each rule and level."""
    kept: dict[tuple[str, bool], Alarm] = {}
    for alarm in alarms:
        kept.setdefault((alarm.rule, alarm.pause), alarm)
    return list(kept.values())


# ---- ours


def ours(series: Series) -> list[Alarm]:
    """The shipped rules, as the callback and `check` hold them."""
    from grpo_lightning.health import Judge, Step, shipped_rules

    judge = Judge(shipped_rules())
    alarms = []
    groups = float(series.prompts * series.every) if series.groups_known else None
    for number, values in series.rows():
        changes = judge.observe(Step(step=number, values=values, span=float(series.every), groups=groups))
        alarms += [
            Alarm(rule=change.alert.rule, step=number, pause=change.alert.action == "pause")
            for change in changes
            if change.change != "resolved"
        ]
    return alarms


# ---- rldoctor


def rldoctor(series: Series) -> list[Alarm]:
    """`LiveMonitor`: every 25 rows from row 75 on, what is new or worse."""
    from rl_doctor import stats
    from rl_doctor.detectors import Severity
    from rl_doctor.live import LiveMonitor

    stats._RNG = np.random.default_rng(0)  # it samples pairs of long series: the same for every series
    config = {"algorithm": "grpo", "num_generations": series.group, "max_steps": series.steps}
    monitor = LiveMonitor(config=config, on_finding=lambda finding: None)
    alarms = []
    for number, values in series.rows():
        for finding in monitor.log(rldoctor_row(values), step=number):
            alarms.append(Alarm(rule=finding.detector, step=number, pause=finding.severity >= Severity.CRITICAL))
    return _first(alarms)


def rldoctor_row(values: dict[str, float]) -> dict[str, float]:
    """A row in the names that it knows."""
    row = {RLDOCTOR_NAMES[name]: value for name, value in values.items() if name in RLDOCTOR_NAMES}
    return row | ({"grad_norm": math.nan} if math.isnan(row.get("loss", 0.0)) else {})


# ---- rlprobe


def rlprobe(series: Series) -> list[Alarm]:
    """Every detector over the rows so far, every 25 steps."""
    from rlprobe.doctor.engine import diagnose_view
    from rlprobe.doctor.live import HaltPolicy
    from rlprobe.doctor.runview import RunView
    from rlprobe.schemas import RunManifest, StepRecord

    manifest = RunManifest(run_id="series", created_at="", algorithm="grpo")
    policy = HaltPolicy()
    records: list[Any] = []
    alarms = []
    for number, values in series.rows():
        fields = {RLPROBE_NAMES[name]: value for name, value in values.items() if name in RLPROBE_NAMES}
        missing = sum(math.isnan(values[name]) for name in ("loss", "grad_norm") if name in values)
        records.append(StepRecord(step=number, nan_count=missing, **fields))
        if number % CHECK_EVERY:
            continue
        for finding in diagnose_view(RunView(manifest, list(records))):
            if finding.severity != "info":
                halts = policy.should_halt([finding]) is not None
                alarms.append(Alarm(rule=finding.signature_id, step=number, pause=halts))
    return _first(alarms)


# ---- stabilityguard


def stabilityguard(series: Series) -> list[Alarm]:
    """The guard's report and the spike detector, every row."""
    import torch
    from stabilityguard.core import SpikeDetector
    from stabilityguard.rlhf import RLHFStabilityGuard

    logging.getLogger("stabilityguard").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    model = torch.nn.Identity()
    guard = RLHFStabilityGuard(policy_model=model, ref_model=model, value_model=model, reward_model=model)
    spikes = SpikeDetector()
    alarms = []
    for number, values in series.rows():
        report = guard.check_stability(**_tensors(values, series))
        alarms += [Alarm(rule=issue, step=number, pause=True) for issue in report["critical_issues"]]
        alarms += [Alarm(rule=text.partition(":")[0], step=number, pause=False) for text in report["warnings"]]
        spike = _spike(spikes, values)
        if spike is not None:
            alarms.append(Alarm(rule=spike, step=number, pause=True))
    return _first(alarms)


def _spike(spikes: Any, values: dict[str, float]) -> str | None:
    """What the spike detector says: it tells a NaN from a large gradient."""
    norm = values["grad_norm"]
    broken = not math.isfinite(norm) or not math.isfinite(values.get("loss", 0.0))
    found, info, _ = spikes.check({"model": norm}, {"model"} if broken else set())
    return ("gradient NaN" if info.is_nan else "gradient spike") if found else None


def _tensors(values: dict[str, float], series: Series) -> dict[str, Any]:
    import torch

    rewards_B = torch.from_numpy(reward_samples(values, series.prompts * series.group))
    zeros_B = torch.zeros_like(rewards_B)
    policy = torch.zeros(1, 1, 2, dtype=torch.float64)
    reference = torch.tensor([[[_logit(values.get("kl", 0.0)), 0.0]]], dtype=torch.float64)
    tensors = {
        "policy_logprobs": policy.log_softmax(-1),
        "ref_logprobs": reference.log_softmax(-1),
        "rewards": rewards_B,
    }
    spread = values.get("advantage_std")
    if spread is not None:
        tensors |= {"values": zeros_B, "returns": zeros_B, "advantages": _spread(len(rewards_B), spread, torch)}
    return tensors


def _spread(size: int, spread: float, torch: Any) -> Any:
    """Numbers with a mean of about 0 and this standard deviation."""
    return torch.linspace(-1, 1, size, dtype=torch.float64) * spread * math.sqrt(3)


def _logit(kl: float) -> float:
    """The logit between a fair coin's two sides that puts a reference `kl` nats away from it.

    KL(1/2 || q) = -1/2 ln(4 q (1 - q)), and q = sigmoid(d) gives d = 2 arcosh(exp(KL)).
    """
    kl = max(kl, 0.0)
    return 2 * math.acosh(math.exp(kl)) if kl < 300 else 2 * (kl + math.log(2))


def reward_samples(values: dict[str, float], size: int) -> np.ndarray:
    """Rewards with the row's mean and spread: right and wrong answers where these say so, as the series were drawn.

    Elsewhere the share of live groups lies on both sides of the mean and the rest on it; all of them where no group is
    live but the groups differ.
    """
    mean, spread = values["reward_mean"], values["reward_std"]
    rights = round(mean * size)
    if 0 <= mean <= 1 and abs(rights - mean * size) < 1e-6 and math.isclose(spread, math.sqrt(mean * (1 - mean))):
        return (np.arange(size) < rights).astype(float)
    live = round((1 - values.get("dead_group_fraction", 0.0)) * size) // 2 * 2
    live = size // 2 * 2 if live == 0 and spread > APART else live
    samples = np.full(size, mean)
    samples[:live] += spread * math.sqrt(size / max(live, 1)) * np.where(np.arange(live) % 2, 1.0, -1.0)
    return samples


TOOLS: tuple[Tool, ...] = (
    Tool(name="grpo-lightning", version=None, alarms=ours),
    Tool(name="rldoctor", version="0.2.0", alarms=rldoctor),
    Tool(name="rlprobe", version="0.1.0", alarms=rlprobe),
    Tool(name="stabilityguard", version="0.3.0", alarms=stabilityguard),
)
