"""Sharing a prompt among its group: equal to a plain forward pass per completion, in every shape and on every kind of model.

The yardstick here is written out: one unpadded sequence at a time through the model as transformers runs it.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from grpo_lightning.objective import PromptBatch, Rollouts
from grpo_lightning.rollout import SamplingConfig, make_engine, rollout_seeds, score_completions
from grpo_lightning.rollout.attention import DecodePlan
from grpo_lightning.rollout.check import sharing_report, works
from grpo_lightning.rollout.decoding import CacheDecoder, Decoder, PlanDecoder
from grpo_lightning.rollout.scoring import Way, choose_way, score_with

VOCABULARY = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
GPT2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0}
KINDS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "mistral, window 5": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=5)),
    "gemma3, window 5 in one layer": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **SIZES, head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, eos_token_id=1)),
    "gpt2, scaled by layer": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**GPT2, eos_token_id=1, scale_attn_by_inverse_layer_idx=True)
    ),
    "granite, scaled logits": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**SIZES, logits_scaling=3.0, attention_multiplier=0.3, residual_multiplier=0.5)
    ),
}


def built(name: str) -> Any:
    torch.manual_seed(0)
    return KINDS[name]().eval()


def rollouts_of(prompt_lengths: list[int], group_size: int, length: int, *, ragged: bool = False) -> Rollouts:
    """Random tokens; the prompts left-padded, the completions of equal or of random lengths."""
    generator = torch.Generator().manual_seed(1)
    prompts, width = len(prompt_lengths), max(prompt_lengths)
    mask_PS = torch.arange(width).flip(0) < torch.tensor(prompt_lengths)[:, None]
    lengths_PG = torch.full((prompts, group_size), length)
    if ragged:
        lengths_PG = torch.randint(1, length + 1, (prompts, group_size), generator=generator)
    mask_PGL = torch.arange(length) < lengths_PG[..., None]
    return Rollouts(
        prompt_ids_PS=torch.randint(2, VOCABULARY, (prompts, width), generator=generator) * mask_PS,
        prompt_mask_PS=mask_PS,
        completion_ids_PGL=torch.randint(2, VOCABULARY, mask_PGL.shape, generator=generator) * mask_PGL,
        completion_mask_PGL=mask_PGL,
        terminated_PG=lengths_PG < length,
        sampler_logprobs_PGL=torch.zeros(mask_PGL.shape),
    )


def one_by_one(model: nn.Module, rollouts: Rollouts) -> Tensor:
    """[P, G, L] log-probs from one plain forward pass per completion."""
    out = torch.zeros(rollouts.completion_mask_PGL.shape)
    for p, prompt_mask in enumerate(rollouts.prompt_mask_PS):
        prompt = rollouts.prompt_ids_PS[p][prompt_mask]
        for g, mask in enumerate(rollouts.completion_mask_PGL[p]):
            own = rollouts.completion_ids_PGL[p, g][mask]
            logits = model(input_ids=torch.cat([prompt, own])[None]).logits[0, len(prompt) - 1 : -1]
            row = torch.log_softmax(logits, -1)[torch.arange(len(own)), own]
            out = out.index_put((torch.tensor(p), torch.tensor(g), torch.arange(len(own))), row)
    return out


def gradients(model: nn.Module, logprobs_PGL: Tensor) -> list[Tensor]:
    model.zero_grad()
    (logprobs_PGL * torch.linspace(-1, 1, logprobs_PGL.numel()).view_as(logprobs_PGL)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal_to_plain(model: nn.Module, rollouts: Rollouts, way: Way) -> None:
    want, got = one_by_one(model, rollouts), score_with(way, model, rollouts).logprobs
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for mine, plain in zip(gradients(model, got), gradients(model, want), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-4, rtol=1e-4)


SHAPES = {
    "padded": ([7, 3, 5], 3, 4, False),
    "ragged completions": ([7, 3, 5], 3, 6, True),
    "prompts of one token": ([1, 1], 2, 3, False),
    "one token beside many": ([1, 9], 2, 3, False),
    "one completion of one token": ([4], 1, 1, False),
    "prompts over a chunk": ([200, 140], 2, 3, False),
    "completions over a block": ([6, 4], 5, 90, True),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("kind", ["llama", "mistral, window 5", "gpt2"])
def test_packed_rows_equal_plain_passes_in_every_shape(kind: str, shape: tuple[Any, ...]) -> None:
    prompt_lengths, group_size, length, ragged = shape
    assert_equal_to_plain(built(kind), rollouts_of(prompt_lengths, group_size, length, ragged=ragged), "packed")


@pytest.mark.parametrize("kind", KINDS)
def test_the_chosen_way_is_packed_rows_and_right(kind: str) -> None:
    model, rollouts = built(kind), rollouts_of([7, 3, 12], 3, 6)
    assert choose_way(model, rollouts) == "packed", sharing_report(model)
    assert_equal_to_plain(model, rollouts, "packed")


@pytest.mark.parametrize("way", ["masked", "cached", "full"])
@pytest.mark.parametrize("shape", ["padded", "one token beside many", "prompts of one token"])
def test_the_other_ways_equal_plain_passes(way: Way, shape: str) -> None:
    prompt_lengths, group_size, length, ragged = SHAPES[shape]
    assert_equal_to_plain(built("llama"), rollouts_of(prompt_lengths, group_size, length, ragged=ragged), way)


def test_a_window_that_binds_is_left_to_the_ways_that_know_it() -> None:
    """Window 5: a masked or cached row would see keys that are too far back."""
    model = built("mistral, window 5")
    assert works(model, "packed", 100)
    assert works(model, "plan_decoding", 100)
    for trial in ("masked", "cached", "cache_decoding"):
        assert not works(model, trial, 6)


def test_a_window_that_no_layer_hands_over_binds_every_way() -> None:
    """A model that keeps its window to itself, as one of unknown make may do."""
    model = built("llama")
    model.config.sliding_window = 9
    assert works(model, "packed", 9)
    assert not works(model, "packed", 10)


def decode(decoder: Decoder, ids_PGL: Tensor) -> Tensor:
    got = []
    with torch.no_grad(), decoder.active():
        logits = decoder.start()
        for t, ids in enumerate(ids_PGL.unbind(-1)):
            got.append(torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0])
            if t + 1 < ids_PGL.shape[-1]:
                logits = decoder.step(ids, t)
    return torch.stack(got, -1)


@pytest.mark.parametrize("split", [False, True], ids=["joint", "split"])
@pytest.mark.parametrize("lengths", [[7, 3, 12], [6, 6], [1], [150, 9]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_sampling_equal_plain_passes(kind: str, lengths: list[int], split: bool) -> None:
    model, rollouts = built(kind), rollouts_of(lengths, 3, 9)
    ids = rollouts.completion_ids_PGL
    decoder = PlanDecoder(model, rollouts.prompt_ids_PS, rollouts.prompt_mask_PS, 3, 9, split=split)
    with torch.no_grad():
        torch.testing.assert_close(decode(decoder, ids), one_by_one(model, rollouts), atol=1e-5, rtol=1e-5)


def test_steps_with_a_repeated_cache_equal_plain_passes() -> None:
    model, rollouts = built("llama"), rollouts_of([7, 3, 12], 3, 9)
    decoder = CacheDecoder(model, rollouts.prompt_ids_PS, rollouts.prompt_mask_PS, 3, 9)
    with torch.no_grad():
        want = one_by_one(model, rollouts)
    torch.testing.assert_close(decode(decoder, rollouts.completion_ids_PGL), want, atol=1e-5, rtol=1e-5)


def test_long_completions_get_keys_of_their_own() -> None:
    mask = torch.ones(2, 16, dtype=torch.bool)
    assert not DecodePlan(mask_PS=mask, group_size=8, length=16).split
    assert DecodePlan(mask_PS=mask, group_size=8, length=500).split


def hybrid() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        **SIZES,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        decoder_sparse_step=5,
    )
    return transformers.Qwen3NextForCausalLM(config).eval()


def batch_of(rollouts: Rollouts) -> PromptBatch:
    prompts = len(rollouts.prompt_ids_PS)
    return PromptBatch(
        ids_PS=rollouts.prompt_ids_PS,
        mask_PS=rollouts.prompt_mask_PS,
        row_ids_P=torch.arange(prompts),
        prompts=[""] * prompts,
        columns={},
        sources=[""] * prompts,
    )


def sampled(model: Any, prompts: PromptBatch, group_size: int = 3, **settings: Any) -> Rollouts:
    sampling = SamplingConfig(**{"max_new_tokens": 7, "eos_ids": (1, 2), "pad_id": 0} | settings)
    seeds = rollout_seeds(0, prompts.row_ids_P, 0, group_size)
    engine = make_engine("transformers", model, model="")
    return engine.generate(model, prompts, group_size=group_size, sampling=sampling, seeds_PG=seeds)


def test_a_hybrid_model_is_found_out_by_the_check() -> None:
    """Its recurrent layers carry one completion's state into the next: full passes, which are right."""
    model, rollouts = hybrid(), rollouts_of([7, 3], 2, 4)
    assert sharing_report(model)["packed"]
    assert sharing_report(model)["plan_decoding"]
    assert choose_way(model, rollouts) == "full"
    assert_equal_to_plain(model, rollouts, "full")
    own = sampled(model, batch_of(rollouts))
    with torch.no_grad():
        torch.testing.assert_close(own.sampler_logprobs_PGL, one_by_one(model, own), atol=1e-4, rtol=1e-4)


