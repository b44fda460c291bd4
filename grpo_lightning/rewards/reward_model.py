"""A reward model: a transformers sequence classifier with one output."""

from __future__ import annotations

from typing import Any

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.text import text_of

__all__ = ["RewardModel"]


class RewardModel:
    """The logit that a sequence classifier gives prompt and response.

    Args:
        model: folder or hub name.
        batch_size: responses scored at once.
        max_tokens: longer texts are cut on the left, so that the response stays.
        device: where it runs.
    """

    __name__ = "reward_model"

    def __init__(self, model: str, *, batch_size: int = 16, max_tokens: int | None = None, device: str = "cpu") -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            self._model = AutoModelForSequenceClassification.from_pretrained(model).eval().to(device)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise RewardError(f"The reward model {model!r} can't be loaded ({reason}): give a folder or a hub name.") from error
        if self._model.config.num_labels != 1:
            raise RewardError(f"The reward model {model!r} has {self._model.config.num_labels} outputs: it must have one.")
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        self._tokenizer.truncation_side = "left"
        self._batch_size, self._max_tokens, self._device = batch_size, max_tokens, device

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        """One value a response."""
        texts = [self._joined(p, c) for p, c in zip(prompts, completions, strict=True)]
        return [v for i in range(0, len(texts), self._batch_size) for v in self._scores(texts[i : i + self._batch_size])]

    def _joined(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + text_of(completion)
        messages = [*prompt, *completion]
        if getattr(self._tokenizer, "chat_template", None):
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join(f"{m['role']}: {m['content']}" for m in messages)

    def _scores(self, texts: list[str]) -> list[float]:
        import torch

        cut = {"truncation": True, "max_length": self._max_tokens} if self._max_tokens else {}
        batch = self._tokenizer(texts, padding=True, return_tensors="pt", **cut).to(self._device)
        with torch.no_grad():
            logits = self._model(**batch).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores
