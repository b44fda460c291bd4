"""Seeds, uniforms, draws and filters, against independent implementations and counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.errors import ConfigError
from grpo_lightning.rollout import SamplingConfig, rollout_seeds
from grpo_lightning.rollout.sampling import TokenSampler, filter_logits, token_uniforms

BITS = (1 << 64) - 1


def splitmix_finaliser(z: int) -> int:
    """Steele, Lea and Flood 2014, figure 17, in Python integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & BITS
    return z ^ (z >> 31)


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_uniforms_are_splitmix_of_seed_and_position(seed: int, position: int) -> None:
    counter = (splitmix_finaliser(seed & BITS) + (position + 1) * 0x9E3779B97F4A7C15) & BITS
    want = (splitmix_finaliser(counter) >> 40) / 2**24
    assert float(token_uniforms(torch.tensor([seed]), position + 1)[0, position]) == want


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    """Chi-square over 64 bins, 63 degrees of freedom: 103 at the 0.1 % level; neighbours in any direction are unrelated."""
    seeds = rollout_seeds(0, torch.arange(200), 0, 8).flatten()
    uniforms = token_uniforms(seeds, 40)
    assert 0 <= float(uniforms.min()) < 1e-3
    assert 1 - 1e-3 < float(uniforms.max()) < 1
    counts = torch.histc(uniforms, 64, 0, 1)
    expected = uniforms.numel() / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 103
    for a, b in ((uniforms[:-1], uniforms[1:]), (uniforms[:, :-1], uniforms[:, 1:]), (uniforms[:-8], uniforms[8:])):
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.02


def test_every_part_of_a_seed_counts_and_none_collide() -> None:
    rows = torch.arange(1000)
    base = rollout_seeds(3, rows, 0, 16)
    assert base.dtype == torch.int64
    assert base.unique().numel() == 16_000
    everything = torch.cat(
        [base, rollout_seeds(4, rows, 0, 16), rollout_seeds(3, rows, 1, 16), rollout_seeds(-3, rows, 0, 16)]
    )
    assert everything.unique().numel() == 64_000
    assert torch.equal(rollout_seeds(3, rows.flip(0), 0, 4), base.flip(0)[:, :4])  # by row, not by place in the batch


LOGITS = torch.randn(400, 50, generator=torch.Generator().manual_seed(0)) * 3
COMBINATIONS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 3},
    "top-k above the vocabulary": {"top_k": 99},
    "top-p": {"top_p": 0.7},
    "top-p that keeps one": {"top_p": 0.01},
    "min-p": {"min_p": 0.2},
    "min-p of 1": {"min_p": 1.0},
    "all three": {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
}


