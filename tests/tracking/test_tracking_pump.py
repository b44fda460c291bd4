"""MLflow filled from the journal: each (segment, signal, step) once, whatever fails on the way."""

from __future__ import annotations

import logging
import math
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.errors import UsageError
from grpo_lightning.sinks import EventRow, Journal, StepRow
from grpo_lightning.tracking import (
    Feeder,
    MetricPump,
    MLflowRun,
    Point,
    TrackingError,
    TrackingRefused,
    make_client,
    sync_run,
)


class FakeRun:
    """Stands for MLflow: keeps a set of rows, as MLflow does, and fails when told to."""

    def __init__(self, fail=lambda call: ""):
        self.run_id = "r"
        self.rows: set[Point] = set()
        self.deferred = []
        self.calls = 0
        self.sizes = []
        self._fail = fail

    def log_points(self, points):
        self.calls += 1
        how = self._fail(self.calls)
        if how == "before":
            raise TrackingError("No MLflow server answers.")
        if how == "bug":
            raise RuntimeError("a bug in a library")
        self.sizes.append(len(points))
        self.rows.update(points)
        if how == "after":
            raise TrackingError("The answer was lost.")

    def counts(self, key="2_health/kl"):
        return Counter(point.step for point in self.rows if point.key == key)


@pytest.fixture
def journal(tmp_path: Path):
    with Journal(tmp_path / "journal.sqlite") as opened:
        opened.start_segment(from_step=0, time=1.0)
        yield opened


def warnings_of(caplog, word: str) -> list[str]:
    return [record.message for record in caplog.records if word in record.message]


# ---------------------------------------------------------------- the feeder


def test_points_carry_page_step_and_the_rows_time(journal, row):
    journal.write_step(row(3, time=12.3456, kl=0.5, mine=2.0))
    fake = FakeRun()
    Feeder(journal, fake.log_points, {"kl": "1_overview"}.get).drain()
    assert fake.rows == {
        Point(key="3_diagnosis/segment", value=1, time_ms=1000, step=0),
        Point(key="1_overview/kl", value=0.5, time_ms=12346, step=3),
        Point(key="2_health/mine", value=2.0, time_ms=12346, step=3),
    }


def test_non_finite_values_are_absent_points_and_a_count(journal, row):
    for number, value in enumerate([math.nan, 1.0, math.inf, -math.inf], start=1):
        journal.write_step(row(number, kl=value))
    fake = FakeRun()
    Feeder(journal, fake.log_points).drain()
    assert {p.step: p.value for p in fake.rows if p.key == "2_health/kl"} == {2: 1.0}
    assert {p.step: p.value for p in fake.rows if p.key == "nonfinite/kl"} == {1: 1, 3: 2, 4: 3}
    journal.write_step(row(5, kl=math.nan))
    Feeder(journal, fake.log_points).drain()
    assert {p.step: p.value for p in fake.rows if p.key == "nonfinite/kl"}[5] == 4, "counted on after a restart"


def test_evaluations_are_metrics_too(journal):
    payload = {"eval_reward_mean": 0.75, "eval_kl": math.nan, "prompts": 8, "note": "text"}
    event = EventRow(run_id="r", segment=1, step=4, time=2.0, kind="evaluation", name="val", payload=payload)
    journal.write_event(event)
    fake = FakeRun()
    Feeder(journal, fake.log_points, lambda _: "1_overview").drain()
    assert {(p.key, p.value, p.step) for p in fake.rows if "segment" not in p.key} == {
        ("1_overview/eval_reward_mean", 0.75, 4),
        ("1_overview/prompts", 8.0, 4),
        ("nonfinite/eval_kl", 1, 4),
    }


def test_batches_hold_at_most_1000_rows(journal, row):
    for number in range(1, 101):
        journal.write_step(row(number, **{f"s{k}": float(k) for k in range(30)}))
    fake = FakeRun()
    assert Feeder(journal, fake.log_points).drain() == 100
    assert fake.sizes == [1, 990, 990, 990, 30]


