"""One change at a time: the verification names it, with the right verdict, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_snapshot import Snapshot, capture, check, verify
from safetensors.torch import load_file, save_file
from snapshot_support import commit, git, install, make_wheel, only_installed

ROWS = 25_000


class Run:
    """A project with everything a run is made of, captured once."""

    def __init__(self, home: Path) -> None:
        self.project, self.site = home / "project", home / "site"
        self.project.mkdir(parents=True)
        git(self.project, "init", "-q", "-b", "main")
        files = {
            "reward.py": "import helper\n\ndef score(completions, **_):\n    return [helper.one() for _ in completions]\n",
            "helper.py": "def one():\n    return 1\n",
            "train.py": "lr = 1\n",
            "test_secrets.py": "A = 1\n",  # no secret by its name
            ".gitignore": "data/\nweights/\nruns/\n",
        }
        commit(self.project, files)
        data, weights = self.project / "data", self.project / "weights"
        data.mkdir()
        weights.mkdir()
        chats = ({"messages": [{"role": "user", "content": f"{i}+1"}], "answer": i + 1} for i in range(ROWS))
        (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
        (data / "val.csv").write_text("q,a\n1+1,2\n2+2,4\n")
        torch.manual_seed(0)
        save_file({"layer.w": torch.randn(64, 64), "layer.b": torch.zeros(64)}, weights / "model.safetensors")
        install(self.site, make_wheel(home, "peach", "1.0", {"peach.py": "x = 1\n"}))

    def capture(self) -> Snapshot:
        """Take the snapshot, in `runs/1` of the project."""
        return capture(
            self.project / "runs" / "1" / "snapshot",
            config={"lr": 1},
            data_files=[self.project / "data" / "train.jsonl", self.project / "data" / "val.csv"],
            reward_paths=[f"{self.project}/reward.py:score"],
            model_state=self.project / "weights" / "model.safetensors",
            seeds={"seed": 0},
            project=self.project,
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Snapshot, Path]]:
    home = tmp_path_factory.mktemp("tamper")
    made = Run(home / "live")
    with only_installed(made.site):
        snapshot = made.capture()
        assert snapshot.reasons == ()
        shutil.copytree(home / "live", home / "copy", symlinks=True)
        yield made, snapshot, home / "copy"


@pytest.fixture
def fresh(run: tuple[Run, Snapshot, Path]) -> Iterator[tuple[Run, Snapshot]]:
    """The run as captured; whatever a test does to it is undone."""
    made, snapshot, copy = run
    yield made, snapshot
    for name in ("project", "site"):
        shutil.rmtree(copy.parent / "live" / name)
        shutil.copytree(copy / name, copy.parent / "live" / name, symlinks=True)


def lines(run: Run, change: Callable[[list[str]], Any]) -> None:
    file = run.project / "data" / "train.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    change(rows)
    file.write_text("".join(rows))


def replace(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def quietly(file: Path, content: bytes) -> None:
    """Change a file and keep its size and time."""
    stat = file.stat()
    assert len(content) == stat.st_size
    file.write_bytes(content)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def tensors(run: Run, change: Callable[[dict[str, torch.Tensor]], Any], **metadata: str) -> None:
    file = run.project / "weights" / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(state)
    file.unlink()
    save_file(state, file, metadata=metadata or None)


def flip(state: dict[str, torch.Tensor]) -> None:
    state["layer.w"].view(torch.int32)[3, 5] ^= 1


def swap(rows: list[str]) -> None:
    rows[10], rows[20] = rows[20], rows[10]


def hide(run: Run) -> None:
    git(run.project, "update-index", "--assume-unchanged", "train.py")
    (run.project / "train.py").write_text("lr = 2\n")


def move_head(run: Run) -> None:
    commit(run.project, {"README.md": "later\n"}, "Later")


TRAIN, VAL, MODEL = "train.jsonl", "val.csv", "model.safetensors"
Act = Callable[[Run], Any]


def model(run: Run) -> Path:
    return run.project / "weights" / MODEL


def row(number: int, line: str) -> Act:
    return lambda r: lines(r, lambda rows: rows.__setitem__(number - 1, line + "\n"))


def rebuild(run: Run) -> None:
    shutil.rmtree(run.site)
    install(run.site, make_wheel(run.project.parent, "peach", "1.0", {"peach.py": "x = 3\n"}))


CHAT = '{"messages": [{"role": "user", "content": "19999+2"}], "answer": 20000}'
NAMED: dict[str, tuple[Act, str, str, str, str]] = {  # change, level, name, verdict, words of the detail
    "one weight bit": (lambda r: tensors(r, flip), "weights", "layer.w", "changed", "values changed"),
    "a tensor gone": (lambda r: tensors(r, lambda s: s.pop("layer.b")), "weights", "layer.b", "missing", "missing"),
    "a tensor's dtype": (
        lambda r: tensors(r, lambda s: s.update({"layer.b": s["layer.b"].half()})),
        "weights", "layer.b", "changed", "dtype float32 -> float16",
    ),
    "weights gone": (lambda r: model(r).unlink(), "weights", MODEL, "missing", "gone"),
    "a cut weights file": (lambda r: os.truncate(model(r), 9000), "weights", MODEL, "unknown", "claims bytes"),
    "one row": (row(5, '{"answer": 0}'), "data", TRAIN, "changed", "row 5 changed, of 25000"),
    "a chat message in row 20,000": (row(20_000, CHAT), "data", TRAIN, "changed", "row 20000 changed, of 25000"),
    "row order": (lambda r: lines(r, swap), "data", TRAIN, "changed", "same in another order, from row 11 on"),
    "rows appended": (lambda r: lines(r, lambda x: x.append("{}\n")), "data", TRAIN, "changed", "row 25001 appended"),
    "a row removed": (lambda r: lines(r, lambda x: x.pop(0)), "data", TRAIN, "changed", "row 1 removed"),
    "a row that keeps size and time": (
        lambda r: quietly(r.project / "data" / VAL, b"q,a\n1+1,2\n2+2,5\n"),
        "data", VAL, "changed", "row 2 changed, of 2",
    ),
    "a moved data file": (
        lambda r: (r.project / "data" / VAL).rename(r.project / "data" / "moved.csv"), "data", VAL, "missing", "is gone",
    ),
    "data that is no JSON now": (row(1, "oops"), "data", TRAIN, "changed", "line 1 is not JSON"),
    "the reward": (
        lambda r: replace(r.project / "reward.py", "one()", "one() + 1"), "reward", "reward", "changed", "reward.py",
    ),
    "a reward's helper": (lambda r: replace(r.project / "helper.py", "1", "2"), "reward", "helper", "changed", "helper.py"),
    "a reward's helper, size and time kept": (
        lambda r: quietly(r.project / "helper.py", b"def one():\n    return 2\n"), "reward", "helper", "changed", "helper.py",
    ),
    "a reward's helper gone": (lambda r: (r.project / "helper.py").unlink(), "reward", "helper", "missing", "is gone"),
    "an edit": (lambda r: replace(r.project / "train.py", "1", "2"), "code", "train.py", "changed", "was edited since"),
    "an assume-unchanged edit": (hide, "code", "train.py", "changed", "was edited since"),
    "code gone": (lambda r: (r.project / "train.py").unlink(), "code", "train.py", "missing", "is gone"),
    "an untracked module": (
        lambda r: (r.project / "numpy.py").write_text("x = 1\n"),
        "code", "numpy.py", "changed", "is new, and git does not follow it",
    ),
    "another commit": (move_head, "code", "project", "changed", "revision"),
    "the repository gone": (lambda r: shutil.rmtree(r.project / ".git"), "code", "project", "unknown", "git"),
    "an edited file in site-packages": (
        lambda r: (r.site / "peach.py").write_text("x = 11\n"), "environment", "peach", "changed", "edited files: peach.py",
    ),
    "a patched version": (
        lambda r: replace(r.site / "peach-1.0.dist-info" / "METADATA", "Version: 1.0", "Version: 1.1"),
        "environment", "peach", "changed", "1.0 -> 1.1",
    ),
    "a distribution gone": (
        lambda r: shutil.rmtree(r.site / "peach-1.0.dist-info"), "environment", "peach", "missing", "1.0 was installed",
    ),
    "another distribution": (
        lambda r: install(r.site, make_wheel(r.project.parent, "plum", "2.0", {"plum.py": ""})),
        "environment", "plum", "changed", "2.0 was installed since",
    ),
    "another build of a version": (rebuild, "environment", "peach", "changed", "same version, different build"),
    "a member of the snapshot": (
        lambda r: replace(r.project / "runs/1/snapshot/config.json", "1", "2"),
        "snapshot", "config.json", "changed", "not as the manifest lists it",
    ),
    "a member gone": (
        lambda r: (r.project / "runs/1/snapshot/freeze.txt").unlink(), "snapshot", "freeze.txt", "missing", "gone",
    ),
    "the manifest": (
        lambda r: replace(r.project / "runs/1/snapshot/manifest.json", '"digest": "', '"digest": "0'),
        "snapshot", "manifest.json", "changed", "digest is not that of what it lists",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", NAMED)
def test_verify_names_the_change_and_nothing_else(fresh: tuple[Run, Snapshot], change: str) -> None:
    run, snapshot = fresh
    act, level, name, verdict, detail = NAMED[change]
    act(run)
    problems = verify(snapshot.path).problems
    told = [(p.level, Path(p.name).name, p.verdict) for p in problems]
    assert told == [(level, name, verdict)], problems
    assert detail in problems[0].detail


KEPT = {
    "weights saved again": lambda r: tensors(r, lambda s: None, saved="again"),
    "data touched": lambda r: os.utime(r.project / "data" / TRAIN),
    "keys in another order": lambda r: lines(
        r, lambda rows: rows.__setitem__(0, json.dumps(dict(reversed(json.loads(rows[0]).items()))) + "\n")
    ),
    "code touched": lambda r: os.utime(r.project / "train.py"),
    "a package touched": lambda r: os.utime(r.site / "peach.py"),
    "compiled code": lambda r: subprocess.run([sys.executable, "-m", "compileall", "-q", str(r.site)], check=True),
    "another run beside": lambda r: shutil.copytree(r.project / "runs" / "1", r.project / "runs" / "2"),
    "notes that are no code": lambda r: (r.project / "notes.txt").write_text("x\n"),
}


@pytest.mark.parametrize("change", KEPT)
def test_what_changes_nothing_is_ok(fresh: tuple[Run, Snapshot], change: str) -> None:
    run, snapshot = fresh
    KEPT[change](run)
    report = verify(snapshot.path)
    assert report.problems == ()
    assert check(snapshot.path) == []


QUICK = [c for c in NAMED if NAMED[c][1] in ("data", "reward", "environment", "code")]
SEEN_BY_READING_ONLY = {"a row that keeps size and time"}


@pytest.mark.parametrize("change", QUICK)
def test_the_quick_check_of_a_checkpoint_sees_it_too(fresh: tuple[Run, Snapshot], change: str) -> None:
    run, snapshot = fresh
    act, level, name, verdict, _ = NAMED[change]
    act(run)
    told = [(f.level, Path(f.name).name, f.verdict) for f in check(snapshot.path)]
    assert told == ([] if change in SEEN_BY_READING_ONLY else [(level, name, verdict)])


def test_quick_says_what_it_did_not_read(fresh: tuple[Run, Snapshot]) -> None:
    _, snapshot = fresh
    details = {f.level: f.detail for f in verify(snapshot.path, quick=True).findings}
    assert "not read again" in details["data"]
    assert "not read again" in details["environment"]


def test_every_installed_file_is_read_when_asked(fresh: tuple[Run, Snapshot]) -> None:
    run, snapshot = fresh
    quietly(run.site / "peach.py", b"x = 2\n")
    assert verify(snapshot.path).ok
    (problem,) = verify(snapshot.path, full=True).problems
    assert (problem.name, problem.detail) == ("peach", "edited files: peach.py")


def test_the_same_things_have_the_same_digest(fresh: tuple[Run, Snapshot]) -> None:
    run, snapshot = fresh
    again = run.capture()
    assert again.digest == snapshot.digest
    (run.project / "helper.py").write_text("def one():\n    return 5\n")
    assert run.capture().digest != snapshot.digest


def test_a_folder_without_manifest_is_incomplete_not_tampered(fresh: tuple[Run, Snapshot]) -> None:
    run, snapshot = fresh
    (snapshot.path / "manifest.json").unlink()
    (finding,) = verify(run.project / "runs" / "1").findings
    assert (finding.level, finding.verdict) == ("snapshot", "missing")
    assert "cut off" in finding.detail


OUTSIDE = (
    b'{"format": "run-snapshot-v1", "digest": "", "created": "", "reasons": [], "members": {"../x": {"sha256": ""}}}'
)


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"{", "can't be read"), (b'{"format": "run-snapshot-v9"}', "run-snapshot-v9"), (b"[]", "can't be read"),
     (OUTSIDE, "outside")],
)  # fmt: skip
def test_a_manifest_that_cant_be_read_is_unknown(fresh: tuple[Run, Snapshot], content: bytes, told: str) -> None:
    _, snapshot = fresh
    (snapshot.path / "manifest.json").write_bytes(content)
    (finding,) = verify(snapshot.path).findings
    assert finding.verdict == "unknown"
    assert told in finding.detail


@pytest.mark.parametrize(
    "member", ["environment.json", "data.json", "rewards.json", "code.json", "weights.json", "stat.json"]
)
def test_a_broken_member_makes_its_part_unknown(fresh: tuple[Run, Snapshot], member: str) -> None:
    _, snapshot = fresh
    (snapshot.path / member).write_text("{}" if member != "data.json" else "{")
    verdicts = {f.name: f.verdict for f in verify(snapshot.path).problems}
    assert verdicts.pop(member) == "changed"
    assert set(verdicts.values()) <= {"unknown"}
    assert bool(verdicts) is (member != "stat.json")


def test_git_is_left_as_it_was(fresh: tuple[Run, Snapshot]) -> None:
    run, snapshot = fresh
    index = (run.project / ".git" / "index").read_bytes()
    verify(snapshot.path)
    run.capture()
    assert (run.project / ".git" / "index").read_bytes() == index
    assert not list((run.project / ".git").glob("*.lock"))
