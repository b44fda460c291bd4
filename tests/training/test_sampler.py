"""The sampler's promises, over all sizes."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.errors import ConfigError
from grpo_lightning.training.sampler import PromptSampler, Slot, sequential_shares


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, Any]:
    world_size = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, 200), min_size=world_size, max_size=150))
    return {
        "lengths": lengths,
        "world_size": world_size,
        "prompts_per_step": draw(st.integers(world_size, 40)),
        "bucket": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**40)),
        "updates_per_batch": draw(st.integers(1, 3)),
    }


@settings(deadline=None)
@given(sizes=sizes(), epoch=st.integers(0, 5))
def test_the_ranks_cover_each_epoch_disjointly_in_balanced_batches(sizes: dict[str, Any], epoch: int) -> None:
    rows, world_size = len(sizes["lengths"]), sizes["world_size"]
    ranks = [PromptSampler(rank=rank, **sizes) for rank in range(world_size)]
    for sampler in ranks:
        sampler.epoch = epoch
    yields = [list(sampler) for sampler in ranks]
    assert [len(y) for y in yields] == [len(ranks[0])] * world_size
    seen: list[int] = []
    batch_sizes = []
    for slots in zip(*yields, strict=True):
        assert len({(s.epoch, s.index, s.repeat, s.final) for s in slots}) == 1
        shares = [len(s.rows) for s in slots]
        assert min(shares) >= 1
        assert max(shares) - min(shares) <= 1
        if slots[0].final:
            seen += [row for s in slots for row in s.rows]
            batch_sizes.append(sum(shares))
    assert sorted(seen) == list(range(rows))
    assert max(batch_sizes) - min(batch_sizes) <= 1
    assert len(batch_sizes) == min(ceil(rows / sizes["prompts_per_step"]), rows // world_size)


@settings(deadline=None)
@given(sizes=sizes(), data=st.data())
def test_a_restored_position_gives_the_rest_of_the_yields(sizes: dict[str, Any], data: st.DataObject) -> None:
    def yields(sampler: PromptSampler, count: int) -> list[Slot]:
        out: list[Slot] = []
        while len(out) < count:
            for slot in sampler:
                sampler.mark_consumed(slot.epoch, slot.index, final=slot.final)
                out.append(slot)
                if len(out) == count:
                    break
        return out

    one_epoch = len(PromptSampler(**sizes))
    stop = data.draw(st.integers(0, 2 * one_epoch))
    whole = yields(PromptSampler(**sizes), 3 * one_epoch)
    first = PromptSampler(**sizes)
    yields(first, stop)
    second = PromptSampler(**sizes)
    second.load_state_dict(first.state_dict())
    assert yields(second, 3 * one_epoch - stop) == whole[stop:]


def test_the_state_is_plain_integers_also_from_numpy_settings() -> None:
    sampler = PromptSampler(np.ones(5), prompts_per_step=2, seed=np.int64(3), bucket=np.bool_(True))  # type: ignore[arg-type]
    state = sampler.state_dict()
    assert {type(v) for v in state.values()} == {int}
    assert state == {
        "seed": 3, "rows": 5, "prompts_per_step": 2, "bucket": 1, "updates_per_batch": 1, "epoch": 0, "done": 0,
    }  # fmt: skip


@pytest.mark.parametrize("batches", [3, 17, 40], ids=["one window", "two windows", "three windows"])
def test_no_batch_mixes_extremes(batches: int) -> None:
    """Lengths 0..N-1: inside one sorted window of W batches of P rows a batch spans about N/W, without it about N."""
    per_step = 8
    rows = batches * per_step - 3
    lengths = np.random.default_rng(0).permutation(rows)
    spans = {}
    for bucket in (True, False):
        sampler = PromptSampler(lengths, prompts_per_step=per_step, bucket=bucket)
        spans[bucket] = [int(np.ptp(lengths[list(s.rows)])) for s in sampler]
    window_batches = batches // ceil(batches / 16)
    assert max(spans[True]) < 2.5 * rows / window_batches
    assert np.median(spans[False]) > 0.6 * rows


def test_the_order_of_lengths_is_not_the_order_of_batches() -> None:
    sampler = PromptSampler(list(range(64)), prompts_per_step=8)
    firsts = [min(s.rows) for s in sampler]
    assert sorted(firsts) == [0, 8, 16, 24, 32, 40, 48, 56]
    assert firsts != sorted(firsts)


def test_ranks_get_prompts_of_the_same_lengths() -> None:
    """Were the sorted batch cut in two, rank 1 would sample from the longer prompts in every step."""
    totals = [
        sum(row for s in PromptSampler(list(range(64)), prompts_per_step=8, rank=rank, world_size=2) for row in s.rows)
        for rank in (0, 1)
    ]
    assert totals[1] - totals[0] == 32  # neighbours are dealt in turn: one apart, 32 times


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return [b.tolist() for b in PromptSampler([1] * 30, prompts_per_step=4, seed=seed).order(epoch)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert order(0, 1) != order(1, 0)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too few prompts a step": ({"prompts_per_step": 2, "world_size": 3}, "prompts_per_step is 2 for 3 ranks"),
    "too few rows": ({"lengths": [1, 1], "world_size": 3}, "2 rows for 3 ranks"),
    "negative seed": ({"seed": -1}, "seed is -1: give 0 or more"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_sizes_that_cannot_hold_say_so(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptSampler(**({"lengths": [1] * 9, "prompts_per_step": 3} | changes))


@given(world_size=st.integers(1, 5), extra=st.integers(0, 40), per_rank=st.integers(1, 9))
def test_held_out_rows_are_shared_once_and_all_ranks_have_as_many_batches(
    world_size: int, extra: int, per_rank: int
) -> None:
    rows = world_size + extra
    shares = [sequential_shares(rows, per_rank=per_rank, rank=r, world_size=world_size) for r in range(world_size)]
    assert len({len(s) for s in shares}) == 1
    assert all(batch for share in shares for batch in share)
    assert sorted(row for share in shares for batch in share for row in batch) == list(range(rows))
    assert all([row for batch in share for row in batch] == sorted(r for b in share for r in b) for share in shares)
    assert max(len(batch) for share in shares for batch in share) <= per_rank + 1


def test_fewer_held_out_rows_than_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.val has 2 rows for 3 ranks"):
        sequential_shares(2, per_rank=4, rank=0, world_size=3)
