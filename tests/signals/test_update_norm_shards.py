"""Weights that are split over two gloo ranks have the update norm of whole ones: through FSDP2, optimizer included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEPS = 3
CASES: dict[str, dict[str, Any]] = {
    "all split, some ranks without a part of a tensor": {"split": [0, 1, 3], "root": True},
    "some whole on both ranks": {"split": [1]},
    "a rank with nothing but copies": {"split": [3]},
    "a sample of the coordinates": {"split": [0, 1, 3], "root": True, "sample": True},
    "a frozen layer": {"split": [0, 1, 3], "root": True, "frozen": 1},
    "copies": {"split": []},
}


def measured(split: list[int], *, root: bool = False, sample: bool = False, frozen: int | None = None) -> list[Any]:
    """Norm and weight ratio of each step, as the step's signals have them."""
    import torch
    from lightning.pytorch.strategies import DDPStrategy
    from signal_records import make_record
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from grpo_lightning.callbacks.monitor import StepMonitor, holds_shards
    from grpo_lightning.signals import UpdateNorm

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    if frozen is not None:
        model[frozen].requires_grad_(False)
    for at in split:
        fully_shard(model[at])
    if root:
        fully_shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    monitor, found = StepMonitor(), []
    if sample:  # half of the coordinates; which ones depends on the split
        monitor._norm = UpdateNorm(exact_up_to=1, sample_size=24)
    for _ in range(STEPS):
        (model(torch.arange(7)).square().mean() * 10).backward()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        monitor.before_update(trained, sharded=holds_shards(DDPStrategy(), trained))
        optimizer.step()
        optimizer.zero_grad()
        joined = monitor.measure(make_record([[0.0, 1.0]]), torch.device("cpu"), main=True)
        assert joined is not None
        found.append([joined.values["update_norm"], joined.values["update_to_weight"]])
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank measured of each case."""
    folder, here = tmp_path_factory.mktemp("shards"), Path(__file__).resolve()
    paths = os.pathsep.join([str(here.parent), str(here.parent.parent.parent), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(here),
        str(folder),
    ]
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return {name: [rank[name] for rank in ranks] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_split_weights_have_the_norm_of_whole_ones(name: str, two_ranks: dict[str, list[Any]]) -> None:
    case = CASES[name]
    whole = measured([], frozen=case.get("frozen"))
    assert all(norm > 0.05 for norm, _ in whole)
    exact = 0.35 if case.get("sample") else 1e-5
    for rank in two_ranks[name]:
        for got, expected in zip(rank, whole, strict=True):
            assert got == pytest.approx(expected, rel=exact)
    assert two_ranks[name][0] == two_ranks[name][1]


if __name__ == "__main__":
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    mine = {name: measured(**case) for name, case in CASES.items()}
    Path(sys.argv[1], f"{torch.distributed.get_rank()}.json").write_text(json.dumps(mine))
    torch.distributed.destroy_process_group()
