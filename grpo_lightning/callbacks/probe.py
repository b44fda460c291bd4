"""The probe: frozen prompts with frozen seeds, sampled beside training, so that runs can be compared.

The seeds are the same in every run, whatever its own seed. The probe leaves weights, rollouts and random states as they
are: a run with it has the weights of one without, bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from time import perf_counter
from typing import Any

from grpo_lightning import signals
from grpo_lightning.callbacks.settings import ProbeSettings
from grpo_lightning.errors import ConfigError
from grpo_lightning.objective.batch import PromptBatch
from grpo_lightning.training import ranks, rng
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.observing import observe

__all__ = ["PROBE_SEED", "Probe", "probed_signals"]

PROBE_SEED = 0x50726F6265
_FAMILIES = ("reward", "advantage", "policy", "response")
_OF_UPDATES = {"kl_coef", "ratio_mean", "ratio_max", "clip_low_fraction", "clip_high_fraction", "signal_token_fraction"}


class Probe:
    """Samples the frozen prompts when it is time. Every rank calls it alike, each with its share of the prompts."""

    def __init__(self, settings: ProbeSettings) -> None:
        self._settings = settings
        self._batch: PromptBatch | None = None

    def due(self, step: int) -> bool:
        """At step 1 and every N steps."""
        every = self._settings.every_n_steps
        return bool(every) and (step == 1 or step % every == 0)

    def measure(self, module: GRPOModule, datamodule: Any) -> dict[str, float]:
        """The `probe_*` signals of the weights as they are."""
        started = perf_counter()
        if self._batch is None:
            self._batch = self._prompts(datamodule, ranks.rank(), ranks.world_size()).to(module.device)
        state = rng.capture()
        try:
            record = observe(module, self._batch, seed=PROBE_SEED)
        finally:
            rng.restore(state)
        own = signals.measure(record)
        packs = ranks.all_gather_tensor(own.pack().to(module.device))
        found = probed_signals(signals.finish(packs, own, record))
        return found | {"probe_seconds": perf_counter() - started}

    def identity(self, module: GRPOModule, datamodule: Any) -> dict[str, Any]:
        """What two runs must share for their probes to be comparable; nothing without a probe."""
        if not self._settings.every_n_steps:
            return {}
        batch = self._prompts(datamodule, 0, 1)
        ids = [row[mask].tolist() for row, mask in zip(batch.ids_PS, batch.mask_PS, strict=True)]
        return {
            "seed": PROBE_SEED,
            "prompts": len(ids),
            "prompts_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
            "group_size": module.group_size,
            "rewards": dict(zip(module.reward_runner.names, module.reward_runner.weights, strict=True)),
            "sampling": asdict(module.collector.sampling),
        }

    def _prompts(self, datamodule: Any, rank: int, world_size: int) -> PromptBatch:
        if not hasattr(datamodule, "frozen_prompts"):
            raise ConfigError("run.probe needs a PromptDataModule: train with one, or set run.probe.every_n_steps: 0.")
        batch: PromptBatch = datamodule.frozen_prompts(self._settings.prompts, rank=rank, world_size=world_size)
        return batch


def probed_signals(values: dict[str, float]) -> dict[str, float]:
    """Those that say something of the policy and not of an update, as `probe_*`."""
    return {f"probe_{name}": value for name, value in values.items() if _is_of_policy(name)}


def _is_of_policy(name: str) -> bool:
    if name in _OF_UPDATES:
        return False
    of = signals.signal(name)
    return of.family in _FAMILIES or name.startswith("reward_") or name == "nonfinite_count"
