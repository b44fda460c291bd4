"""Signals end a run after its step, with a checkpoint that goes on bit for bit; Slurm's has the job queued again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from test_kill import Runs, _log, assert_same, finished_run, outcome

SCONTROL = '#!/bin/sh\necho "$@" >> "{record}"\n'


def attempts(job: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((Path(job["folder"]) / "attempts.json").read_text())
    return found


def statuses(folder: Path) -> list[str]:
    with finished_run(folder).journal(read_only=True) as journal:
        return [segment.status for segment in journal.segments()]


@pytest.fixture
def runs(tmp_path: Path, mlflow_template: Path) -> Runs:
    return Runs(tmp_path, mlflow_template)


def test_signals_save_and_end_and_slurm_has_the_job_queued_again(runs: Runs, tmp_path: Path) -> None:
    record = tmp_path / "scontrol.txt"
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "scontrol").write_text(SCONTROL.format(record=record))
    (programs / "scontrol").chmod(0o755)
    slurm = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_RESTART_COUNT": "{attempt}",
    }
    at = "a backward pass is done"  # in the middle of an update
    ctrl_c = {"at": at, "count": 8, "signal": int(signal.SIGINT)}
    term = {"at": at, "count": 7, "signal": int(signal.SIGTERM)}
    requeue = {"at": at, "count": 10, "signal": int(signal.SIGUSR1)}
    runs.add("ctrl-c", "windows", ctrl_c)
    runs.add("term", "windows", term)
    runs.add("slurm", "windows", requeue, same=True, env=slurm)
    runs.carry_out(seconds=900)
    whole = outcome(tmp_path / "whole windows")
    by_name = {Path(job["folder"]).name: job for job in runs.jobs}
    codes = {name: [a["codes"] for a in attempts(job)] for name, job in by_name.items()}
    assert codes["ctrl-c"] == [[130], [0]], _log(tmp_path / "ctrl-c", 0)
    assert codes["term"] == [[143], [0]], _log(tmp_path / "term", 0)
    assert codes["slurm"] == [[0], [0]], _log(tmp_path / "slurm", 0)
    for name in ("ctrl-c", "term", "slurm"):
        assert_same(outcome(tmp_path / name), whole)
    assert statuses(tmp_path / "ctrl-c") == ["killed", "finished"]
    assert statuses(tmp_path / "term") == ["killed", "finished"]
    assert statuses(tmp_path / "slurm") == ["interrupted", "finished"]
    assert record.read_text() == "requeue 77\n"
    for name, step in (("ctrl-c", 8), ("term", 7), ("slurm", 10)):  # nothing is trained twice
        with finished_run(tmp_path / name).journal(read_only=True) as journal:
            assert journal.segments()[1].from_step == step
