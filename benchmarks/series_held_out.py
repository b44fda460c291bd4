"""A second, independent set of generated series, on which no rule was tuned.

Other shapes, other noise and other logs than in `series.py`: answers are drawn from prompts of unequal difficulty, rewards
have any scale and may be continuous, noise is heavy-tailed and correlated, runs are 200 to 1,000 steps long and faults begin
anywhere after step 40. Faults act on the answers, and what follows from them (spread, advantages, gradient) is computed. Dips
of the healthy are 30 to 60 % deep and 15 to 45 steps long, and some take length and truncation along. Each series is logged
as one of six trainers might: all signals; without the dead share; without the groups' std; with TRL's metrics only; these
as means of 5 steps; and without a KL. Once a rule was tuned on a draw of them, `--draw` makes the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from series import Pair, Series, Values

__all__ = ["DRESSES", "FAULTS", "Setting", "draw_setting", "healthy_series", "make", "pairs"]

FAMILIES = 10  # of seeds, so that `--healthy 5` makes 50 series
DRAW = 100_000  # seeds from a draw to the next
CURVES = ("power", "stairs", "late", "linear", "flat", "solved", "peak")
TRL = (
    "reward_mean",
    "reward_std",
    "dead_group_fraction",
    "kl",
    "entropy",
    "grad_norm",
    "loss",
    "response_length_mean",
    "truncated_fraction",
    "eval_accuracy",
)
DRESSES = ("all", "no dead share", "no group std", "trl", "trl every 5", "no kl")
LAST = 100  # steps that a fault has at least


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a run is like, apart from its noise."""

    dress: str
    steps: int
    prompts: int
    group: int
    curve: str
    low: float  # share of right answers at the start
    high: float
    sameness: float  # concentration of the prompts' difficulty: small makes dead groups
    continuous: bool  # rewards with a part for style
    scale: float
    shift: float
    entropy: float
    entropy_end: float  # relative to the start
    kl: float
    kl_shape: str
    length: float
    growth: float  # of the length, earned with the reward
    cut: float  # truncated share at the start
    spikes: int
    dips: tuple[tuple[int, int, float, bool], ...]  # start, steps, depth, whether length goes along


@dataclass(kw_only=True, slots=True)
class World:
    """What happens at each step, before answers are drawn: faults change it. Arrays over steps."""

    skill: np.ndarray
    hacked: np.ndarray  # share of the answers that get the greatest reward whatever they say
    same: np.ndarray  # share of the groups whose answers are all alike
    widened: np.ndarray  # factor on advantages
    entropy: np.ndarray
    kl: np.ndarray
    gradient: np.ndarray  # factor on its norm
    length: np.ndarray
    cut: np.ndarray
    repeats: np.ndarray
    broken: np.ndarray  # bool: the loss is NaN
    truth: np.ndarray  # share of right answers in evaluation
    seed: int
    noise: np.random.Generator = field(repr=False)


def healthy_series(seeds: int, draw: int = 0) -> list[Series]:
    """`seeds` times ten healthy runs, all different, and different in each draw."""
    numbers = range(DRAW * draw, DRAW * draw + FAMILIES * seeds)
    return [make(draw_setting(number), number) for number in numbers]


def pairs(seeds: int, draw: int = 0) -> list[Pair]:
    """Every fault, `seeds` times."""
    return [_pair(fault, kind, seed, draw) for kind, fault in enumerate(FAULTS) for seed in range(seeds)]


def _pair(fault: str, kind: int, seed: int, draw: int) -> Pair:
    number = DRAW * draw + 10_000 + 100 * kind + seed
    setting = draw_setting(number)
    dress = DRESSES[(seed + kind) % len(DRESSES)]
    setting = replace(setting, dress="trl" if fault == "KL explosion" and dress == "no kl" else dress)
    return Pair(fault=fault, series=make(setting, number, fault), twin=make(setting, number))


