"""Engines: what any must do, on the transformers engine and on vLLM behind a stand-in of its API."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.tiny import make_tiny_model

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import PromptBatch, Rollouts
from grpo_lightning.rollout import SamplingConfig, make_engine, rollout_seeds, score_completions
from grpo_lightning.rollout.check import sharing_report
from grpo_lightning.rollout.sampling import TokenSampler, filter_logits
from grpo_lightning.rollout.scoring import choose_way, score_with
from grpo_lightning.rollout.vllm_engine import VLLMEngine, merged_weights

BASE = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
HEADS = {**BASE, "head_dim": 8}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE)),
    "llama eager": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE, attn_implementation="eager")),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**BASE)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**HEADS)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**BASE)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**HEADS, sliding_window=48)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=41, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1
        )
    ),
}


def built(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def batch(rows: list[list[int]], first_row: int = 0) -> PromptBatch:
    width = max(map(len, rows))
    return PromptBatch(
        ids_PS=torch.tensor([[0] * (width - len(r)) + r for r in rows]),
        mask_PS=torch.tensor([[False] * (width - len(r)) + [True] * len(r) for r in rows]),
        row_ids_P=torch.arange(first_row, first_row + len(rows)),
        prompts=[str(r) for r in rows],
        columns={},
        sources=[""] * len(rows),
    )


SHARING = ("packed", "masked", "cached")
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
SAMPLING = SamplingConfig(max_new_tokens=6, eos_ids=(1, 2, 3), pad_id=0, temperature=0.8)


def sample(model: Any, prompts: PromptBatch, group_size: int = 4, sampling: SamplingConfig = SAMPLING) -> Rollouts:
    seeds = rollout_seeds(0, prompts.row_ids_P, 0, group_size)
    return make_engine("transformers", model, model="").generate(
        model, prompts, group_size=group_size, sampling=sampling, seeds_PG=seeds
    )


@pytest.mark.parametrize("name", MODELS)
def test_sharing_the_prefix_changes_no_log_prob_and_no_gradient(name: str) -> None:
    model = built(name)
    assert set(sharing_report(model).values()) == {""}
    rollouts = sample(model, batch(PROMPTS))
    results = {}
    for way in ("full", *SHARING):
        model.zero_grad()
        scores = score_with(way, model, rollouts, temperature=0.8)  # type: ignore[arg-type]
        (scores.logprobs.sum() + scores.entropies.sum()).backward()
        results[way] = (scores, [p.grad.clone() for p in model.parameters() if p.grad is not None])
    for way in SHARING:
        torch.testing.assert_close(results[way][0].logprobs, results["full"][0].logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(results[way][0].entropies, results["full"][0].entropies, atol=1e-5, rtol=1e-5)
        for got, want in zip(results[way][1], results["full"][1], strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_samplers_log_probs_are_the_trainers(name: str) -> None:
    model = built(name)
    rollouts = sample(model, batch(PROMPTS))
    scores = score_completions(model, rollouts, temperature=0.8)
    torch.testing.assert_close(rollouts.sampler_logprobs_PGL, scores.logprobs, atol=1e-5, rtol=1e-5)


def test_a_completion_depends_on_its_prompt_and_seed_alone() -> None:
    """Alone, padded by longer siblings, in another order, in a bigger group: the same tokens."""
    model = built("llama")
    together = sample(model, batch(PROMPTS))
    for i, row in enumerate(PROMPTS):
        alone = sample(model, batch([row], first_row=i), group_size=6)
        width = min(alone.completion_ids_PGL.shape[-1], together.completion_ids_PGL.shape[-1])
        assert torch.equal(alone.completion_ids_PGL[0, :4, :width], together.completion_ids_PGL[i, :, :width])
    again = sample(model, batch(PROMPTS))
    assert torch.equal(again.completion_ids_PGL, together.completion_ids_PGL)
    other = sample(model, batch(PROMPTS, first_row=7))
    assert not torch.equal(other.completion_ids_PGL[..., 0], together.completion_ids_PGL[..., 0])


def test_nothing_after_the_end_is_in_the_mask() -> None:
    rollouts = sample(built("llama"), batch(PROMPTS), group_size=16)
    ids, mask = rollouts.completion_ids_PGL, rollouts.completion_mask_PGL
    is_eos = torch.isin(ids, torch.tensor(SAMPLING.eos_ids)) & mask
    assert bool((is_eos.sum(-1) <= 1).all())
    assert torch.equal(is_eos.any(-1), rollouts.terminated_PG)
    ended, cut = rollouts.terminated_PG, ~rollouts.terminated_PG
    assert bool(ended.any())
    assert bool(cut.any())
    last = rollouts.lengths_PG - 1
    assert bool(torch.isin(ids.gather(-1, last.unsqueeze(-1)).squeeze(-1)[ended], torch.tensor(SAMPLING.eos_ids)).all())
    assert rollouts.lengths_PG[cut].unique().tolist() == [SAMPLING.max_new_tokens]
    assert bool((ids[~mask] == SAMPLING.pad_id).all())


def test_a_recurrent_model_takes_full_passes_and_samples_the_same_way() -> None:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=41, hidden_size=32, num_hidden_layers=2)
    model = transformers.MambaForCausalLM(config).eval()
    assert all(sharing_report(model).values())
    rollouts = sample(model, batch([[5, 6, 7], [8, 9]]))
    assert choose_way(model, rollouts) == "full"
    scores = score_completions(model, rollouts, temperature=0.8)
    torch.testing.assert_close(rollouts.sampler_logprobs_PGL, scores.logprobs, atol=1e-4, rtol=1e-4)


def test_a_context_that_is_too_short_names_both_numbers() -> None:
    sampling = SamplingConfig(max_new_tokens=60, eos_ids=(1,), pad_id=0)
    with pytest.raises(ConfigError, match=r"5 tokens.*60.*64"):
        sample(built("llama"), batch(PROMPTS), sampling=sampling)


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 seeds: 4 degrees of freedom, 18.5 at the 0.1 % level."""
    probs = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    seeds = rollout_seeds(3, torch.arange(2500), 0, 8).flatten()
    sampler = TokenSampler(SamplingConfig(max_new_tokens=1, eos_ids=(), pad_id=0), seeds)
    ids, logprobs = sampler.draw(probs.log().expand(len(seeds), -1), 0)
    counts = torch.bincount(ids, minlength=5)
    expected = probs * len(seeds)
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5
    torch.testing.assert_close(logprobs, probs.log()[ids], atol=1e-5, rtol=1e-5)


