"""`compare`: what differs, environment first; results are put down to a level only when all others are equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from registry_runs import Project

from grpo_lightning.cli.main import main
from grpo_lightning.registry.comparing import Comparison, LevelResult
from grpo_lightning.sinks import EventRow, RunDirectory

pytest.importorskip("run_snapshot")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Iterator[dict[str, RunDirectory]]:
    with pytest.MonkeyPatch.context() as patch:
        project = Project(tmp_path_factory.mktemp("compare"), mlflow_template, helper="my_sizes")
        patch.chdir(project.folder)
        patch.setenv("MLFLOW_TRACKING_URI", project.store)
        made = {"base": project.run("base"), "again": project.run("again")}
        made["faster"] = project.run("faster", extra=["--model.optimizer.lr=0.01"])
        lines = project.data.read_text().splitlines(keepends=True)
        project.data.write_text("".join([lines[1], lines[0], *lines[2:], '{"prompt": "7=", "answer": "7"}\n']))
        made["rows"] = project.run("rows")
        made["rows and faster"] = project.run("both", extra=["--model.optimizer.lr=0.01"])
        (project.folder / "my_sizes.py").write_text("def size(text):\n    return len(text) + 1\n")
        made["reward"] = project.run("reward")
        project.commit("a longer size")
        made["committed reward"] = project.run("committed")
        yield made


def compare(
    a: RunDirectory, b: RunDirectory, capsys: pytest.CaptureFixture[str], *extra: str
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["compare", str(a.path), str(b.path), "--json", *extra])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, found


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {level["level"]: level["verdict"] for level in found["levels"] if level["verdict"] != "equal"}


def test_equal_runs_have_equal_results(runs: dict[str, RunDirectory], capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compare(runs["base"], runs["again"], capsys)
    assert (code, verdicts(found), found["stopped"]) == (0, {}, "")
    assert [level["level"] for level in found["levels"]] == [
        "environment",
        "data",
        "reward",
        "code",
        "config",
        "weights",
    ]
    assert all(result["a"] == result["b"] for result in found["results"])
    assert {r["name"]: r["a"] for r in found["results"]}["steps"] == 4


def test_a_setting_made_the_difference(runs: dict[str, RunDirectory], capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compare(runs["base"], runs["faster"], capsys)
    assert (code, verdicts(found), found["attributed"]) == (0, {"config": "differs"}, "config")
    (config,) = [level for level in found["levels"] if level["level"] == "config"]
    assert [(d["name"], d["a"], d["b"]) for d in config["differences"]] == [("model.optimizer.lr", "0.001", "0.01")]
    assert any(r["a"] != r["b"] for r in found["results"])


def test_rows_made_the_difference(runs: dict[str, RunDirectory], capsys: pytest.CaptureFixture[str]) -> None:
    code, found = compare(runs["base"], runs["rows"], capsys)
    assert (code, found["attributed"]) == (0, "data")
    (data,) = [level for level in found["levels"] if level["level"] == "data"]
    assert "row" in json.dumps(data["differences"])


def test_two_levels_stop_it_and_the_first_has_to_be_made_equal(
    runs: dict[str, RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = compare(runs["base"], runs["rows and faster"], capsys)
    assert (code, found["attributed"]) == (1, None)
    assert found["stopped"] == "the data differs, and so it is with config: make the data equal first"
    assert compare(runs["base"], runs["rows and faster"], capsys, "--force")[0] == 0
    main(["compare", str(runs["base"].path), str(runs["rows and faster"].path)])
    said = capsys.readouterr().out
    assert "stop: the data differs" in said
    assert "eval" not in said.split("stop:")[1]


def test_a_helpers_edit_shows_its_source(runs: dict[str, RunDirectory], capsys: pytest.CaptureFixture[str]) -> None:
    _, found = compare(runs["rows"], runs["reward"], capsys)
    (reward,) = [level for level in found["levels"] if level["level"] == "reward"]
    assert reward["verdict"] == "differs"
    assert "+    return len(text) + 1" in json.dumps(reward["differences"])


def test_a_run_without_a_snapshot_is_unknown_and_never_equal(
    runs: dict[str, RunDirectory], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bare = tmp_path / "runs" / runs["again"].run_id
    shutil.copytree(runs["again"].path, bare)
    shutil.rmtree(bare / "snapshot")
    code, found = compare(runs["base"], RunDirectory.open(bare), capsys)
    assert code == 1
    assert set(verdicts(found).values()) == {"unknown"}


def test_snapshot_commands_take_runs(
    runs: dict[str, RunDirectory], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = str(runs["base"].path)
    assert main(["snapshot", "show", base]) == 0
    assert "reward" in capsys.readouterr().out
    assert main(["snapshot", "diff", base, str(runs["again"].path)]) == 1  # the names of the runs
    assert "run.name" in capsys.readouterr().out
    assert main(["snapshot", "verify", base, "--checkpoint", str(runs["base"].checkpoints / "last.ckpt")]) == 0
    assert "as saved" in capsys.readouterr().out
    assert main(["snapshot", "restore", base, "-o", str(tmp_path / "again"), "--no-install"]) in (0, 1)
    said = capsys.readouterr().out
    assert "repeat the run: cd" in said
    assert (tmp_path / "again" / "code" / "my_reward.py").is_file()
    assert main(["snapshot", "restore", base, "-o", str(tmp_path / "again"), "--no-install"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_committed_reward_is_put_down_to_the_reward(
    runs: dict[str, RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit makes another revision; nothing but the reward is another in it."""
    code, found = compare(runs["rows"], runs["committed reward"], capsys)
    assert (code, verdicts(found), found["attributed"]) == (0, {"reward": "differs"}, "reward")


