"""Generated series of signals: healthy runs of many families, and runs with one fault each. No model is trained.

A series is what a run might print, step by step, made from a random state. A faulty one is its healthy twin up to the onset
of the fault: the same seed, the same noise. Faults follow what real runs do: entropy mostly explodes when a policy falls
apart, spread vanishes in some steps rather than at once, a decline is slow and does not turn back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["FAMILIES", "FAULTS", "Family", "Pair", "Series", "Values", "faulty", "healthy", "healthy_series", "pairs"]

STEPS = 300
Values = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Settings of a healthy run."""

    name: str
    entropy: float = 1.2  # nats at the start
    kl_scale: float = 1.0
    dead: float = 0.3  # share of dead groups at the start
    prompts: int = 8
    group: int = 8
    spikes: bool = False  # single harmless gradient spikes
    dip: bool = False  # the reward dips and recovers
    solved: bool = False  # ends at the top
    late: bool = False  # learns from the middle on only


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Signals by name, one value per row; NaN where not measured at the row (evaluations)."""

    name: str
    values: Values
    prompts: int
    group: int
    seed: int
    onset: int | None = None  # the optimizer step (from 1) at which the fault begins
    every: int = 1  # optimizer steps that a row stands for
    groups_known: bool = True  # whether a log of it tells the prompts of a step

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.values["reward_mean"]) * self.every

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(optimizer step, signals measured there) of each row; a NaN that is not an evaluation's gap is kept."""
        for i in range(len(self.values["reward_mean"])):
            row = {name: float(value[i]) for name, value in self.values.items()}
            if math.isnan(row.get("eval_accuracy", 0.0)):
                del row["eval_accuracy"]
            yield (i + 1) * self.every, row


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A series with a fault and the same without it."""

    fault: str
    series: Series
    twin: Series


FAMILIES: tuple[Family, ...] = (
    Family(name="plain"),
    Family(name="low entropy", entropy=0.6),
    Family(name="high entropy", entropy=2.4),
    Family(name="kl x10", kl_scale=10.0),
    Family(name="kl x40", kl_scale=40.0),
    Family(name="few dead groups", dead=0.1),
    Family(name="many dead groups", dead=0.6),
    Family(name="gradient spikes", spikes=True),
    Family(name="group of 2", group=2, dead=0.5),
    Family(name="group of 16", group=16),
    Family(name="one prompt a step", prompts=1),
    Family(name="two prompts a step", prompts=2, group=16),
    Family(name="32 prompts a step", prompts=32, group=4),
    Family(name="dip that recovers", dip=True),
    Family(name="dip with spikes", dip=True, spikes=True, entropy=0.8),
    Family(name="solved task", solved=True),
    Family(name="solved, few dead", solved=True, dead=0.1, entropy=0.7),
    Family(name="late bloomer", late=True),
    Family(name="late bloomer, kl x5", late=True, kl_scale=5.0, prompts=4),
    Family(name="all at once", spikes=True, dip=True, kl_scale=20.0, entropy=2.0, prompts=4, group=4),
)


def healthy(family: Family, seed: int) -> Series:
    """A healthy run of a family."""
    return Series(
        name=family.name, values=_healthy(family, seed), prompts=family.prompts, group=family.group, seed=seed
    )


def faulty(fault: str, family: Family, seed: int) -> Series:
    """The healthy run of the same family and seed with a fault from its onset on."""
    values = _healthy(family, seed)
    rng = np.random.default_rng([seed, 7, sorted(FAULTS).index(fault)])
    onset = int(rng.integers(100, 180))
    after = np.arange(STEPS) - (onset - 1)  # 0 at the onset
    FAULTS[fault](values, np.maximum(after, -1), rng)
    return Series(
        name=f"{fault} in {family.name}",
        values=values,
        prompts=family.prompts,
        group=family.group,
        seed=seed,
        onset=onset,
    )


def healthy_series(seeds: int) -> list[Series]:
    """Every family, `seeds` times."""
    return [healthy(family, seed) for family in FAMILIES for seed in range(seeds)]


def pairs(seeds: int) -> list[Pair]:
    """Every fault, `seeds` times, in families that take turns."""
    return [
        Pair(fault=fault, series=faulty(fault, family, seed), twin=healthy(family, seed))
        for kind, fault in enumerate(FAULTS)
        for seed in range(seeds)
        for family in (FAMILIES[(seed * 3 + kind) % len(FAMILIES)],)
    ]


# ---- healthy


def _healthy(family: Family, seed: int) -> Values:
    rng = np.random.default_rng([seed, FAMILIES.index(family)])
    t = np.arange(STEPS) / STEPS
    skill = _skill(family, t, rng)
    live = _live_share(family, skill)
    values = _rewards(family, skill, live, rng)
    values |= _policy(family, t, skill, rng)
    values |= _responses(t, values["reward_mean"], rng)
    values["eval_accuracy"] = np.where(
        (np.arange(STEPS) + 1) % 20 == 0, np.clip(skill + rng.normal(0, 0.015, STEPS), 0, 1), np.nan
    )
    return values


def _skill(family: Family, t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The share of right answers, in truth."""
    low, high = 0.25 + 0.1 * rng.random(), 0.6 + 0.15 * rng.random()
    if family.solved:
        high = 0.985
    middle, speed = (0.6, 18.0) if family.late else (0.35, 7.0)
    skill = low + (high - low) / (1 + np.exp(-speed * (t - middle)))
    if family.dip:
        at, width = 0.45 + 0.2 * rng.random(), 0.03 + 0.02 * rng.random()
        skill = skill - 0.45 * skill * np.exp(-(((t - at) / width) ** 2) / 2)
    return skill


