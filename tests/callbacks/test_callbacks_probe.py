"""The probe changes nothing and is the same in every run; the fingerprint; the histogram's picture."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import make_module, record_run, steps_of, weights_of, without_timings

from grpo_lightning.callbacks import ProbeSettings
from grpo_lightning.callbacks.histogram import EDGES, draw_histogram
from grpo_lightning.errors import ConfigError, DataError
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.settings import AdvantageSettings, KLSettings, LoraSettings

MakeData = Callable[..., PromptDataModule]
PROBE = ProbeSettings(every_n_steps=2, prompts=5)


def drawn(completions: list[str], **_: Any) -> list[float]:
    """Draws from every generator there is: a probe that let this go on would change training."""
    noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
    return [len(set(c)) + 0.01 * noise * i for i, c in enumerate(completions)]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two passes over two minibatches": {"num_iterations": 2, "num_minibatches": 2},
    "lora": {"lora": LoraSettings(r=2)},
    "kl in the reward, batch scaling": {
        "kl": KLSettings(use="reward"),
        "advantages": AdvantageSettings(scale="batch"),
    },
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
def test_a_run_with_a_probe_has_the_weights_of_one_without(
    tmp_path: Path, tiny_model: Path, make_data: MakeData, changes: dict[str, Any]
) -> None:
    found = []
    for name, settings in (("without", {}), ("with", {"probe": PROBE})):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        module = make_module(tiny_model, f"{__file__}:drawn", **changes)
        run = record_run(tmp_path / name, module, make_data(), 5, **settings)
        values = [{k: v for k, v in row.values.items() if not k.startswith("probe_")} for row in steps_of(run)]
        found.append((weights_of(module), [without_timings(v) for v in values]))
    (weights, values), (probed_weights, probed_values) = found
    assert all(torch.equal(v, probed_weights[k]) for k, v in weights.items())
    assert values == probed_values


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, make_data: MakeData) -> Any:
    folder = tmp_path_factory.mktemp("probed")
    return record_run(folder, make_module(tiny_model, seed=3), make_data(), 4, probe=PROBE, fingerprint_steps=3)


def _probe_values(values: Any) -> dict[str, float]:
    return {k: v for k, v in values.items() if k.startswith("probe_") and k != "probe_seconds"}


def test_it_comes_at_step_1_and_every_n_steps(probed: Any) -> None:
    rows = steps_of(probed)
    assert [bool(_probe_values(row.values)) for row in rows] == [True, True, False, True]
    names = set(_probe_values(rows[1].values))
    assert names >= {
        *("probe_reward_mean", "probe_group_reward_std", "probe_kl", "probe_entropy", "probe_truncated_fraction"),
        *("probe_response_length_mean", "probe_ngram_repetition", "probe_reward/dense_mean", "probe_advantage_std"),
    }
    assert not names & {"probe_loss", "probe_grad_norm", "probe_lr", "probe_ratio_mean", "probe_updates_skipped"}
    assert rows[1].values["probe_seconds"] > 0


def test_runs_of_other_seeds_and_orders_have_the_same_probe(
    tmp_path: Path, tiny_model: Path, make_data: MakeData, probed: Any
) -> None:
    """At a learning rate of about 0 the weights stay: then only the probe's own seeds and prompts could differ."""
    from grpo_lightning.training.settings import OptimizerSettings

    found = []
    for seed in (1, 2):
        module = make_module(tiny_model, seed=seed, optimizer=OptimizerSettings(lr=1e-30))
        data = make_data(seed=seed, prompts_per_step=4 * seed)
        run = record_run(tmp_path / str(seed), module, data, 2, probe=PROBE)
        found.append([_probe_values(row.values) for row in steps_of(run)])
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]