@pytest.mark.parametrize("setting", COMBINATIONS.values(), ids=COMBINATIONS.keys())
@pytest.mark.parametrize("logits", [LOGITS, LOGITS.round()], ids=["distinct", "with ties"])
def test_filters_keep_what_transformers_keeps(logits: torch.Tensor, setting: dict[str, Any]) -> None:
    if not torch.equal(logits, LOGITS) and "top_p" in setting:
        pytest.skip("which of tied tokens top-p drops is up to the sort")
    warpers = {
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    want = logits.clone()
    for name, value in setting.items():
        want = warpers[name](value)(torch.zeros(len(want), 1, dtype=torch.int64), want)
    got = filter_logits(logits.clone(), **setting)
    assert torch.equal(got, want)
    assert bool(torch.isfinite(got).any(-1).all())


def draw(probs: torch.Tensor, count: int, **config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    sampler = TokenSampler(
        SamplingConfig(**{"max_new_tokens": 2, "eos_ids": (), "pad_id": 0} | config),
        rollout_seeds(5, torch.arange(count), 0, 1).flatten(),
    )
    return sampler.draw(probs.log().expand(count, -1), 1)


def chi_square(ids: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * len(ids)
    seen = expected > 0
    return float(((torch.bincount(ids, minlength=len(probs)) - expected)[seen] ** 2 / expected[seen]).sum())


@pytest.mark.parametrize("vocabulary", [2, 255, 256, 257, 700])
def test_draws_follow_the_distribution_in_every_block_of_the_vocabulary(vocabulary: int) -> None:
    """Mean of chi-square is its degrees of freedom d, its deviation sqrt(2 d): within 4 of them."""
    probs = torch.rand(vocabulary, generator=torch.Generator().manual_seed(1)) + 0.2
    probs /= probs.sum()
    ids, logprobs = draw(probs, 60_000)
    freedom = vocabulary - 1
    assert chi_square(ids, probs) < freedom + 4 * (2 * freedom) ** 0.5 + 4
    torch.testing.assert_close(logprobs, probs.log()[ids], atol=1e-5, rtol=1e-5)


def test_filtered_draws_follow_the_filtered_distribution_but_report_the_unfiltered_log_probs() -> None:
    """Top-k 2 of 0.5, 0.3, 0.2 draws 5/8 and 3/8; log-probs stay log 0.5 and log 0.3."""
    probs = torch.tensor([0.3, 0.2, 0.5])
    ids, logprobs = draw(probs, 20_000, top_k=2)
    assert chi_square(ids, torch.tensor([3 / 8, 0.0, 5 / 8])) < 10.8  # 1 degree of freedom, 0.1 %
    assert set(ids.tolist()) == {0, 2}
    torch.testing.assert_close(logprobs, probs.log()[ids], atol=1e-5, rtol=1e-5)


def test_the_temperature_is_in_draws_and_log_probs() -> None:
    probs = torch.tensor([0.7, 0.2, 0.1])
    ids, logprobs = draw(probs, 20_000, temperature=2.0)
    flat = probs.sqrt() / probs.sqrt().sum()
    assert chi_square(ids, flat) < 13.8  # 2 degrees of freedom, 0.1 %
    torch.testing.assert_close(logprobs, flat.log()[ids], atol=1e-5, rtol=1e-5)


def test_a_token_of_no_probability_is_never_drawn() -> None:
    """Nor at the ends of a block, whatever rounding does to the cumulative sums."""
    probs = torch.zeros(600)
    probs[[1, 254, 257, 598]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    ids, _ = draw(probs, 50_000)
    assert set(ids.tolist()) == {1, 254, 257, 598}


def test_greedy_takes_the_likeliest_and_needs_no_seed() -> None:
    ids, logprobs = draw(torch.tensor([0.2, 0.5, 0.3]), 3, greedy=True, temperature=0.5, top_k=1)
    assert ids.tolist() == [1, 1, 1]
    want = torch.tensor(0.25 / (0.04 + 0.25 + 0.09)).log()  # squared by the temperature
    torch.testing.assert_close(logprobs, want.expand(3))


def test_broken_logits_stay_visible() -> None:
    """NaN weights must not end in an index error before anyone can see them."""
    sampler = TokenSampler(SamplingConfig(max_new_tokens=1, eos_ids=(), pad_id=0), torch.zeros(2, dtype=torch.int64))
    ids, logprobs = sampler.draw(torch.tensor([[torch.nan] * 300, [0.0] * 300]), 0)
    assert 0 <= int(ids[0]) < 300
    assert bool(logprobs[0].isnan())
    assert bool(logprobs[1].isfinite())


BAD: dict[str, Any] = {
    "temperature": [0.0, -1.0, float("inf"), float("nan")],
    "top_p": [0.0, 1.1],
    "top_k": [-1],
    "min_p": [-0.1, 1.5],
    "max_new_tokens": [0],
    "pad_id": [-1],
    "eos_ids": [(-1,)],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values], ids=str)
def test_settings_that_cannot_hold_name_value_and_fix(name: str, value: Any) -> None:
    values = {"max_new_tokens": 4, "eos_ids": (1,), "pad_id": 0} | {name: value}
    with pytest.raises(ConfigError, match=rf"sampling\.{name} is .*: .*give") as caught:
        SamplingConfig(**values)
    assert str(value) in str(caught.value)
