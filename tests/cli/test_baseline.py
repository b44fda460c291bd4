"""`baseline build`, `show` and `compare` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import calm, collapsing, write_log, write_run

from grpo_lightning.cli.main import main
from grpo_lightning.health import load_baseline


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_store: str) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    write_log(tmp_path / "good.jsonl", calm())
    return tmp_path


def test_build_marks_the_steps_where_something_happened(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(here / "climb.jsonl", calm() | {"kl": [0.02 + 0.001 * (i % 2) for i in range(50)] + [0.31] * 40})
    assert main(["baseline", "build", "climb.jsonl", "-o", "ruler.json"]) == 0
    assert "kl began to climb at step 51 (0.02" in capsys.readouterr().out
    built = load_baseline(here / "ruler.json")
    assert built.band("kl", 80) == pytest.approx((0.31, 0.0062))
    assert [m.step for m in built.near_mark(60)] == [51]


def test_build_from_several_runs_of_one_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(here / "runs", f"run-{i}", calm() | {"kl": [0.1 * (i + 1)] * 90}, name="same") for i in range(3)]
    assert main(["baseline", "build", *[str(run.path) for run in runs], "-o", "ruler.json", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(set(told["runs"])) == 3, "none replaces another"
    band = load_baseline(here / "ruler.json").band("kl", 40)
    assert band is not None
    assert band[0] == pytest.approx(0.2), "the median of three runs"


def test_show(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", "build", "good.jsonl", "-o", "ruler.json"]) == 0
    capsys.readouterr()
    assert main(["baseline", "show", "ruler.json"]) == 0
    shown = capsys.readouterr().out
    assert "90 steps of good.jsonl" in shown
    assert "group_reward_std" in shown
    assert main(["baseline", "show", "ruler.json", "--json"]) == 0
    assert "kl" in json.loads(capsys.readouterr().out)["signals"]


def test_compare_says_what_left_its_band_and_when(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(here / "bad.jsonl", collapsing(collapse_at=30))
    assert main(["baseline", "build", "good.jsonl", "-o", "ruler.json"]) == 0
    capsys.readouterr()
    assert main(["baseline", "compare", "ruler.json", "good.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["away"] == []
    assert main(["baseline", "compare", "ruler.json", "bad.jsonl", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    first = {row["signal"]: row["first_outside"] for row in found["signals"]}
    assert first["group_reward_std"] == 31
    assert "group_reward_std" in found["away"]
    assert "kl" not in found["away"]
    assert main(["baseline", "compare", "ruler.json", "bad.jsonl"]) == 1
    assert "group_reward_std" in capsys.readouterr().out


BAD: dict[str, tuple[list[str], str]] = {
    "no command": (["baseline"], "build|show|compare"),
    "no run": (["baseline", "build", "-o", "x.json"], "RUN"),
    "no output": (["baseline", "build", "good.jsonl"], "--out"),
    "no such run": (["baseline", "build", "nowhere", "-o", "x.json"], "nowhere"),
    "a folder that is none": (["baseline", "build", "good.jsonl", "-o", "no/such/x.json"], "can't be written"),
    "a folder to write": (["baseline", "build", "good.jsonl", "-o", "."], "can't be written"),
    "nothing finite": (["baseline", "build", "nan.jsonl", "-o", "x.json"], "nothing to build"),
    "not a baseline": (["baseline", "show", "good.jsonl"], "baseline build"),
    "another format": (["baseline", "show", "later.json"], "this version reads"),
    "columns of two lengths": (["baseline", "show", "uneven.json"], "different lengths"),
    "a spread of 0": (["baseline", "show", "zero.json"], "numbers that can't be"),
    "a list": (["baseline", "show", "list.json"], "not a baseline"),
    "a nest": (["baseline", "show", "nest.json"], "not a baseline"),
    "to compare with nothing": (["baseline", "compare", "zero.json", "good.jsonl"], "numbers that can't be"),
}


def _ruler(**band: list[float]) -> str:
    made = {"steps": [1.0], "levels": [0.5], "spreads": [0.1]} | band
    head = {"format": "grpo-lightning-baseline/1", "runs": ["a"], "steps": 10, "marks": []}
    return json.dumps(head | {"signals": {"kl": made}})


@pytest.mark.parametrize(("argv", "named"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(here: Path, capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    write_log(here / "nan.jsonl", {"reward_mean": [float("nan")] * 9})
    (here / "later.json").write_text(_ruler().replace("/1", "/9"))
    (here / "uneven.json").write_text(_ruler(levels=[0.5, 0.6]))
    (here / "zero.json").write_text(_ruler(spreads=[0.0]))
    (here / "list.json").write_text("[]")
    (here / "nest.json").write_text("[" * 100_000)
    assert main(argv) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert named in error


def test_a_failed_write_leaves_the_old_ruler(here: Path) -> None:
    assert main(["baseline", "build", "good.jsonl", "-o", "ruler.json"]) == 0
    before = (here / "ruler.json").read_bytes()
    assert main(["baseline", "build", "nowhere", "-o", "ruler.json"]) == 2
    assert (here / "ruler.json").read_bytes() == before
    assert {p.name for p in here.glob(".*.draft")} == set()
