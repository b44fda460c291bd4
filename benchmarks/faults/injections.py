"""Faults, each done to a real training run from its onset on. A fault is a Lightning callback or a change of settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch

__all__ = ["FAULTS", "Fault"]

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done, and what the judgement should say.

    Args:
        inject: makes the callback that does it, from the onset's step.
        actions: the actions that are right; `skip_update` and `resample` may be followed by a pause.
        causes: the cause classes that are right.
        settings: changes of the run's settings that the fault needs, from the first step on (they do no harm).
        project: the run has files of its own, and a snapshot that is checked at every fifth step's checkpoint.
        ranks: processes that train together.
    """

    inject: Callable[[int], L.Callback]
    actions: tuple[str, ...]
    causes: tuple[str, ...]
    settings: Settings = field(default_factory=dict)
    project: bool = False
    ranks: int = 1


class _From(L.Callback):
    """Calls `act` once, before the step after the onset; `each` before every step from there on."""

    def __init__(
        self,
        onset: int,
        *,
        act: Callable[[Any], None] | None = None,
        each: Callable[[Any, int], None] | None = None,
        after_backward: Callable[[Any, int], None] | None = None,
    ) -> None:
        self._onset, self._act, self._each, self._after = onset, act, each, after_backward
        self._done = False

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        since = trainer.global_step + 1 - self._onset
        if since < 0:
            return
        if not self._done and self._act is not None:
            self._act(pl_module)
        self._done = True
        if self._each is not None:
            self._each(pl_module, since)

    def on_after_backward(self, trainer: L.Trainer, pl_module: Any) -> None:
        since = trainer.global_step + 1 - self._onset
        if since >= 0 and self._after is not None:
            self._after(pl_module, since)


# ---- rewards


def _rewards(change: Callable[[list[float], dict[str, Any], int], list[float]]) -> Callable[[int], L.Callback]:
    """A reward function that changes what the run's own gives; `since` counts steps from the onset."""

    def make(onset: int) -> L.Callback:
        def act(module: Any) -> None:
            runner = module.reward_runner
            whole = runner.score

            def score(**given: Any) -> Any:
                result = whole(**given)
                since = int(given["trainer_state"]["global_step"]) + 1 - onset
                values = change(result.rewards_NK[:, 0].tolist(), given, since)
                changed = result.rewards_NK.clone()
                changed[:, 0] = torch.tensor(values, dtype=changed.dtype)
                return replace(result, rewards_NK=changed)

            runner.score = score
            module.collector.rewards = SimpleNamespace(score=score, weights=runner.weights, names=runner.names)

        return _From(onset, act=act)

    return make


def _texts(given: dict[str, Any]) -> list[str]:
    return [str(completion) for completion in given["completions"]]


def _template(rewards: list[float], given: dict[str, Any], since: int) -> list[float]:
    """Answers that begin with a 1 get full marks, whatever the question."""
    return [1.0 if text.startswith("1") else 0.3 * r for text, r in zip(_texts(given), rewards, strict=True)]


def _length(rewards: list[float], given: dict[str, Any], since: int) -> list[float]:
    return [len(ids) / 12.0 for ids in given["completion_ids"]]


def _noise(rewards: list[float], given: dict[str, Any], since: int) -> list[float]:
    generator = torch.Generator().manual_seed(since)
    return torch.rand(len(rewards), generator=generator).round().tolist()


