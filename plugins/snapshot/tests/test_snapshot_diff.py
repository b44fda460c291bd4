"""What two snapshots do not share, by name and in order of suspicion; and the command that prints it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_snapshot import SnapshotError, capture, diff
from run_snapshot.cli import main
from run_snapshot.records import LEVELS
from snapshot_support import commit, install, make_wheel, only_installed

Make = Callable[..., Path]
SETTINGS: dict[str, Any] = {"config": {"lr": 1, "sampling": {"t": 1.0, "n": [1, 2]}}, "seeds": {"seed": 0}}


class Bench:
    """A project of which snapshots are taken."""

    def __init__(self, root: Path, site: Path, out: Path) -> None:
        self.root, self.site, self.out = root, site, out

    def take(self, name: str, **settings: Any) -> Path:
        """A snapshot of the project as it is."""
        given = {
            "data_files": ["data.jsonl"], "reward_paths": ["reward.py:score"], "model_state": {"w": torch.ones(2)}, **SETTINGS,
        }  # fmt: skip
        return capture(self.out / name, **(given | settings)).path


@pytest.fixture
def bench(make_repository: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    rows = "".join(json.dumps({"q": i, "messages": [{"role": "user", "content": str(i)}]}) + "\n" for i in range(6))
    files = {
        "reward.py": "import helper\n\ndef score(x=1):\n    return 1\n",
        "helper.py": "A = 1\n",
        ".gitignore": "*.jsonl\n",
    }
    root = make_repository(files=files)
    (root / "data.jsonl").write_text(rows)
    monkeypatch.chdir(root)
    install(tmp_path / "site", make_wheel(tmp_path, "peach", "1.0", {"peach.py": ""}))
    with only_installed(tmp_path / "site"):
        yield Bench(root, tmp_path / "site", tmp_path / "out")


def reinstall(bench: Bench, version: str, content: str = "") -> None:
    shutil.rmtree(bench.site)
    install(bench.site, make_wheel(bench.out, "peach", version, {"peach.py": content}))


def data(bench: Bench, change: Callable[[list[str]], Any]) -> None:
    rows = (bench.root / "data.jsonl").read_text().splitlines(keepends=True)
    change(rows)
    (bench.root / "data.jsonl").write_text("".join(rows))


CHANGES: dict[str, tuple[Callable[[Bench], Any], dict[str, Any], list[tuple[str, str, str, str, str]]]] = {
    "nothing": (lambda b: None, {}, []),
    "a version": (lambda b: reinstall(b, "1.1"), {}, [("environment", "peach", "changed", "1.0", "1.1")]),
    "a build": (lambda b: reinstall(b, "1.0", "x = 1\n"), {}, [("environment", "peach", "changed", "1.0", "1.0")]),
    "a distribution": (
        lambda b: install(b.site, make_wheel(b.out, "plum", "2", {"plum.py": ""})),
        {}, [("environment", "plum", "added", "(absent)", "2")],
    ),
    "row order": (lambda b: data(b, list.reverse), {}, [("data", "data.jsonl", "reordered", "6 rows", "6 rows")]),
    "a row": (lambda b: data(b, lambda r: r.append('{"q": 9}\n')), {}, [("data", "data.jsonl", "changed", "6 rows", "7 rows")]),
    "a row's type": (
        lambda b: data(b, lambda r: r.__setitem__(0, r[0].replace('"q": 0', '"q": "0"'))), {},
        [("data", "data.jsonl", "changed", "6 rows", "6 rows"), ("data", "data.jsonl: q", "changed", "int", "int or str")],
    ),
    "a data file more": (
        lambda b: (b.root / "more.jsonl").write_text("{}\n"), {"data_files": ["data.jsonl", "more.jsonl"]},
        [("data", "more.jsonl", "added", "", "1 rows")],
    ),
    "the same data elsewhere": (
        lambda b: shutil.copy(b.root / "data.jsonl", b.root / "copy.jsonl"), {"data_files": ["copy.jsonl"]}, [],
    ),
    "the reward's helper": (
        lambda b: commit(b.root, {"helper.py": "A = 2\n"}), {},
        [("reward", "helper", "changed", "", "")],
    ),
    "a reward's default": (
        lambda b: commit(b.root, {"reward.py": "import helper\n\ndef score(x=2):\n    return 1\n"}), {},
        [("reward", "reward", "changed", "", "")],
    ),
    "a commit of code": (
        lambda b: commit(b.root, {"model.py": "A = 1\n"}), {},
        [("code", "project: revision", "changed", "", ""), ("code", "project: model.py", "added", "(absent)", "")],
    ),
    "a commit of prose": (lambda b: commit(b.root, {"README.md": "hi\n"}), {}, []),
    "a commit of settings": (
        lambda b: commit(b.root, {"conf/a.yaml": "lr: 1\n"}), {}, [("config", "project: conf/a.yaml", "added", "(absent)", "")],
    ),
    "data that could not be read": (
        lambda b: None, {"data_files": ["data.jsonl", "gone.jsonl"]}, [("data", "data", "unknown", "", "not captured")],
    ),
    "uncommitted code": (
        lambda b: (b.root / "new.py").write_text("1\n"), {}, [("code", "project: new.py", "added", "(absent)", "untracked")],
    ),
    "settings": (
        lambda b: None, {"config": {"lr": 2, "sampling": {"t": 1.0, "n": [1, 2, 3]}}},
        [("config", "lr", "changed", "1", "2"), ("config", "sampling.n[2]", "added", "(absent)", "3")],
    ),
    "seeds": (lambda b: None, {"seeds": {"seed": 1}}, [("config", "seeds.seed", "changed", "0", "1")]),
    "weights": (
        lambda b: None, {"model_state": {"w": torch.zeros(2), "v": torch.ones(1)}},
        [("weights", "initial weights", "changed", "", "")],
    ),
    "weights not taken": (
        lambda b: None, {"model_state": None}, [("weights", "weights.json", "unknown", "captured", "not captured")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_differences_are_named(bench: Bench, change: str) -> None:
    act, settings, expected = CHANGES[change]
    a = bench.take("a")
    act(bench)
    found = diff(a, bench.take("b", **settings))
    assert [(d.level, d.name, d.kind) for d in found] == [e[:3] for e in expected]
    for difference, (_, _, _, old, new) in zip(found, expected, strict=True):
        assert difference.a.startswith(old)
        assert difference.b.startswith(new)


def test_they_come_in_order_of_suspicion_with_their_details(bench: Bench) -> None:
    a = bench.take("a")
    reinstall(bench, "1.1")
    data(bench, lambda rows: rows.pop(2))
    (bench.root / "helper.py").write_text("A = 2\n")  # of the reward: no code difference besides
    (bench.root / "other.py").write_text("B = 1\n")
    found = diff(a, bench.take("b", config={"lr": 3}, model_state={"w": torch.zeros(2)}))
    levels = [d.level for d in found]
    assert levels == sorted(levels, key=LEVELS.index)
    assert set(levels) == {"environment", "data", "reward", "code", "config", "weights"}
    details = {d.level: d.detail for d in found if d.detail}
    assert details["data"] == "row 3 removed: 6 rows became 5"
    assert details["reward"] == "--- a/helper\n+++ b/helper\n@@ -1 +1 @@\n-A = 1\n+A = 2"
    assert details["weights"] == "w (values changed)"


def test_what_a_function_closes_over_differs(bench: Bench) -> None:
    (bench.root / "made.py").write_text("def make(bonus):\n    def score():\n        return bonus\n    return score\n")
    space: dict[str, Any] = {}
    import importlib.util

    spec = importlib.util.spec_from_file_location("made", bench.root / "made.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    space = {name: bench.take(name, reward_paths=[module.make(i)]) for i, name in enumerate("ab")}
    (difference,) = diff(space["a"], space["b"])
    assert (difference.level, difference.name, difference.a, difference.b) == (
        "reward", "make.<locals>.score, closure.bonus", "0", "1",
    )  # fmt: skip


def test_edits_that_are_committed_since_are_no_difference(bench: Bench) -> None:
    (bench.root / "model.py").write_text("A = 1\n")
    a = bench.take("a")
    commit(bench.root, {"notes.md": "model.py is in git now\n"})
    assert diff(a, bench.take("b")) == []


def test_commits_of_a_repository_that_is_gone_count_by_their_revision(bench: Bench) -> None:
    a = bench.take("a")
    commit(bench.root, {"notes.md": "hi\n"})
    b = bench.take("b")
    shutil.rmtree(bench.root / ".git")
    (found,) = diff(a, b)
    assert (found.level, found.name, found.kind) == ("code", "project: revision", "changed")
    assert "no repository here has both" in found.detail


def test_two_captures_that_lack_the_same_are_not_equal(bench: Bench) -> None:
    taken = [bench.take(name, data_files=["gone.jsonl"]) for name in "ab"]
    (found,) = diff(*taken)
    assert (found.level, found.kind, found.a, found.b) == ("data", "unknown", "not captured", "not captured")
    assert "gone.jsonl' does not exist" in found.detail


def test_what_is_no_snapshot_is_said(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="does not exist"):
        diff(bench.take("a"), tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SnapshotError, match="holds no manifest"):
        diff(bench.take("a"), tmp_path / "empty")


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_command(bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (bench.root / "config.yaml").write_text("lr: 0.1\napi_key: hunter2\n")
    words = ["--config", "config.yaml", "--data", "data.jsonl", "--reward", "reward.py:score", "--seed", 3]
    code, out, _ = run(capsys, "capture", tmp_path / "run" / "snapshot", *words, "--json")
    record = json.loads(out)
    assert (code, record["partial"], len(record["digest"])) == (0, False, 64)

    code, out, _ = run(capsys, "show", tmp_path / "run")  # a run directory
    assert code == 0
    for words_shown in (record["digest"], "6 rows", "reward       helper:", "code         ", "1 distributions"):
        assert words_shown in out
    code, out, _ = run(capsys, "show", tmp_path / "run", "--json")
    assert json.loads(out)["config"] == {"lr": 0.1, "api_key": "***"}

    assert run(capsys, "verify", tmp_path / "run")[0] == 0
    data(bench, lambda rows: rows.pop())
    code, out, _ = run(capsys, "verify", tmp_path / "run")
    assert code == 1
    assert "changed      data         data.jsonl: row 6 removed" in out
    code, out, _ = run(capsys, "verify", tmp_path / "run", "--json")
    report = json.loads(out)
    assert (code, report["ok"]) == (1, False)
    assert {"level", "name", "verdict", "detail"} == set(report["findings"][0])

    code, out, _ = run(capsys, "capture", tmp_path / "b", "--data", "data.jsonl", "--data", "gone.jsonl")
    assert code == 1
    assert "gone.jsonl' does not exist" in out
    code, out, _ = run(capsys, "diff", tmp_path / "run", tmp_path / "b")
    assert code == 1
    assert "row 6 removed: 6 rows became 5" in out
    assert run(capsys, "diff", tmp_path / "run", tmp_path / "run")[:2] == (0, "no differences\n")
    code, out, _ = run(capsys, "diff", tmp_path / "b", tmp_path / "b")  # partial: it is not known what is missing
    assert (code, out.split()[:3]) == (1, ["unknown", "data", "data:"])
    code, out, _ = run(capsys, "diff", tmp_path / "run", tmp_path / "b", "--json")
    assert json.loads(out)[0]["level"] == "data"


@pytest.mark.parametrize(
    "words",
    [["verify", "nowhere"], ["show", "."], ["diff", "nowhere", "nowhere"], ["capture", "x", "--config", "gone.yaml"],
     ["restore", "nowhere", "x"]],
    ids=" ".join,
)  # fmt: skip
def test_wrong_use_is_one_sentence(bench: Bench, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("run-snapshot: ")
    assert err.count("\n") == 1


def test_control_characters_of_a_name_do_not_reach_the_terminal(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = "evil\x1b[2J.jsonl"
    (bench.root / name).write_text("{}\n")
    run(capsys, "capture", tmp_path / "s", "--data", name)
    out = run(capsys, "show", tmp_path / "s")[1]
    assert "\x1b" not in out
    assert "evil\\x1b[2J.jsonl" in out
