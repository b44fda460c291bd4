"""`status` and `acknowledge` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import alerts_of, calm, collapsing, write_run

from grpo_lightning.cli.main import main
from grpo_lightning.health import acknowledge_command


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_store: str) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    return tmp_path


def status(capsys: pytest.CaptureFixture[str], run: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = main(["status", run, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_calm_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(here / "runs", "calm-run", calm(), name="first")
    code, facts = status(capsys, "calm-run")
    assert (code, facts["verdict"], facts["step"], facts["name"]) == (0, "healthy", 90, "first")
    assert facts["alerts"] == []
    assert facts["values"]["kl"] == pytest.approx(calm()["kl"][-1])


def test_a_paused_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(here / "runs", "bad-run", collapsing())
    code, facts = status(capsys, str(run.path))
    assert (code, facts["verdict"], facts["status"]) == (1, "unhealthy", "paused")
    assert [alert["id"] for alert in facts["alerts"]] == alerts_of(run)
    assert all(alert["open"] and alert["acknowledged"] is None for alert in facts["alerts"])
    assert main(["status", "bad-run"]) == 1
    shown = capsys.readouterr().out
    assert "bad-run" in shown
    assert "acknowledge" in shown
    assert "group_reward_std" in shown


def test_acknowledging_closes_one_after_the_other(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(here / "runs", "bad-run", collapsing())
    (run.checkpoints / "paused-step-0000065.ckpt").write_bytes(b"x")
    alerts = alerts_of(run)
    for place, alert in enumerate(alerts, 1):
        argv = ["acknowledge", "bad-run", alert, "--cause", "reward", "--note", "the regex matched all"]
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert f"{alert} is acknowledged: reward." in out
        assert ("continue: python -m grpo_lightning fit --ckpt_path" in out) == (place == len(alerts))
    code, facts = status(capsys, "bad-run")
    assert (code, facts["verdict"]) == (0, "healthy")
    told = facts["alerts"][0]["acknowledged"]
    assert (told["cause"], told["note"]) == ("reward", "the regex matched all")


def test_the_command_can_be_pasted() -> None:
    command = acknowledge_command("runs/a b", "r@1", "reward")
    assert command.startswith("python -m grpo_lightning acknowledge 'runs/a b' r@1 --cause reward --note")


BAD: dict[str, tuple[list[str], str]] = {
    "no run": (["status"], "RUN"),
    "no such run": (["status", "nowhere"], "nowhere"),
    "a path out of the folder": (["status", "../../etc"], "../../etc"),
    "no such alert": (["acknowledge", "bad-run", "kl@3", "--cause", "data", "--note", "n"], "variance_collapse@"),
    "no such cause": (["acknowledge", "bad-run", "kl@3", "--cause", "moon", "--note", "n"], "false-alarm"),
    "no cause": (["acknowledge", "bad-run", "kl@3", "--note", "n"], "--cause"),
    "no note": (["acknowledge", "bad-run", "kl@3", "--cause", "data"], "--note"),
    "an empty note": (["acknowledge", "bad-run", "kl@3", "--cause", "data", "--note", "  "], "--note is empty"),
}


@pytest.mark.parametrize(("argv", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    write_run(here / "runs", "bad-run", collapsing())
    assert main(argv) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert named in error


def test_what_a_run_says_is_not_obeyed_by_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(here / "runs", "bad-run", collapsing(), name="\x1b]0;owned\x07[bold]x")
    assert main(["status", str(run.path)]) == 1
    shown = capsys.readouterr().out
    assert "\x1b]0" not in shown
    assert "\x07" not in shown
    assert "[bold]x" in shown, "written out, not obeyed"
