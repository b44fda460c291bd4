"""The commands of docs/monitoring.md, run as they stand; and the picture that it shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
BLOCKS = dict(
    zip(
        re.findall(r"^##+ (.+)$(?=[^#]*?```bash)", PAGE, re.M),
        re.findall(r"```bash\n(.*?)```", PAGE, re.S),
        strict=True,
    )
)
TOOLS = {"Prometheus": "prometheus", "Weights & Biases": "wandb"}


def run(block: str, folder: Path) -> str:
    """Run a block of commands in bash, each of which must succeed; what it printed."""
    for port in ("9090", "9093"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            block = block.replace(port, str(free.getsockname()[1]))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_API_KEY"):
        env.pop(name, None)
    log = folder / "out.log"
    with log.open("wb") as out:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=folder,
            env=env,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            code = shell.wait(280)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)  # what it left in the background
    assert code == 0, log.read_text()[-3000:]
    return log.read_text()


def test_every_block_of_commands_is_run_below() -> None:
    assert set(BLOCKS) == {"JSON lines", "Prometheus", "Grafana", "Weights & Biases", "Alertmanager and webhooks"}


def test_grafana(tmp_path: Path) -> None:
    pytest.importorskip("grpo_prometheus", reason="the Prometheus plugin is not installed")
    assert "1_overview.json\n2_health.json\n3_diagnosis.json" in run(BLOCKS["Grafana"], tmp_path)


@pytest.mark.slow
def test_json_lines(tmp_path: Path) -> None:
    last = json.loads(run(BLOCKS["JSON lines"], tmp_path).splitlines()[-1])
    lines = [json.loads(line) for line in (tmp_path / "signals.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "kind" not in line] == [1, 2, 3]
    assert last["run_id"]


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (apt-get install prometheus)"
)
def test_prometheus(tmp_path: Path) -> None:
    pytest.importorskip("grpo_prometheus", reason="the Prometheus plugin is not installed")
    answer = run(BLOCKS["Prometheus"], tmp_path).splitlines()[-1]
    found = re.fullmatch(r'\{run_id="(\w+)", run_name=".+"\} => (\d+) @\[.+\]', answer)
    assert found, answer
    assert (tmp_path / "runs" / found[1]).is_dir()
    assert int(found[2]) > 1


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("prometheus-alertmanager") is None,
    reason="Alertmanager is not installed (apt-get install prometheus-alertmanager)",
)
def test_alertmanager(tmp_path: Path) -> None:
    said = run(BLOCKS["Alertmanager and webhooks"], tmp_path)
    (path,) = (tmp_path / "runs").iterdir()
    shown = said[said.index("Labels") :]
    assert 'alertname="hello"' in shown
    assert f'run_id="{path.name}"' in shown


@pytest.mark.slow
def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")
    assert "offline-run-" in run(BLOCKS["Weights & Biases"], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="Chromium is not installed (apt-get install chromium chromium-driver)",
)
def test_mlflow_shows_the_three_sections_in_order_in_a_real_browser(tmp_path: Path) -> None:
    pytest.importorskip("selenium", reason="selenium is not installed")
    script, out = ROOT / "docs" / "figures" / "mlflow_pages.py", tmp_path / "pages.png"
    done = subprocess.run(
        [sys.executable, str(script), "-o", str(out), "--steps", "4"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["1_overview", "2_health", "3_diagnosis"]
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_small() -> None:
    assert (ROOT / "docs" / "figures" / "mlflow_pages.png").stat().st_size < 400_000
