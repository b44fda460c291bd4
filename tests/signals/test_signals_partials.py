"""Partials: any split over ranks gives the same signals; histograms, hashes and moments against plain computation."""

from __future__ import annotations

import unittest.mock
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from signal_records import INF, NAN, make_record, of_groups, signals_of

from grpo_lightning.errors import DataError
from grpo_lightning.signals import policy, responses
from grpo_lightning.signals.hashing import place_factors, prefix_hashes
from grpo_lightning.signals.measuring import finish, measure
from grpo_lightning.signals.partials import SAMPLE_SIZE, Moments, Partials, merge, moments_of
from grpo_lightning.signals.responses import distinct, ngram_repetition, prefix_overlap
from grpo_lightning.signals.sketch import RELATIVE_ERROR, Sketch, sketches

ABOUT_THE_SPLIT = {"rank_overlap_fraction", "rank_advantage_gap"}
numbers = st.floats(-1e3, 1e3, width=32)
broken = st.sampled_from([NAN, INF, -INF])


@st.composite
def records(draw: Any) -> Any:
    groups, size, functions = draw(st.integers(1, 5)), draw(st.integers(2, 4)), draw(st.integers(1, 2))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (groups, size), generator=generator).tolist()
    ids = [[torch.randint(1, 4, (n,), generator=generator).tolist() for n in row] for row in lengths]
    rewards = torch.randint(0, 3, (groups, size, functions), generator=generator).double() / 2
    shape = (groups, size, max(n for row in lengths for n in row))
    values = {name: -torch.rand(shape, generator=generator) * 3 for name in ("logprobs", "old", "ref", "sampler")}
    values["entropies"] = torch.rand(shape, generator=generator)
    flaw = draw(st.sampled_from(["none", "reward", *values]))
    if flaw == "reward":
        rewards.view(-1)[seed % rewards.numel()] = draw(broken)
    elif flaw != "none" and values[flaw].numel():
        values[flaw].view(-1)[seed % values[flaw].numel()] = draw(broken)
    if draw(st.booleans()):
        values["ref"] = None
    prompts = [torch.randint(1, 3, (1 + seed % 3,), generator=generator).tolist() for _ in range(groups)]
    record = make_record(
        rewards,
        weights=[1.0, 0.5][:functions],
        ids=ids,
        tokens=values,
        prompts=prompts,
        sources=["ab"[i % 2] for i in range(groups)],
        importance_level=draw(st.sampled_from(["token", "sequence"])),
        seconds={"step": 2.0},
        terminated=(torch.rand(groups, size, generator=generator) < 0.7).tolist(),
    )
    ranks = draw(st.lists(st.integers(0, 2), min_size=groups, max_size=groups))
    return record, [[i for i in range(groups) if ranks[i] == r] for r in range(3)]


@settings(max_examples=60, deadline=None)
@given(records())
def test_any_split_over_ranks_gives_the_same_signals(drawn: Any) -> None:
    record, split = drawn
    whole = signals_of(record)
    parted = signals_of(*(of_groups(record, groups) for groups in split))
    kept = {name: value for name, value in parted.items() if name not in ABOUT_THE_SPLIT}
    assert kept == pytest.approx(whole, rel=1e-9, abs=1e-9, nan_ok=True)


def test_a_rank_without_groups_packs_the_same_layout() -> None:
    record = make_record([[0.0, 1.0]], tokens={"ref": -2.0})
    full, empty = measure(record), measure(of_groups(record, []))
    nothing = measure(make_record([[0.0, 1.0]], tokens={"ref": None, "entropies": None}))
    assert full.layout() == empty.layout() == nothing.layout()
    assert len(full.pack()) == len(empty.pack()) == len(nothing.pack())


def test_no_groups_anywhere_measures_nothing_of_them() -> None:
    values = signals_of(of_groups(make_record([[0.0, 1.0]]), []))
    assert set(values) == {
        *("loss", "policy_loss", "lr", "grad_norm", "grad_norm_clipped", "updates_skipped"),
        *("nonfinite_count", "nonfinite_count_loss", "nonfinite_count_grad_norm"),
        *("rollouts_resampled", "rollouts_unrepaired"),
    }


def test_ranks_of_other_configurations_are_refused() -> None:
    one, two = measure(make_record([[0.0, 1.0]])), measure(make_record([[[0.0, 1.0], [1.0, 1.0]]]))
    with pytest.raises(DataError, match="same configuration"):
        finish([one.pack(), two.pack()], one, make_record([[0.0, 1.0]]))


def test_parts_of_the_tokens_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record([[0.0, 1.0]] * 5, tokens={"ref": -1.5, "entropies": 0.25, "old": -1.25})
    whole = signals_of(record)
    monkeypatch.setattr(policy, "_PART_TOKENS", {"cpu": 1})  # one group at a time
    assert signals_of(record) == pytest.approx(whole, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(numbers | broken, max_size=6), min_size=1, max_size=4))
