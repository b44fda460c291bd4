"""Random steps, split over two gloo ranks and into parts of any size: every signal is that of the whole step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from signal_records import of_groups
from test_signals_partials import ABOUT_THE_SPLIT, records

from grpo_lightning.signals import CATALOGUE, UpdateSize, finish, measure, policy
from grpo_lightning.training import ranks

ELSEWHERE = {"eval_accuracy", "monitor_seconds", "probe_seconds"}  # by callbacks, from numbers of all ranks
PARTS = ("step", "rollout", "reward", "score", "update")


@st.composite
def steps(draw: Any) -> Any:
    """A step with all that can be measured of it, which of two ranks has each group, and the tokens of a part."""
    record, _ = draw(records())
    record = replace(
        record,
        reward_errors=dict.fromkeys(record.reward_names, draw(st.integers(0, 2))),
        reward_seconds=dict.fromkeys(record.reward_names, draw(st.floats(0, 9))),
        seconds={name: draw(st.floats(0.1, 9)) for name in PARTS},
        kl_coef=0.1,
        kl_loss=0.5,
    )
    groups = len(record.row_ids_P)
    owner = draw(st.lists(st.integers(0, 1), min_size=groups, max_size=groups))
    return record, owner, draw(st.integers(1, 60))


def holds_over_ranks(examples: int) -> set[str]:
    """Raise unless all ranks together measure what one alone does; the signals that were compared.

    Both ranks draw the same steps and see the same numbers, so they also fail together.
    """
    seen: set[str] = set()
    size = UpdateSize(update_squares=4.0, weight_squares=16.0)

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(steps())
    def check(drawn: Any) -> None:
        record, owner, part_tokens = drawn
        alone = measure(record, update=size)
        whole = finish([alone.pack()], alone, record)
        mine = of_groups(record, [i for i, rank in enumerate(owner) if rank == ranks.rank()])
        if ranks.rank():
            mine = replace(mine, reward_errors=dict.fromkeys(record.reward_names, 0))  # they add up over ranks
        with patch.object(policy, "_PART_TOKENS", {"cpu": part_tokens}):
            own = measure(mine, update=size)
        parted = finish(ranks.all_gather_tensor(own.pack()), own, record)
        seen.update(parted)
        kept = {name: value for name, value in parted.items() if name not in ABOUT_THE_SPLIT}
        assert kept == pytest.approx(whole, rel=1e-9, abs=1e-9, nan_ok=True)
        assert parted.get("rank_overlap_fraction", 0.0) == 0.0
        assert parted.get("rank_advantage_gap", 0.0) >= 0.0

    check()
    return seen


def test_two_gloo_ranks_measure_what_one_does(tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    paths = os.pathsep.join(
        [str(here.parent), str(here.parents[1]), str(here.parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(here),
        str(tmp_path),
    ]
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    seen = [set(json.loads((tmp_path / f"{rank}.json").read_text())) for rank in (0, 1)]
    measured = {name for name, signal in CATALOGUE.items() if signal.merge != "run"} - ELSEWHERE
    assert measured - seen[0] == set(), "compared in no step"
    assert seen[0] == seen[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found = holds_over_ranks(150)
    Path(sys.argv[1], f"{ranks.rank()}.json").write_text(json.dumps(sorted(found)))
    torch.distributed.destroy_process_group()