def test_a_refused_point_does_not_hold_up_the_others(journal, row, caplog):
    def send(points):
        if any(point.key == "2_health/bad" for point in points):
            raise TrackingRefused("Invalid value")
        fake.log_points(points)

    fake = FakeRun()
    for number in range(1, 6):
        journal.write_step(row(number, kl=1.0, bad=1.0, zeta=2.0))
    assert Feeder(journal, send).drain() == 5
    assert fake.counts() == fake.counts("2_health/zeta") == Counter(range(1, 6))
    assert len(warnings_of(caplog, "does not take 2_health/bad")) == 1


def test_a_signal_keeps_its_first_page(journal, row):
    fake = FakeRun()
    journal.write_step(row(1, kl=1.0))
    Feeder(journal, fake.log_points, lambda _: "1_overview").drain()
    journal.write_step(row(2, kl=1.0))
    Feeder(journal, fake.log_points).drain()
    assert fake.counts("1_overview/kl") == Counter([1, 2])


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    failures=st.lists(st.sampled_from(["", "before", "after"]), max_size=12),
)
def test_each_segment_signal_step_arrives_once(steps, failures):
    """Rows come between tries, which fail before or after MLflow stored them; a new feeder stands for a restart."""
    fake = FakeRun(lambda call: failures[call - 1] if call <= len(failures) else "")
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "j") as journal:
        wrote, number = set(), 0
        for count in steps:
            segment = journal.start_segment(from_step=max(0, number - 1), time=0.0)
            number = max(0, number - 1)
            for _ in range(count):
                number += 1
                value = math.nan if number % 3 == 0 else float(number)
                at = 10.0 * segment + number / 1000
                values = {"kl": value, "one": 1.0}
                row = StepRow(run_id="r", segment=segment, step=number, time=at, values=values)
                journal.write_step(row)
                wrote.add((segment, number))
            try:
                Feeder(journal, fake.log_points).drain()
            except TrackingError:
                continue
        while True:
            try:
                Feeder(journal, fake.log_points).drain()
                break
            except TrackingError:
                continue
        got = Counter(point.step for point in fake.rows if point.key == "2_health/one")
        assert got == Counter(step for _, step in wrote)
        assert sum(fake.counts().values()) == sum(step % 3 != 0 for _, step in wrote)
        bad = sorted(point.value for point in fake.rows if point.key == "nonfinite/kl")
        assert bad == list(range(1, 1 + sum(step % 3 == 0 for _, step in wrote)))
        assert Feeder(journal, fake.log_points).backlog() == 0


# ---------------------------------------------------------------- the thread


def test_the_pump_sends_in_the_background(journal, row):
    fake = FakeRun()
    with MetricPump(journal, fake, interval=0.02) as pump:
        for number in range(1, 51):
            journal.write_step(row(number, kl=1.0))
            pump.notify()
        until = time.monotonic() + 10
        while len(fake.counts()) < 50 and time.monotonic() < until:
            time.sleep(0.01)
        assert fake.counts() == Counter(range(1, 51)), "without a flush"


def test_it_waits_for_the_interval_and_is_flushed_at_once(journal, row):
    fake = FakeRun()
    pump = MetricPump(journal, fake, interval=60.0).start()
    assert pump.flush(5)
    journal.write_step(row(1, kl=1.0))
    pump.notify()
    time.sleep(0.1)
    assert fake.counts() == Counter()
    assert pump.flush(5)
    assert fake.counts() == Counter([1])
    assert pump.close(5)


