"""A real MLflow server over HTTP, killed in the middle of a run and started again."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from grpo_lightning.sinks import RunDirectory, StepRow
from grpo_lightning.tracking import MetricPump, MLflowRun, make_client

pytestmark = pytest.mark.slow


def start_server(folder: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "art")]
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return server
        except OSError:
            time.sleep(0.3)
    kill(server)
    raise AssertionError((folder / "server.log").read_text()[-3000:])


def kill(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_killed_server_costs_nothing_and_gets_everything_once(workdir, caplog, capsys):
    caplog.set_level(logging.WARNING)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    server = start_server(workdir, port)
    try:
        run = MLflowRun.create(experiment="e", config={"lr": 1}, tracking_uri=uri)
        directory = RunDirectory.create(workdir / "runs", run.run_id)
        journal = directory.journal()
        segment = journal.start_segment(from_step=0)
        pump = MetricPump(journal, run, page_of=lambda _: "1_overview", interval=0.1, longest_wait=2.0).start()
        slowest = 0.0

        def record(first: int, last: int) -> None:
            nonlocal slowest
            for number in range(first, last + 1):
                started = time.perf_counter()
                values = {f"s{k}": number / (k + 1) for k in range(20)}
                now = time.time()
                journal.write_step(StepRow(run_id="r", segment=segment, step=number, time=now, values=values))
                pump.notify()
                slowest = max(slowest, time.perf_counter() - started)
                time.sleep(0.01)

        record(1, 60)
        assert pump.flush(60)
        record(61, 90)  # the server dies with some of these on the way
        kill(server)
        record(91, 200)
        pump.submit(lambda: run.set_tags({"during": "outage"}), "a tag")
        assert not pump.flush(1.0)
        server = start_server(workdir, port)
        record(201, 230)
        pump.submit(lambda: run.set_status("finished"), "the status")
        assert pump.close(120)
        found = make_client(uri).get_run(run.run_id)
        for k in range(20):
            history = make_client(uri).get_metric_history(run.run_id, f"1_overview/s{k}")
            assert Counter(point.step for point in history) == Counter(range(1, 231))
            assert all(point.value == point.step / (k + 1) for point in history)
    finally:
        kill(server)
    assert (found.info.status, found.data.tags["during"]) == ("FINISHED", "outage")
    messages = [record.message for record in caplog.records]
    assert sum("can't be filled now" in message for message in messages) == 1
    assert sum("MLflow is back:" in message for message in messages) == 1
    assert not any("Retrying" in message for message in messages)
    assert "View run" not in capsys.readouterr().out
    assert slowest < 1.0, "recording a step never waits for MLflow"


def test_a_run_is_resumed_while_its_server_is_away(workdir):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    server = start_server(workdir, port)
    try:
        run = MLflowRun.create(experiment="e", config={"lr": 1}, tracking_uri=uri)
        directory = RunDirectory.create(workdir / "runs", run.run_id)
        run.set_status("paused")
        kill(server)
        journal = directory.journal()
        segment = journal.start_segment(from_step=5)
        again = MLflowRun.resume(run.run_id, segment=segment, from_step=5, config={"lr": 2}, recorded_uri=uri)
        pump = MetricPump(journal, again, interval=0.1, longest_wait=1.0).start()
        journal.write_step(StepRow(run_id="r", segment=segment, step=6, time=time.time(), values={"kl": 1.0}))
        assert not pump.flush(1.0)
        server = start_server(workdir, port)
        assert pump.close(60)
        found = make_client(uri).get_run(run.run_id)
        assert (found.info.status, found.data.metrics["2_health/kl"]) == ("RUNNING", 1.0)
        assert "grpo.segment.1.changed" in found.data.tags
    finally:
        kill(server)