def test_attention_that_the_plan_does_not_compute_is_found_out() -> None:
    """Gemma 2 caps its attention scores."""
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8)).eval()
    rollouts = rollouts_of([7, 3], 2, 4)
    assert "softcap" in sharing_report(model)["packed"]
    assert choose_way(model, rollouts) == "masked"
    assert_equal_to_plain(model, rollouts, "masked")


def test_gradient_checkpointing_keeps_the_gradient() -> None:
    """Its second forward pass runs outside the plan."""
    model, rollouts = built("llama"), rollouts_of([7, 3], 2, 4)
    want = gradients(model, one_by_one(model, rollouts))
    model.train()
    model.gradient_checkpointing_enable()
    assert choose_way(model, rollouts) == "masked"
    for got, plain in zip(gradients(model, score_completions(model, rollouts).logprobs), want, strict=True):
        torch.testing.assert_close(got, plain, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        assert choose_way(model, rollouts) == "packed"


def test_adapters_are_scored_and_sampled_with_and_without() -> None:
    from peft import LoraConfig, get_peft_model

    plain = built("llama")
    model = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    rollouts = sampled(model, batch_of(rollouts_of([7, 3], 2, 4)))
    assert choose_way(model, rollouts) == "packed"
    assert_equal_to_plain(model, rollouts, "packed")
    with torch.no_grad():
        adapted = score_completions(model, rollouts).logprobs
        torch.testing.assert_close(rollouts.sampler_logprobs_PGL, adapted, atol=1e-5, rtol=1e-5)
        with model.disable_adapter():
            torch.testing.assert_close(
                score_completions(model, rollouts).logprobs, one_by_one(plain, rollouts), atol=1e-5, rtol=1e-5
            )
    assert not torch.allclose(adapted, score_completions(built("llama"), rollouts).logprobs, atol=1e-3)


def test_the_model_is_left_as_it_was_found() -> None:
    model = built("llama")
    model.train()
    model.model.layers[0].eval()
    before = [m.training for m in model.modules()]
    rollouts = sampled(model, batch_of(rollouts_of([7, 3], 2, 4)))
    score_completions(model, rollouts)
    assert [m.training for m in model.modules()] == before
    assert model.config._attn_implementation == "sdpa"
    assert all(p.grad is None for p in model.parameters())


def test_the_check_leaves_the_random_state_alone() -> None:
    model, before = built("gpt2"), torch.get_rng_state()
    sharing_report(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dropout", [True, False])
def test_dropout_while_scoring_is_the_callers_choice(dropout: bool) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_dropout=0.5))
    model.train(dropout)
    rollouts = rollouts_of([7, 3], 2, 4)
    works(model, "packed", 0)
    first, second = (score_completions(model, rollouts).logprobs for _ in range(2))
    assert torch.equal(first, second) is not dropout
    one = sampled(model, batch_of(rollouts))  # sampling has none either way
    assert torch.equal(one.completion_ids_PGL, sampled(model, batch_of(rollouts)).completion_ids_PGL)


