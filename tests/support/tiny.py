"""A model of a few thousand weights with a character tokenizer, made on the spot."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

CHARACTERS = "0123456789+-=abcdefghijklmnopqrstuvwxyz ?"


def make_tiny_model(folder: Path, *, seed: int = 0, max_positions: int = 64, hidden: int = 32) -> Path:
    """Save a random 2-layer Llama and its tokenizer below `folder`; its path."""
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
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    path = folder / "tiny-llama"
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def write_prompts(path: Path, count: int = 12) -> Path:
    """Sums with their answers as JSONL; lengths differ."""
    rows = [{"prompt": f"{i}+{i * i % 97}=", "answer": str(i + i * i % 97)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def share_of_a(completions: list[str], **_: Any) -> list[float]:
    """A reward that any model can learn: the share of the letter a."""
    return [c.count("a") / max(len(c), 1) for c in completions]


def dense(completions: list[str], **_: Any) -> list[float]:
    """A deterministic reward that differs within nearly every group."""
    return [sum(map(ord, c)) % 17 / 17 for c in completions]


def one_short(completions: list[str], **_: Any) -> list[float]:
    """Breaks the contract: one value too few."""
    return [0.0] * (len(completions) - 1)


def telling(completions: list[str], log_metric: Any = None, log_extra: Any = None, **_: Any) -> list[float]:
    """`dense`, that logs how many completions hold a digit, and the first letter of each."""
    if log_metric is not None:
        log_metric("with digit", sum(any(c.isdigit() for c in text) for text in completions) / len(completions))
        log_extra("first", [text[:1] for text in completions])
        log_extra("too short", completions[:1])
    return dense(completions)


def raises_escapes(completions: list[str], **_: Any) -> list[float]:
    """Its message would colour the terminal."""
    raise ValueError("\x1b[31mred")


def signals_itself(completions: list[str], **_: Any) -> list[float]:
    """Sends the process the signal of TEST_SIGNAL."""
    os.kill(os.getpid(), int(os.environ["TEST_SIGNAL"]))
    return dense(completions)


def infinite_once(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Infinite for the prompt 3+9= when it comes first in this process, else as `dense`."""
    values = dense(completions)
    hit = [i for i, prompt in enumerate(prompts) if prompt == "3+9="]
    if hit and not _HIT:
        _HIT.append(True)
        values[hit[0]] = float("inf")
    return values


_HIT: list[bool] = []
