"""Our optimizer step against TRL's GRPOTrainer: same model, prompts, group size and completion length, KL on.

    python benchmarks/step_time.py [--steps 12]

Both train the same random Llama (hidden 128, 4 layers) in this process, one after the other, on two threads. Completions
run to the length limit in both (no end token), so that both generate the same number of tokens. A step is sampling,
reward, reference and policy passes, backward and AdamW. Medians over the steps after the first three. The last line is
JSON: `short` and `long`, each `ours_s`, `trl_s` and `ratio` = TRL / ours.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
import warnings
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

SHAPES = {"short": {"S": 16, "L": 16, "G": 8, "P": 8}, "long": {"S": 512, "L": 32, "G": 8, "P": 4}}
WARM_UP = 3
VOCABULARY = 1024


def make_model(folder: Path) -> Path:
    """A random Llama whose tokenizer reads a word as a token; its end token is outside what is ever sampled."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # an end token that is never drawn: every completion has the full length
        model.lm_head.weight[1] = 0.0
        model.lm_head.weight[2:] += 0.0
    path = folder / "model"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_prompts(folder: Path, length: int, count: int) -> Path:
    """Prompts of exactly `length` tokens."""
    rng = random.Random(0)
    rows = [{"prompt": " ".join(f"w{rng.randrange(2, VOCABULARY)}" for _ in range(length))} for _ in range(count)]
    path = folder / f"prompts-{length}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reward(completions: list[str], **_: Any) -> list[float]:
    """Cheap, and different within nearly every group."""
    return [sum(map(ord, c)) % 97 / 97 for c in completions]


def ours(model: Path, prompts: Path, shape: dict[str, int], steps: int) -> float:
    """Median seconds of a step under a real Trainer."""
    import lightning as L

    from grpo_lightning.objective import LossConfig
    from grpo_lightning.rewards import RewardSpec
    from grpo_lightning.training.data import PromptDataModule
    from grpo_lightning.training.module import GRPOModule
    from grpo_lightning.training.settings import KLSettings, OptimizerSettings, SamplingSettings

    class Clock(L.Callback):
        seconds: list[float] = []  # noqa: RUF012 - one run

        def on_train_batch_start(self, *_: Any) -> None:
            self.started = perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            self.seconds.append(perf_counter() - self.started)
            lengths = module.last_record.rollouts.lengths_PG
            if not bool((lengths == shape["L"]).all()):
                raise RuntimeError("a completion ended early: the two sides would not do the same work")

    clock = Clock()
    clock.seconds = []
    module = GRPOModule(
        str(model),
        [RewardSpec(path=f"{__file__}:reward")],
        group_size=shape["G"],
        sampling=SamplingSettings(max_new_tokens=shape["L"]),
        loss=LossConfig(loss="dapo"),
        kl=KLSettings(use="loss", coef=0.04),
        optimizer=OptimizerSettings(lr=1e-6),
    )
    _never_end(module.policy)
    trainer = L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(module, datamodule=PromptDataModule(str(prompts), model=str(model), prompts_per_step=shape["P"]))
    return median(clock.seconds[WARM_UP:])


def _never_end(model: torch.nn.Module) -> None:
    """Bar the end token by a large negative logit, on either side."""

    def bar(_module: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(logits.shape[-1])
        mask[:2] = -1e4
        return logits + mask

    model.lm_head.register_forward_hook(bar)


def trl(model: Path, prompts: Path, shape: dict[str, int], steps: int) -> float:
    """Median seconds of TRL's step: from one step's begin to its end."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(perf_counter() - self.started)

    rollouts = shape["P"] * shape["G"]
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=rollouts,
            num_generations=shape["G"],
            max_completion_length=shape["L"],
            beta=0.04,
            learning_rate=1e-6,
            max_steps=steps,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            temperature=1.0,
        )
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        _never_end(policy)
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_json(str(prompts)),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            callbacks=[Clock()],
        )
        trainer.train()
    return median(seconds[WARM_UP:])


def quiet() -> None:
    """Only the table and the JSON line are of interest."""
    from transformers.utils import logging as hf_logging

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()


def main() -> None:
    """Measure both shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="steps a side, the first three not counted")
    parser.add_argument("--only", choices=SHAPES, help="one shape alone")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(2)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for name, shape in SHAPES.items():
            if args.only not in (None, name):
                continue
            prompts = make_prompts(Path(folder), shape["S"], shape["P"] * args.steps)
            mine, theirs = ours(model, prompts, shape, args.steps), trl(model, prompts, shape, args.steps)
            results[name] = {"ours_s": round(mine, 4), "trl_s": round(theirs, 4), "ratio": round(theirs / mine, 2)}
    print(f"{'shape':<8}{'S':>5}{'L':>5}{'G':>4}{'P':>4}{'ours, s':>10}{'TRL, s':>10}{'ratio':>8}")
    for name, row in results.items():
        s = SHAPES[name]
        print(
            f"{name:<8}{s['S']:>5}{s['L']:>5}{s['G']:>4}{s['P']:>4}{row['ours_s']:>10.3f}{row['trl_s']:>10.3f}{row['ratio']:>8.2f}"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