def test_only_completion_tokens_go_through_the_head() -> None:
    model, rollouts = built("llama"), rollouts_of([40, 30], 3, 5)
    works(model, "packed", 0)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].shape[:-1].numel()))
    score_completions(model, rollouts)
    assert seen == [2 * 3 * 5]


def test_columns_that_are_padding_everywhere_cost_nothing() -> None:
    """Micro-batches cut from a batch with longer rows: the wider tensors give the same numbers from the same work."""
    model, rollouts = built("llama"), rollouts_of([6, 4], 2, 4)
    wide = Rollouts(
        prompt_ids_PS=nn.functional.pad(rollouts.prompt_ids_PS, (50, 0)),
        prompt_mask_PS=nn.functional.pad(rollouts.prompt_mask_PS, (50, 0)),
        completion_ids_PGL=nn.functional.pad(rollouts.completion_ids_PGL, (0, 60)),
        completion_mask_PGL=nn.functional.pad(rollouts.completion_mask_PGL, (0, 60)),
        terminated_PG=rollouts.terminated_PG,
        sampler_logprobs_PGL=nn.functional.pad(rollouts.sampler_logprobs_PGL, (0, 60)),
    )
    works(model, "packed", 0)
    widths: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda _m, inputs, _o: widths.append(inputs[0].shape[1]))
    narrow, scored = score_completions(model, rollouts), score_completions(model, wide)
    assert widths[0] == widths[1]
    assert scored.logprobs.shape == (2, 2, 64)
    torch.testing.assert_close(scored.logprobs[..., :4], narrow.logprobs)
    assert bool((scored.logprobs[..., 4:] == 0).all())
    assert scored.entropies is not None
    assert bool((scored.entropies[..., 4:] == 0).all())


