"""What every engine must do: a new engine joins `ENGINES` and passes.

Each entry makes a model and an engine that samples from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.tiny import make_tiny_model
from test_rollout_engines import FakeLLM

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import PromptBatch, Rollouts
from grpo_lightning.rollout import RolloutEngine, SamplingConfig, check_vocabulary, make_engine, rollout_seeds
from grpo_lightning.rollout import transformers_engine as under_test
from grpo_lightning.rollout.decoding import DECODERS

PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
SAMPLING = SamplingConfig(max_new_tokens=9, eos_ids=(1, 2, 3), pad_id=0, temperature=0.8)
Made = tuple[Any, RolloutEngine]


def _tiny(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(make_tiny_model(folder), dtype=torch.float32)


def transformers_shared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    model = _tiny(folder)
    return model, make_engine("transformers", model, model="")


def transformers_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(under_test, "DECODERS", {"cache_decoding": DECODERS["cache_decoding"]})
    return transformers_shared(folder, monkeypatch)


def transformers_recurrent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=44, hidden_size=32, num_hidden_layers=2)
    model = transformers.MambaForCausalLM(config)
    return model, make_engine("transformers", model, model="")


def vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLLM, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    model = _tiny(folder)
    return model, make_engine("vllm", model, model=str(folder / "tiny-llama"))


ENGINES: list[Callable[[Path, pytest.MonkeyPatch], Made]] = [
    transformers_shared,
    transformers_cache,
    transformers_recurrent,
    vllm,
]


@pytest.fixture(params=ENGINES, ids=lambda make: make.__name__)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    result: Made = request.param(tmp_path, monkeypatch)
    return result


def batch(rows: list[list[int]], row_ids: list[int] | None = None, *, extra: int = 0) -> PromptBatch:
    width = max(map(len, rows)) + extra
    return PromptBatch(
        ids_PS=torch.tensor([[0] * (width - len(r)) + r for r in rows]),
        mask_PS=torch.tensor([[False] * (width - len(r)) + [True] * len(r) for r in rows]),
        row_ids_P=torch.tensor(row_ids or list(range(len(rows)))),
        prompts=[str(r) for r in rows],
        columns={},
        sources=[""] * len(rows),
    )


def generate(
    made: Made, prompts: PromptBatch, group_size: int = 6, sampling: SamplingConfig = SAMPLING, run_seed: int = 0
) -> Rollouts:
    model, engine = made
    seeds = rollout_seeds(run_seed, prompts.row_ids_P, prompts.epoch, group_size)
    return engine.generate(model, prompts, group_size=group_size, sampling=sampling, seeds_PG=seeds)


def completions(rollouts: Rollouts) -> list[list[list[int]]]:
    return [
        [ids[mask].tolist() for ids, mask in zip(group, masks, strict=True)]
        for group, masks in zip(rollouts.completion_ids_PGL, rollouts.completion_mask_PGL, strict=True)
    ]


def plain_logits(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor([prompt + completion])).logits[0]
    return logits[len(prompt) - 1 : -1]


def test_the_engine_is_one(made: Made) -> None:
    assert isinstance(made[1], RolloutEngine)


def test_shapes_types_and_the_prompts_as_given(made: Made) -> None:
    prompts = batch(PROMPTS)
    rollouts = generate(made, prompts)
    ids, mask = rollouts.completion_ids_PGL, rollouts.completion_mask_PGL
    assert torch.equal(rollouts.prompt_ids_PS, prompts.ids_PS)
    assert torch.equal(rollouts.prompt_mask_PS, prompts.mask_PS)
    assert ids.shape[:2] == (3, 6)
    assert ids.shape == mask.shape == rollouts.sampler_logprobs_PGL.shape
    assert int(rollouts.lengths_PG.max()) == ids.shape[-1] <= SAMPLING.max_new_tokens
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)
    assert (rollouts.sampler_logprobs_PGL.dtype, rollouts.terminated_PG.dtype) == (torch.float32, torch.bool)
    assert not rollouts.sampler_logprobs_PGL.is_inference()


def test_the_mask_ends_with_the_end_token_and_terminated_says_whether_there_was_one(made: Made) -> None:
    rollouts = generate(made, batch(PROMPTS), group_size=20)
    own = [c for group in completions(rollouts) for c in group]
    terminated = rollouts.terminated_PG.flatten().tolist()
    assert set(terminated) == {True, False}
    for completion, ended in zip(own, terminated, strict=True):
        assert not set(completion[:-1]) & set(SAMPLING.eos_ids)
        assert (completion[-1] in SAMPLING.eos_ids) is ended
        assert ended or len(completion) == SAMPLING.max_new_tokens
    after = ~rollouts.completion_mask_PGL
    assert bool((rollouts.completion_ids_PGL[after] == SAMPLING.pad_id).all())
    assert bool((rollouts.sampler_logprobs_PGL[after] == 0).all())
    assert torch.equal(rollouts.completion_mask_PGL, rollouts.completion_mask_PGL.cummin(-1).values)


def test_cut_is_by_the_limit_not_by_the_longest_of_the_batch(made: Made) -> None:
    """All of a batch end early: none of them is truncated, though the longest fills its tensor."""
    everything = replace(SAMPLING, eos_ids=tuple(range(20)), max_new_tokens=30)
    rollouts = generate(made, batch(PROMPTS), sampling=everything)
    assert rollouts.completion_ids_PGL.shape[-1] < 30
    assert bool(rollouts.terminated_PG.all())


def test_sampler_log_probs_are_those_of_a_plain_pass_under_the_temperature(made: Made) -> None:
    rollouts = generate(made, batch(PROMPTS))
    for p, group in enumerate(completions(rollouts)):
        for g, own in enumerate(group):
            want = torch.log_softmax(plain_logits(made[0], PROMPTS[p], own) / SAMPLING.temperature, -1)
            got = rollouts.sampler_logprobs_PGL[p, g, : len(own)]
            torch.testing.assert_close(got, want[torch.arange(len(own)), own], atol=1e-4, rtol=1e-4)


def test_greedy_is_the_argmax_of_a_plain_pass(made: Made) -> None:
    rollouts = generate(made, batch(PROMPTS), group_size=2, sampling=replace(SAMPLING, greedy=True))
    for p, group in enumerate(completions(rollouts)):
        assert group[0] == group[1]
        assert group[0] == plain_logits(made[0], PROMPTS[p], group[0]).argmax(-1).tolist()


def test_a_completion_depends_on_its_prompt_and_seed_alone(made: Made) -> None:
    """Two ranks with half the prompts each, another order, more padding, a smaller group: the same completions."""
    whole = completions(generate(made, batch(PROMPTS)))
    assert completions(generate(made, batch(PROMPTS))) == whole
    first, second = generate(made, batch(PROMPTS[:2])), generate(made, batch(PROMPTS[2:], [2]))
    assert completions(first) + completions(second) == whole
    assert completions(generate(made, batch(PROMPTS[::-1], [2, 1, 0], extra=3))) == whole[::-1]
    assert completions(generate(made, batch(PROMPTS), group_size=2)) == [group[:2] for group in whole]


def test_other_seeds_rows_and_epochs_give_other_completions(made: Made) -> None:
    whole = completions(generate(made, batch(PROMPTS)))
    assert completions(generate(made, batch(PROMPTS), run_seed=1)) != whole
    assert completions(generate(made, batch(PROMPTS, [7, 8, 9]))) != whole
    assert completions(generate(made, replace(batch(PROMPTS), epoch=1))) != whole
    twins = completions(generate(made, batch([[5, 6], [5, 6]])))
    assert twins[0] != twins[1]  # one text in two rows stays two groups
    assert all(len({tuple(c) for c in group}) > 1 for group in whole)


def test_new_weights_are_sampled_from_after_sync(made: Made) -> None:
    model, engine = made
    before = completions(generate(made, batch(PROMPTS)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    engine.sync_weights(model)
    assert completions(generate(made, batch(PROMPTS))) != before
    test_sampler_log_probs_are_those_of_a_plain_pass_under_the_temperature(made)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_keeps_its_mode_and_gets_no_gradient(made: Made, training: bool) -> None:
    model = made[0].train(training)
    generate(made, batch(PROMPTS))
    assert all(module.training is training for module in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_the_global_random_state_is_not_used(made: Made) -> None:
    if type(made[1]).__name__ == "VLLMEngine":
        pytest.skip("vLLM draws from generators of its own")
    generate(made, batch(PROMPTS))  # anything done once
    before = torch.get_rng_state()
    generate(made, batch(PROMPTS))
    assert torch.equal(torch.get_rng_state(), before)


ENDINGS = SamplingConfig(max_new_tokens=24, eos_ids=tuple(range(1, 12)), pad_id=0)


@pytest.mark.parametrize("make", [transformers_shared, transformers_cache], ids=lambda make: make.__name__)
@pytest.mark.parametrize("split", [False, True], ids=["joint", "split"])
def test_rollouts_that_ended_are_dropped_without_a_change(
    make: Any, split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About a quarter of the vocabulary ends a rollout: few are left after some steps, and only they cost."""
    made = make(tmp_path, monkeypatch)
    monkeypatch.setattr(
        under_test,
        "DECODERS",
        {
            name: (lambda *a, kind=kind, **k: kind(*a, **k | {"split": split}))
            for name, kind in under_test.DECODERS.items()
        },
    )
    tokens: list[int] = []
    generate(made, batch(PROMPTS), sampling=ENDINGS)
    made[0].model.layers[0].mlp.register_forward_hook(lambda _m, i, _o: tokens.append(i[0].shape[:-1].numel()))
    dropped = generate(made, batch(PROMPTS), group_size=16, sampling=ENDINGS)
    worked = sum(tokens)
    monkeypatch.setattr(under_test, "_kept_rows", lambda ended: None)
    tokens.clear()
    whole = generate(made, batch(PROMPTS), group_size=16, sampling=ENDINGS)
    assert worked < 0.7 * sum(tokens)
    assert completions(dropped) == completions(whole)
    torch.testing.assert_close(dropped.sampler_logprobs_PGL, whole.sampler_logprobs_PGL, atol=1e-5, rtol=1e-5)
    assert torch.equal(dropped.terminated_PG, whole.terminated_PG)


def test_a_context_that_is_too_short_names_both_numbers_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = transformers_shared(tmp_path, monkeypatch)
    assert generate(made, batch(PROMPTS), sampling=replace(SAMPLING, max_new_tokens=59)) is not None  # 5 + 59 = 64
    with pytest.raises(ConfigError, match=r"5 tokens.*60.*context of 64.*lower max_new_tokens"):
        generate(made, batch(PROMPTS, extra=20), sampling=replace(SAMPLING, max_new_tokens=60))


@pytest.mark.parametrize(("largest", "fits"), [(43, True), (44, False), (10**6, False)])
def test_a_token_that_the_model_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int, fits: bool
) -> None:
    model, _ = transformers_shared(tmp_path, monkeypatch)
    assert model.get_input_embeddings().num_embeddings == 44
    with (
        nullcontext() if fits else pytest.raises(ConfigError, match=rf"token id {largest} and the model has 44 tokens")
    ):
        check_vocabulary(model, largest)


def test_an_engine_of_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'sglang'.*'transformers' or 'vllm'"):
        make_engine("sglang", torch.nn.Linear(1, 1), model="")
