"""Make the shipped example: its task, its character tokenizer and its warm-started tiny Llama.

The task is addition and subtraction of two-digit numbers. The model has read worked examples whose pupils forgot to
carry and to borrow two times out of three ("47+85=22" instead of 132): it knows how to carry, and mostly doesn't.
Greedy answers are right where nothing has to be carried; sampled ones differ inside most groups, so GRPO has a
signal from its first step. No prompt is shared by the warm start, the training and the validation data, nor is one
with the operands of a sum swapped.

    python examples/arithmetic/warm_start.py --out /tmp/arithmetic

About four minutes, on one thread so that the machine's cores don't change the sums: the same seed and torch version
give the same bytes on the same kind of CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
ALPHABET = "0123456789+-="
SMALLEST, LARGEST = 10, 99
PROMPT_TOKENS, ANSWER_TOKENS = 6, 4  # "99+99=", "198<eos>"
FORGOTTEN = 0.65  # share of the warm start's answers without carrying
VAL_ROWS, TRAIN_ROWS = 256, 4096
STEPS, BATCH, PEAK_LR = 2000, 256, 1e-3
WARMUP_STEPS, DECAY_SHARE = 50, 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One sum or difference; a difference is never negative."""

    left: int
    sign: str  # + or -
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}{self.sign}{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right if self.sign == "+" else self.left - self.right)

    @property
    def answer_without_carrying(self) -> str:
        """Column by column, each modulo ten: 47+85 gives 22."""
        way = 1 if self.sign == "+" else -1
        tens = (self.left // 10 + way * (self.right // 10)) % 10
        ones = (self.left + way * self.right) % 10
        return str(10 * tens + ones)

    @property
    def row(self) -> dict[str, str]:
        source = "addition" if self.sign == "+" else "subtraction"
        return {"prompt": self.prompt, "answer": self.answer, "source": source}


def families() -> list[list[Problem]]:
    """Every problem, those that differ in the order of their operands alone together."""
    numbers = range(SMALLEST, LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers if b <= a]
    sums = [[Problem(left=x, sign="+", right=y) for x, y in {(a, b), (b, a)}] for a, b in pairs]
    return sums + [[Problem(left=a, sign="-", right=b)] for a, b in pairs]


def split(seed: int) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Validation, training and warm-start problems; whole families go to one of them."""
    rng = random.Random(seed)
    groups = families()
    rng.shuffle(groups)
    parts: tuple[list[Problem], list[Problem], list[Problem]] = ([], [], [])
    for group in groups:
        sizes = (VAL_ROWS - len(parts[0]), TRAIN_ROWS - len(parts[1]))
        part = next((i for i, room in enumerate(sizes) if room >= len(group)), 2)
        parts[part].extend(sorted(group, key=lambda p: p.prompt))
    for part_ in parts:
        rng.shuffle(part_)
    return parts


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; nothing is added to a prompt."""
    vocab = {token: i for i, token in enumerate([PAD, BOS, EOS, UNK, *ALPHABET])}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=64,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of a third of a million parameters."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """N problems as tokens: a left-padded prompt, then either answer, right-padded."""

    prompts: Tensor  # int64 [N, PROMPT_TOKENS]
    right: Tensor  # int64 [N, ANSWER_TOKENS]
    wrong: Tensor  # int64 [N, ANSWER_TOKENS], without carrying

    def batches(self, generator: torch.Generator) -> Iterator[Tensor]:
        """Random batches of rows, forgotten carries among them, for ever."""
        while True:
            rows = torch.randint(len(self.prompts), (BATCH,), generator=generator)
            forgets = torch.rand(BATCH, 1, generator=generator) < FORGOTTEN
            yield torch.cat([self.prompts[rows], torch.where(forgets, self.wrong[rows], self.right[rows])], 1)


def encode(problems: list[Problem], tokenizer: PreTrainedTokenizerFast) -> Examples:
    def block(texts: list[str], width: int, side: str) -> Tensor:
        return tokenizer(
            texts, padding="max_length", max_length=width, padding_side=side, return_tensors="pt"
        ).input_ids

    return Examples(
        prompts=block([p.prompt for p in problems], PROMPT_TOKENS, "left"),
        right=block([p.answer + EOS for p in problems], ANSWER_TOKENS, "right"),
        wrong=block([p.answer_without_carrying + EOS for p in problems], ANSWER_TOKENS, "right"),
    )


def logits_of(model: LlamaForCausalLM, ids: Tensor, pad_id: int) -> Tensor:
    mask = ids != pad_id
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False).logits


def rate_share(step: int) -> float:
    """The share of the peak learning rate at a step, counted from 0."""
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.02, (STEPS - step) / (DECAY_SHARE * STEPS)))


def train(model: LlamaForCausalLM, examples: Examples, *, pad_id: int, seed: int) -> None:
    """Supervised training on the answers: AdamW with a warm-up, a plateau and a linear decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.1, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_share)
    batches = examples.batches(torch.Generator().manual_seed(seed))
    for step, ids in zip(range(1, STEPS + 1), batches, strict=False):
        logits = logits_of(model, ids, pad_id)[:, PROMPT_TOKENS - 1 : -1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT_TOKENS:].flatten(), ignore_index=pad_id)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def complete(model: LlamaForCausalLM, prompts_NS: Tensor, *, pad_id: int, greedy: bool) -> Tensor:
    """ANSWER_TOKENS tokens after each prompt."""
    ids = prompts_NS
    for _ in range(ANSWER_TOKENS):
        last = logits_of(model, ids, pad_id)[:, -1]
        chosen = last.argmax(-1, keepdim=True) if greedy else torch.multinomial(last.softmax(-1), 1)
        ids = torch.cat([ids, chosen], 1)
    return ids[:, PROMPT_TOKENS:]