def test_a_group_reads_its_prompt_once() -> None:
    """40 prompt tokens and 3 completions of 5: 39 + 15 positions go through the layers, not 3 times 45."""
    model, rollouts = built("llama"), rollouts_of([40], 3, 5)
    works(model, "packed", 0)
    works(model, "plan_decoding", 0)
    seen: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0].shape[:-1].numel()))
    score_completions(model, rollouts)
    assert seen == [39 + 15]
    seen.clear()
    sampled(model, batch_of(rollouts), max_new_tokens=4, eos_ids=())
    assert seen == [40, 3, 3, 3]


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 weights", "bf16 autocast"])
def test_half_precision_agrees_within_its_rounding(autocast: bool) -> None:
    model, rollouts = built("llama"), rollouts_of([7, 3], 2, 4)
    with torch.no_grad():
        want = one_by_one(model, rollouts)
        model = model if autocast else model.to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            assert choose_way(model, rollouts) == "packed", sharing_report(model)
            torch.testing.assert_close(score_completions(model, rollouts).logprobs, want, atol=0.05, rtol=0.0)


def test_a_way_with_right_log_probs_and_wrong_gradients_is_found_out() -> None:
    """A model that cuts the gradient of the prompt's tokens where positions do not simply count up, as in packed rows."""
    model = built("llama")
    embed = model.model.embed_tokens

    def cut(_module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        packed = inputs[0].shape[1] > 6 + 4  # the check's longest plain sequence: 7 tokens and 4 less the last
        return output.detach() if packed else output

    embed.register_forward_hook(cut)
    report = sharing_report(model)
    assert report["packed"] == "gradients of packed rows differ from full passes"
    assert report["masked"] == "gradients of masked rows differ from full passes"
    assert report["cached"] == ""
    assert choose_way(model, rollouts_of([7, 3], 2, 4)) == "cached"
