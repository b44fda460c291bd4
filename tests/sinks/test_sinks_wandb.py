"""W&B in its offline mode: what the file that `wandb sync` sends holds."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_lightning.errors import ConfigError
from grpo_lightning.sinks import EventRow, GuardedSink, SinkError, StepRow, load_sink

wandb = pytest.importorskip("wandb", reason="the extra 'wandb' is not installed")


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def step(number: int, run_id: str = "r1", **values: float) -> StepRow:
    return StepRow(run_id=run_id, segment=1, step=number, time=1.0, values=values)


def event(kind: Any, name: str, number: int = 3, **payload: Any) -> EventRow:
    return EventRow(run_id="r1", segment=1, step=number, time=1.0, kind=kind, name=name, payload=payload)


def records(folder: Path, run_id: str = "r1") -> list[Any]:
    """The records of a closed run's `.wandb` file. W&B writes the last of them after `finish` has returned."""
    until = time.monotonic() + 30
    while True:
        found = list(parsed(folder, run_id))
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        assert time.monotonic() < until, f"the run {run_id} was not closed"
        time.sleep(0.05)


def parsed(folder: Path, run_id: str) -> Iterator[Any]:
    """LevelDB's log format: blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob(f"run-{run_id}.wandb")
    data, at, body = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        body += data[at + 7 : at + 7 + length]
        at += 7 + length
        if at > len(data):  # still being written
            return
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(body)
            body = b""
            yield record


def history(folder: Path, run_id: str = "r1") -> list[dict[str, Any]]:
    found = [r.history for r in records(folder, run_id) if r.WhichOneof("record_type") == "history"]
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item if item.key[:1] != "_"}
        for row in found
    ]


def test_every_signal_of_every_step_arrives_once_in_its_section(tmp_path: Path) -> None:
    first = load_sink("wandb", mode="offline", dir=tmp_path, run_id="r1", run_name="one", description="what for")
    second = load_sink("wandb", mode="offline", dir=tmp_path, run_id="r2", run_name="two")
    for number in range(1, 31):
        first.write_step(step(number, kl=number / 8, reward_mean=1.0, entropy_p10=0.5, **{"reward/f_mean": 2.0}))
        second.write_step(step(number, run_id="r2", kl=-number))
    first.close()
    second.close()
    rows = [row for row in history(tmp_path) if "segment" in row]

    def of(row: dict[str, Any]) -> dict[str, Any]:
        return {name.replace("/", "|"): value for name, value in row.items() if not name.startswith("_")}

    assert [row["step"] for row in rows] == list(range(1, 31))
    keys = {"1_overview/reward_mean": 1.0, "1_overview/reward/f_mean": 2.0, "3_diagnosis/entropy_p10": 0.5}
    assert [of(row) for row in rows] == [
        of({"step": n, "segment": 1, "2_health/kl": n / 8, **keys}) for n in range(1, 31)
    ]
    assert [row["2_health/kl"] for row in history(tmp_path, "r2")] == [-n for n in range(1, 31)]
    (run,) = [r.run for r in records(tmp_path) if r.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.display_name, run.notes, run.project) == ("r1", "one", "what for", "grpo-lightning")
    axes = {(m.name or m.glob_name): m.step_metric for m in metrics(tmp_path)}
    assert axes == {"step": "", "*": "step"}


def metrics(folder: Path) -> list[Any]:
    return [r.metric for r in records(folder) if r.WhichOneof("record_type") == "metric"]


def test_alerts_arrive_as_alerts_and_as_a_table(tmp_path: Path) -> None:
    sink = load_sink("wandb", mode="offline", dir=tmp_path, run_id="r1", run_name="one")
    sink.write_step(step(3, kl=0.5))
    told = {
        "state": "firing",
        "severity": "critical",
        "action": "pause",
        "value": 0.25,
        "bound": 0.5,
        "summary": "std <b>0.25</b>",
    }
    sink.write_event(event("alert", "variance_low", **told))
    sink.write_event(event("alert", "length_high", severity="warning", action="notify", summary="long"))
    sink.write_event(event("alert", "variance_low", number=9, **{**told, "state": "resolved"}))
    sink.write_event(event("evaluation", "val", eval_accuracy=0.75))
    sink.write_event(event("recovery", "skip_update"))
    sink.write_event(event("recovery", "skip_update", number=4))
    sink.write_event(event("note", "n"))
    sink.close()
    alerts = [r.alert for r in records(tmp_path) if r.WhichOneof("record_type") == "alert"]
    assert [(a.title, a.level, a.text) for a in alerts] == [
        ("one: variance_low at step 3", "ERROR", "std <b>0.25</b> (run r1)"),
        ("one: length_high at step 3", "WARN", "long (run r1)"),
    ]
    rows = history(tmp_path)
    assert any(row.get("1_overview/eval_accuracy") == 0.75 and row["step"] == 3 for row in rows)
    assert [row["2_health/recoveries/skip_update"] for row in rows if "2_health/recoveries/skip_update" in row] == [
        1,
        2,
    ]
    (table,) = [json.loads(path.read_text()) for path in tmp_path.rglob("alerts*.table.json")]
    assert table["columns"] == ["step", "rule", "state", "severity", "action", "value", "bound", "summary"]
    assert table["data"] == [
        ["3", "variance_low", "firing", "critical", "pause", "0.25", "0.5", "std <b>0.25</b>"],
        ["3", "length_high", None, "warning", "notify", None, None, "long"],
        ["9", "variance_low", "resolved", "critical", "pause", "0.25", "0.5", "std <b>0.25</b>"],
    ]


def test_values_that_are_not_finite_stay_visible(tmp_path: Path) -> None:
    sink = load_sink("wandb", mode="offline", dir=tmp_path, run_id="r1")
    sink.write_step(step(1, kl=math.nan, loss=math.inf))
    sink.close()
    rows = history(tmp_path)
    assert len(rows) == 1, [r.WhichOneof("record_type") for r in records(tmp_path)]
    row = rows[0]
    assert math.isnan(float(row["2_health/kl"]))
    assert float(row["1_overview/loss"]) == math.inf


HOSTILE = [
    'a"b',
    "new\nline",
    "sl/ash//x",
    "ünï",
    "x" * 300,
    "[bold]x[/]",
    "../..",
    "a.b",
    "\x1b[31m",
    "\ud800",
    "step",
    "",
]


def test_hostile_names_are_other_charts_and_lose_nothing(tmp_path: Path) -> None:
    sink = load_sink("wandb", mode="offline", dir=tmp_path, run_id="r1", run_name='[bold]"\n<b>')
    sink.write_step(step(1, kl=0.5, **{f"reward_metric/{name}": float(n) for n, name in enumerate(HOSTILE)}))
    sink.close()
    (found,) = history(tmp_path)
    named = [name.encode("utf-8", "backslashreplace").decode() for name in HOSTILE if name]
    assert {key: found[key] for key in found if "reward_metric/" in key} == {
        **{f"3_diagnosis/reward_metric/{name}": float(n) for n, name in enumerate(named)},
        "2_health/reward_metric/": float(len(named)),
    }
    assert (found["step"], found["2_health/kl"]) == (1, 0.5)


def test_nothing_starts_before_the_first_row_and_nothing_is_taken_after_the_end(tmp_path: Path) -> None:
    sink = load_sink("wandb", mode="offline", dir=tmp_path, run_id="r1")
    assert not list(tmp_path.rglob("*.wandb"))
    sink.close()
    with pytest.raises(SinkError, match="closed"):
        sink.write_step(step(1, kl=1.0))


def test_no_account_is_one_clear_sentence() -> None:
    with pytest.raises(ConfigError, match="run `wandb login`, set WANDB_API_KEY, or give the sink `mode: offline`"):
        load_sink("wandb", run_id="r1")


def test_a_bad_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="'onlin': give 'online' or 'offline'"):
        load_sink("wandb", mode="onlin")


def test_a_server_that_can_not_be_reached_is_reported_once_and_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    sink = load_sink("wandb", dir=tmp_path, run_id="r1")

    def refuse(**_: Any) -> None:
        raise wandb.errors.CommError("no route to host")

    monkeypatch.setattr(wandb, "init", refuse)
    guard = GuardedSink(sink, name="wandb", clock=lambda: 0.0)
    for number in range(1, 4):
        guard.write_step(step(number, kl=1.0))
    assert guard.waiting == 3
    assert [r.message for r in caplog.records if "failed" in r.message] == [
        "The sink wandb failed: no route to host. Training goes on; its rows are kept and tried again."
    ]


_WITHOUT = """
import sys
sys.modules["wandb"] = None
from grpo_lightning.errors import ConfigError
from grpo_lightning.sinks import load_sink
try:
    load_sink("wandb", mode="offline")
except ConfigError as error:
    print(error)
"""


def test_without_the_extra_the_message_has_the_command() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "The sink 'wandb' needs W&B: pip install 'grpo-lightning[wandb]'."
