"""`audit` over a real run: each single change is named, with its verdict, and nothing else."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from registry_runs import Kept, Project, same_times

from grpo_lightning.cli.main import main
from grpo_lightning.sinks import EventRow, RunDirectory

pytest.importorskip("run_snapshot")


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path
) -> Iterator[tuple[Project, RunDirectory, Kept]]:
    folder = tmp_path_factory.mktemp("audit")
    with pytest.MonkeyPatch.context() as patch:
        project = Project(folder, mlflow_template, helper="my_helper")
        patch.chdir(project.folder)
        patch.setenv("MLFLOW_TRACKING_URI", project.store)
        run = project.run("one")
        yield project, run, Kept(project.folder)


@pytest.fixture
def made(
    whole: tuple[Project, RunDirectory, Kept], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Project, RunDirectory]]:
    project, run, kept = whole
    monkeypatch.chdir(project.folder.parent)
    yield project, run
    kept.put_back()
    client = MlflowClient(project.store)
    client.set_terminated(run.run_id, "FINISHED")
    client.set_tag(run.run_id, "mlflow.runName", "one")


def audit(project: Project, capsys: pytest.CaptureFixture[str], *extra: str) -> tuple[int, list[dict[str, Any]]]:
    capsys.readouterr()
    code = main(["audit", "--root", str(project.folder / "runs"), "--json", *extra])
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return code, found


def problems(audits: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    bad = ("changed", "missing", "unknown")
    return [(f["level"], f["name"], f["verdict"]) for a in audits for f in a["findings"] if f["verdict"] in bad]


def test_a_run_that_nothing_happened_to(made: tuple[Project, RunDirectory], capsys: pytest.CaptureFixture[str]) -> None:
    project, _ = made
    code, audits = audit(project, capsys)
    assert (code, problems(audits)) == (0, [])
    levels = {f["level"] for f in audits[0]["findings"] if f["verdict"] == "ok"}
    assert levels == {"run", "snapshot", "environment", "data", "reward", "code", "weights", "monitoring"}
    assert audits[0]["experiment"] == "registry"


Change = Callable[[Project, RunDirectory], object]


def flip_a_bit(project: Project, run: RunDirectory) -> None:
    path = run.checkpoints / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    name = next(n for n in saved["state_dict"] if n.endswith("q_proj.weight"))
    saved["state_dict"][name].view(torch.int32)[0, 0] ^= 1
    torch.save(saved, path)


def save_again(project: Project, run: RunDirectory) -> None:
    path = run.checkpoints / "last.ckpt"
    torch.save(torch.load(path, weights_only=True), path)


def both(project: Project, run: RunDirectory) -> None:
    """Weights and the record inside the checkpoint changed together: the file beside it tells."""
    from run_snapshot import checkpoint_record

    path = run.checkpoints / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    next(iter(saved["state_dict"].values())).add_(1.0)
    saved["run_snapshot"] |= checkpoint_record(saved["state_dict"], digest=saved["run_snapshot"]["digest"])
    torch.save(saved, path)


def drop_state(project: Project, run: RunDirectory) -> None:
    path = run.checkpoints / "last.ckpt"
    saved = torch.load(path, weights_only=True)
    del saved["grpo_health"]
    torch.save(saved, path)


def rows(project: Project, change: Callable[[list[str]], object]) -> None:
    lines = project.data.read_text().splitlines(keepends=True)
    change(lines)
    project.data.write_text("".join(lines))


def swap(lines: list[str]) -> None:
    lines[3], lines[4] = lines[4], lines[3]


def health(run: RunDirectory, **change: object) -> None:
    path = run.checkpoints / "last.health.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def hidden_edit(project: Project, run: RunDirectory) -> None:
    project.git("update-index", "--assume-unchanged", "notes.py")
    (project.folder / "notes.py").write_text("A = 2\n")


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def die(project: Project, run: RunDirectory) -> None:
    with sqlite3.connect(run.journal_path) as db:
        db.execute("UPDATE segments SET status = 'running', ended = NULL")


def alert(project: Project, run: RunDirectory) -> None:
    payload = {"action": "pause", "severity": "critical", "cause": "reward", "summary": "s"}
    event = EventRow(
        run_id=run.run_id, segment=1, step=3, time=0.0, kind="alert", name="collapse", payload=payload, id="collapse@3"
    )
    with run.journal() as journal:
        journal.write_event(event)


def repair(project: Project, run: RunDirectory) -> None:
    event = EventRow(
        run_id=run.run_id, segment=1, step=3, time=0.0, kind="recovery", name="resample", payload={"count": 1}, id="r@3"
    )
    with run.journal() as journal:
        journal.write_event(event)


def idle_segment(project: Project, run: RunDirectory) -> None:
    with run.journal() as journal:
        journal.start_segment(from_step=4, reason="resumed")
        journal.end_segment("failed", reason="RuntimeError: no")


def no_steps_in_mlflow(project: Project, run: RunDirectory) -> None:
    MlflowClient(project.store).update_run(run.run_id, status="RUNNING")


TRAIN = "train.jsonl"
CHANGES: dict[str, tuple[Change, str, str, str]] = {
    "one weight bit": (flip_a_bit, "weights", "q_proj.weight", "changed"),
    "weights and their record together": (both, "weights", "last.ckpt", "changed"),
    "a checkpoint cut short": (lambda p, r: cut(r.checkpoints / "last.ckpt"), "weights", "last.ckpt", "unknown"),
    "a checkpoint gone": (lambda p, r: (r.checkpoints / "step-0000002.ckpt").unlink(), "weights", "step-0000002", "missing"),
    "a checkpoint of another run": (lambda p, r: health(r, run_id="other"), "monitoring", "last.health.json", "changed"),
    "no judgement beside it": (
        lambda p, r: (r.checkpoints / "last.health.json").unlink(), "monitoring", "last.health.json", "missing",
    ),
    "a judgement that can't be read": (
        lambda p, r: (r.checkpoints / "last.health.json").write_text("{"), "monitoring", "last.health.json", "changed",
    ),
    "no monitoring state in it": (drop_state, "monitoring", "last.ckpt", "missing"),
    "one row": (lambda p, r: rows(p, lambda x: x.__setitem__(4, x[4].replace("4", "5"))), "data", TRAIN, "changed"),
    "row order": (lambda p, r: rows(p, swap), "data", TRAIN, "changed"),
    "a row more": (lambda p, r: rows(p, lambda x: x.append(x[0])), "data", TRAIN, "changed"),
    "a row that keeps size and time": (
        lambda p, r: same_times(p.data, p.data.read_bytes().replace(b'"4"', b'"5"')), "data", TRAIN, "changed",
    ),
    "data moved": (lambda p, r: p.data.rename(p.folder / "gone.jsonl"), "data", TRAIN, "missing"),
    "the reward": (
        lambda p, r: (p.folder / "my_reward.py").write_text(
            (p.folder / "my_reward.py").read_text().replace("% 3", "% 5")), "reward", "my_reward", "changed",
    ),
    "the reward's helper": (
        lambda p, r: (p.folder / "my_helper.py").write_text("def size(text):\n    return 1\n"),
        "reward", "my_helper", "changed",
    ),
    "an assume-unchanged edit": (hidden_edit, "code", "notes.py", "changed"),
    "an untracked module": (lambda p, r: (p.folder / "new.py").write_text("B = 1\n"), "code", "new.py", "changed"),
    "no repository": (lambda p, r: shutil.rmtree(p.folder / ".git"), "code", "project", "unknown"),
    "a member of the snapshot": (
        lambda p, r: (r.snapshot / "freeze.txt").write_text("x"), "snapshot", "freeze.txt", "changed",
    ),
    "a manifest cut short": (lambda p, r: cut(r.snapshot / "manifest.json"), "snapshot", "manifest.json", "unknown"),
    "no snapshot": (lambda p, r: shutil.rmtree(r.snapshot), "snapshot", "snapshot", "missing"),
    "a run that died": (die, "run", "status", "changed"),
    "RUNNING in MLflow": (no_steps_in_mlflow, "run", "status", "changed"),
    "a segment without steps": (idle_segment, "run", "segment 2", "missing"),
    "an open alert": (alert, "alerts", "collapse@3", "unknown"),
    "a repair nobody looked at": (repair, "alerts", "recoveries", "unknown"),
    "a journal that is none": (lambda p, r: r.journal_path.write_bytes(b"no" * 5000), "run", "run", "unknown"),
    "the run directory gone": (lambda p, r: shutil.rmtree(r.path), "snapshot", "snapshot", "unknown"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_single_change_is_named_and_nothing_else(
    made: tuple[Project, RunDirectory], capsys: pytest.CaptureFixture[str], change: str
) -> None:
    project, run = made
    act, level, name, verdict = CHANGES[change]
    act(project, run)
    code, audits = audit(project, capsys)
    found = problems(audits)
    assert code == 1
    assert len(found) == 1, found
    assert (found[0][0], found[0][2]) == (level, verdict)
    assert name in found[0][1]


KEPT: dict[str, Change] = {
    "saved again": save_again,
    "data touched": lambda p, r: p.data.touch(),
    "code that is no run's": lambda p, r: (p.folder / "notes.txt").write_text("x"),
}


@pytest.mark.parametrize("change", KEPT)
def test_what_changes_nothing_is_no_finding(
    made: tuple[Project, RunDirectory], capsys: pytest.CaptureFixture[str], change: str
) -> None:
    project, run = made
    KEPT[change](project, run)
    code, audits = audit(project, capsys)
    assert (code, problems(audits)) == (0, [])


def test_commits_since_are_no_finding_while_the_revision_is_there(
    made: tuple[Project, RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    project, _ = made
    (project.folder / "my_helper.py").write_text("def size(text):\n    return 2\n")
    project.commit("another helper")
    code, audits = audit(project, capsys)
    assert (code, problems(audits)) == (0, [])
    assert any("by commits since" in f["detail"] for f in audits[0]["findings"])
    (project.folder / "my_helper.py").write_text("def size(text):\n    return 3\n")
    assert problems(audit(project, capsys)[1]) == [("reward", "my_helper", "changed")]


def test_a_moved_registry_is_found_where_it_lies_now(
    made: tuple[Project, RunDirectory], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    project, run = made
    elsewhere = project.folder.parent / "elsewhere"
    shutil.copytree(run.path, elsewhere / "runs" / run.run_id)
    shutil.copy(project.data, elsewhere / TRAIN)
    shutil.rmtree(run.path)
    project.data.unlink()
    moved = ["--remap", f"{project.folder}/runs={elsewhere}/runs", "--remap", f"{project.data}={elsewhere / TRAIN}"]
    code, audits = audit(project, capsys, *moved)
    assert (code, problems(audits)) == (0, [])
    assert audits[0]["directory"] == str(elsewhere / "runs" / run.run_id)
    shutil.rmtree(elsewhere)


def test_runs_of_others_have_no_snapshot_and_quick_says_what_it_left_out(
    made: tuple[Project, RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    project, run = made
    client = MlflowClient(project.store)
    theirs = client.create_run(client.create_experiment("theirs"), run_name="sklearn").info.run_id
    flip_a_bit(project, run)
    code, audits = audit(project, capsys, "--quick")
    by_name = {a["name"]: a["findings"] for a in audits}
    assert code == 0
    assert by_name["sklearn"] == [
        {
            "level": "snapshot",
            "name": "snapshot",
            "verdict": "not checked",
            "detail": "no snapshot: another tool made this run",
        }
    ]
    assert any("not read again (--quick)" in f["detail"] for f in by_name["one"])
    assert len(audit(project, capsys, "--experiment", "registry")[1]) == 1
    assert main(["audit", "--experiment", "no such"]) == 2
    assert "no such" in capsys.readouterr().err
    client.delete_run(theirs)


def test_the_page_and_the_table_escape_what_they_show(
    made: tuple[Project, RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    project, run = made
    MlflowClient(project.store).set_tag(run.run_id, "mlflow.runName", "<script>\x1b[31m")
    alert(project, run)
    page = project.folder.parent / "audit.html"
    assert main(["audit", "--root", str(project.folder / "runs"), "--html", str(page)]) == 1
    assert "\x1b[31m" not in capsys.readouterr().out.replace("\x1b[31m╷", "")
    text = page.read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "collapse@3" in text
    page.unlink()
