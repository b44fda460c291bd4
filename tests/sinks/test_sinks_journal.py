"""The journal: what was written is read back, after rewinds, beside a writer, and after a SIGKILL."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.errors import UsageError
from grpo_lightning.sinks import Cursor, EventRow, Journal, Sink, SinkError, StepRow


@pytest.fixture
def journal(tmp_path: Path):
    with Journal(tmp_path / "journal.sqlite") as opened:
        opened.set_meta(run_id="r")
        yield opened


def step(number: int, segment: int = 1, time: float | None = None, **values: float) -> StepRow:
    return StepRow(run_id="r", segment=segment, step=number, time=time or float(number), values=values)


def event(kind, number: int = 1, segment: int = 1, name: str = "low_std", **payload) -> EventRow:
    return EventRow(run_id="r", segment=segment, step=number, time=float(number), kind=kind, name=name, payload=payload)


def write(journal: Journal, *numbers: int, segment: int = 1, scale: float = 1.0) -> None:
    for number in numbers:
        journal.write_step(step(number, segment, kl=scale * number))


def test_is_a_sink(journal):
    assert isinstance(journal, Sink)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1.7976931348623157e308, 0.1],
    ids=str,
)
def test_every_float_is_kept_bit_for_bit(journal, value):
    journal.start_segment(from_step=0)
    journal.write_step(step(1, kl=value))
    (row,) = journal.rows()
    assert struct.pack("<d", row.values["kl"]) == struct.pack("<d", value)
    assert struct.pack("<d", journal.series("kl").values[0]) == struct.pack("<d", value)


def test_not_measured_is_absent(journal):
    journal.start_segment(from_step=0)
    journal.write_step(step(1, kl=1.0, entropy=2.0))
    journal.write_step(step(2, entropy=3.0))
    journal.write_step(step(3, zeta=9.0, kl=4.0))
    assert [dict(row.values) for row in journal.rows()] == [
        {"entropy": 2.0, "kl": 1.0},
        {"entropy": 3.0},
        {"kl": 4.0, "zeta": 9.0},
    ]
    assert (journal.series("kl").steps, journal.series("kl").values) == ([1, 3], [1.0, 4.0])
    assert journal.series("entropy").steps == [1, 2]
    assert len(journal.series("never")) == 0
    assert journal.signals() == ["entropy", "kl", "zeta"]


def test_numpy_and_torch_scalars_are_numbers(journal):
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    journal.start_segment(from_step=0)
    journal.write_step(step(1, kl=np.float32(0.5), loss=torch.tensor(2.0), on=True))
    journal.write_event(event("alert", value=np.float64(0.25), steps=np.int64(3), mask=np.array([1, 2])))
    assert dict(next(journal.rows()).values) == {"kl": 0.5, "loss": 2.0, "on": 1.0}
    assert journal.alerts()[0].event.payload == {"value": 0.25, "steps": 3, "mask": [1, 2]}


def test_a_step_is_recorded_once_a_segment(journal):
    journal.start_segment(from_step=0)
    write(journal, 1)
    with pytest.raises(SinkError, match=r"Step 1 of segment 1 is already recorded.*start a new segment"):
        write(journal, 1, scale=7.0)
    write(journal, 2)
    assert journal.series("kl").values == [1.0, 2.0]


def test_a_failed_transaction_does_not_leave_a_layout_behind(journal):
    """The refused row brings a new set of names; a later row with that set must still find it."""
    journal.start_segment(from_step=0)
    write(journal, 1)
    with pytest.raises(SinkError):
        journal.write_step(step(1, fresh=1.0))
    journal.write_step(step(2, fresh=2.0))
    assert journal.series("fresh").values == [2.0]


# ---------------------------------------------------------------- rewinds


def test_after_a_rewind_every_step_has_the_later_segments_value(journal):
    journal.start_segment(from_step=0)
    write(journal, *range(1, 11))
    journal.start_segment(from_step=8)
    assert journal.latest().step == 8, "9 and 10 are abandoned as soon as the run goes on from 8"
    write(journal, 9, 10, 11, segment=2, scale=-1.0)
    series = journal.series("kl")
    assert series.steps == list(range(1, 12))
    assert series.values == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, -9.0, -10.0, -11.0]
    assert series.segments == [1] * 8 + [2] * 3
    assert [row.values["kl"] for row in journal.rows()] == series.values
    assert [row.step for row in journal.rows(after_step=9)] == [10, 11]
    assert journal.latest().values == {"kl": -11.0}
    assert len(list(journal.rows(all_segments=True))) == 13, "nothing is deleted"


def test_a_segment_that_records_its_first_step_again_wins(journal):
    journal.start_segment(from_step=0)
    write(journal, 7, 8, 9)
    journal.start_segment(from_step=8)
    write(journal, 8, segment=2, scale=-1.0)
    assert journal.series("kl").values == [7.0, -8.0]
    assert journal.latest().values == {"kl": -8.0}


def test_abandoned_events_are_not_live(journal):
    journal.start_segment(from_step=0)
    for number in (5, 9):
        for kind in ("alert", "recovery", "evaluation"):
            journal.write_event(event(kind, number, n=number))
    journal.start_segment(from_step=8)
    assert [alert.event.step for alert in journal.alerts()] == [5]
    assert [found.step for found in journal.recoveries()] == [5]
    assert [found.payload for found in journal.evaluations()] == [{"n": 5}]
    assert [alert.event.step for alert in journal.alerts(all_segments=True)] == [5, 9]


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=6),
    sparse=st.booleans(),
)
def test_readers_agree_with_a_plain_model_of_rewinding(parts, sparse):
    """The model: a dict that a restart at f cuts back to the steps up to f."""
    model: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "j") as journal:
        for back, length in parts:
            start = min(back, max(model, default=0))
            segment = journal.start_segment(from_step=start)
            model = {number: value for number, value in model.items() if number <= start}
            for number in range(start + 1, start + 1 + length, 2 if sparse else 1):
                model[number] = 1000.0 * segment + number
                journal.write_step(step(number, segment, kl=model[number]))
        series = journal.series("kl")
        assert dict(zip(series.steps, series.values, strict=True)) == model
        assert series.steps == sorted(model)
        assert {row.step: row.values["kl"] for row in journal.rows()} == model
        latest = journal.latest()
        assert (latest.step if latest else None) == max(model, default=None)


# ---------------------------------------------------------------- segments, alerts, cursors


def test_segments_say_how_they_ended(journal):
    assert journal.start_segment(from_step=0, time=10.0) == 1
    write(journal, 1)
    journal.end_segment("paused", reason="an alert", time=20.0)
    journal.end_segment("failed", reason="too late", time=30.0)
    assert journal.start_segment(from_step=1, time=40.0) == 2
    first, second = journal.segments()
    assert (first.status, first.reason, first.ended) == ("paused", "an alert", 20.0)
    assert (second.status, second.ended, second.from_step) == ("running", None, 1)


def test_a_segment_left_open_is_closed_at_its_last_row(journal):
    journal.start_segment(from_step=0, time=1.0)
    journal.write_step(step(1, time=77.0, kl=1.0))
    journal.start_segment(from_step=1)
    assert (journal.segments()[0].status, journal.segments()[0].ended) == ("interrupted", 77.0)
    assert journal.repair()
    assert not journal.repair()
    assert journal.segments()[1].status == "interrupted"


def test_acknowledging_closes_an_alert_until_it_fires_again(journal):
    journal.start_segment(from_step=0)
    journal.write_event(event("alert", 4, value=math.inf))
    (alert,) = journal.alerts(open_only=True)
    assert (alert.event.key, alert.event.payload) == ("low_std@4", {"value": math.inf})
    journal.acknowledge("low_std@4", cause="reward", note="parser broke", time=9.0)
    (alert,) = journal.alerts()
    assert alert.acknowledged is not None
    assert (alert.acknowledged.cause, alert.acknowledged.note, alert.acknowledged.time) == (
        "reward",
        "parser broke",
        9.0,
    )
    assert journal.alerts(open_only=True) == []
    journal.start_segment(from_step=2)
    journal.write_event(event("alert", 4, segment=2))
    assert [found.event.segment for found in journal.alerts(open_only=True)] == [2]


def test_an_event_written_again_is_updated_in_place(journal):
    journal.start_segment(from_step=0)
    journal.write_event(event("alert", 4, state="firing"))
    journal.acknowledge("low_std@4", cause="data", note="")
    journal.write_event(event("alert", 4, state="resolved"))
    (alert,) = journal.alerts()
    assert alert.event.payload == {"state": "resolved"}
    assert not alert.open


def test_an_unknown_alert_is_named_with_the_known_ones(journal):
    journal.write_event(event("alert", 4))
    with pytest.raises(UsageError, match=r"no alert 'nope'.*it has: low_std@4"):
        journal.acknowledge("nope", cause="data", note="")


def test_cursors_never_go_back(journal):
    assert journal.cursor("mlflow", "steps") == Cursor()
    journal.advance("mlflow", "steps", Cursor(last_id=5, state={"nonfinite": {"kl": 2}}))
    journal.advance("mlflow", "steps", Cursor(last_id=3))
    assert journal.cursor("mlflow", "steps") == Cursor(last_id=5, state={"nonfinite": {"kl": 2}})
    assert journal.cursor("other", "steps") == Cursor()


def test_consumers_read_in_the_order_of_writing(journal):
    journal.start_segment(from_step=0)
    write(journal, 1, 2, 3)
    journal.start_segment(from_step=1)
    write(journal, 2, segment=2)
    rows = journal.steps_after(0, limit=3)
    assert [(row.segment, row.step) for _, row in rows] == [(1, 1), (1, 2), (1, 3)]
    assert [(row.segment, row.step) for _, row in journal.steps_after(rows[-1][0])] == [(2, 2)]
    assert journal.count_steps_after(rows[-1][0]) == 1


# ---------------------------------------------------------------- two at once, crashes, bad files


def test_a_reader_beside_a_writer_sees_whole_rows_only(tmp_path):
    path = tmp_path / "journal.sqlite"
    Journal(path).close()

    def produce():
        with Journal(path) as writer:
            writer.start_segment(from_step=0)
            for number in range(1, 301):
                writer.write_step(step(number, a=float(number), b=-float(number)))

    thread = threading.Thread(target=produce)
    thread.start()
    seen = [0]
    while thread.is_alive() or seen[-1] < 300:
        with Journal(path, read_only=True) as reader:
            rows = list(reader.rows())
        assert all(row.values["a"] == row.step == -row.values["b"] for row in rows)
        seen.append(len(rows))
    thread.join()
    assert seen == sorted(seen)


_WRITER = """
import sys, time
from grpo_lightning.sinks import Journal, StepRow
journal = Journal(sys.argv[1])
journal.start_segment(from_step=0)
step = 0
while True:
    step += 1
    row = StepRow(run_id="r", segment=1, step=step, time=float(step), values={"kl": float(step), "x": 1.0})
    journal.write_step(row)
    print(step, flush=True)
