"""The memory formula against what autograd really keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from grpo_lightning.objective.batch import Rollouts
from grpo_lightning.rollout import score_completions
from grpo_lightning.training.memory import StepShape, step_memory

BASE = {"h": 128, "i": 512, "heads": 8, "kv": 2, "layers": 4, "V": 1024, "P": 4, "G": 8, "S": 64, "L": 32}


def saved_bytes(model: nn.Module, rollouts: Rollouts) -> int:
    """Bytes of the storages that a forward pass keeps for its backward pass, without the weights'."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = score_completions(model, rollouts, with_entropy=True)
        assert scores.entropies is not None
        (scores.logprobs.sum() + scores.entropies.sum()).detach()
    return sum(kept.values())


def llama(s: dict[str, int]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=s["V"],
        hidden_size=s["h"],
        intermediate_size=s["i"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv"],
        max_position_embeddings=1024,
    )
    model: nn.Module = LlamaForCausalLM(config).eval()
    return model


def random_rollouts(s: dict[str, int]) -> Rollouts:
    P, G, S, L = s["P"], s["G"], s["S"], s["L"]
    return Rollouts(
        prompt_ids_PS=torch.randint(2, s["V"], (P, S)),
        prompt_mask_PS=torch.ones(P, S, dtype=torch.bool),
        completion_ids_PGL=torch.randint(2, s["V"], (P, G, L)),
        completion_mask_PGL=torch.ones(P, G, L, dtype=torch.bool),
        terminated_PG=torch.zeros(P, G, dtype=torch.bool),
        sampler_logprobs_PGL=torch.zeros(P, G, L),
    )


@pytest.mark.parametrize(
    "change",
    [{}, {"layers": 8}, {"V": 4096}, {"h": 256}, {"i": 1024}, {"kv": 8}, {"L": 96}, {"S": 256}, {"G": 2}],
    ids=lambda change: ",".join(f"{k}={v}" for k, v in change.items()) or "base",
)
def test_kept_activations_are_as_the_formula_says(change: dict[str, int]) -> None:
    s = BASE | change
    model = llama(s)
    count = sum(p.numel() for p in model.parameters())
    shape = StepShape(
        parameters=count,
        trained=count,
        bytes_per_weight=4,
        layers=s["layers"],
        hidden=s["h"],
        mlp=s["i"],
        keys=s["kv"] * (s["h"] // s["heads"]),
        vocabulary=s["V"],
        prompts=s["P"],
        group_size=s["G"],
        micro_groups=s["P"],
        prompt_tokens=s["S"],
        completion_tokens=s["L"],
    )
    found = step_memory(shape)
    expected = found.activations + found.logits / 3  # the forward pass keeps one copy of the logits
    assert saved_bytes(model, random_rollouts(s)) == pytest.approx(expected, rel=0.15)


def test_each_part_by_hand() -> None:
    shape = StepShape(
        parameters=1000,
        trained=100,
        bytes_per_weight=2,
        layers=3,
        hidden=10,
        mlp=20,
        keys=5,
        vocabulary=7,
        prompts=4,
        group_size=2,
        micro_groups=1,
        prompt_tokens=6,
        completion_tokens=8,
        reference_copy=True,
    )
    found = step_memory(shape)
    assert (found.weights, found.gradients, found.optimizer, found.reference) == (2000, 200, 400, 2000)
    assert found.activations == round(22 * 3 * (100 + 80 + 16.5) * 2)  # 1 x (6 + 2 x 8) tokens
    assert found.logits == 3 * 16 * 7 * 4
    assert found.sampling == 2 * 3 * 5 * 2 * 4 * 22
    assert found.total == 4600 + found.activations + found.logits
