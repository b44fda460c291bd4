"""`check` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_runs import alerts_of, calm, collapsing, write_log, write_run

from grpo_lightning.cli.check import _Watch
from grpo_lightning.cli.main import main
from grpo_lightning.errors import RunPaused
from grpo_lightning.health import shipped_rules
from grpo_lightning.logs import LogStep


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_store: str) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    return tmp_path


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_healthy_log_is_healthy(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(here / "good.jsonl", calm())
    code, found = as_json(capsys, "check", "good.jsonl")
    assert (code, found["verdict"], found["steps"], found["alerts"]) == (0, "healthy", 90, [])
    assert found["unread"] == 0
    assert {"rule": "repetition", "missing": "ngram_repetition"} in found["not_judged"]


def test_an_unhealthy_log_has_the_keys_of_the_contract(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(here / "bad.jsonl", collapsing())
    code, found = as_json(capsys, "check", "bad.jsonl")
    assert (code, found["verdict"]) == (1, "unhealthy")
    assert {"verdict", "steps", "alerts", "not_judged", "unknown_keys", "unread"} <= set(found)
    first = found["alerts"][0]
    keys = {"rule", "step", "onset_step", "severity", "action", "cause", "value", "bound", "summary"}
    assert keys <= set(first)
    assert first["rule"] == "variance_collapse"
    assert 61 <= first["step"] <= 75
    assert 55 <= first["onset_step"] <= 66


def test_rows_of_five_steps_say_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every = write_log(here / "every.jsonl", collapsing(collapse_at=100, steps=160))
    rows = write_log(here / "rows.jsonl", collapsing(collapse_at=100, steps=160), every=5)
    _, one = as_json(capsys, "check", str(every))
    _, five = as_json(capsys, "check", str(rows))
    steps = {a["rule"]: a["step"] for a in one["alerts"]}
    rows_at = {a["rule"]: a["step"] for a in five["alerts"]}
    assert steps
    assert rows_at.keys() == steps.keys()
    assert all(abs(rows_at[rule] - at) <= 5 for rule, at in steps.items())


def test_what_people_see(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(here / "bad.jsonl", collapsing() | {"my_own_number": [1.0] * 90})
    assert main(["check", "bad.jsonl"]) == 1
    shown = capsys.readouterr().out
    assert "bad.jsonl: unhealthy" in shown
    assert "variance_collapse" in shown
    assert "first: Read one whole group" in shown
    assert "group_reward_std" in shown
    assert "not judged, for want of the signal" in shown
    assert "my_own_number" in shown, "keys that are not known are told"


def test_several_logs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(here / "good.jsonl", calm())
    write_log(here / "bad.jsonl", collapsing())
    code, found = as_json(capsys, "check", "good.jsonl", "bad.jsonl")
    assert (code, [one["verdict"] for one in found]) == (1, ["healthy", "unhealthy"])


WARN = "[{name: warm, signal: kl, above: 0.0, summary: 'kl {value}', runbook: r.md}]"


@pytest.mark.parametrize(("extra", "code"), [((), 0), (("--fail-on", "warning"), 1)], ids=["default", "warning"])
def test_a_warning_fails_only_when_asked(here: Path, extra: tuple[str, ...], code: int) -> None:
    write_log(here / "good.jsonl", calm())
    (here / "mine.yaml").write_text(WARN)
    assert main(["check", "good.jsonl", "--rules", "mine.yaml", *extra]) == code


def test_a_later_file_replaces_a_rule(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(here / "good.jsonl", calm())
    (here / "a.yaml").write_text(WARN)
    (here / "b.yaml").write_text(WARN.replace("above: 0.0", "above: 100"))
    assert as_json(capsys, "check", "good.jsonl", "--rules", "a.yaml")[1]["verdict"] == "warning"
    both = ("--rules", "a.yaml", "--rules", "b.yaml")
    assert as_json(capsys, "check", "good.jsonl", *both)[1]["verdict"] == "healthy"


def test_a_baseline_is_the_ruler(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that begins where good runs never were: its own start would be the wrong ruler."""
    write_log(here / "good.jsonl", calm())
    write_log(here / "flat.jsonl", calm() | {"entropy": [0.05] * 90})
    assert main(["baseline", "build", "good.jsonl", "-o", "ruler.json"]) == 0
    assert as_json(capsys, "check", "flat.jsonl")[1]["verdict"] == "healthy"
    code, found = as_json(capsys, "check", "flat.jsonl", "--baseline", "ruler.json")
    assert "entropy_collapsed" in {alert["rule"] for alert in found["alerts"]}
    assert code in (0, 1)