def draw_setting(number: int) -> Setting:
    """The setting of a seed."""
    rng = np.random.default_rng([number, 1])
    steps = int(rng.integers(200, 1001))
    curve = str(rng.choice(CURVES))
    low = rng.uniform(0.12, 0.45)
    rise = {"flat": 0.0, "solved": 0.97 - low}.get(curve, rng.uniform(0.2, 0.45))
    scale = float(rng.choice([1.0, 1.0, 2.0, 10.0]))
    return Setting(
        dress=DRESSES[number % len(DRESSES)],
        steps=steps,
        prompts=int(rng.choice([1, 2, 4, 8, 16, 64])),
        group=int(rng.choice([2, 4, 8, 16])),
        curve=curve,
        low=low,
        high=low + rise,
        sameness=rng.uniform(0.7, 4.0),
        continuous=bool(rng.random() < 0.4),
        scale=scale,
        shift=float(rng.choice([0.0, 0.0, -0.5 * scale, -1.0])),
        entropy=float(np.exp(rng.uniform(np.log(0.15), np.log(2.6)))),
        entropy_end=float(rng.choice([0.4, 0.6, 0.9, 1.6])),
        kl=0.01 * float(np.exp(rng.uniform(0, np.log(80)))),
        kl_shape=str(rng.choice(["root", "linear", "saturating", "synced"], p=[0.3, 0.3, 0.3, 0.1])),
        length=rng.uniform(60, 900),
        growth=float(rng.choice([-0.3, 0.0, 0.4, 0.9])),
        cut=float(rng.choice([0.0, 0.03, 0.15, 0.5])),
        spikes=int(rng.choice([0, 0, 3, 8])),
        dips=_dips(rng, steps),
    )


def _dips(rng: np.random.Generator, steps: int) -> tuple[tuple[int, int, float, bool], ...]:
    count = int(rng.choice([0, 1, 2], p=[0.55, 0.3, 0.15]))
    return tuple(
        (
            int(rng.integers(40, steps - 60)),
            int(rng.integers(15, 46)),
            float(rng.uniform(0.3, 0.6)),
            bool(rng.random() < 0.5),
        )
        for _ in range(count)
    )


# ---- a run


def make(setting: Setting, seed: int, fault: str | None = None) -> Series:
    """A run; with a fault, the same run until the fault's onset."""
    world = _world(setting, seed)
    onset = None
    if fault is not None:
        rng = np.random.default_rng([seed, 3])
        onset = int(rng.integers(41, max(42, setting.steps - LAST)))
        after = np.arange(setting.steps) - (onset - 1)
        FAULTS[fault](world, np.maximum(after, -1), rng)
    values = _dressed(setting.dress, _signals(setting, world))
    every = 5 if setting.dress == "trl every 5" else 1
    return Series(
        name=f"{fault or 'healthy'} ({setting.dress}, {setting.curve}, {setting.prompts}x{setting.group}, {setting.steps})",
        values=_means(values, every) if every > 1 else values,
        prompts=setting.prompts,
        group=setting.group,
        seed=seed,
        onset=onset,
        every=every,
        groups_known=not setting.dress.startswith("trl"),
    )


def _world(setting: Setting, seed: int) -> World:
    n, rng = setting.steps, np.random.default_rng([seed, 2])
    t = np.arange(n) / n
    curve = _curve(setting, t, rng)
    skill = setting.low + (setting.high - setting.low) * curve + _walk(rng, n, 0.006)
    fallen, longer = _fallen(setting)
    skill = np.clip(skill * (1 - fallen), 0.005, 0.995)
    length = setting.length * (1 + setting.growth * curve) * (1 + 0.7 * longer) * np.exp(_walk(rng, n, 0.012))
    cut = setting.cut * (1 - 0.6 * curve) + 0.4 * longer
    return World(
        skill=skill,
        hacked=np.zeros(n),
        same=np.zeros(n),
        widened=np.ones(n),
        entropy=setting.entropy * setting.entropy_end ** (1 - np.exp(-3 * t)) * np.exp(_walk(rng, n, 0.015)),
        kl=setting.kl * _kl_shape(setting, t, rng) * np.exp(_walk(rng, n, 0.03)),
        gradient=np.ones(n),
        length=length,
        cut=np.clip(cut, 0, 1),
        repeats=np.full(n, rng.uniform(0.02, 0.12)),
        broken=np.zeros(n, dtype=bool),
        truth=skill.copy(),
        seed=seed,
        noise=rng,
    )


