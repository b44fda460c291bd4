"""`snapshot show / verify / diff / restore RUN`: on real runs, and a run that is made again from what was recorded of it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from registry_runs import HELPER, Kept, Project

from grpo_lightning.cli.main import main
from grpo_lightning.sinks import RunDirectory

pytest.importorskip("run_snapshot")


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path
) -> Iterator[tuple[Project, RunDirectory, Kept]]:
    """A run with an uncommitted edit in its reward's helper."""
    with pytest.MonkeyPatch.context() as patch:
        project = Project(tmp_path_factory.mktemp("snapshot"), mlflow_template, helper="my_widths")
        patch.chdir(project.folder)
        patch.setenv("MLFLOW_TRACKING_URI", project.store)
        (project.folder / "my_widths.py").write_text(f"{HELPER}\n\nPADDING = 0\n")
        run = project.run("base")
        yield project, run, Kept(project.folder)


@pytest.fixture
def made(
    trained: tuple[Project, RunDirectory, Kept], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Project, RunDirectory]]:
    project, run, kept = trained
    monkeypatch.chdir(project.folder)
    yield project, run
    kept.put_back()


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["snapshot", *words])
    return code, capsys.readouterr().out


def flip_a_bit(path: Path) -> None:
    """On the disk, in the file's bytes, where the weights lie."""
    saved = torch.load(path, weights_only=True)
    name = next(n for n in saved["state_dict"] if n.endswith("q_proj.weight"))
    content = bytearray(path.read_bytes())
    place = content.find(saved["state_dict"][name].contiguous().numpy().tobytes())
    assert place > 0
    content[place + 5] ^= 1
    path.write_bytes(content)


def save_again(path: Path) -> None:
    torch.save(torch.load(path, weights_only=True), path)


def with_another_record(path: Path) -> None:
    from run_snapshot import checkpoint_record

    saved = torch.load(path, weights_only=True)
    next(iter(saved["state_dict"].values())).add_(1.0)
    saved["run_snapshot"] |= checkpoint_record(saved["state_dict"], digest=saved["run_snapshot"]["digest"])
    torch.save(saved, path)


TAMPERED: dict[str, tuple[Callable[[Path], object], int, str, str]] = {
    "nothing": (lambda path: None, 0, "ok", "the same file as saved"),
    "one bit on the disk": (flip_a_bit, 1, "changed", "q_proj.weight: values changed in last.ckpt"),
    "saved again": (save_again, 0, "ok", "re-saved, tensors same"),
    "weights and their record": (with_another_record, 1, "changed", "recorded beside it is"),
    "gone": (lambda path: path.unlink(), 1, "missing", "last.ckpt"),
}


@pytest.mark.parametrize("change", TAMPERED)
@pytest.mark.parametrize("chosen", [(), ("--checkpoint", "last")], ids=["of the run", "one checkpoint"])
def test_verify_reads_weights_again_and_names_tensors(
    made: tuple[Project, RunDirectory], capsys: pytest.CaptureFixture[str], change: str, chosen: tuple[str, ...]
) -> None:
    _, run = made
    act, expected, verdict, detail = TAMPERED[change]
    act(run.checkpoints / "last.ckpt")
    code, out = told(capsys, "verify", "base", *chosen, "--json")
    ((found),) = json.loads(out)
    assert (code, found["run_id"]) == (expected, run.run_id)
    about = [f for f in found["findings"] if detail in f"{f['name']}: {f['detail']}"]
    assert [f["verdict"] for f in about][:1] == [verdict], found["findings"]
    if expected:
        assert [f for f in found["findings"] if f["verdict"] in ("changed", "missing", "unknown")] == about