def test_a_run_is_replayed_as_it_was_judged_live(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the number of groups that it had, which its journal's signals don't tell."""
    run = write_run(here / "runs", "a1b2c3d4", collapsing(collapse_at=70, steps=120), prompts=1)
    live = alerts_of(run)
    assert live
    _, found = as_json(capsys, "check", str(run.path))
    assert [f"{a['rule']}@{a['step']}" for a in found["alerts"]] == live
    _, by_journal = as_json(capsys, "check", str(run.journal_path))
    assert by_journal["alerts"] == found["alerts"]


BAD: dict[str, tuple[list[str], str]] = {
    "no log": (["check"], "LOG"),
    "no such file": (["check", "nowhere.log"], "nowhere.log"),
    "an empty name": (["check", ""], "journal.sqlite"),
    "a folder": (["check", "."], "journal.sqlite"),
    "empty": (["check", "empty.log"], "empty.log"),
    "bytes": (["check", "bytes.log"], "bytes.log"),
    "an unknown format": (["check", "good.jsonl", "--format", "csvv"], "--format"),
    "zero steps a row": (["check", "good.jsonl", "--logging-steps", "0"], "from 1"),
    "a run that it lacks": (["check", "good.jsonl", "--run", "7"], "it holds 1"),
    "no rules": (["check", "good.jsonl", "--rules", "nowhere.yaml"], "nowhere.yaml"),
    "bad rules": (["check", "good.jsonl", "--rules", "bad.yaml"], "bad.yaml"),
    "a baseline that is none": (["check", "good.jsonl", "--baseline", "good.jsonl"], "baseline build"),
    "to follow two": (["check", "good.jsonl", "empty.log", "--follow"], "start one check for each"),
    "to look all the time": (["check", "good.jsonl", "--follow", "--poll", "0"], "seconds above 0"),
    "to look never": (["check", "good.jsonl", "--follow", "--poll", "nan"], "seconds above 0"),
}


@pytest.mark.parametrize(("argv", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    write_log(here / "good.jsonl", calm(30))
    (here / "empty.log").write_text("")
    (here / "bytes.log").write_bytes(bytes(range(256)) * 20)
    (here / "bad.yaml").write_text("[{name: r, signal: nothing_like_it, above: 1, summary: s}]")
    assert main(argv) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert named in error


def follow(log: Path, *extra: str) -> subprocess.Popen[str]:
    code = "import sys; from grpo_lightning.cli.main import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-c", code, "check", str(log), "--follow", "--poll", "0.05", *extra]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_following_ends_with_75_where_a_rule_would_pause(here: Path) -> None:
    """The log grows under it; the alert comes at the step at which a check afterwards finds it."""
    columns = collapsing(collapse_at=60, steps=90)
    whole = write_log(here / "whole.jsonl", columns).read_text().splitlines(keepends=True)
    log = here / "train.jsonl"
    log.write_text("".join(whole[:50]))
    process = follow(log)
    try:
        time.sleep(1.0)
        assert process.poll() is None
        with log.open("a") as file:
            file.write("".join(whole[50:]))
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75
    assert "variance_collapse" in out
    assert "would pause this run at step" in err
    assert "Traceback" not in err


def paused_by(watch: _Watch, rows: list[LogStep]) -> str:
    """What a watch says when one of the rows would pause the run."""
    try:
        for row in rows:
            watch.see(row, 1.0)
    except RunPaused as pause:
        return str(pause)
    return ""


def test_a_restart_goes_back_to_what_was_known_there(capsys: pytest.CaptureFixture[str]) -> None:
    """A collapse that a restart undoes is forgotten; what is known from before the restart is not."""
    columns = collapsing(collapse_at=60, steps=90)
    rows = [LogStep(step=i + 1, values={n: v[i] for n, v in columns.items()}, groups=8.0) for i in range(90)]
    good = [replace(row, values={n: v[row.step - 31] for n, v in columns.items()}) for row in rows[60:]]
    watch = _Watch(shipped_rules(), None)
    alone = paused_by(watch, rows)
    again = _Watch(shipped_rules(), None)
    for row in [*rows[:64], *good]:  # step 61 comes again, healthy
        again.see(row, 1.0)
    assert "the log goes back to step 61" in capsys.readouterr().out
    bad = [replace(row, step=row.step + 30) for row in rows[60:]]
    step = int(alone.split("at step ")[1].split(";")[0])
    assert f"at step {step + 30};" in paused_by(again, bad)


def test_a_hostile_log_can_not_write_to_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(here / "odd.jsonl", calm())
    with log.open("a") as file:
        file.write(json.dumps({"step": 91, "\x1b[31m[bold]kl\x07": 1.0, "reward_mean": 0.5}) + "\n")
    main(["check", "odd.jsonl"])
    shown = capsys.readouterr().out
    assert "\x1b[31m" not in shown
    assert "\x07" not in shown


def test_the_shipped_rules_are_held_unless_others_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(here / "good.jsonl", {"made_up": [1.0] * 5, "reward_mean": [0.1] * 5})
    _, found = as_json(capsys, "check", "good.jsonl")
    judged = {entry["rule"] for entry in found["not_judged"]}
    assert judged <= {rule.name for rule in shipped_rules()}
    assert len(judged) > 30
