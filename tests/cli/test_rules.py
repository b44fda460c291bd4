"""`rules check`, `rules test`, `rules replay` and `rules stats` as a user types them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cli_runs import alerts_of, calm, collapsing, write_log, write_run

from grpo_lightning.cli.main import main
from grpo_lightning.health import load_tests, shipped_path, shipped_rules
from grpo_lightning.health import tests_path as path_of_tests

GOOD = (
    "- {name: high, signal: kl, above: 0.5, for_steps: 2, action: pause, summary: 'kl {value:.2f}', runbook: kl.md}\n"
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_store: str) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    (tmp_path / "mine.yaml").write_text(GOOD)
    (tmp_path / "kl.md").write_text("# Look at the data\n")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(list(argv))
    return code, capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    code, out = said(capsys, *argv, "--json")
    return code, json.loads(out)


def test_the_shipped_rules_pass_their_check_and_their_tests(capsys: pytest.CaptureFixture[str]) -> None:
    count, tests = len(shipped_rules()), len(load_tests(path_of_tests(shipped_path())))
    assert said(capsys, "rules", "check", "shipped") == (0, f"{shipped_path()}: {count} rules are fine.\n")
    assert said(capsys, "rules", "test", "shipped") == (0, f"{tests} of {tests} tests passed.\n")
    assert as_json(capsys, "rules", "test", "shipped") == (0, {"tests": tests, "failed": {}})


def test_check_my_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "rules", "check", "mine.yaml") == (0, {"rules": ["high"]})


def test_a_failed_test_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.test.yaml").write_text("""
- {name: right, series: {kl: 0x3 0.6x2}, expect: [{rule: high, step: 5}]}
- {name: wrong, series: {kl: 0x3 0.6x2}, expect: [{rule: high, step: 4}]}
""")
    code, out = said(capsys, "rules", "test", "mine.yaml")
    assert code == 1
    assert "FAILED wrong: high did not fire at step 4; high fired at step 5" in out
    assert "1 of 2 tests passed." in out
    (here / "others.yaml").write_text("[{name: right, series: {kl: 1}, expect: []}]")
    assert said(capsys, "rules", "test", "mine.yaml", "others.yaml")[0] == 0


def test_replay_says_what_would_have_fired(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(here / "log.jsonl", calm() | {"kl": [0.0] * 50 + [0.6] * 40})
    code, found = as_json(capsys, "rules", "replay", "mine.yaml", "log.jsonl")
    (alert,) = found["alerts"]
    assert (code, alert["rule"], alert["step"], alert["onset_step"]) == (0, "high", 52, 51)
    assert (alert["action"], alert["summary"], found["verdict"]) == ("pause", "kl 0.60", "warning")
    assert "high" in said(capsys, "rules", "replay", "mine.yaml", "log.jsonl")[1]


def test_replay_of_runs_and_logs_together(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(here / "runs", "run-one", collapsing())
    write_log(here / "good.jsonl", calm())
    code, found = as_json(capsys, "rules", "replay", "shipped", str(run.path), "good.jsonl")
    assert code == 1
    assert [one["verdict"] for one in found] == ["unhealthy", "healthy"]
    assert [f"{a['rule']}@{a['step']}" for a in found[0]["alerts"]] == alerts_of(run)


def test_stats_count_causes_and_false_alarms(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(here / "runs", f"run-{i}", collapsing(collapse_at=60 + i)) for i in range(3)]
    rule = alerts_of(runs[0])[0].split("@")[0]
    for run, cause in zip(runs, ("reward", "false-alarm"), strict=False):
        with run.journal() as journal:
            journal.acknowledge(alerts_of(run)[0], cause=cause, note="n")
    code, found = as_json(capsys, "rules", "stats")
    assert (code, found["runs"]) == (0, 3)
    (mine,) = [row for row in found["rules"] if row["rule"] == rule]
    assert mine == {"rule": rule, "fired": 3, "causes": {"reward": 1, "false-alarm": 1, "open": 1}}
    out = said(capsys, "rules", "stats", "--root", "runs")[1]
    assert re.search(rf"{rule}\D+3\D+1\D+1\D+reward 1", out)


BAD: dict[str, tuple[list[str], str]] = {
    "no command": (["rules"], "check|test|replay|stats"),
    "an unknown command": (["rules", "chek", "mine.yaml"], "invalid choice"),
    "no file": (["rules", "check", "nowhere.yaml"], "nowhere.yaml"),
    "a folder": (["rules", "check", "."], "no file"),
    "a typo in a signal": (["rules", "check", "typo.yaml"], "did you mean 'group_reward_std'"),
    "no runbook": (["rules", "check", "alone.yaml"], "the runbook of high is missing"),
    "a repair elsewhere": (["rules", "check", "repair.yaml"], "needs a person"),
    "no tests": (["rules", "test", "mine.yaml"], "mine.test.yaml"),
    "tests that are rules": (["rules", "test", "mine.yaml", "mine.yaml"], "needs a name, series"),
    "no run": (["rules", "replay", "mine.yaml"], "RUN"),
    "no such run": (["rules", "replay", "mine.yaml", "nowhere"], "nowhere"),
    "no runs": (["rules", "stats", "--root", "nothing"], "--root"),
    "a broken journal": (["rules", "stats", "--root", "broken"], "journal.sqlite"),
}


@pytest.mark.parametrize(("argv", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    (here / "typo.yaml").write_text(GOOD.replace("signal: kl", "signal: group_reward_sd"))
    (here / "alone.yaml").write_text(GOOD.replace("kl.md", "../kl.md"))
    (here / "repair.yaml").write_text(GOOD.replace("pause", "resample"))
    (here / "broken" / "x").mkdir(parents=True)
    (here / "broken" / "x" / "journal.sqlite").write_text("no database")
    assert main(argv) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert named in error


def test_mutated_files_are_one_sentence_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random, text = Random(5), GOOD.encode()
    codes = set()
    for _ in range(60):
        broken = bytearray(text)
        for _ in range(random.randint(1, 5)):
            broken[random.randrange(len(broken))] = random.randrange(256)
        (here / "mine.yaml").write_bytes(broken)
        codes.add(code := main(["rules", "check", "mine.yaml"]))
        err = capsys.readouterr().err
        assert code in (0, 2)
        assert err.count("\n") == (1 if code else 0), err
    assert 2 in codes