@pytest.mark.parametrize("how", ["before", "after", "bug"])
def test_an_outage_is_said_once_and_caught_up(journal, row, caplog, how):
    caplog.set_level(logging.WARNING)
    away = threading.Event()
    fake = FakeRun(lambda _: how if away.is_set() else "")
    pump = MetricPump(journal, fake, interval=0.01, longest_wait=0.05).start()
    journal.write_step(row(1, kl=1.0))
    assert pump.flush(5)
    away.set()
    for number in range(2, 40):
        journal.write_step(row(number, kl=1.0))
        pump.notify()
    assert not pump.flush(1.2), "a flush during an outage gives up in time"
    assert fake.calls >= 4, "it was tried again and again"
    assert len(warnings_of(caplog, "Training goes on")) == 1
    away.clear()
    assert pump.flush(10)
    assert fake.counts() == Counter(range(1, 40))
    assert len(warnings_of(caplog, "MLflow is back:")) == 1
    assert pump.close(5)


def test_what_was_not_sent_stays_in_the_journal(journal, row, caplog):
    fake = FakeRun(lambda _: "before")
    pump = MetricPump(journal, fake, interval=0.01).start()
    journal.write_step(row(1, kl=1.0))
    started = time.monotonic()
    assert not pump.close(timeout=0.3)
    assert time.monotonic() - started < 3
    assert "Nothing is lost" in caplog.text
    later = FakeRun()
    with MetricPump(journal, later, interval=0.01) as again:
        assert again.flush(5)
    assert later.counts() == Counter([1])


def test_a_server_that_hangs_does_not_hold_training(journal, row):
    release = threading.Event()

    class Hanging(FakeRun):
        def log_points(self, points):
            release.wait(30)

    pump = MetricPump(journal, Hanging(), interval=0.01).start()
    started = time.monotonic()
    for number in range(1, 21):
        journal.write_step(row(number, kl=1.0))
        pump.notify()
    assert not pump.close(timeout=0.2)
    assert time.monotonic() - started < 3
    release.set()


def test_tasks_are_done_in_order_and_tried_again(journal, caplog):
    done, tries = [], []

    def flaky():
        tries.append(1)
        if len(tries) < 3:
            raise TrackingError("away")
        done.append("flaky")

    def broken():
        raise FileNotFoundError("report.html")

    fake = FakeRun()
    fake.deferred.append(("first", lambda: done.append("deferred")))
    with MetricPump(journal, fake, interval=0.01, longest_wait=0.02) as pump:
        pump.submit(flaky, "a tag")
        pump.submit(broken, "the report")
        pump.submit(lambda: done.append("last"))
        assert pump.flush(10)
    assert done == ["deferred", "flaky", "last"]
    assert len(warnings_of(caplog, "Can't send the report to MLflow: report.html")) == 1


def test_a_pump_that_was_never_started_can_be_closed(journal):
    assert not MetricPump(journal, FakeRun()).close(timeout=0.1)


# ---------------------------------------------------------------- into a real store


def sql(run: MLflowRun, query: str):
    return sqlite3.connect(run.tracking_uri.removeprefix("sqlite:///")).execute(query).fetchall()


def test_a_real_store_gets_every_row_once_and_no_infinity(run, directory, row):
    journal = directory.journal()
    journal.start_segment(from_step=0)
    values = {1: 0.5, 2: math.inf, 3: math.nan, 4: 1e300, 5: -math.inf, 6: 0.25}
    with MetricPump(journal, run, page_of={"kl": "1_overview"}.get, interval=0.05) as pump:
        for number, value in values.items():
            journal.write_step(row(number, kl=value, one=1.0))
        assert pump.flush(30)
        journal.start_segment(from_step=4)
        journal.write_step(row(5, segment=2, kl=5.0, one=1.0))
        assert pump.flush(30)
    kl = sql(run, "SELECT step, value FROM metrics WHERE key = '1_overview/kl' ORDER BY step, timestamp")
    assert kl == [(1, 0.5), (4, 1e300), (5, 5.0), (6, 0.25)]
    assert sql(run, "SELECT count(*) FROM metrics WHERE is_nan OR abs(value) > 1.7e308") == [(0,)]
    assert sql(run, "SELECT count(*) FROM metrics WHERE key = '2_health/one'") == [(7,)]
    assert sql(run, "SELECT step, value FROM metrics WHERE key = '3_diagnosis/segment' ORDER BY step") == [
        (0, 1),
        (4, 2),
    ]
    journal.close()