def test_a_resumed_run_probes_alike(tmp_path: Path, tiny_model: Path, make_data: MakeData, probed: Any) -> None:
    settings: dict[str, Any] = {"probe": PROBE, "fingerprint_steps": 3}
    first = record_run(tmp_path, make_module(tiny_model, seed=3), make_data(), 2, every=2, **settings)
    assert len(json.loads((first.path / "fingerprint.json").read_text())["rows"]) == 2  # what there was
    ckpt = first.checkpoints / "step-0000002.ckpt"
    again = record_run(tmp_path, make_module(tiny_model, seed=3), make_data(), 4, ckpt=ckpt, **settings)
    for row, other in zip(steps_of(again), steps_of(probed), strict=True):
        assert without_timings(row.values) == without_timings(other.values)
    mine, theirs = (json.loads((run.path / "fingerprint.json").read_text()) for run in (again, probed))
    assert mine["rows"] == theirs["rows"]


def test_the_fingerprint_is_the_first_steps_table(probed: Any, make_data: MakeData) -> None:
    found = json.loads((probed.path / "fingerprint.json").read_text())
    rows = steps_of(probed)
    assert found["columns"][0] == "step"
    assert [row[0] for row in found["rows"]] == [1, 2, 3]
    at = found["columns"].index("reward_mean")
    assert [row[at] for row in found["rows"]] == [row.values["reward_mean"] for row in rows[:3]]
    at = found["columns"].index("probe_entropy")
    assert [row[at] is None for row in found["rows"]] == [False, False, True]
    assert not [name for name in found["columns"] if "second" in name]
    assert (found["probe"]["prompts"], found["probe"]["group_size"]) == (5, 4)
    assert found["probe"]["sampling"]["max_new_tokens"] == 6


def _ready(data: PromptDataModule) -> PromptDataModule:
    data.setup("fit")
    return data


def test_frozen_prompts_are_spread_and_shared_by_ranks(make_data: MakeData, tiny_files: Path) -> None:
    data = _ready(make_data())
    assert data.frozen_prompts(4).row_ids_P.tolist() == [0, 10, 20, 30]
    shares = [data.frozen_prompts(5, rank=r, world_size=2).row_ids_P.tolist() for r in (0, 1)]
    assert shares == [[0, 20], [10, 30]]
    held_out = _ready(make_data(val=str(tiny_files / "val.jsonl")))
    assert held_out.frozen_prompts(99).row_ids_P.tolist() == list(range(8))
    assert held_out.frozen_prompts(1).prompts == ["40+48="]
    with pytest.raises(DataError, match="ask for fewer"):
        data.frozen_prompts(1, world_size=2)


def test_held_out_prompts_without_the_rewards_columns_are_not_used(
    make_data: MakeData, tiny_files: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"prompt": "1+1=", "source": "a"}\n')
    assert _ready(make_data(val=str(bare))).frozen_prompts(1).prompts == ["0+0="]


@pytest.mark.parametrize("bad", [{"every_n_steps": -1}, {"prompts": 0}])
def test_settings_that_cannot_hold(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"run\.probe\."):
        ProbeSettings(**bad)


def test_the_picture_shows_each_bar() -> None:
    counts = [0.0] * 24
    counts[3], counts[12] = 8.0, 4.0  # from -2.25 to -2.0, and from 0 to 0.25
    picture = draw_histogram(counts, title="advantages at step 3")
    pixels = np.asarray(picture)
    assert pixels.shape == (280, 480, 3)
    blue = (pixels == (0x25, 0x63, 0xEB)).all(-1)
    grey = (pixels == (0x9C, 0xA3, 0xAF)).all(-1)
    width = 416 / 24
    assert 48 + 3 * width <= blue.any(0).nonzero()[0].min() <= blue.any(0).nonzero()[0].max() <= 48 + 4 * width
    assert 48 + 12 * width <= grey.any(0).nonzero()[0].min() <= grey.any(0).nonzero()[0].max() <= 48 + 13 * width
    assert blue.any(1).sum() == pytest.approx(2 * grey.any(1).sum(), abs=2)
    assert len(EDGES) == 25
    draw_histogram([0.0] * 24)
