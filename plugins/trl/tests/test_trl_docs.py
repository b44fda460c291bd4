"""The commands of docs/trl.md, run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "trl.md").read_text()


@pytest.mark.slow
def test_the_three_faults_are_reproduced_by_the_pages_commands(tmp_path: Path) -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    paused = re.findall(r"^paused by (\w+) at step (\d+)", done.stdout, re.M)
    assert paused == [("no_reward_spread_from_start", "20"), ("rewards_unrepaired", "6"), ("loss_not_finite", "6")]
    for rule, _ in paused:
        assert f"`{rule}`" in PAGE
    assert "frac_reward_zero_std 0.0" in done.stdout