"""


def test_what_was_written_survives_sigkill(tmp_path):
    path = tmp_path / "journal.sqlite"
    child = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        said = [int(child.stdout.readline()) for _ in range(200)]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        said += [int(line) for line in child.stdout.read().splitlines()]
        child.wait()
    with Journal(path, read_only=True) as reader:
        assert reader.series("kl").steps[: len(said)] == said
        assert len(reader.series("kl")) - len(said) in (0, 1), "one row may be written and not yet printed"
    with Journal(path) as journal:
        segment = journal.start_segment(from_step=100)
        write(journal, 101, segment=segment, scale=-1.0)
        assert journal.latest().values["kl"] == -101.0
        assert journal.segments()[0].status == "interrupted"
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


_FULL = """
import resource, signal, sys
from grpo_lightning.sinks import Journal, SinkError, StepRow
journal = Journal(sys.argv[1])
journal.start_segment(from_step=0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
step = 0
try:
    while step < 5000:
        values = {f"s{k}": float(step) for k in range(100)}
        journal.write_step(StepRow(run_id="r", segment=1, step=step + 1, time=0.0, values=values))
        step += 1
except SinkError as error:
    print(f"{step}|{error}")
"""


def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path):
    path = tmp_path / "journal.sqlite"
    command = [sys.executable, "-c", _FULL, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    steps, _, message = done.stdout.partition("|")
    assert "Can't record step" in message
    assert "Free some space" in message
    with Journal(path, read_only=True) as reader:
        assert len(reader.series("s1")) == int(steps) > 10


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(
            lambda path: path.write_bytes(b"not a database " * 99),
            "not a journal or is damaged",
            id="garbage",
        ),
        pytest.param(lambda path: sqlite3.connect(path).execute("CREATE TABLE t (x)"), "not a journal", id="foreign"),
        pytest.param(lambda path: path.mkdir(), "must exist and be writable", id="folder"),
    ],
)
def test_a_file_that_is_no_journal_is_refused(tmp_path, make, said):
    make(tmp_path / "j")
    with pytest.raises(UsageError, match=said):
        Journal(tmp_path / "j")


def test_a_newer_format_is_refused(tmp_path):
    Journal(tmp_path / "j").close()
    sqlite3.connect(tmp_path / "j").execute("PRAGMA user_version = 99")
    with pytest.raises(UsageError, match=r"format 99.*upgrade grpo-lightning"):
        Journal(tmp_path / "j")


def test_a_missing_journal_is_not_made_by_reading(tmp_path):
    with pytest.raises(UsageError, match="no journal at"):
        Journal(tmp_path / "j", read_only=True)
    assert not list(tmp_path.iterdir())


def test_a_reader_can_not_write(tmp_path):
    Journal(tmp_path / "j").close()
    with Journal(tmp_path / "j", read_only=True) as journal, pytest.raises(SinkError, match="read only"):
        journal.start_segment(from_step=0)


def test_closed_means_closed(tmp_path):
    journal = Journal(tmp_path / "j")
    journal.close()
    journal.close()
    with pytest.raises(SinkError, match="is closed"):
        journal.latest()


def test_half_a_surrogate_pair_is_read_as_it_was_written(tmp_path):
    """File names that are no UTF-8 have them, and so may what a reward function logs."""
    name, said = "reward_metric/\ud800 ü", {"message": "data: \udcff.jsonl changed", "ok": "\\ud800"}
    with Journal(tmp_path / "j") as journal:
        journal.start_segment(from_step=0)
        for number in (1, 2):
            journal.write_step(StepRow(run_id="r", segment=1, step=number, time=1.0, values={name: 0.5, "kl": 1.0}))
        journal.write_event(EventRow(run_id="r", segment=1, step=2, time=1.0, kind="note", name="drift", payload=said))
    with Journal(tmp_path / "j") as journal:
        assert [dict(row.values) for row in journal.rows()] == [{name: 0.5, "kl": 1.0}] * 2
        assert [dict(event.payload) for event in journal.events("note")] == [said]
