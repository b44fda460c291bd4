"""Draw the metrics page of a run in MLflow's UI: its three sections, in order, in a real Chromium.

    python docs/figures/mlflow_pages.py -o docs/figures/mlflow_pages.png
    python docs/figures/mlflow_pages.py --store sqlite:////path/mlflow.db --run RUN_ID -o FILE     an existing run

Without a run it trains the shipped example for some steps first. It needs Chromium with its driver (`apt-get install chromium
chromium-driver`) and `pip install selenium`, and prints the names of the sections that it saw, one a line.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECTIONS = ("1_overview", "2_health", "3_diagnosis")
_SECONDS = 120  # until the page shows its sections
_STRIP = 400  # pixels that the picture has of each section
_HEADERS = """
return Array.from(document.querySelectorAll('*'))
  .filter(e => !e.children.length && e.getBoundingClientRect().height > 0)
  .map(e => [e.textContent.trim().split(' ')[0], e])
  .filter(([text]) => arguments[0].includes(text));
"""
_PLACE = """
let pane = arguments[0];
while (pane.getBoundingClientRect().width < 500) pane = pane.parentElement;
const box = pane.getBoundingClientRect();
return [box.left, arguments[0].getBoundingClientRect().top, box.right];
"""
_SHOW = "arguments[0].scrollIntoView({block: 'start'})"
_NO_TOOLS = """
const style = document.createElement('style');
style.textContent = '.modebar-container { display: none !important }';
document.head.append(style);
"""


def main() -> None:
    """Train if need be, serve the store, take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--store", help="an MLflow store; with --run")
    parser.add_argument("--run", help="a run's id")
    parser.add_argument("--steps", type=int, default=40, help="how long to train")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, run = (args.store, args.run) if args.run else train(Path(folder), args.steps)
        with served(store, Path(folder)) as address:
            for name in photograph(
                f"{address}/#/experiments/{experiment_of(store, run)}/runs/{run}/model-metrics", args.out
            ):
                print(name)


def train(folder: Path, steps: int) -> tuple[str, str]:
    """The shipped example for some steps; its store and its run."""
    store = f"sqlite:///{folder}/mlflow.db"
    command = [
        sys.executable,
        "-m",
        "grpo_lightning",
        "fit",
        "--trainer.max_steps",
        str(steps),
        "--run.name",
        "arithmetic",
    ]
    env = {**os.environ, "MLFLOW_TRACKING_URI": store}
    subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
    (run,) = (path.name for path in (folder / "runs").iterdir())
    return store, run


def experiment_of(store: str, run: str) -> str:
    """The id of the run's experiment."""
    from grpo_lightning.tracking import make_client

    return str(make_client(store).get_run(run).info.experiment_id)


@contextmanager
def served(store: str, folder: Path) -> Iterator[str]:
    """MLflow's UI over a store, on a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "--backend-store-uri", store], cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, server, folder / "server.log")
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


def _wait(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    sys.exit(f"MLflow's server did not start:\n{log.read_text()[-2000:]}")


@contextmanager
def chromium(width: int, height: int) -> Iterator[Any]:
    """A headless Chromium."""
    try:
        from selenium import webdriver
    except ImportError:
        sys.exit("This needs selenium: pip install selenium")
    browser, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if browser is None or driver is None:
        sys.exit("This needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},{height}")
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    try:
        yield started
    finally:
        started.quit()


def photograph(url: str, out: Path) -> list[str]:
    """Save the beginning of each section, one below the other; the sections that the page has, from top to bottom."""
    with chromium(1280, 1000) as browser:
        browser.get(url)
        headers = _sections(browser)
        browser.execute_script(_NO_TOOLS)
        tops = [browser.execute_script(_PLACE, header)[1] for _, header in headers]
        strips = [_strip(browser, header, first=not number) for number, (_, header) in enumerate(headers)]
    _save(strips, out)
    return [name for _, (name, _) in sorted(zip(tops, headers, strict=True), key=lambda pair: pair[0])]


def _sections(browser: Any) -> list[Any]:
    """The headers of the sections, as soon as all are there, in the order of the page's text."""
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        found = browser.execute_script(_HEADERS, list(SECTIONS))
        if {name for name, _ in found} == set(SECTIONS):
            return list(found)
        time.sleep(0.5)
    sys.exit(f"The page does not show the sections {', '.join(SECTIONS)}: it shows {found}.")


def _strip(browser: Any, header: Any, *, first: bool) -> Any:
    """A picture of a section's beginning; of the first one with all that stands above it."""
    from PIL import Image

    if not first:
        browser.execute_script(_SHOW, header)
    time.sleep(4)  # charts draw themselves when they come into view
    left, top, right = (int(place) for place in browser.execute_script(_PLACE, header))
    whole = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    return whole.crop((left - 60, 0 if first else top, right + 16, top + _STRIP))


def _save(strips: Sequence[Any], out: Path) -> None:
    from PIL import Image

    picture = Image.new("RGB", (strips[0].width, sum(strip.height for strip in strips)), "white")
    bottom = 0
    for strip in strips:
        picture.paste(strip, (0, bottom))
        bottom += strip.height
    out.parent.mkdir(parents=True, exist_ok=True)
    picture.quantize(128).save(out, optimize=True)


if __name__ == "__main__":
    main()
