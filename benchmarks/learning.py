"""Our learning curve against TRL's GRPOTrainer: same warm-started weights, prompts, reward and settings.

    python benchmarks/learning.py [--seeds 3] [--steps 150]

Both train the shipped arithmetic model in this process, one after the other for each seed, with the same batch, learning
rate, loss (dapo, dead groups in its denominator as in TRL) and no KL. Greedy exact match on the held-out prompts is
measured by one and the same function on both sides, every few steps; the clock stands still meanwhile. The last line is JSON:
`ours_final` and `trl_final` are mean accuracies after the last step, `seconds_ratio_to_0.9` is our training seconds until
the first evaluation of at least 0.9 over TRL's, medians over the seeds (null when a seed of either side never gets there).
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch

from grpo_lightning import shipped

FOLDER = Path(shipped.expand("shipped:arithmetic"))
P, G, L = 32, 8, 4  # prompts a step, completions a prompt, completion tokens
RATE, RATE_WARMUP = 1e-4, 5
GOAL = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Where a run stands after a step."""

    step: int
    seconds: float  # of training, evaluation excluded
    accuracy: float


@dataclass(kw_only=True, slots=True)
class Curve:
    """A run's points, and the clock that makes them."""

    every: int
    points: list[Point] = field(default_factory=list)
    _seconds: float = 0.0
    _since: float = 0.0

    def start(self) -> None:
        """The clock runs from now."""
        self._since = perf_counter()

    def step_done(self, step: int, model: torch.nn.Module) -> None:
        """Stop the clock for an evaluation when one is due."""
        if step % self.every:
            return
        self._seconds += perf_counter() - self._since
        self.points.append(Point(step=step, seconds=self._seconds, accuracy=greedy_accuracy(model)))
        self.start()

    def seconds_to(self, goal: float) -> float | None:
        """Training seconds until the first evaluation that reaches `goal`."""
        return next((p.seconds for p in self.points if p.accuracy >= goal), None)

    @property
    def step_seconds(self) -> float:
        """Median over the stretches between evaluations: the number to read on a busy machine."""
        times = [0.0, *(p.seconds for p in self.points)]
        return median((end - begin) / self.every for begin, end in pairwise(times))


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward of both sides."""
    return [float(text == want) for text, want in zip(completions, answer, strict=True)]


@torch.no_grad()
def greedy_accuracy(model: torch.nn.Module) -> float:
    """Share of the held-out prompts that are answered exactly; the same code for both sides."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    rows = [json.loads(line) for line in (FOLDER / "val.jsonl").read_text().splitlines()]
    prompts = tokenizer([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    training = model.training
    model.eval()
    ids = model.generate(**prompts, max_new_tokens=L, do_sample=False)  # type: ignore[operator]
    model.train(training)
    texts = tokenizer.batch_decode(ids[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    return mean(exact(texts, [row["answer"] for row in rows]))


def ours(seed: int, steps: int, every: int) -> Curve:
    """GRPOModule under a Lightning Trainer."""
    import lightning

    from grpo_lightning.objective import LossConfig
    from grpo_lightning.rewards import RewardSpec
    from grpo_lightning.training.data import PromptDataModule
    from grpo_lightning.training.module import GRPOModule
    from grpo_lightning.training.settings import OptimizerSettings, SamplingSettings

    curve = Curve(every=every)

    class Watch(lightning.Callback):
        def on_train_start(self, *_: Any) -> None:
            curve.start()

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            curve.step_done(trainer.global_step, module.policy)

    lightning.seed_everything(seed, verbose=False)
    module = GRPOModule(
        str(FOLDER),
        [RewardSpec(path=f"{__file__}:exact")],
        group_size=G,
        sampling=SamplingSettings(max_new_tokens=L),
        loss=LossConfig(loss="dapo", dead_groups="keep"),
        optimizer=OptimizerSettings(lr=RATE, schedule="linear", warmup_steps=RATE_WARMUP),
        seed=seed,
    )
    data = PromptDataModule(str(FOLDER / "train.jsonl"), model=str(FOLDER), prompts_per_step=P, seed=seed)
    trainer = lightning.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
    )
    trainer.fit(module, datamodule=data)
    return curve


def trl(seed: int, steps: int, every: int) -> Curve:
    """TRL's GRPOTrainer with the same settings."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    curve = Curve(every=every)

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            curve.start()

        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            curve.step_done(state.global_step, model)

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            seed=seed,
            per_device_train_batch_size=P * G,
            num_generations=G,
            max_completion_length=L,
            max_steps=steps,
            learning_rate=RATE,
            lr_scheduler_type="linear",
            warmup_steps=RATE_WARMUP,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="dapo",
            scale_rewards="group",
            epsilon=0.2,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32),
            reward_funcs=exact,
            args=config,
            train_dataset=Dataset.from_json(str(FOLDER / "train.jsonl")),
            processing_class=AutoTokenizer.from_pretrained(FOLDER, padding_side="left"),
            callbacks=[Watch()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return curve


def print_curves(curves: dict[str, list[Curve]], rows: int = 10) -> None:
    """Accuracy and seconds of both sides, means over the seeds."""
    points = {name: list(zip(*(c.points for c in runs), strict=True)) for name, runs in curves.items()}
    count = len(points["ours"])
    shown = sorted({round(i * (count - 1) / (rows - 1)) for i in range(rows)})
    print(f"{'step':>6}{'ours':>9}{'s':>8}{'TRL':>9}{'s':>8}")
    for i in shown:
        cells = [
            f"{mean(p.accuracy for p in points[name][i]):>9.3f}{mean(p.seconds for p in points[name][i]):>8.1f}"
            for name in ("ours", "trl")
        ]
        print(f"{points['ours'][i][0].step:>6}{''.join(cells)}")


def print_seeds(curves: dict[str, list[Curve]]) -> None:
    """One line a run."""
    for name, runs in curves.items():
        for seed, curve in enumerate(runs):
            reached = curve.seconds_to(GOAL)
            shown = f"{reached:.1f} s" if reached is not None else "never"
            print(
                f"{name:<5} seed {seed}: final {curve.points[-1].accuracy:.3f}, {GOAL} after {shown}, "
                f"{curve.step_seconds:.3f} s a step"
            )


def summary(curves: dict[str, list[Curve]]) -> dict[str, float | None]:
    """The last line."""
    reached = {name: [c.seconds_to(GOAL) for c in runs] for name, runs in curves.items()}
    complete = all(s is not None for runs in reached.values() for s in runs)
    ratio = median(reached["ours"]) / median(reached["trl"]) if complete else None  # type: ignore[type-var]
    return {
        "ours_final": round(mean(c.points[-1].accuracy for c in curves["ours"]), 4),
        "trl_final": round(mean(c.points[-1].accuracy for c in curves["trl"]), 4),
        "seconds_ratio_to_0.9": None if ratio is None else round(ratio, 3),
    }


def quiet() -> None:
    """Only the tables and the JSON line are of interest."""
    from datasets import disable_progress_bars
    from transformers.utils import logging as hf_logging

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    disable_progress_bars()


def main() -> None:
    """Measure every seed on both sides."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.steps < args.every or args.steps % args.every:
        parser.error(
            f"--steps {args.steps} must be a multiple of --every {args.every}, so that the last step is evaluated."
        )
    quiet()
    torch.set_num_threads(args.threads)
    sides: dict[str, Callable[[int, int, int], Curve]] = {"ours": ours, "trl": trl}
    curves: dict[str, list[Curve]] = {name: [] for name in sides}
    for seed in range(args.seeds):
        for name, side in sides.items():
            curves[name].append(side(seed, args.steps, args.every))
    print_curves(curves)
    print_seeds(curves)
    print(json.dumps(summary(curves)))


if __name__ == "__main__":
    main()
