"""JSON lines, the guard around a sink, entry points, redaction, the run directory."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml

from grpo_lightning.errors import ConfigError, UsageError
from grpo_lightning.sinks import (
    EventRow,
    GuardedSink,
    Journal,
    JsonLines,
    RunDirectory,
    Sink,
    SinkError,
    StepRow,
    available_sinks,
    base,
    load_sink,
    redact_config,
    redact_text,
)


def step(number: int, **values: float) -> StepRow:
    return StepRow(run_id="r", segment=1, step=number, time=float(number), values=values or {"kl": 1.0})


# ---------------------------------------------------------------- JSON lines


def test_lines_are_strict_json(tmp_path):
    sink = JsonLines(tmp_path / "deep" / "log.jsonl")
    sink.write_step(step(1, kl=0.5, a=math.nan, b=math.inf, c=-math.inf))
    payload = {"value": math.nan, "rows": [1, math.inf]}
    sink.write_event(EventRow(run_id="r", segment=1, step=2, time=2.0, kind="alert", name="low", payload=payload))
    sink.close()

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    lines = (tmp_path / "deep" / "log.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    head = {"run_id": "r", "segment": 1, "step": 1, "time": 1.0}
    assert first == {**head, "kl": 0.5, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    assert second["payload"] == {"value": "NaN", "rows": [1, "Infinity"]}
    assert (second["kind"], second["id"]) == ("alert", "low@2")


def test_a_line_cut_by_a_crash_stays_alone(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    sink = JsonLines(path)
    sink.write_step(step(2))
    sink.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"step": 1}', '{"ste']
    assert json.loads(lines[2])["step"] == 2


def test_a_dash_is_stdout(capsys):
    sink = JsonLines("-")
    sink.write_step(step(3))
    sink.close()
    assert json.loads(capsys.readouterr().out)["step"] == 3
    with pytest.raises(SinkError, match="closed"):
        sink.write_step(step(4))


def test_a_path_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Give a writable path"):
        JsonLines(tmp_path / "file" / "log.jsonl")


# ---------------------------------------------------------------- the guard


class Flaky:
    """A sink that fails while `broken`."""

    def __init__(self):
        self.rows, self.calls, self.broken, self.closed = [], 0, False, False

    def write_step(self, row):
        self.calls += 1
        if self.broken:
            raise OSError("no route to host")
        self.rows.append(row.step)

    def write_event(self, row):
        self.write_step(row)

    def close(self):
        self.closed = True
        if self.broken:
            raise OSError("still no route")


def test_a_failing_sink_is_reported_once_retried_with_back_off_and_gets_everything(caplog):
    now = [0.0]
    sink = Flaky()
    guard = GuardedSink(sink, name="mine", first_wait=1.0, longest_wait=4.0, clock=lambda: now[0])
    guard.write_step(step(1))
    sink.broken, tried_at = True, []
    for number in range(2, 22):
        before = sink.calls
        now[0] = float(number)
        guard.write_step(step(number))
        if sink.calls > before:
            tried_at.append(number)
    assert tried_at == [2, 3, 5, 9, 13, 17, 21], "after 1, 2, 4 and then every 4 seconds"
    assert [record.message for record in caplog.records if "failed" in record.message] == [
        "The sink mine failed: no route to host. Training goes on; its rows are kept and tried again."
    ]
    sink.broken, now[0] = False, 30.0
    guard.write_step(step(22))
    assert sink.rows == list(range(1, 23))
    assert (guard.waiting, guard.lost) == (0, 0)
    assert caplog.records[-1].message == "The sink mine works again."


def test_the_guard_keeps_a_bounded_number_of_rows(caplog):
    sink = Flaky()
    sink.broken = True
    guard = GuardedSink(sink, capacity=3, clock=lambda: 0.0)
    for number in range(1, 6):
        guard.write_step(step(number))
    assert (guard.waiting, guard.lost) == (3, 2)
    sink.broken = False
    guard.close()
    assert sink.rows == [3, 4, 5]
    assert sink.closed
    assert "did not get 2 rows" in caplog.text


def test_closing_a_broken_sink_does_not_raise(caplog):
    sink = Flaky()
    sink.broken = True
    guard = GuardedSink(sink)
    guard.write_step(step(1))
    guard.close()
    assert "did not get 1 rows" in caplog.text
    assert "could not be closed" in caplog.text


# ---------------------------------------------------------------- entry points


def points(*pairs: tuple[str, str]):
    return lambda group: [EntryPoint(name, value, group) for name, value in pairs]


def test_a_sink_is_loaded_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(base, "entry_points", points(("lines", "grpo_lightning.sinks:JsonLines")))
    sink = load_sink("lines", path=tmp_path / "x.jsonl")
    assert isinstance(sink, JsonLines)
    assert isinstance(sink, Sink)
    sink.close()


@pytest.mark.parametrize(
    ("pairs", "name", "said"),
    [
        ([("a", "m:A"), ("a", "n:B")], "a", "Two installed sinks are called 'a': m:A and n:B"),
        ([("a", "m:A")], "b", "no sink called 'b'; installed are: a"),
        ([("a", "builtins:dict")], "a", "made a dict, which has no write_step"),
    ],
    ids=["duplicate", "unknown", "not-a-sink"],
)
def test_bad_sinks_fail_loudly(monkeypatch, pairs, name, said):
    monkeypatch.setattr(base, "entry_points", points(*pairs))
    with pytest.raises(ConfigError, match=said):
        load_sink(name)


def test_one_distribution_seen_twice_is_no_duplicate(monkeypatch):
    monkeypatch.setattr(base, "entry_points", points(("a", "m:A"), ("a", "m:A")))
    assert set(available_sinks()) == {"a"}


# ---------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("postgresql://ada:pw@db:5432/mlflow", "postgresql://***@db:5432/mlflow"),
        ("see https://token@host/x and http://h/y", "see https://***@host/x and http://h/y"),
        ("mysql+pymysql://u:p%40ss@h/d", "mysql+pymysql://***@h/d"),
        ("https://u:p@ss@h/d", "https://***@h/d"),
        ("https://h/x?token=abc&step=1", "https://h/x?token=***&step=1"),
        ("hf_abcdefghijklmnopqrstuvwx", "***"),
        ("AKIAABCDEFGHIJKLMNOP!", "***!"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- tail", "*** tail"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("mail ada@example.org", "mail ada@example.org"),
        ("http://h/users/@ada", "http://h/users/@ada"),
    ],
)
def test_texts_lose_their_secrets(text, clean):
    assert redact_text(text) == clean


SECRET = [
    "api_key",
    "OPENAI_API_KEY",
    "HF_TOKEN",
    "password",
    "db.password",
    "client_secret",
    "auth_token",
    "token",
]
PLAIN = [
    "max_tokens",
    "pad_token",
    "use_cls_token",
    "num_memory_tokens",
    "eos_token",
    "tokenizer",
    "secretary",
    "key",
]


@pytest.mark.parametrize("name", SECRET)
def test_secret_names_are_redacted(name):
    assert redact_config({"model": [{name: "abc"}]}) == {"model": [{name: "***"}]}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_names_are_not(name):
    assert redact_config({name: "abc", "n": {name: 7}}) == {name: "abc", "n": {name: 7}}


# ---------------------------------------------------------------- run directory


def test_a_run_directory_has_its_places(tmp_path):
    made = RunDirectory.create(tmp_path / "runs", "abc")
    opened = RunDirectory.open(tmp_path / "runs" / "abc")
    assert made == opened
    assert sorted(path.name for path in made.path.iterdir() if path.suffix not in {".sqlite-shm", ".sqlite-wal"}) == [
        "checkpoints",
        "eval",
        "evidence",
        "journal.sqlite",
        "snapshot",
    ]
    with opened.journal(read_only=True) as journal:
        assert journal.run_id == "abc"
    assert (opened.report.name, opened.config.name) == ("report.html", "config.yaml")


@pytest.mark.parametrize("run_id", ["", "..", "a/b", "../up", ".hidden", "a b"])
def test_a_run_id_can_not_leave_the_root(tmp_path, run_id):
    with pytest.raises(UsageError, match="can't name a run directory"):
        RunDirectory.create(tmp_path, run_id)


def test_an_existing_run_is_not_made_again_and_a_folder_is_not_a_run(tmp_path):
    RunDirectory.create(tmp_path, "abc")
    with pytest.raises(UsageError, match=r"exists\. Resume"):
        RunDirectory.create(tmp_path, "abc")
    with pytest.raises(UsageError, match="not a run directory"):
        RunDirectory.open(tmp_path)


def test_the_config_is_kept_to_the_letter_unless_it_holds_a_secret(tmp_path):
    run = RunDirectory.create(tmp_path, "abc")
    text = "# my run\nlr: 1e-6\nname: 'x'\n"
    assert run.write_config(text).read_text() == text
    run.write_config(text + "hf_token: hf_abc\nuri: https://a:b@h\n")
    assert yaml.safe_load(run.config.read_text()) == {
        "lr": "1e-6",
        "name": "x",
        "hf_token": "***",
        "uri": "https://***@h",
    }
    assert not list(run.path.glob(".config*"))


_HOLD = """
import sys, time
from grpo_lightning.sinks import RunDirectory
with RunDirectory.open(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_process_trains_a_run_and_a_killed_one_frees_it(tmp_path):
    run = RunDirectory.create(tmp_path, "abc")
    child = subprocess.Popen([sys.executable, "-c", _HOLD, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert run.is_live()
        with pytest.raises(UsageError, match="Another process is training the run abc"), run.lock():
            pass
    finally:
        child.kill()
        child.wait()
    assert not run.is_live()
    with run.lock():
        assert run.is_live()
    assert not run.is_live()


def test_importing_sinks_is_cheap():
    code = "import sys, grpo_lightning.sinks; print({'torch', 'mlflow', 'lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_journal_behind_a_guard_records(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    journal = Journal(tmp_path / "j")
    journal.start_segment(from_step=0)
    guard = GuardedSink(journal)
    guard.write_step(step(1))
    guard.write_event(EventRow(run_id="r", segment=1, step=1, time=1.0, kind="note", name="n"))
    assert len(journal.series("kl")) == 1
    assert len(journal.events("note")) == 1
    guard.close()
    assert caplog.records == []


def test_paths_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.create("runs", "a").path == Path(tmp_path / "runs" / "a")