FILTERS = {
    "top-k": ({"top_k": 3}, lambda: transformers.TopKLogitsWarper(3)),
    "top-p": ({"top_p": 0.7}, lambda: transformers.TopPLogitsWarper(0.7)),
    "min-p": ({"min_p": 0.2}, lambda: transformers.MinPLogitsWarper(0.2)),
}


@pytest.mark.parametrize(("setting", "warper"), FILTERS.values(), ids=FILTERS.keys())
def test_filters_keep_what_transformers_keeps(setting: dict[str, Any], warper: Any) -> None:
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    got = torch.isneginf(filter_logits(logits.clone(), **setting))
    assert torch.equal(got, torch.isneginf(warper()(torch.zeros(50, 1, dtype=torch.int64), logits.clone())))


BAD = {"temperature": 0.0, "top_p": 0.0, "top_k": -1, "min_p": 1.5, "max_new_tokens": 0}


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_sampling_settings_that_cannot_hold(name: str, value: float) -> None:
    settings = {"max_new_tokens": 4, "eos_ids": (1,), "pad_id": 0} | {name: value}
    with pytest.raises(ConfigError, match=name):
        SamplingConfig(**settings)  # type: ignore[arg-type]


class FakeLLM:
    """The part of vllm.LLM that the engine uses, over a transformers model."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.inner = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.settings, self.resets = settings, 0

    def generate(self, requests: list[Any], *, sampling_params: list[Any], use_tqdm: bool) -> list[Any]:
        return [self._one(r["prompt_token_ids"], p) for r, p in zip(requests, sampling_params, strict=True)]

    def _one(self, ids: list[int], params: Any) -> Any:
        generator = torch.Generator().manual_seed(params.seed)
        tokens: list[int] = []
        logprobs: list[dict[int, Any]] = []
        while len(tokens) < params.max_tokens and not (tokens and tokens[-1] in params.stop_token_ids):
            logits = self.inner(input_ids=torch.tensor([ids + tokens])).logits[0, -1]
            scaled = (logits / (params.temperature or 1.0)).log_softmax(-1)
            token = int(
                scaled.argmax() if not params.temperature else torch.multinomial(scaled.exp(), 1, generator=generator)
            )
            tokens.append(token)
            logprobs.append({token: SimpleNamespace(logprob=float(scaled[token]))})
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(tokens), logprobs=logprobs)])

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self)]

    def load_weights(self, weights: Any) -> None:
        self.inner.load_state_dict(dict(weights))

    def reset_prefix_cache(self) -> None:
        self.resets += 1


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLLM, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


def test_vllm_samples_scores_and_takes_over_weights(tmp_path: Path, fake_vllm: None) -> None:
    path = make_tiny_model(tmp_path)
    policy = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    engine = make_engine("vllm", policy, model=str(path))
    assert isinstance(engine, VLLMEngine)
    prompts = batch(PROMPTS)
    seeds = rollout_seeds(0, prompts.row_ids_P, 0, 3)

    def mismatch() -> float:
        rollouts = engine.generate(policy, prompts, group_size=3, sampling=SAMPLING, seeds_PG=seeds)
        scores = score_completions(policy, rollouts, temperature=0.8)
        return float((scores.logprobs - rollouts.sampler_logprobs_PGL).detach().abs().max())

    assert mismatch() < 1e-5
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    assert mismatch() > 1e-3
    engine.sync_weights(policy)
    assert mismatch() < 1e-5


def test_adapters_are_merged_for_vllm_and_left_as_they_were() -> None:
    from peft import LoraConfig, get_peft_model

    plain = built("llama")
    names = set(plain.state_dict())
    adapted = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    ids = torch.tensor([[5, 6, 7]])
    want = adapted(input_ids=ids).logits
    fresh = MODELS["llama"]().eval()
    merged = dict(merged_weights(adapted))
    assert set(merged) == names
    fresh.load_state_dict(merged)
    torch.testing.assert_close(fresh(input_ids=ids).logits, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(adapted(input_ids=ids).logits, want, atol=1e-6, rtol=1e-6)


def test_without_vllm_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"pip install 'grpo-lightning\[vllm\]'"):
        VLLMEngine("anything")