def test_a_run_that_only_mlflow_has_is_compared_by_its_metrics(
    runs: dict[str, RunDirectory],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    there = runs["faster"].path
    away = tmp_path / there.name
    there.rename(away)
    try:
        code = main(["compare", "base", "faster", "--json"])
    finally:
        away.rename(there)
    found = json.loads(capsys.readouterr().out)
    assert (code, found["attributed"], found["b"]) == (0, "config", there.name)
    results = {r["name"]: r for r in found["results"]}
    assert results["steps"] == {"name": "steps", "a": 4.0, "b": 4.0}
    assert results["reward_mean, last 10 steps"]["b"] is not None


def test_a_change_on_the_way_is_a_difference(
    runs: dict[str, RunDirectory], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    changed = tmp_path / runs["again"].run_id
    shutil.copytree(runs["again"].path, changed)
    directory = RunDirectory.open(changed)
    payload = {"levels": ["data"], "note": "more rows", "message": "accepted: row 25 appended\x1b[2J; more rows"}
    with directory.journal() as journal:
        segment = journal.segments()[-1].segment
        journal.write_event(
            EventRow(
                run_id=directory.run_id, segment=segment, step=3, time=1.0, kind="note", name="drift_accepted", payload=payload
            )
        )  # fmt: skip
    code, found = compare(runs["base"], directory, capsys)
    assert (code, verdicts(found)) == (0, {"data": "differs"})
    main(["compare", str(runs["base"].path), str(changed)])
    said = capsys.readouterr().out
    assert "changed at step 3" in said
    assert "row 25 appended\\x1b[2J" in said
    assert "\x1b[2J" not in said


def level(name: str, verdict: str = "equal", *names: str) -> LevelResult:
    differences = [{"level": name, "name": n, "kind": "changed", "a": "1", "b": "2", "detail": ""} for n in names]
    return LevelResult(level=name, verdict=verdict, differences=differences)  # type: ignore[arg-type]


ATTRIBUTED: dict[str, tuple[list[LevelResult], str | None, str]] = {
    "all equal": ([level("environment"), level("data")], None, ""),
    "one": ([level("environment"), level("data", "differs", "x")], "data", ""),
    "one unknown": ([level("data", "unknown", "x")], None, "whether the data is the same is not known"),
    "unknown before": (
        [level("environment", "unknown", "x"), level("config", "differs", "y")], None, "make the environment equal first",
    ),
    "unknown after": (
        [level("environment", "differs", "x"), level("config", "unknown", "y")], None, "make the environment equal first",
    ),
    "a seed's weights": (
        [level("config", "differs", "seeds.model.seed"), level("weights", "differs", "initial weights")], "config", "",
    ),
    "weights that no setting explains": (
        [level("config", "differs", "model.optimizer.lr"), level("weights", "differs", "initial weights")],
        None, "make the config equal first",
    ),
    "weights not known": (
        [level("config", "differs", "model.model"), level("weights", "unknown", "x")], None, "make the config equal first",
    ),
    "weights alone": ([level("config"), level("weights", "differs", "initial weights")], "weights", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", ATTRIBUTED)
def test_the_stop_rule(case: str) -> None:
    levels, attributed, stopped = ATTRIBUTED[case]
    found = Comparison(a="a", b="b", levels=levels, results=[])
    assert found.attributed == attributed
    assert stopped in found.stopped
    assert bool(stopped) == bool(found.stopped)