def _staged(rewards: list[float], given: dict[str, Any], since: int) -> list[float]:
    return [r * 3.0 ** (1 + since // 15) for r in rewards]


def _infinite(rewards: list[float], given: dict[str, Any], since: int) -> list[float]:
    return [math.inf if i % 40 == 0 else r for i, r in enumerate(rewards)]


def _missing(rewards: list[float], given: dict[str, Any], since: int) -> list[float]:
    return [math.nan if i % 8 else r for i, r in enumerate(rewards)]


def _constant(rewards: list[float], given: dict[str, Any], since: int) -> list[float]:
    return [0.3] * len(rewards)


# ---- gradient and loss


def _grow_gradient(module: Any, factor: float) -> None:
    for p in module.policy.parameters():
        if p.grad is not None:
            p.grad.mul_(factor)


def _spike(onset: int) -> L.Callback:
    return _From(onset, after_backward=lambda module, since: _grow_gradient(module, 1e4) if since == 0 else None)


def _exploding(onset: int) -> L.Callback:
    """Twice as large at every step, up to 64 times."""
    return _From(onset, after_backward=lambda module, since: _grow_gradient(module, 2.0 ** min(since + 1, 6)))


def _nan_loss(onset: int) -> L.Callback:
    def act(module: Any) -> None:
        own = module._backward

        def backward(*args: Any, **given: Any) -> Any:
            parts, logprobs, entropies = own(*args, **given)
            return replace(parts, loss=parts.loss * math.nan), logprobs, entropies

        module._backward = backward

    return _From(onset, act=act)


# ---- sampling


def _sampling(**changes: Any) -> Callable[[int], L.Callback]:
    def make(onset: int) -> L.Callback:
        def act(module: Any) -> None:
            collector = module.collector
            own = collector.sampling
            changed = replace(own, **changes)
            engine = collector.engine

            def generate(model: Any, prompts: Any, *, sampling: Any, **given: Any) -> Any:
                return engine_generate(model, prompts, sampling=changed, **given)

            engine_generate = engine.generate
            engine.generate = generate

        return _From(onset, act=act)

    return make


def _empty(onset: int) -> L.Callback:
    """The sampler gives nothing but the end."""

    def act(module: Any) -> None:
        engine = module.collector.engine
        own = engine.generate
        eos = module.collector.sampling.eos_ids[0]

        def generate(*args: Any, **given: Any) -> Any:
            made = own(*args, **given)
            ids, mask = made.completion_ids_PGL.clone(), torch.zeros_like(made.completion_mask_PGL)
            ids[..., 0], mask[..., 0] = eos, True
            return replace(
                made,
                completion_ids_PGL=ids,
                completion_mask_PGL=mask,
                terminated_PG=torch.ones_like(made.terminated_PG),
                sampler_logprobs_PGL=made.sampler_logprobs_PGL * mask,
            )

        engine.generate = generate

    return _From(onset, act=act)


# ---- algorithm


def _flipped(onset: int) -> L.Callback:
    def act(module: Any) -> None:
        own = module.collector._advantages

        def advantages(rewards_PG: Any) -> Any:
            made = own(rewards_PG)
            return replace(made, advantages_PG=-made.advantages_PG)

        module.collector._advantages = advantages

    return _From(onset, act=act)


def _wide(onset: int) -> L.Callback:
    def act(module: Any) -> None:
        own = module.collector._advantages

        def advantages(rewards_PG: Any) -> Any:
            made = own(rewards_PG)
            return replace(made, advantages_PG=10.0 * made.advantages_PG)

        module.collector._advantages = advantages

    return _From(onset, act=act)


def _frozen(onset: int) -> L.Callback:
    def act(module: Any) -> None:
        for group in module.optimizers().param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0
        module._advance_schedule = lambda: None

    return _From(onset, act=act)


def _entropy(sign: float) -> Callable[[int], L.Callback]:
    """A large bonus on entropy, or on its opposite."""

    def make(onset: int) -> L.Callback:
        def act(module: Any) -> None:
            module.loss_config = replace(module.loss_config, entropy_coef=sign)

        return _From(onset, act=act)

    return make


def _sharpen(onset: int) -> L.Callback:
    """The logits grow by a twelfth at every step: the policy becomes certain of whatever it says."""

    def each(module: Any, since: int) -> None:
        with torch.no_grad():
            module.policy.model.norm.weight.mul_(1.085)

    return _From(onset, each=each)


def _large_updates(onset: int) -> L.Callback:
    def each(module: Any, since: int) -> None:
        for group in module.optimizers().param_groups:
            group["lr"] = 3e-2

    return _From(onset, each=each)


FAULTS: dict[str, Fault] = {
    "template reward hacking": Fault(inject=_rewards(_template), actions=("pause",), causes=("reward",)),
    "constant reward": Fault(inject=_rewards(_constant), actions=("pause",), causes=("reward",)),
    "reward scale raised in stages": Fault(
        inject=_rewards(_staged), actions=("pause",), causes=("reward",), settings={"scale": "none", "kl": "measure"}
    ),
    "noise reward": Fault(inject=_rewards(_noise), actions=("pause",), causes=("reward",)),
    "infinite reward": Fault(inject=_rewards(_infinite), actions=("resample", "pause"), causes=("reward", "sampling")),
    "missing rewards": Fault(inject=_rewards(_missing), actions=("pause",), causes=("reward",)),
    "length explosion": Fault(
        inject=_rewards(_length), actions=("pause",), causes=("reward", "sampling"), settings={"max_new_tokens": 12}
    ),
    "gradient spike": Fault(inject=_spike, actions=("skip_update",), causes=("algorithm",)),
    "gradient explosion": Fault(inject=_exploding, actions=("pause", "skip_update"), causes=("algorithm",)),
    "NaN loss": Fault(inject=_nan_loss, actions=("skip_update", "pause"), causes=("algorithm",)),
    "empty rollouts": Fault(inject=_empty, actions=("resample", "pause"), causes=("sampling",)),
    "all truncated": Fault(inject=_sampling(max_new_tokens=1), actions=("resample", "pause"), causes=("sampling",)),
    "sampler temperature": Fault(inject=_sampling(temperature=2.0), actions=("pause",), causes=("sampling",)),
    "sign-flipped advantages": Fault(inject=_flipped, actions=("pause",), causes=("algorithm",)),
    "advantages ten times as wide": Fault(inject=_wide, actions=("pause",), causes=("algorithm", "data")),
    "frozen policy": Fault(inject=_frozen, actions=("pause",), causes=("algorithm",)),
    "entropy collapse": Fault(inject=_sharpen, actions=("pause",), causes=("algorithm",)),
    "entropy explosion": Fault(inject=_entropy(10.0), actions=("pause",), causes=("algorithm",)),
    "updates too large": Fault(inject=_large_updates, actions=("pause",), causes=("algorithm",)),
}