def matches(completions_NL: Tensor, right_NL: Tensor, pad_id: int) -> Tensor:
    """Whether a completion is the answer up to its end token."""
    return ((completions_NL == right_NL) | (right_NL == pad_id)).all(1)


def measure(model: LlamaForCausalLM, examples: Examples, *, pad_id: int, group: int = 8) -> dict[str, float]:
    """Greedy accuracy, and over `group` samples at temperature 1: accuracy, share of prompts solved, and mixed."""
    greedy_NL = complete(model, examples.prompts, pad_id=pad_id, greedy=True)
    repeated_RS = examples.prompts.repeat_interleave(group, 0)
    sampled_RL = complete(model, repeated_RS, pad_id=pad_id, greedy=False)
    hits_NG = matches(sampled_RL, examples.right.repeat_interleave(group, 0), pad_id).view(-1, group).float()
    rate_N = hits_NG.mean(1)
    return {
        "greedy": matches(greedy_NL, examples.right, pad_id).float().mean().item(),
        "sampled": rate_N.mean().item(),
        f"pass_at_{group}": (rate_N > 0).float().mean().item(),
        "mixed_groups": ((rate_N > 0) & (rate_N < 1)).float().mean().item(),
    }


def save(out: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model.save_pretrained(out)
    tokenizer.backend_tokenizer.no_padding()  # `encode` left its own behind
    tokenizer.save_pretrained(out)
    weights = out / "model.safetensors"
    weights.chmod(0o644)
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (out / "model.safetensors.sha256").write_text(f"{digest}  model.safetensors\n")


def write_rows(path: Path, problems: list[Problem]) -> None:
    path.write_text("".join(json.dumps(p.row) + "\n" for p in problems))


def main() -> None:
    """Make everything below --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    val, training, warm = split(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    pad_id = tokenizer.pad_token_id
    train(model, encode(warm, tokenizer), pad_id=pad_id, seed=args.seed)
    save(args.out, model, tokenizer)
    write_rows(args.out / "train.jsonl", training)
    write_rows(args.out / "val.jsonl", val)
    report = measure(model, encode(val, tokenizer), pad_id=pad_id)
    print(f"{len(warm)} warm-start, {len(training)} training, {len(val)} validation problems")
    print("  ".join(f"{name} {value:.3f}" for name, value in report.items()))


if __name__ == "__main__":
    main()
