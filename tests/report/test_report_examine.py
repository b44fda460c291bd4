"""What a report gathers: alerts as recorded, evidence, snapshot, and the repair that it offers."""

from __future__ import annotations

import json
import logging
import math
import shlex
from pathlib import Path

import pytest
from report_runs import evidence_row, make_run

from grpo_lightning.errors import UsageError
from grpo_lightning.health import Alert, Step, build_baseline, save_baseline
from grpo_lightning.invocation import command_line
from grpo_lightning.report import examine_log, examine_run, publish_report, repairs_of
from grpo_lightning.report.evidence import read_evidence
from grpo_lightning.report.told import Told, alert_of
from grpo_lightning.sinks import RunDirectory


def test_a_run_is_examined_from_its_directory(tmp_path: Path) -> None:
    found = examine_run(make_run(tmp_path, evidence=[evidence_row(1, g) for g in range(4)]))
    assert (found.name, found.verdict, found.status) == ("tidy-run", "unhealthy", "paused")
    assert found.facts == {"started": "1970-01-01 00:16 UTC", "training time": "1 min 40 s"}
    assert found.diagnosis.onset == 60
    assert [one.alert.id for one in found.told] == ["kl_runaway@65"]
    assert list(found.run["eval_accuracy"].steps) == [20, 40, 60, 80]
    assert [file.name for file in found.evidence] == ["step-000065-kl_runaway.jsonl"]
    assert {f.name for f in found.diagnosis.levels[3].findings} == {"kl_runaway"}
    assert [event.name for event in found.events] == ["resample"]


def test_a_run_without_alerts_is_healthy(tmp_path: Path) -> None:
    found = examine_run(make_run(tmp_path, onset=None))
    assert (found.verdict, found.status, found.repairs) == ("healthy", "finished", [])
    assert found.diagnosis.onset is None
    assert found.diagnosis.look_first is None


def test_the_repair_is_offered_with_its_commands(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "a run")
    say, back = examine_run(directory).repairs
    assert shlex.split(say.command)[:6] == [
        "python",
        "-m",
        "grpo_lightning",
        "acknowledge",
        str(directory.path),
        "kl_runaway@65",
    ]
    checkpoint = directory.checkpoints / "step-0000050.ckpt"  # the last before 60
    assert back.command == command_line("fit", "--ckpt_path", checkpoint)