def test_moments_join_as_if_never_parted(parts: list[list[float]]) -> None:
    joined = Moments()
    for part in parts:
        count, mean, squares, cubes, least, greatest = moments_of(torch.tensor([part], dtype=torch.float64))[0].tolist()
        joined = joined + Moments(count=count, mean=mean, squares=squares, cubes=cubes, least=least, greatest=greatest)
    every = np.array([v for part in parts for v in part if np.isfinite(v)])
    assert joined.count == len(every)
    if len(every):
        off = every - every.mean()
        expected = [every.mean(), (off**2).sum(), (off**3).sum(), every.min(), every.max()]
        scale = max(1.0, np.abs(every).max()) ** 3
        found = [joined.mean, joined.squares, joined.cubes, joined.least, joined.greatest]
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-10 * scale)


def test_a_small_spread_on_a_high_level_keeps_its_digits() -> None:
    # a sum of squares about 0 has lost them: 1e16 + 1 is 1e16 in float64
    values = signals_of(make_record([[1e8, 1e8 + 1.0], [1e8, 1e8 + 1.0]]))
    assert values["reward_std"] == pytest.approx(np.std([0, 1, 0, 1], ddof=1), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(numbers | broken, max_size=40), st.lists(numbers, max_size=10), st.floats(0, 1))
def test_quantiles_are_within_the_documented_error(left: list[float], right: list[float], share: float) -> None:
    packed = sum(sketches([(torch.tensor(part, dtype=torch.float64), True)])[0] for part in (left, right))
    every = [v for v in left + right if np.isfinite(v)]
    found = Sketch.of(torch.as_tensor(packed)).quantiles([share])
    if not every:
        assert found == []
        return
    near = max(abs(v) for v in _neighbours(every, share))
    assert found[0] == pytest.approx(np.quantile(every, share), abs=RELATIVE_ERROR * near + 1e-6)


def _neighbours(values: list[float], share: float) -> list[float]:
    place = (len(values) - 1) * share
    return sorted(values)[int(place) : int(place) + 2]


def test_quantiles_of_few_different_values_are_exact() -> None:
    values = torch.tensor([0.0, 0.25, 0.25, 3.0, 1e9, 1e-12])
    found = Sketch.of(sketches([(values, False)])[0]).quantiles([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert found == pytest.approx(sorted(values.tolist()), rel=1e-12)


def test_several_histograms_at_once_are_those_of_each() -> None:
    parts = [(torch.tensor([-1.0, 2.0]), True), (torch.tensor([]), False), (torch.tensor([0.0, NAN, 5.0]), False)]
    for together, part in zip(sketches(parts), parts, strict=True):
        assert torch.equal(together, sketches([part])[0])


def test_distinct_prompts_beyond_the_sample_are_estimated_without_bias() -> None:
    hashes = torch.randint(0, 2**53, (2_000,), generator=torch.Generator().manual_seed(0))
    part = Partials()
    part.samples(["prompts"], torch.cat([hashes, hashes[:1_000]]).unsqueeze(0))  # every other one twice
    (sample,) = merge([part.pack()], part.layout()).samples["prompts"]
    assert SAMPLE_SIZE * 0.9 < len(sample) < SAMPLE_SIZE
    assert 1 - len(set(sample.tolist())) / len(sample) == pytest.approx(1 / 3, abs=0.08)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=9), min_size=2, max_size=5), st.integers(1, 4))
def test_repetition_against_plain_python(rows: list[list[int]], n: int) -> None:
    length = max(1, *(len(r) for r in rows))
    ids = torch.tensor([[r + [0] * (length - len(r)) for r in rows]])
    lengths = torch.tensor([[len(r) for r in rows]])
    grams = [[tuple(r[i : i + n]) for i in range(len(r) - n + 1)] for r in rows]
    expected = [1 - len(set(g)) / len(g) if g else NAN for g in grams]
    assert ngram_repetition(ids, lengths, n)[0].tolist() == pytest.approx(expected, nan_ok=True)
    pairs = [_shared(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :]]
    mean = sum(map(len, rows)) / len(rows)
    expected_overlap = pytest.approx(sum(pairs) / len(pairs) / mean if mean else NAN, nan_ok=True)
    for limit in (0, 10**9):  # by bisection, and directly
        with unittest.mock.patch.object(responses, "_DIRECT", limit):
            assert prefix_overlap(prefix_hashes(ids), lengths)[0].item() == expected_overlap


def _shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_distinct_counts_only_what_is_held() -> None:
    hashes = torch.tensor([[3, 3, 0, 7], [1, 1, 1, 1], [5, 6, 7, 8]])
    held = torch.tensor([[True, True, True, False], [True] * 4, [False] * 4])
    assert distinct(hashes, held).tolist() == [2, 1, 0]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64])
def test_a_places_factor_does_not_depend_on_the_length(length: int) -> None:
    assert torch.equal(place_factors(200, torch.device("cpu"))[:length], place_factors(length, torch.device("cpu")))
