"""`diagnose` as a user types it: runs and logs, text and JSON, exit codes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lightning.cli.main import main
from grpo_lightning.sinks import EventRow, RunDirectory, StepRow

ORDER = ["1. environment", "2. data", "3. reward and sampling", "4. algorithm"]


def run_with(root: Path, *, paused: bool, name: str = "a-run") -> RunDirectory:
    """60 steps; in a paused one prompts get longer from step 41 on."""
    directory = RunDirectory.create(root, "0123456789abcdef")
    with directory.journal() as journal:
        journal.set_meta(name=name, description="to be diagnosed")
        journal.start_segment(from_step=0, time=0.0)
        for step in range(1, 61):
            wave = 1 + 0.02 * math.sin(step)
            values = {"reward_mean": 0.5 * wave, "prompt_length_mean": (300 if paused and step > 40 else 100) * wave}
            row = StepRow(run_id=directory.run_id, segment=1, step=step, time=float(step), values=values)
            journal.write_step(row)
        if paused:
            payload = {
                "severity": "critical", "action": "pause", "cause": "data", "signal": "prompt_length_mean", "step": 45,
                "onset_step": 41, "summary": "Long prompts.", "first": "Shuffle.", "value": 3.0, "bound": 1.5,
            }  # fmt: skip
            journal.write_event(
                EventRow(
                    run_id=directory.run_id, segment=1, step=45, time=45.0, kind="alert", name="long", payload=payload
                )
            )
        journal.end_segment("paused" if paused else "finished", time=61.0)
    (directory.checkpoints / "step-0000040.ckpt").write_bytes(b"")
    return directory


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_paused_run_is_told_in_order_with_the_repair(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_with(here / "runs", paused=True)
    assert main(["diagnose", "a-run"]) == 1
    text = told(capsys)
    places = [text.index(f"{title}:") for title in ORDER]
    assert places == sorted(places)
    assert "1. environment: nothing found, but not all of it was checked" in text
    assert "2. data: 2 findings" in text
    assert "Prompts went from 100 to 300 tokens in the mean" in text
    assert "[steps 41-60]" in text
    assert "Alert long at step 45: Long prompts." in text
    assert "moved first: prompt_length_mean at 41" in text
    assert "not checked: data files against the snapshot: no snapshot" in text
    assert f"acknowledge {directory.path} long@45 --cause data" in text
    assert f"fit --ckpt_path {directory.checkpoints / 'step-0000040.ckpt'}" in text


def test_nothing_is_carried_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_with(here / "runs", paused=True)

    def content() -> dict[Path, bytes]:
        files = [path for path in directory.path.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files if not path.name.endswith((".lock", "-shm", "-wal"))}

    before = content()
    main(["diagnose", "a-run"])
    assert content() == before


def test_a_healthy_run_has_no_findings(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(here / "runs", paused=False)
    assert main(["diagnose", "a-run"]) == 0
    text = told(capsys)
    assert text.count("nothing found") == 4
    assert "acknowledge" not in text


def test_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(here / "runs", paused=True)
    assert main(["diagnose", "0123", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["name"], facts["verdict"], facts["onset_step"]) == ("a-run", "unhealthy", 41)
    assert [level["level"] for level in facts["levels"]] == ["environment", "data", "reward", "algorithm"]
    assert facts["look_first"]["name"] == "prompts_changed"
    assert facts["look_first"]["numbers"][0]["signal"] == "prompt_length_mean"
    assert facts["alerts"][0]["id"] == "long@45"
    assert [repair["command"].split()[3] for repair in facts["repair"]] == ["acknowledge", "fit"]


def test_another_step_is_looked_at_on_request(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(here / "runs", paused=True)
    assert main(["diagnose", "a-run", "--step", "20", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["onset_step"], facts["before"], facts["look_first"]) == (20, [1, 19], None)


def write_log(path: Path, *, collapse: bool) -> Path:
    rows = []
    for step in range(1, 81):
        bad = collapse and step > 50
        row = {
            "step": step,
            "reward": 0.0 if bad else 0.5,
            "reward_std": 0.0 if bad else 0.4,
            "entropy": 1.0,
            "kl": 0.01,
        }
        rows.append(json.dumps(row | {"loss": "NaN"} if bad else row | {"loss": 0.1}))
    path.write_text("\n".join(rows).replace('"NaN"', "NaN") + "\n")
    return path


def test_a_log_of_another_trainer(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(here / "train.jsonl", collapse=True)
    assert main(["diagnose", str(log), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["onset_step"] == 51
    assert "not_finite" in {f["name"] for f in facts["levels"][3]["findings"]}
    assert facts["repair"] == [{"what": "Resume your trainer from its last checkpoint before step 51.", "command": ""}]
    assert main(["diagnose", str(write_log(here / "good.jsonl", collapse=False))]) == 0


WRONG = [
    ("no such run", ["nothing-of-that-name"], "There is no run"),
    ("step 0", ["a-run", "--step", "0"], "steps are counted from 1"),
    ("beyond the end", ["a-run", "--step", "99"], "ends at step 60"),
    ("no run", [], "required: RUN"),
    ("no baseline", ["a-run", "--baseline", "gone.json"], "gone.json is not a baseline"),
]


@pytest.mark.parametrize(("args", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_use_is_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    run_with(here / "runs", paused=False)
    assert main(["diagnose", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert error.count("\n") == 1


def test_a_run_without_steps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunDirectory.create(here / "runs", "empty-run")
    assert main(["diagnose", "empty-run"]) == 2
    assert "no recorded steps yet" in capsys.readouterr().err


def test_control_characters_do_not_reach_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_with(here / "runs", paused=True, name="a\x1b[31mrun\x07")
    main(["diagnose", "0123456789abcdef"])
    out = capsys.readouterr().out
    assert "\x1b[31mrun" not in out
    assert "\\x1b[31mrun\\x07" in out


def test_it_starts_without_torch_and_mlflow(here: Path) -> None:
    directory = run_with(here / "runs", paused=True)
    code = (
        "import sys; from grpo_lightning.cli.main import main;"
        f"main(['diagnose', {str(directory.path)!r}]); print(sorted({{'torch', 'mlflow', 'lightning'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