def test_a_batch_sent_again_after_a_lost_answer_is_kept_once(run, directory, row):
    """The cursor did not move: the same rows go to the real store twice."""
    journal = directory.journal()
    journal.start_segment(from_step=0)
    for number in range(1, 21):
        journal.write_step(row(number, time=1_700_000_000.123456 + number, kl=number / 3, bad=math.nan))
    lost = []

    def send(points):
        run.log_points(points)
        if len(lost) < 2:
            lost.append(len(points))
            raise TrackingError("The answer was lost.")

    for _ in range(2):
        with pytest.raises(TrackingError):
            Feeder(journal, send).drain()
    journal.write_step(row(21, kl=7.0))
    Feeder(journal, send).drain()
    assert len(lost) == 2
    rows = sql(run, "SELECT step, count(*) FROM metrics WHERE key = '2_health/kl' GROUP BY step")
    assert rows == [(number, 1) for number in range(1, 22)]
    assert sql(run, "SELECT count(*), max(value) FROM metrics WHERE key = 'nonfinite/bad'") == [(20, 20.0)]
    journal.close()


def test_a_deleted_run_is_an_outage_until_it_is_restored(run, directory, row):
    client = make_client(run.tracking_uri)
    client.delete_run(run.run_id)
    with directory.journal() as journal:
        journal.start_segment(from_step=0)
        journal.write_step(row(1, kl=1.0))
        with pytest.raises(TrackingError, match="mlflow runs restore"):
            Feeder(journal, run.log_points).drain()
        client.restore_run(run.run_id)
        assert Feeder(journal, run.log_points).drain() == 1


def test_a_run_that_is_gone_takes_nothing_from_the_journal(run, directory, row):
    store = sqlite3.connect(run.tracking_uri.removeprefix("sqlite:///"))
    with store:
        for table in ("tags", "latest_metrics", "metrics", "params"):
            store.execute(f"DELETE FROM {table} WHERE run_uuid = ?", (run.run_id,))
        store.execute("DELETE FROM runs WHERE run_uuid = ?", (run.run_id,))
    with directory.journal() as journal:
        journal.start_segment(from_step=0)
        journal.write_step(row(1, kl=1.0))
        with pytest.raises(TrackingError, match="is gone from"):
            Feeder(journal, run.log_points).drain()
        assert Feeder(journal, run.log_points).backlog() == 1


def test_what_a_killed_process_left_is_sent_and_its_status_repaired(run, directory, row):
    with directory.journal() as journal:
        journal.start_segment(from_step=0)
        for number in range(1, 11):
            journal.write_step(row(number, kl=1.0))
    assert make_client(run.tracking_uri).get_run(run.run_id).info.status == "RUNNING"
    with directory.lock():
        report = sync_run(directory.path)
        assert (report.steps_sent, report.status) == (10, None), "a live run keeps its status"
    report = sync_run(directory.path)
    assert (report.steps_sent, report.status) == (0, "interrupted")
    found = make_client(run.tracking_uri).get_run(run.run_id)
    assert (found.info.status, found.data.tags["grpo.status"]) == ("KILLED", "interrupted")
    assert sql(run, "SELECT count(*) FROM metrics WHERE key = '2_health/kl'") == [(10,)]


def test_a_run_without_mlflow_can_not_be_synced(tmp_path):
    from grpo_lightning.sinks import RunDirectory

    made = RunDirectory.create(tmp_path, "abc")
    with pytest.raises(UsageError, match="was not recorded in MLflow"):
        sync_run(made.path)
