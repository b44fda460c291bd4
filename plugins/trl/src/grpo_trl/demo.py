"""Faults that TRL's own metrics hide, on a model of a few thousand weights that is made on the spot.

    python -m grpo_trl.demo constant     # a reward of 0.3 for every answer
    python -m grpo_trl.demo infinite     # a reward that overflows at step 6
    python -m grpo_trl.demo nan          # a loss that is NaN at step 6
    python -m grpo_trl.demo healthy

It prints what TRL logs, and exits with 75 when the run is paused.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from grpo_lightning.callbacks import RunSettings
from grpo_trl.watching import Watcher, watch

__all__ = ["Fault", "main", "make_model", "train"]

Fault = Literal["constant", "infinite", "nan", "healthy"]

FAULTY_FROM = 6  # optimizer step
CHARACTERS = "0123456789+-=abcdefghijklmnopqrstuvwxyz ?"
_SHOWN = ("loss", "reward", "reward_std", "frac_reward_zero_std", "grad_norm")

Reward = Callable[..., list[float]]


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """Save a random 2-layer Llama with a tokenizer of characters below `folder`; its path."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer.padding_side = "left"
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    path = folder / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def varied(completions: list[str], **_: Any) -> list[float]:
    """Differs within nearly every group, and nothing in it can be learned soon."""
    return [sum(map(ord, c)) % 17 / 17 for c in completions]


def constant(completions: list[str], **_: Any) -> list[float]:
    """The same for every answer."""
    return [0.3] * len(completions)


def overflowing(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
    """Infinite for one answer, from a step on."""
    rewards = varied(completions)
    if trainer_state.global_step + 1 >= FAULTY_FROM:
        rewards[0] = math.inf
    return rewards


_REWARDS: dict[str, Reward] = {"constant": constant, "infinite": overflowing}


def train(fault: Fault, folder: Path, *, steps: int = 40, mlflow: bool = False) -> tuple[Watcher, list[dict[str, Any]]]:
    """Train with a fault below `folder`; the watcher, and what TRL logged."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class NanTrainer(GRPOTrainer):  # type: ignore[misc]
        """Its loss overflows at one step."""

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            return loss * math.nan if self.state.global_step + 1 == FAULTY_FROM else loss

    trainer = (NanTrainer if fault == "nan" else GRPOTrainer)(
        model=str(make_model(folder)),
        reward_funcs=[_REWARDS.get(fault, varied)],
        train_dataset=Dataset.from_list([{"prompt": f"{i}+{i * i % 97}="} for i in range(64)]),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            run_name=f"demo-{fault}",
            per_device_train_batch_size=16,
            num_generations=8,
            max_completion_length=6,
            learning_rate=1e-4,
            max_steps=steps,
            logging_steps=1,
            save_steps=5,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
    )
    settings = RunSettings(dir=str(folder / "runs"), mlflow=mlflow, description=f"the fault {fault!r}, on purpose")
    watcher = watch(trainer, run=settings)
    trainer.train()
    return watcher, trainer.state.log_history


def main(argv: list[str] | None = None) -> int:
    """The command; 75 when the run was paused."""
    parser = argparse.ArgumentParser(prog="python -m grpo_trl.demo", description="A fault that TRL's metrics hide.")
    parser.add_argument("fault", choices=get_args(Fault))
    parser.add_argument("--dir", type=Path, default=Path("trl-demo"), help="where to (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default: %(default)s)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    args.dir.mkdir(parents=True, exist_ok=True)
    watcher, history = train(args.fault, args.dir, steps=args.steps)
    rows = [row for row in history if "reward" in row]
    print("\nwhat TRL logged in its last three steps:")
    for row in rows[-3:]:
        print(f"  step {row['step']}: " + ", ".join(f"{name} {row.get(name)}" for name in _SHOWN))
    print(f"\n{watcher.paused or 'nothing was found'}")
    return 75 if watcher.paused else 0


if __name__ == "__main__":
    sys.exit(main())
