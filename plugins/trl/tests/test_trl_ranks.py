"""Two processes whose groups are spread over both: one record, whole groups, and a pause that both carry out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import stdev

import pytest
from support.tiny import make_tiny_model
from trl_runs import alerts_of, only_run, steps_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_groups_that_are_spread_over_two_processes(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    script = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(script.parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(script), str(tmp_path), str(model)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first["paused"] == second["paused"]
    assert first["paused"].startswith("paused by six_steps at step 6")
    assert (first["step"], second["step"]) == (6, 6)
    assert (first["recorded"], second["recorded"]) == (True, False)
    run = only_run(tmp_path)
    rows = steps_of(run)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.event.name for row in alerts_of(run)] == ["six_steps"]
    for row, told in zip(rows, first["logged"], strict=False):
        for ours, theirs in {"reward_mean": "reward", "reward_std": "reward_std", "entropy": "entropy"}.items():
            assert row.values[ours] == pytest.approx(told[theirs], rel=1e-4)
        assert row.values["response_length_mean"] == pytest.approx(told["completions/mean_length"])
        assert row.values["reward_rank_agreement"] == 1.0
        assert row.values["dead_group_fraction"] in (0.0, 1.0), "the six of both processes are one group"
    assert rows[-1].values["group_reward_std"] == pytest.approx(stdev(first["rewards"]))
    assert (tmp_path / "trl" / "checkpoint-6" / "grpo_health.json").is_file()
