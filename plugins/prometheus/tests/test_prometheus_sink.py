"""What a scrape of a run sees, and how the endpoint comes and goes."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from grpo_prometheus import PrometheusSink, metric_of
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from grpo_lightning.errors import ConfigError
from grpo_lightning.signals import CATALOGUE
from grpo_lightning.sinks import EventRow, Sink, StepRow, load_sink

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
RUN = {"run_id": "r1", "run_name": "first"}


@pytest.fixture
def sink() -> Iterator[PrometheusSink]:
    made = PrometheusSink(port="auto", run_id="r1", run_name="first", description="what for")
    yield made
    made.close()


def step(number: int, **values: float) -> StepRow:
    return StepRow(run_id="r1", segment=1, step=number, time=100.0 + number, values=values)


def event(kind: Any, name: str, *, key: str = "", **payload: Any) -> EventRow:
    return EventRow(run_id="r1", segment=1, step=3, time=1.0, kind=kind, name=name, payload=payload, id=key)


def scrape(sink: PrometheusSink) -> str:
    with urllib.request.urlopen(f"http://{sink.address}/metrics", timeout=5) as answer:
        return str(answer.read().decode())


def samples(sink: PrometheusSink) -> Samples:
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(scrape(sink))
        for s in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset({**RUN, **labels}.items())))


def full_row(number: int = 7) -> StepRow:
    functions = {f"reward/exact-match_{s}": 1.0 for s in ("mean", "std", "missing", "errors", "seconds")}
    probes = {f"probe_{name}": 0.25 for name in CATALOGUE}
    return step(number, **{name: float(i) for i, name in enumerate(CATALOGUE)}, **functions, **probes)


# ---------------------------------------------------------------- what it shows


def test_every_signal_is_a_gauge_with_run_id_and_run_name(sink: PrometheusSink) -> None:
    sink.write_step(full_row())
    found = samples(sink)
    for i, name in enumerate(CATALOGUE):
        assert value(found, metric_of(name).name) == float(i), name
    assert value(found, "grpo_reward_function_mean", function="exact-match") == 1.0
    assert value(found, "grpo_step") == 7
    assert value(found, "grpo_step_timestamp_seconds") == 107.0
    assert value(found, "grpo_run_info", description="what for") == 1
    assert all({"run_id", "run_name"} <= dict(labels).keys() for _, labels in found)


def test_help_has_formula_unit_and_reading(sink: PrometheusSink) -> None:
    sink.write_step(full_row())
    text = scrape(sink)
    entry = CATALOGUE["kl"]
    assert f"# HELP grpo_kl {entry.formula[0].upper()}{entry.formula[1:]} [nats]. {entry.reading}" in text
    assert "# TYPE grpo_kl gauge" in text
    helped = set(re.findall(r"^# HELP (\S+) \S", text, re.MULTILINE))
    assert {metric_of(name).name for name in CATALOGUE} <= helped


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
def test_promtool_finds_nothing_to_complain_about(sink: PrometheusSink) -> None:
    sink.write_step(full_row())
    sink.write_event(event("alert", "low", severity="critical", action="pause"))
    sink.write_event(event("recovery", "skip_update"))
    sink.write_event(event("evaluation", "val", eval_accuracy=0.5))
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=scrape(sink), text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


NAMES = [
    ("group_reward_std", "grpo_group_reward_std", {}),
    ("reward/a/b_c_mean", "grpo_reward_function_mean", {"function": "a/b_c"}),
    ("reward/x_std", "grpo_reward_function_std", {"function": "x"}),
    ("reward_metric/with digit", "grpo_reward_metric", {"metric": "with digit"}),
    ("prompt_tokens_total", "grpo_prompt_tokens_total_value", {}),
    ("nonfinite_count", "grpo_nonfinite_count_value", {}),
    ("nonfinite_count_loss", "grpo_nonfinite_count_loss", {}),
    ("probe_kl", "grpo_probe_kl", {}),
    ("eval_x/y", "grpo_eval_x_y", {"signal": "eval_x/y"}),
    ("step", "grpo_step_value", {}),
    ("step_value", "grpo_step_value", {"signal": "step_value"}),
    ("a count", "grpo_a_count_value", {"signal": "a count"}),
    ("mein Maß", "grpo_mein_Ma_", {"signal": "mein Maß"}),
]


@pytest.mark.parametrize(("signal", "name", "labels"), NAMES, ids=[n[0] for n in NAMES])
def test_names(signal: str, name: str, labels: dict[str, str]) -> None:
    metric = metric_of(signal)
    assert (metric.name, metric.labels) == (name, labels)


_ODD = st.sampled_from(["step", "step_value", "step value", "a_count", "a_count_value", "a count", "a count value"])


@given(st.lists(st.text(min_size=1, max_size=12) | _ODD, unique=True, max_size=6))
def test_no_two_signals_are_one_series(names: list[str]) -> None:
    everything = dict.fromkeys([*names, *CATALOGUE, "reward/a_mean", "step", "step_value"])
    keys = {(metric_of(n).name, tuple(metric_of(n).labels.items())) for n in everything}
    assert len(keys) == len(everything)
    assert all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", key[0]) for key in keys)


def test_what_was_not_measured_is_absent_and_what_is_not_finite_is_shown(sink: PrometheusSink) -> None:
    sink.write_step(step(1, kl=0.5, loss=1.0))
    sink.write_step(step(2, kl=math.nan, grad_norm=math.inf))
    found = samples(sink)
    assert math.isnan(value(found, "grpo_kl") or 0.0)
    assert value(found, "grpo_grad_norm") == math.inf
    assert value(found, "grpo_loss") is None, "not measured at step 2"


def test_what_is_measured_seldom_stays_until_it_is_measured_again(sink: PrometheusSink) -> None:
    sink.write_step(step(1, probe_kl=0.25, prompt_length_mean=8.0))
    sink.write_event(event("evaluation", "val", eval_accuracy=0.5, note="text is no number", ok=True))
    sink.write_step(step(2, kl=1.0))
    found = samples(sink)
    assert value(found, "grpo_probe_kl") == 0.25
    assert value(found, "grpo_prompt_length_mean") == 8.0
    assert value(found, "grpo_eval_accuracy") == 0.5
    assert value(found, "grpo_evaluation_step") == 3
    sink.write_step(step(3, probe_kl=0.5))
    assert value(samples(sink), "grpo_probe_kl") == 0.5


def test_alerts_and_recoveries_are_counted(sink: PrometheusSink) -> None:
    low = {"rule": "low", "severity": "critical", "action": "notify"}
    for key in ("low@3", "low@3", "low@9"):  # one comes twice
        sink.write_event(event("alert", "low", key=key, state="firing", **low))
    sink.write_event(event("recovery", "skip_update"))
    sink.write_event(event("note", "n"))
    found = samples(sink)
    assert value(found, "grpo_alerts_total", **low) == 2
    assert value(found, "grpo_alert_open", **low) == 2
    assert value(found, "grpo_recoveries_total", kind="skip_update") == 1


def test_an_alert_rises_in_severity_and_is_resolved(sink: PrometheusSink) -> None:
    mild = {"rule": "low", "severity": "warning", "action": "notify"}
    hard = {"rule": "low", "severity": "critical", "action": "notify"}
    sink.write_event(event("alert", "low", key="low@3", state="firing", **mild))
    sink.write_event(event("alert", "low", key="low@3", state="escalated", **hard))
    found = samples(sink)
    assert value(found, "grpo_alert_open", **mild) is None
    assert value(found, "grpo_alert_open", **hard) == 1
    sink.write_event(event("alert", "low", key="low@3", state="resolved", **hard))
    found = samples(sink)
    assert value(found, "grpo_alert_open", **hard) is None
    assert value(found, "grpo_alerts_total", **mild) == 1, "one alert, counted as it was raised"


@pytest.mark.parametrize(
    ("action", "seen", "waits"),
    [("pause", False, True), ("pause", True, False), ("notify", False, False)],
    ids=["pause-unseen", "pause-seen", "notify"],
)
def test_a_run_that_pauses_waits_for_a_scrape_that_sees_why(action: str, seen: bool, waits: bool) -> None:
    made = PrometheusSink(port="auto", run_id="r1", linger=0.6)
    samples(made)
    made.write_event(event("alert", "low", severity="critical", action=action, state="firing"))
    if seen:
        samples(made)
    started = time.monotonic()
    made.close()
    assert (time.monotonic() - started >= 0.6) == waits


def test_the_wait_ends_with_the_scrape() -> None:
    made = PrometheusSink(port="auto", run_id="r1", linger=30)
    made.write_event(event("alert", "low", severity="critical", action="pause", state="firing"))
    Timer(0.2, lambda: scrape(made)).start()
    started = time.monotonic()
    made.close()
    assert time.monotonic() - started < 10


HOSTILE = ['"} 1\nevil 1', "a\\", "\ud800", "ünï", "x" * 5000]


@pytest.mark.parametrize("name", HOSTILE, ids=["quotes", "backslash", "surrogate", "unicode", "long"])
def test_hostile_names_stay_in_their_label(name: str) -> None:
    sink = PrometheusSink(port="auto", run_id="r1", run_name=name)
    try:
        sink.write_step(step(1, kl=0.5, **{f"reward/{name}_mean": 1.0}))
        found = samples(sink)
    finally:
        sink.close()
    shown = name.encode("utf-8", "backslashreplace").decode()
    assert {dict(labels)["run_name"] for _, labels in found} == {shown}
    assert [dict(labels)["function"] for key, labels in found if key == "grpo_reward_function_mean"] == [shown]
    assert not any(key == "evil" for key, _ in found)


# ---------------------------------------------------------------- how it comes and goes


def test_it_is_a_sink_by_its_entry_point() -> None:
    made = load_sink("prometheus")
    assert isinstance(made, PrometheusSink)
    assert isinstance(made, Sink)


def test_port_0_is_off_and_takes_rows(tmp_path: Path) -> None:
    made = PrometheusSink(targets_dir=tmp_path / "targets", run_id="r1")
    made.write_step(step(1, kl=0.5))
    assert made.address == ""
    assert not (tmp_path / "targets").exists()
    made.close()


def test_only_this_machine_reaches_it(sink: PrometheusSink) -> None:
    assert sink.address.startswith("127.0.0.1:")


def test_a_port_in_use_is_one_clear_sentence(sink: PrometheusSink) -> None:
    port = int(sink.address.split(":")[1])
    with pytest.raises(ConfigError) as caught:
        PrometheusSink(port=port)
    assert str(caught.value) == (
        f"The Prometheus port {port} on 127.0.0.1 is in use: give this run another port, or 'auto'."
    )


@pytest.mark.parametrize("port", [-1, 65536, "9464", "any", 1.5, True, None])
def test_a_bad_port_is_refused(port: Any) -> None:
    with pytest.raises(ConfigError, match="give 1 to 65535, 'auto', or 0 for none"):
        PrometheusSink(port=port)


def test_a_bad_host_is_refused() -> None:
    with pytest.raises(ConfigError, match="Give another host or port"):
        PrometheusSink(port=9464, host="203.0.113.7")


def test_a_folder_that_can_not_be_written_frees_the_port(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for _ in range(2):
        with pytest.raises(ConfigError, match="Can't write the Prometheus target file"):
            PrometheusSink(port=port, targets_dir=tmp_path / "file" / "x")


def test_the_target_file_is_there_while_the_run_is(tmp_path: Path) -> None:
    folder = tmp_path / "targets"
    first = PrometheusSink(port="auto", targets_dir=folder, run_id="r1")
    second = PrometheusSink(port="auto", targets_dir=folder, run_id="r2")
    files = {path.name: json.loads(path.read_text()) for path in folder.iterdir()}
    assert files == {
        "r1.json": [{"targets": [first.address], "labels": {}}],
        "r2.json": [{"targets": [second.address], "labels": {}}],
    }
    first.close()
    assert [path.name for path in folder.iterdir()] == ["r2.json"]
    second.close()


def test_closing_ends_the_endpoint_and_frees_the_port() -> None:
    made = PrometheusSink(port="auto", run_id="r1")
    host, port = made.address.split(":")
    made.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=2)
    again = PrometheusSink(port=int(port), run_id="r1")
    again.close()
    again.close()