def test_verify_names_what_changed_of_the_snapshot(
    made: tuple[Project, RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    project, run = made
    lines = project.data.read_text().splitlines(keepends=True)
    project.data.write_text("".join(lines[1:]))
    code, out = told(capsys, "verify", run.run_id[:8])
    assert code == 1
    assert "changed      data         train.jsonl: row 1 removed" in out.replace(str(project.folder) + "/", "")


@pytest.mark.parametrize(
    "words",
    [
        ["show", "nobody"],
        ["verify", "nobody"],
        ["diff", "base", "nobody"],
        ["restore", "nobody", "-o", "x"],
        ["show"],
        ["paint"],
    ],
    ids=" ".join,
)
def test_wrong_use_is_one_sentence(
    made: tuple[Project, RunDirectory], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    code = main(["snapshot", *words])
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert "Traceback" not in said.err


def test_a_run_that_only_mlflow_has_is_fetched_from_it(
    made: tuple[Project, RunDirectory], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, run = made
    shutil.move(run.path, tmp_path / "away")
    code, out = told(capsys, "show", "base")
    assert (code, "my_widths" in out) == (0, True)
    code, out = told(capsys, "verify", "base", "--json")
    (found,) = json.loads(out)
    assert (code, found["run_id"]) == (0, run.run_id)
    assert {"level": "weights", "name": "checkpoints", "verdict": "not checked"}.items() <= found["findings"][
        -1
    ].items()
    code, out = told(capsys, "restore", "base", "-o", str(tmp_path / "again"), "--no-install", "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    assert (tmp_path / "again" / "code" / "my_widths.py").read_text().endswith("PADDING = 0\n")


def make_again(project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Edit, commit and move what the run was made of, then restore it; the command that repeats it."""
    (project.folder / "my_widths.py").write_text("def size(text):\n    return 1\n")
    project.commit("another reward")
    project.data.rename(tmp_path / "elsewhere.jsonl")
    into = tmp_path / "again and again"
    code, out = told(capsys, "restore", "base", "-o", str(into), "--search", str(tmp_path), "--no-install")
    assert code == 0, out
    assert (into / "code" / "my_widths.py").read_text() == f"{HELPER}\n\nPADDING = 0\n"
    return out.split("repeat the run: ")[1].strip()


def rows(run: RunDirectory) -> list[tuple[int, float, float]]:
    with run.journal(read_only=True) as journal:
        return [(row.step, row.values["reward_mean"], row.values["loss"]) for row in journal.rows()]


def root_of(run: RunDirectory) -> str:
    return str(json.loads((run.checkpoints / "last.health.json").read_text())["weights_root"])


def test_a_restored_run_repeats_itself(
    made: tuple[Project, RunDirectory],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    project, run = made
    kept = tmp_path / "kept"
    shutil.copytree(run.path, kept)
    command = make_again(project, tmp_path, capsys)
    cd, _, words = command.partition(" && ")
    monkeypatch.chdir(shlex.split(cd)[1])
    arguments = shlex.split(words)
    assert arguments[1:3] == ["-m", "grpo_lightning"]
    assert main(arguments[3:]) == 0
    (again,) = Path("runs").iterdir()
    assert rows(RunDirectory.open(again)) == rows(RunDirectory.open(kept))
    assert root_of(RunDirectory.open(again)) == root_of(RunDirectory.open(kept))


@pytest.mark.slow
def test_the_printed_command_runs_as_pasted(
    made: tuple[Project, RunDirectory], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project, run = made
    command = make_again(project, tmp_path, capsys)
    subprocess.run(
        ["bash", "-c", command], cwd="/", check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    (again,) = (tmp_path / "again and again" / "code" / "runs").iterdir()
    assert rows(RunDirectory.open(again)) == rows(run)
    assert root_of(RunDirectory.open(again)) == root_of(run)


def test_a_config_that_names_data_by_its_whole_path_is_led_to_where_it_lies(
    made: tuple[Project, RunDirectory], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project, _ = made
    project.run("whole path", data=str(project.data))
    project.data.rename(tmp_path / "elsewhere.jsonl")
    into = tmp_path / "again"
    code, out = told(capsys, "restore", "whole path", "-o", str(into), "--search", str(tmp_path), "--no-install")
    assert code == 0, out
    path = Path(yaml.safe_load((into / "config.yaml").read_text())["data"]["train"])
    assert path.is_relative_to(into)
    assert path.resolve() == tmp_path / "elsewhere.jsonl"
    assert f"{project.data} is {path} now" in out


def test_what_cant_be_restored_is_printed(
    made: tuple[Project, RunDirectory], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project, _ = made
    project.data.unlink()
    shutil.rmtree(project.folder / ".git")
    into = tmp_path / "again"
    code, out = told(capsys, "restore", "base", "-o", str(into), "--no-install")
    assert code == 1
    assert "missing      data" in out
    assert "missing      code" in out
    assert "ok           reward       sources: 2 of 2 files as captured" in out  # they are in the snapshot
    assert (into / "code" / "my_reward.py").is_file()
    assert "repeat the run: cd " in out
