"""A reward model: a transformers sequence classifier with one output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.text import text_of

__all__ = ["RewardModel"]

_UNLIMITED = 1_000_000  # tokenizers without a limit of their own give an astronomical one


class RewardModel:
    """The logit that a sequence classifier gives prompt and response.

    As in TRL: chat goes through the tokenizer's template, plain text is joined, no special tokens are added, padding is on
    the right.

    Args:
        model: folder or hub name.
        batch_size: responses scored at once.
        max_tokens: longer texts are cut on the left, so that the response stays; the model's own limit when not given.
        device: where it runs.
    """

    __name__ = "reward_model"

    def __init__(self, model: str, *, batch_size: int = 16, max_tokens: int | None = None, device: str = "cpu") -> None:
        if batch_size < 1 or (max_tokens is not None and max_tokens < 1):
            raise RewardError(f"reward_model has batch_size {batch_size}, max_tokens {max_tokens}: give at least 1.")
        self._model, self._tokenizer = _load(model, device)
        self._batch_size, self._device = batch_size, device
        self._max_tokens = max_tokens or _limit(self._model, self._tokenizer)

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        """One value a response."""
        texts = [self._joined(p, c) for p, c in zip(prompts, completions, strict=True)]
        return [score for batch in self._batches(texts) for score in self._scores(batch)]

    def _batches(self, texts: list[str]) -> Iterator[list[str]]:
        for i in range(0, len(texts), self._batch_size):
            yield texts[i : i + self._batch_size]

    def _joined(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + text_of(completion)
        messages = [*prompt, *completion]
        if getattr(self._tokenizer, "chat_template", None):
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join(f"{m['role']}: {text_of([m])}" for m in messages)

    def _scores(self, texts: list[str]) -> list[float]:
        import torch

        cut = {"truncation": True, "max_length": self._max_tokens} if self._max_tokens else {}
        batch = self._tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False, **cut)
        if not batch["input_ids"].shape[1]:
            raise RewardError("The reward model got only empty texts: prompts must not be empty.")
        with torch.inference_mode():
            logits = self._model(**batch.to(self._device)).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores


def _load(name: str, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="right", truncation_side="left")
        model = AutoModelForSequenceClassification.from_pretrained(name).eval().requires_grad_(False).to(device)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RewardError(
            f"The reward model {name!r} can't be loaded ({reason}): give a folder or a hub name."
        ) from error
    if model.config.num_labels != 1:
        raise RewardError(f"The reward model {name!r} has {model.config.num_labels} outputs: it must have one.")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise RewardError(
                f"The reward model {name!r} has neither a pad nor an EOS token: add one to its tokenizer."
            )
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _limit(model: Any, tokenizer: Any) -> int | None:
    """The longest text that both can read; None without a limit."""
    limits = [tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None)]
    return min((n for n in limits if n and n < _UNLIMITED), default=None)