def _curve(setting: Setting, t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """From 0 to about 1."""
    at = rng.uniform(0.4, 0.65)
    jumps = np.sort(rng.uniform(0.1, 0.8, 3))
    shapes: dict[str, Callable[[], np.ndarray]] = {
        "power": lambda: (1 - (1 + 9 * t) ** -0.8) / (1 - 10**-0.8),
        "stairs": lambda: sum((1 / (1 + np.exp(-(t - jump) * 90)) for jump in jumps), np.zeros_like(t)) / 3,
        "late": lambda: 1 / (1 + np.exp(-(t - at) * 25)),
        "linear": lambda: t,
        "flat": lambda: np.zeros_like(t),
        "solved": lambda: 1 - np.exp(-9 * t),
        "peak": lambda: np.minimum(t / 0.6, 1) - 0.25 * np.maximum(t - 0.7, 0),
    }
    return shapes[setting.curve]()


def _fallen(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """How much of the skill is missing in dips, and how much longer the answers are there."""
    fallen, longer = np.zeros(setting.steps), np.zeros(setting.steps)
    for start, steps, depth, along in setting.dips:
        inside = (np.arange(setting.steps) - start) / steps
        shape = np.where((inside >= 0) & (inside <= 1), np.minimum(1, 1.6 * np.sin(np.pi * np.clip(inside, 0, 1))), 0)
        fallen = np.maximum(fallen, depth * shape)
        longer = np.maximum(longer, shape if along else 0)
    return fallen, longer


def _kl_shape(setting: Setting, t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    since = (t * setting.steps) % rng.integers(150, 400)  # the reference is brought up to the policy now and then
    shapes = {"root": np.sqrt(t), "linear": t, "saturating": 1 - np.exp(-5 * t), "synced": 0.15 + since / 300}
    shape: np.ndarray = shapes[setting.kl_shape]
    return 0.02 + shape


def _walk(rng: np.random.Generator, n: int, size: float) -> np.ndarray:
    """A slow walk that is pulled back, with kicks of Student's t (4)."""
    kicks = rng.standard_t(4, n) * size
    out = np.zeros(n)
    for i in range(1, n):
        out[i] = 0.95 * out[i - 1] + kicks[i]
    return out


# ---- from answers to signals


def _signals(setting: Setting, world: World) -> Values:
    n, rng = setting.steps, world.noise
    values = _draw(setting, world)
    tail = np.exp(0.25 * rng.standard_t(5, n).clip(-6, 6))
    for at in rng.choice(np.arange(30, n), setting.spikes, replace=False):
        tail[at] *= 10 ** rng.uniform(0.9, 1.7)
    usual = max(float(values["advantage_std"][:30].mean()), 0.05)
    pull = 0.1 + 0.9 * values["advantage_std"] / usual
    values |= {
        "entropy": world.entropy * np.exp(rng.normal(0, 0.05, n)),
        "kl": world.kl * np.exp(0.2 * rng.standard_t(5, n)),
        "grad_norm": 0.3 * tail * pull * world.gradient,
        "loss": np.where(world.broken, np.nan, rng.normal(0, 0.03, n) * world.widened + 0.02 * world.kl),
        "response_length_mean": world.length * np.exp(rng.normal(0, 0.06, n)),
        "truncated_fraction": np.clip(world.cut + rng.normal(0, 0.02, n), 0, 1).round(3),
        "ngram_repetition": np.clip(world.repeats + rng.normal(0, 0.01, n), 0, 1),
        "eval_accuracy": np.where(
            (np.arange(n) + 1) % 25 == 0, np.clip(world.truth + rng.normal(0, 0.02, n), 0, 1), np.nan
        ),
    }
    return values


def _draw(setting: Setting, world: World) -> Values:
    names = (
        "reward_mean",
        "reward_std",
        "group_reward_std",
        "dead_group_fraction",
        "advantage_std",
        "advantage_flat_fraction",
    )
    table = np.array([_step(setting, world, i) for i in range(setting.steps)])
    return {name: table[:, k] for k, name in enumerate(names)}


def _step(setting: Setting, world: World, i: int) -> tuple[float, ...]:
    rng = np.random.default_rng([world.seed, 4, i])  # one a step: a fault changes no later step's draws
    P, G = setting.prompts, setting.group
    skill, c = world.skill[i], setting.sameness
    ease_P = rng.beta(skill * c, (1 - skill) * c, P)
    right_PG = rng.random((P, G)) < ease_P[:, None]
    right_PG |= rng.random((P, G)) < world.hacked[i]
    alike_P = rng.random(P) < world.same[i]
    style_PG = rng.random((P, G))
    right_PG = np.where(alike_P[:, None], right_PG[:, :1], right_PG)
    style_PG = np.where(alike_P[:, None], style_PG[:, :1], style_PG)
    raw_PG = right_PG * (0.7 + 0.3 * style_PG) if setting.continuous else right_PG.astype(float)
    return _moments(raw_PG * setting.scale + setting.shift, setting.scale, world.widened[i])


def _moments(rewards_PG: np.ndarray, scale: float, widened: float) -> tuple[float, ...]:
    spread_P = rewards_PG.std(1, ddof=1)
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdims=True)
    advantages_PG = widened * centred_PG / (spread_P[:, None] + 1e-4)
    return (
        rewards_PG.mean(),
        rewards_PG.std(),
        spread_P.mean(),
        float((spread_P < 1e-6 * scale).mean()),
        advantages_PG.std(),
        float((np.abs(advantages_PG) < 0.02).mean()),
    )


def _dressed(dress: str, values: Values) -> Values:
    if dress.startswith("trl"):
        return {name: values[name] for name in TRL}
    left = {
        "no dead share": ("dead_group_fraction", "advantage_flat_fraction"),
        "no group std": ("group_reward_std",),
        "no kl": ("kl",),
    }.get(dress, ())
    return {name: value for name, value in values.items() if name not in left}


def _means(values: Values, every: int) -> Values:
    """Rows that average `every` steps; an evaluation stands in the row that ends at it."""
    rows = len(values["reward_mean"]) // every
    parts = {name: value[: rows * every].reshape(rows, every) for name, value in values.items()}
    return {name: part[:, -1] if name == "eval_accuracy" else part.mean(1) for name, part in parts.items()}


# ---- faults: `after` is -1 before the onset, then 0, 1, ...


def _ramp(after: np.ndarray, steps: float) -> np.ndarray:
    return np.clip((after + 1) / steps, 0, 1)


def _entropy_collapse(world: World, after: np.ndarray, rng: np.random.Generator) -> None:
    world.entropy *= np.maximum(np.exp(-(after + 1) / rng.uniform(5, 20)), rng.uniform(0.002, 0.05))
    world.same = np.maximum(world.same, 0.9 * _ramp(after, 50))


def _entropy_explosion(world: World, after: np.ndarray, rng: np.random.Generator) -> None:
    ramp = _ramp(after, rng.uniform(6, 25))
    world.entropy += ramp**2 * rng.uniform(3, 7)
    world.skill *= 1 - 0.99 * ramp
    world.truth *= 1 - 0.99 * ramp
    world.length *= 1 + rng.uniform(0.5, 2.5) * ramp
    world.cut += (1 - world.cut) * ramp


def _variance_collapse(world: World, after: np.ndarray, rng: np.random.Generator) -> None:
    world.same = np.maximum(world.same, _ramp(after, rng.uniform(5, 30)))


def _kl_explosion(world: World, after: np.ndarray, rng: np.random.Generator) -> None:
    rise = np.clip((after + 1) / rng.uniform(4, 15), 0, rng.uniform(4, 8))
    world.kl = world.kl * np.exp(rise)
    world.gradient *= np.exp(0.2 * rise)


def _gradient_explosion(world: World, after: np.ndarray, rng: np.random.Generator) -> None:
    world.gradient *= np.exp(np.clip((after + 1) / rng.uniform(1, 6), 0, rng.uniform(3, 6)))


def _nan_loss(world: World, after: np.ndarray, rng: np.random.Generator) -> None:
    world.broken |= after >= 0


def _wide_advantages(world: World, after: np.ndarray, rng: np.random.Generator) -> None:
    world.widened *= np.where(after >= 0, 10.0, 1.0)


def _reward_hacking(world: World, after: np.ndarray, rng: np.random.Generator) -> None:
    ramp = _ramp(after, rng.uniform(15, 50))
    world.hacked = np.maximum(world.hacked, rng.uniform(0.75, 0.95) * ramp)
    world.truth *= 1 - rng.uniform(0.4, 0.8) * _ramp(after, 50)
    world.length *= 1 + rng.uniform(0.3, 1.2) * ramp
    world.repeats += rng.uniform(0.3, 0.6) * ramp
    world.entropy *= 1 - 0.3 * ramp


def _length_explosion(world: World, after: np.ndarray, rng: np.random.Generator) -> None:
    ramp = _ramp(after, rng.uniform(12, 40))
    world.length *= 1 + rng.uniform(1.8, 4) * ramp
    world.cut += (0.97 - world.cut) * ramp**2
    world.repeats += rng.uniform(0.1, 0.4) * ramp
    world.skill *= 1 - 0.4 * ramp


def _declining_reward(world: World, after: np.ndarray, rng: np.random.Generator) -> None:
    fall = 1 - rng.uniform(0.8, 0.95) * _ramp(after, rng.uniform(50, 120))
    world.skill *= fall
    world.truth *= fall


Fault = Callable[[World, np.ndarray, np.random.Generator], None]
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