def test_what_is_acknowledged_need_not_be_said_again(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    with directory.journal() as journal:
        journal.acknowledge("kl_runaway@65", cause="reward", note="regex")
    found = examine_run(directory)
    assert found.verdict == "healthy"
    assert [repair.command.split()[3] for repair in found.repairs] == ["fit"]
    assert (found.told[0].cause, found.told[0].note) == ("reward", "regex")


def test_without_a_checkpoint_before_the_onset_the_run_starts_anew(tmp_path: Path) -> None:
    directory = make_run(tmp_path, checkpoints=(75,))
    assert "No checkpoint from before step 60" in examine_run(directory).repairs[-1].what
    directory.write_config({"seed": 1})
    assert examine_run(directory).repairs[-1].command.endswith(f"fit --config {directory.config}")


def test_a_warning_asks_for_no_repair() -> None:
    warning = alert_of({"severity": "warning", "action": "notify", "onset_step": 3}, id="x@5", rule="x", step=5)
    assert repairs_of([Told(alert=warning)], Path("runs/1"), 3) == []


RECORDED = [
    ("words for numbers", {"value": "nan", "bound": "inf", "expected": None, "values": {"kl": "-inf"}}, math.inf, None),
    ("nothing recorded", {}, math.nan, None),
    ("odd types", {"value": [], "bound": {}, "expected": "x", "values": 3, "onset_step": "y"}, math.nan, math.nan),
]


@pytest.mark.parametrize(("payload", "bound", "expected"), [r[1:] for r in RECORDED], ids=[r[0] for r in RECORDED])
def test_recorded_alerts_are_read_back(payload: dict[str, object], bound: float, expected: float | None) -> None:
    found = alert_of(payload, id="x@5", rule="x", step=5)
    assert isinstance(found, Alert)
    assert (found.rule, found.step, found.onset_step, found.severity, found.action) == ("x", 5, 5, "warning", "notify")
    assert found.bound == pytest.approx(bound, nan_ok=True)
    assert found.expected == (pytest.approx(expected, nan_ok=True) if expected is not None else None)


def evidence_files(folder: Path, *steps: int) -> None:
    folder.mkdir(exist_ok=True)
    for step in steps:
        (folder / f"step-{step:06d}-regular.jsonl").write_text(json.dumps({"step": step}) + "\n")


CHOSEN = [
    ("around the onset", 100, [90, 110, 120, 130, 140], [90]),
    ("the newest without an onset", None, [120, 130, 140, 150], []),
]


@pytest.mark.parametrize(("onset", "steps", "before"), [c[1:] for c in CHOSEN], ids=[c[0] for c in CHOSEN])
def test_which_evidence_is_read(tmp_path: Path, onset: int | None, steps: list[int], before: list[int]) -> None:
    evidence_files(tmp_path, *range(10, 151, 10))
    (tmp_path / "notes.txt").write_text("no evidence")
    if onset is not None:
        (tmp_path / f"step-{onset:06d}-regular.jsonl").unlink()
    found = read_evidence(tmp_path, [], onset)
    assert sorted(file.step for file in found) == steps
    assert [file.step for file in found if file.before] == before


def test_an_alerts_own_evidence_is_read_however_far_it_is(tmp_path: Path) -> None:
    evidence_files(tmp_path, *range(101, 141, 10), 300)
    told = Told(alert=alert_of({}, id="x@300", rule="x", step=300), evidence="/moved/step-000300-regular.jsonl")
    assert 300 in [file.step for file in read_evidence(tmp_path, [told], 100)]


def test_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    (tmp_path / "step-000005-x.jsonl").write_bytes(b'{"a": 1}\n[1]\nnot json\n\xff\xfe\n' + b"[" * 100_000 + b"\n")
    (file,) = read_evidence(tmp_path, [], None)
    assert (len(file.rows), file.unread) == (1, 4)


def test_the_runs_own_baseline_is_its_ruler(tmp_path: Path) -> None:
    directory = make_run(tmp_path)
    save_baseline(
        build_baseline({"old": [Step(step=i, values={"kl": 9.0}) for i in range(1, 50)]}), tmp_path / "b.json"
    )
    assert examine_run(directory).baseline is None
    directory.write_config({"health": {"baseline": str(tmp_path / "b.json")}})
    found = examine_run(directory).baseline
    assert found is not None
    assert found.runs == ("old",)
    directory.write_config({"health": {"baseline": str(tmp_path / "gone.json")}})
    assert examine_run(directory).baseline is None


def test_a_snapshot_is_held_against_what_is_there_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_snapshot = pytest.importorskip("run_snapshot")
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1"}\n')
    directory = make_run(tmp_path / "runs")
    assert any("no snapshot" in said for said in examine_run(directory).diagnosis.levels[1].unchecked)
    run_snapshot.capture(directory.snapshot, config={}, data_files=[data], project=tmp_path)
    assert "data files against the snapshot" in examine_run(directory).diagnosis.levels[1].checked
    data.write_text('{"prompt": "1+1"}\n{"prompt": "2+2"}\n')
    for weights in (True, False):
        findings = examine_run(directory, weights=weights).diagnosis.levels[1].findings
        assert [(f.name, f.strength) for f in findings] == [("snapshot_data", "strong")]


def test_a_broken_snapshot_is_unknown_never_ok(tmp_path: Path) -> None:
    pytest.importorskip("run_snapshot")
    directory = make_run(tmp_path)
    (directory.snapshot / "manifest.json").write_text("{")
    for weights in (True, False):
        findings = examine_run(directory, weights=weights).diagnosis.levels[0].findings
        assert [(f.name, f.strength) for f in findings] == [("snapshot_snapshot", "hint")]


def test_a_log_is_judged_and_told_where_to_resume() -> None:
    rows = [Step(step=i, values={"loss": 0.1 if i < 30 else math.nan, "kl": 0.1}) for i in range(1, 41)]
    found = examine_log("x.log", rows)
    assert (found.verdict, found.status) == ("unhealthy", "log")
    assert [one.alert.rule for one in found.told] == ["loss_not_finite"]
    assert [repair.what for repair in found.repairs] == ["Resume your trainer from its last checkpoint before step 30."]
    assert any(note.startswith("Rules were not judged for want of") for note in found.notes)


def test_an_empty_log_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"x\.log has no steps that can be read"):
        examine_log("x.log", [])


def test_the_report_of_a_runs_end_is_handed_on(tmp_path: Path) -> None:
    directory, taken = make_run(tmp_path), []
    with directory.lock():  # as the run's own process does at its end
        assert examine_run(directory).status == "running"
        assert publish_report(directory, taken.append, status="killed") == directory.report
    assert "<dd>killed</dd>" in directory.report.read_text()
    assert taken == [directory.report]
    assert directory.report.read_text().startswith("<!doctype html>")


def test_a_report_that_fails_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = make_run(tmp_path)

    def full(path: Path) -> None:
        raise OSError("the disk is full")

    with caplog.at_level(logging.WARNING):
        assert publish_report(directory, full) is None
        assert publish_report(RunDirectory(tmp_path / "nowhere")) is None
    assert "the disk is full" in caplog.text


def test_a_run_without_steps_can_still_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = RunDirectory.create(tmp_path, "started")
    with directory.journal() as journal:
        journal.start_segment(from_step=0)
        journal.end_segment("failed")
    with caplog.at_level(logging.WARNING):
        assert publish_report(directory) is None
    assert not caplog.text  # there is nothing to report, and nothing wrong with that
    assert publish_report(RunDirectory.create(tmp_path, "empty")) is None
