"""What watching costs: a step with everything watched against the same step with nothing watched.

    python benchmarks/monitor_overhead.py [--rounds 8] [--only tiny|smollm2|catalogue]

The same steps are trained again and again in this process, in turn watched and bare, each time from the same weights, so
that both do the same work; then a probe's cost beside them. Watched: every signal, the rules, the journal, MLflow in its
background thread, a JSON-lines sink, evidence and histograms. A step's time goes from one step's end to the next's; of
each step the least over rounds counts. `hooks` is the time inside the watching callbacks alone, which the difference of two
noisy times can't show when it is small, and `behind` the processor time of MLflow's and the sink's threads, which may or may
not slow a step. The catalogue is evaluated on random rollouts of 512 prompts x 16 completions x 1,024 tokens. On a
busy machine `--cpu` counts the main thread's processor time, on one thread, instead of the clock's. The last line is JSON:
`tiny` and `smollm2`, fractions of a step, the greater of `overhead` and `hooks/step`; `catalogue_ms`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = {
    "tiny": ["--config", str(ROOT / "grpo_lightning/shipped/arithmetic/config.yaml")],
    "smollm2": ["--config", str(ROOT / "examples/smollm2/config.yaml")],
}
STEPS = {"tiny": 45, "smollm2": 4}
WARM_UP = {"tiny": 5, "smollm2": 1}
CPU = {"only": False}
BEHIND = {"seconds": 0.0}  # processor time of other threads
HOOKS = ("on_before_optimizer_step", "on_train_batch_end")


def now() -> float:
    """Seconds; which ones is chosen by `--cpu`."""
    return thread_time() if CPU["only"] else perf_counter()


@dataclass(kw_only=True)
class Times:
    """Seconds of each step, one list a round."""

    steps: list[list[float]] = field(default_factory=list)
    hooks: list[list[float]] = field(default_factory=list)

    def typical(self, which: str) -> float:
        """The mean step, of each step the least over rounds: what disturbs a step only adds to it."""
        rounds = getattr(self, which)
        return sum(min(same) for same in zip(*rounds, strict=True)) / len(rounds[0])


class Bench:
    """A config's module and data, trained from the same weights as often as asked."""

    def __init__(self, name: str, folder: Path) -> None:
        from grpo_lightning.cli.fit import _build

        self.name, self.folder, self.rounds = name, folder, 0
        cli = _build("fit", [*CONFIGS[name], "--data.val", "null", "--trainer.max_steps", str(STEPS[name])])
        self.module, self.data = cli.model, cli.datamodule
        self.first = copy.deepcopy(dict(self.module.policy.state_dict()))

    def run(self, *, watched: bool, probe: int = 0) -> tuple[list[float], list[float]]:
        """Seconds of each step after the warm-up, and of those the seconds inside watching hooks."""
        import lightning as L

        self.rounds += 1
        self.module.policy.load_state_dict(self.first)
        self.module.window, self.module.updates_done = None, 0
        clock = _clock()
        callbacks = [*(_timed(c, clock) for c in self._watchers(probe)), clock] if watched else [clock]
        trainer = L.Trainer(
            max_steps=STEPS[self.name],
            max_epochs=-1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=watched,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=callbacks,
            default_root_dir=self.folder,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(self.module, datamodule=self.data)
        warm = WARM_UP[self.name]
        return clock.steps[warm:], clock.hooks[warm:]

    def _watchers(self, probe: int) -> list[Any]:
        from grpo_lightning.callbacks import CheckpointSettings, ProbeSettings, RunSettings, run_callbacks

        run = RunSettings(
            dir=str(self.folder / "runs"),
            sinks={"jsonl": {"path": str(self.folder / f"{self.name}-{self.rounds}.jsonl")}},
            evidence_every=25,
            histogram_every=25,
            probe=ProbeSettings(every_n_steps=probe),
        )
        return run_callbacks(run=run, checkpoint=CheckpointSettings(every_n_steps=0), config_yaml="model: {}\n")


def _clock() -> Any:
    import lightning as L

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.steps: list[float] = []
            self.hooks: list[float] = []
            self.inside = 0.0

        def on_train_start(self, *_: Any) -> None:
            self.last = now()

        def on_train_batch_end(self, *_: Any) -> None:
            ended = now()
            self.steps.append(ended - self.last)
            self.hooks.append(self.inside)
            self.last, self.inside = ended, 0.0

    return Clock()


def _timed(callback: Any, clock: Any) -> Any:
    """The same callback, its time per step added up in the clock."""
    for name in HOOKS:
        inner = getattr(callback, name)

        def hook(*args: Any, inner: Any = inner, **kwargs: Any) -> Any:
            started = now()
            result = inner(*args, **kwargs)
            clock.inside += now() - started
            return result

        setattr(callback, name, hook)
    return callback


def count_background() -> None:
    """Add up the processor time of what MLflow's thread and the sinks' do with rows."""
    from grpo_lightning.sinks import GuardedSink
    from grpo_lightning.tracking import MetricPump

    for owner, name in ((MetricPump, "_cycle"), (GuardedSink, "write_step")):
        inner = getattr(owner, name)

        def counted(*args: Any, inner: Any = inner) -> Any:
            started = thread_time()
            try:
                return inner(*args)
            finally:
                BEHIND["seconds"] += thread_time() - started

        setattr(owner, name, counted)


def overhead(name: str, rounds: int, folder: Path) -> dict[str, float]:
    """Mean step watched and bare, and of the watched one the hooks' part; seconds."""
    bench = Bench(name, folder)
    bench.run(watched=True)  # imports, stores, ways of attention: once
    watched, bare = Times(), Times()
    BEHIND["seconds"] = 0.0
    for _ in range(rounds):
        for times, is_watched in ((watched, True), (bare, False)):
            steps, hooks = bench.run(watched=is_watched)
            times.steps.append(steps)
            times.hooks.append(hooks)
    behind = BEHIND["seconds"] / rounds / STEPS[name]
    probed, _ = bench.run(watched=True, probe=1)
    with_it, without = watched.typical("steps"), bare.typical("steps")
    return {
        "watched_s": with_it,
        "bare_s": without,
        "behind_s": behind,
        "hooks_s": watched.typical("hooks"),
        "probe_s": max(sum(probed) / len(probed) - with_it, 0.0),
    }


def catalogue_ms(repeats: int = 3) -> float:
    """Milliseconds of one evaluation of the whole catalogue on one rank."""
    from grpo_lightning.signals import finish, measure

    record = big_record(512, 16, 1024)
    times = []
    for _ in range(repeats + 1):
        started = perf_counter()
        own = measure(record)
        finish([own.pack()], own, record)
        times.append(perf_counter() - started)
    return 1000 * median(times[1:])


def big_record(groups: int, size: int, length: int) -> Any:
    """Random rollouts with everything measured."""
    from grpo_lightning.objective import Rollouts, StepRecord, group_advantages

    generator = torch.Generator().manual_seed(0)
    shape = (groups, size, length)
    lengths_PG = torch.randint(length // 4, length + 1, shape[:2], generator=generator)
    mask_PGL = torch.arange(length) < lengths_PG.unsqueeze(-1)
    rewards_PG = torch.randint(0, 2, shape[:2], generator=generator).double()

    def tokens() -> torch.Tensor:
        return -torch.rand(shape, generator=generator)

    rollouts = Rollouts(
        prompt_ids_PS=torch.randint(2, 32_000, (groups, 256), generator=generator),
        prompt_mask_PS=torch.ones(groups, 256, dtype=torch.bool),
        completion_ids_PGL=torch.randint(2, 32_000, shape, generator=generator) * mask_PGL,
        completion_mask_PGL=mask_PGL,
        terminated_PG=lengths_PG < length,
        sampler_logprobs_PGL=tokens(),
    )
    return StepRecord(
        step=1,
        rollouts=rollouts,
        row_ids_P=torch.arange(groups),
        sources=["a", "b"] * (groups // 2),
        reward_names=["right"],
        reward_weights=[1.0],
        rewards_PGK=rewards_PG.unsqueeze(-1),
        rewards_PG=rewards_PG,
        advantages_PG=group_advantages(rewards_PG).advantages_PG,
        loss_mask_PGL=mask_PGL,
        logprobs_PGL=tokens(),
        old_logprobs_PGL=tokens(),
        ref_logprobs_PGL=tokens(),
        entropies_PGL=-tokens(),
        loss=0.0,
        policy_loss=0.0,
        kl_loss=0.0,
        kl_coef=0.04,
        clip_low=0.2,
        clip_high=0.2,
        importance_level="token",
        grad_norm=1.0,
        grad_norm_clipped=1.0,
        lr=1e-6,
        update_skipped=False,
        max_completion_tokens=length,
        seconds={"step": 1.0},
    )


@contextlib.contextmanager
def quiet_store() -> Iterator[Path]:
    """A folder with its own MLflow store; only the table and the JSON line are of interest."""
    from transformers.utils import logging as hf_logging

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        yield Path(folder)


def main() -> None:
    """Measure, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="times that each step is trained watched, and bare")
    parser.add_argument("--only", choices=[*CONFIGS, "catalogue"], help="one row alone")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--cpu", action="store_true", help="processor time of the main thread on one thread")
    args = parser.parse_args()
    CPU["only"] = args.cpu
    torch.set_num_threads(1 if args.cpu else args.threads)
    count_background()
    results: dict[str, Any] = {}
    with quiet_store() as folder:
        rows = {n: overhead(n, args.rounds, folder) for n in CONFIGS if args.only in (None, n)}
    header = ("run", "bare, ms", "watched, ms", "overhead", "hooks, ms", "hooks/step", "behind, ms", "probe, ms")
    print("{:<10}{:>10}{:>13}{:>10}{:>11}{:>12}{:>12}{:>11}".format(*header))
    for name, row in rows.items():
        bare, watched, hooks, probe = (1000 * row[k] for k in ("bare_s", "watched_s", "hooks_s", "probe_s"))
        behind = 1000 * row["behind_s"]
        results[name] = round(max(watched / bare - 1, hooks / bare), 4)
        shares = f"{watched / bare - 1:>10.2%}{hooks:>11.2f}{hooks / bare:>12.2%}{behind:>12.2f}"
        print(f"{name:<10}{bare:>10.1f}{watched:>13.1f}{shares}{probe:>11.1f}")
    if args.only in (None, "catalogue"):
        results["catalogue_ms"] = round(catalogue_ms(), 1)
        print(f"catalogue at 512 prompts x 16 completions x 1,024 tokens: {results['catalogue_ms']} ms")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
