"""Reward models against TRL's own calls of them, and their limits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards import RewardRunner, RewardSpec

WORDS = ["<unk>", "<pad>", "</s>", "user", "assistant", ":", "a", "b", "c", "d"]
TEMPLATE = "{% for m in messages %}{{ m.role + ' : ' + m.content + ' </s> ' }}{% endfor %}"
PLAIN = (["a b ", "a ", "d ", "b b b b b "], ["c", "b c d", "a", "c"])
CHAT = (
    [[{"role": "user", "content": text}] for text in PLAIN[0]],
    [[{"role": "assistant", "content": text}] for text in PLAIN[1]],
)


def tokenizer(**tokens: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **tokens)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a score head, a pad token and a chat template."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(WORDS), num_labels=1, pad_token_id=1, **sizes)
    return save(tmp_path_factory, LlamaForSequenceClassification(config), "</s>")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with 8 positions, which fails on longer texts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(WORDS), num_labels=1, pad_token_id=1, max_position_embeddings=8, **sizes)
    return save(tmp_path_factory, BertForSequenceClassification(config), "</s>")


def save(factory: pytest.TempPathFactory, model: Any, eos: str) -> Path:
    folder = factory.mktemp("classifier")
    words = tokenizer(eos_token=eos, pad_token="<pad>")
    words.chat_template = TEMPLATE
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def ours(folder: Path, prompts: list[Any], completions: list[Any], **kwargs: Any) -> torch.Tensor:
    spec = RewardSpec(path="reward_model", kwargs={"model": str(folder), **kwargs})
    return RewardRunner([spec]).score(prompts=prompts, completions=completions, columns={}).rewards_NK


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """TRL's own code for a reward model, on a trainer with nothing else in it."""
    grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    monkeypatch.setattr(grpo, "profiling_context", contextmanager(lambda *_: iter([None])))
    from accelerate import PartialState

    PartialState(cpu=True)

    def calculate(folder: Path, prompts: list[Any], completions: list[Any]) -> torch.Tensor:
        trainer = object.__new__(grpo.GRPOTrainer)
        cpu = torch.device("cpu")
        vars(trainer).update(
            accelerator=SimpleNamespace(device=cpu),
            args=SimpleNamespace(report_to=[], device=cpu, past_index=-1),
            is_deepspeed_enabled=False,
            reward_funcs=[AutoModelForSequenceClassification.from_pretrained(folder).eval()],
            reward_processing_classes=[AutoTokenizer.from_pretrained(folder)],
            reward_func_names=["model"],
            chat_template_kwargs={},
            state=None,
            environments=None,
        )
        inputs = [{"prompt": p} for p in prompts]
        method = grpo.GRPOTrainer._calculate_rewards
        rewards: torch.Tensor = getattr(method, "__wrapped__", method)(trainer, inputs, prompts, completions, None)
        return rewards

    return calculate


@pytest.mark.parametrize(("prompts", "completions"), [PLAIN, CHAT], ids=["plain", "chat"])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_same_numbers_as_trl(prompts: Any, completions: Any, batch_size: int, llama: Path, theirs: Any) -> None:
    want = theirs(llama, prompts, completions)
    assert len(want.unique()) == len(prompts)
    torch.testing.assert_close(ours(llama, prompts, completions, batch_size=batch_size).float(), want)


def test_texts_beyond_the_models_own_limit_keep_the_response(bert: Path) -> None:
    got = ours(bert, ["a a a a a a a a a b c d a "], ["b c d d"])
    torch.testing.assert_close(got, ours(bert, ["b c d a "], ["b c d d"]))


def test_scores_do_not_depend_on_the_training_state(llama: Path) -> None:
    with torch.enable_grad():
        first, second = ours(llama, *PLAIN), ours(llama, *PLAIN)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not first.requires_grad


def test_neither_pad_nor_eos(tmp_path: Path, llama: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(llama).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RewardError, match="neither a pad nor an EOS token"):
        ours(tmp_path, *PLAIN)


def test_empty_texts(llama: Path) -> None:
    with pytest.raises(RewardError, match="only empty texts"):
        ours(llama, [""], [""])


@pytest.mark.parametrize("setting", [{"batch_size": 0}, {"max_tokens": 0}], ids=repr)
def test_settings_that_can_not_hold(setting: dict[str, int], llama: Path) -> None:
    with pytest.raises(RewardError, match="at least 1"):
        ours(llama, *PLAIN, **setting)