def _live_share(family: Family, skill: np.ndarray) -> np.ndarray:
    """Groups with a spread: fewest where nearly all answers are right."""
    room = np.clip(4 * skill * (1 - skill), 0, 1)
    share: np.ndarray = np.clip(room / room[:20].mean(), 0, 1.15).clip(0, 1 / (1 - family.dead))
    return (1 - family.dead) * share


def _rewards(family: Family, skill: np.ndarray, live: np.ndarray, rng: np.random.Generator) -> Values:
    """Rewards of P groups of G, drawn: a live group's answers differ, a dead one's don't."""
    P, G = family.prompts, family.group
    names = (
        "reward_mean",
        "reward_std",
        "group_reward_std",
        "dead_group_fraction",
        "advantage_std",
        "advantage_flat_fraction",
    )
    out: Values = {name: np.zeros(STEPS) for name in names}
    for step in range(STEPS):
        alive = rng.random(P) < live[step]
        # a live group has at least one answer of each kind
        rights = np.where(
            alive, np.clip(rng.binomial(G, skill[step], P), 1, G - 1), np.where(rng.random(P) < skill[step], G, 0)
        )
        rewards_PG = np.arange(G)[None, :] < rights[:, None]
        spread_P = rewards_PG.std(1, ddof=1)
        advantages_PG = np.divide(
            rewards_PG - rewards_PG.mean(1, keepdims=True),
            spread_P[:, None],
            out=np.zeros((P, G)),
            where=spread_P[:, None] > 0,
        )
        row = (
            rewards_PG.mean(),
            rewards_PG.std(),
            spread_P.mean(),
            (spread_P == 0).mean(),
            advantages_PG.std(),
            (np.abs(advantages_PG) < 0.02).mean(),
        )
        for name, value in zip(names, row, strict=True):
            out[name][step] = value
    return out


def _policy(family: Family, t: np.ndarray, skill: np.ndarray, rng: np.random.Generator) -> Values:
    kept = 0.35 + 0.3 * rng.random()  # of the entropy, at the end
    entropy = (
        family.entropy * (kept + (1 - kept) * np.exp(-3.5 * t)) * np.exp(_drift(rng, 0.01) + rng.normal(0, 0.03, STEPS))
    )
    kl = (
        family.kl_scale
        * 0.02
        * (1 - np.exp(-4 * t) + 0.6 * t)
        * np.exp(_drift(rng, 0.015) + rng.normal(0, 0.12, STEPS))
    )
    norm = 0.4 * np.exp(rng.normal(0, 0.3, STEPS) + _drift(rng, 0.02))
    if family.spikes:
        norm[rng.choice(np.arange(40, STEPS), 4, replace=False)] *= 10 ** rng.uniform(1.0, 1.6, 4)
    return {"entropy": entropy, "kl": kl, "grad_norm": norm, "loss": rng.normal(0, 0.02, STEPS) + 0.04 * kl}


def _responses(t: np.ndarray, reward: np.ndarray, rng: np.random.Generator) -> Values:
    growth = rng.uniform(-0.25, 0.5)
    length = 180 * (1 + growth * t) * np.exp(_drift(rng, 0.01) + rng.normal(0, 0.05, STEPS))
    cut = np.clip(0.03 + 0.04 * rng.random() + rng.normal(0, 0.02, STEPS), 0, 1)
    repeats = np.clip(0.06 + 0.04 * rng.random() + rng.normal(0, 0.01, STEPS), 0, 1)
    return {"response_length_mean": length, "truncated_fraction": cut, "ngram_repetition": repeats}


def _drift(rng: np.random.Generator, size: float) -> np.ndarray:
    """A slow random walk that is pulled back."""
    walk, out = 0.0, np.zeros(STEPS)
    for i, kick in enumerate(rng.normal(0, size, STEPS)):
        walk = 0.97 * walk + kick
        out[i] = walk
    return out


# ---- faults: change the values from the onset on; `after` is -1 before it, then 0, 1, ...


def _ramp(after: np.ndarray, steps: float) -> np.ndarray:
    return np.clip((after + 1) / steps, 0, 1)


def _entropy_collapse(values: Values, after: np.ndarray, rng: np.random.Generator) -> None:
    values["entropy"] *= np.exp(-(after + 1) / rng.uniform(6, 14))


def _entropy_explosion(values: Values, after: np.ndarray, rng: np.random.Generator) -> None:
    ramp = _ramp(after, rng.uniform(8, 16))
    values["entropy"] += ramp * rng.uniform(4, 6) * np.exp(rng.normal(0, 0.05, STEPS))
    values["reward_mean"] *= 1 - ramp
    _flatten(values, ramp)


def _flatten(values: Values, ramp: np.ndarray) -> None:
    """The spread vanishes as `ramp` goes to 1."""
    for name in ("group_reward_std", "reward_std", "advantage_std"):
        values[name] *= 1 - ramp
    for name in ("dead_group_fraction", "advantage_flat_fraction"):
        values[name] += (1 - values[name]) * ramp


def _variance_collapse(values: Values, after: np.ndarray, rng: np.random.Generator) -> None:
    _flatten(values, _ramp(after, rng.uniform(8, 20)) * 0.995)


def _kl_explosion(values: Values, after: np.ndarray, rng: np.random.Generator) -> None:
    values["kl"] *= np.exp(np.clip((after + 1) / rng.uniform(5, 10), 0, 7))


def _gradient_explosion(values: Values, after: np.ndarray, rng: np.random.Generator) -> None:
    values["grad_norm"] *= np.exp(np.clip((after + 1) / rng.uniform(2, 5), 0, 6))


def _nan_loss(values: Values, after: np.ndarray, rng: np.random.Generator) -> None:
    values["loss"][after >= 0] = math.nan


def _wide_advantages(values: Values, after: np.ndarray, rng: np.random.Generator) -> None:
    values["advantage_std"] *= np.where(after >= 0, 10.0, 1.0)


def _reward_hacking(values: Values, after: np.ndarray, rng: np.random.Generator) -> None:
    ramp = _ramp(after, rng.uniform(20, 40))
    values["reward_mean"] += (1 - values["reward_mean"]) * 0.8 * ramp
    values["eval_accuracy"] *= 1 - 0.6 * _ramp(after, 40)
    values["response_length_mean"] *= 1 + 0.8 * ramp
    values["ngram_repetition"] += 0.5 * ramp
    for name in ("group_reward_std", "reward_std"):
        values[name] *= 1 - 0.7 * ramp


def _length_explosion(values: Values, after: np.ndarray, rng: np.random.Generator) -> None:
    ramp = _ramp(after, rng.uniform(15, 30))
    values["response_length_mean"] *= 1 + rng.uniform(2, 4) * ramp
    values["truncated_fraction"] += (0.95 - values["truncated_fraction"]) * ramp**2
    values["ngram_repetition"] += 0.3 * ramp


def _declining_reward(values: Values, after: np.ndarray, rng: np.random.Generator) -> None:
    values["reward_mean"] *= 1 - 0.9 * _ramp(after, rng.uniform(60, 100))


Fault = Callable[[Values, np.ndarray, np.random.Generator], None]
FAULTS: dict[str, Fault] = {
    "entropy collapse": _entropy_collapse,
    "entropy explosion": _entropy_explosion,
    "variance collapse": _variance_collapse,
    "KL explosion": _kl_explosion,
    "gradient explosion": _gradient_explosion,
    "NaN loss": _nan_loss,
    "advantages ten times as wide": _wide_advantages,
    "reward hacking": _reward_hacking,
    "length explosion": _length_explosion,
    "declining reward": _declining_reward,
}
