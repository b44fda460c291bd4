"""The webhook against servers that fail and a real Alertmanager; its secrets against everything that is written."""

from __future__ import annotations

import json
import logging
import sqlite3
from base64 import b64encode
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from secrets import token_hex
from time import monotonic, time
from typing import Any

import pytest
from hook_server import alertmanager, free_port, known_to, needs_alertmanager, serve, wait_until
from hypothesis import given
from hypothesis import strategies as st

from grpo_lightning.errors import ConfigError
from grpo_lightning.sinks import (
    EventRow,
    Sink,
    SinkError,
    StepRow,
    available_sinks,
    load_sink,
    redact_config,
    redact_text,
)
from grpo_lightning.sinks.webhook import WebhookSink
from grpo_lightning.sinks.webhook_bodies import FIELDS, JsonBodies, fields_of

IDENTITY = {"run_id": "1f2e", "run_name": "wren", "description": "does a stronger KL help?"}
PAYLOAD = {
    "state": "firing",
    "severity": "critical",
    "action": "pause",
    "cause": "reward",
    "onset_step": 31,
    "signal": "group_reward_std",
    "value": 0.0123456,
    "bound": 0.15,
    "expected": 0.4,
    "values": {"group_reward_std": 0.0123456, "kl": "nan"},
    "summary": "Group reward std fell.",
    "first": "Read one whole group.",
    "runbook": "runbooks/variance-collapse.md",
    "message": "critical, began about step 31: Group reward std fell. (reward; pause)",
    "evidence": "/runs/1f2e/evidence/step-000040-variance_collapse.jsonl",
}


def alert(state: str = "firing", step: int = 40, *, at: float | None = None, key: str = "", **changes: Any) -> EventRow:
    payload = PAYLOAD | {"state": state} | changes
    key = key or "variance_collapse@40"
    when = time() if at is None else at
    return EventRow(
        run_id="1f2e", segment=1, step=step, time=when, kind="alert", name=key[:-3], payload=payload, id=key
    )


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


# ---------------------------------------------------------------- what is sent


def test_it_is_a_sink_by_its_entry_point():
    assert available_sinks()["webhook"].value == "grpo_lightning.sinks.webhook:WebhookSink"
    sink = load_sink("webhook", url="http://127.0.0.1:9")
    assert isinstance(sink, Sink)
    sink.close()
    with pytest.raises(SinkError, match="closed"):
        sink.write_event(alert())


def test_alertmanager_gets_labels_annotations_and_times():
    with serve() as hook:
        sink = WebhookSink(url=hook.url, **IDENTITY)
        sink.write_step(StepRow(run_id="1f2e", segment=1, step=40, time=0.0, values={"kl": 1.0}))
        sink.write_event(EventRow(run_id="1f2e", segment=1, step=40, time=0.0, kind="recovery", name="resample"))
        sink.write_event(alert(at=1000.25))
        sink.close()
        ((path, headers, (posted,)),) = hook.got
    assert (path, headers["Content-Type"]) == ("/api/v2/alerts", "application/json")
    assert posted["labels"] == {
        "alertname": "variance_collapse",
        "run_id": "1f2e",
        "run_name": "wren",
        "severity": "critical",
        "cause": "reward",
        "action": "pause",
    }
    told = posted["annotations"]
    assert {name: told[name] for name in ("summary", "first", "runbook")} == {
        name: PAYLOAD[name] for name in ("summary", "first", "runbook")
    }
    for words in ("wren (1f2e)", "does a stronger KL help?", "value 0.01235", "ruler 0.4", "action: pause", "kl nan"):
        assert words in told["description"]
    assert (posted["startsAt"], told["alert"], told["value"]) == (
        "1970-01-01T00:16:40.250Z",
        "variance_collapse@40",
        "0.0123456",
    )
    assert posted["endsAt"] > posted["startsAt"]
    assert all(isinstance(value, str) for value in told.values())


def test_a_resolved_alert_ends_and_one_that_rises_replaces_the_milder_one():
    mild = {"severity": "warning", "action": "notify"}
    with serve() as hook:
        sink = WebhookSink(url=f"{hook.url}/api/v2/alerts/", **IDENTITY)
        sink.write_event(alert(at=1000.0, **mild))
        sink.write_event(alert("escalated", 50, at=2000.0))
        sink.write_event(alert("resolved", 60, at=3000.0))
        sink.close()
        first, second, third = hook.wait_for(3)
        assert {path for path, _, _ in hook.got} == {"/api/v2/alerts/"}
    assert first[0]["labels"]["severity"] == "warning"
    raised, ended = second
    assert (raised["labels"]["severity"], raised["labels"]["action"]) == ("critical", "pause")
    assert (ended["labels"], ended["endsAt"]) == (first[0]["labels"], "1970-01-01T00:33:20.000Z")
    (over,) = third
    assert (over["labels"], over["endsAt"]) == (raised["labels"], "1970-01-01T00:50:00.000Z")
    assert over["startsAt"] == raised["startsAt"]


def test_an_alert_from_before_a_resume_can_end_and_rise():
    with serve() as hook:
        sink = WebhookSink(url=hook.url, **IDENTITY)
        sink.write_event(alert("resolved", 60, at=3000.0))
        sink.write_event(alert("escalated", 70, at=4000.0, key="kl_runaway@66"))
        sink.close()
        (over,), (raised, ended) = hook.wait_for(2)
    assert over["endsAt"] == "1970-01-01T00:50:00.000Z"
    assert "startsAt" not in over
    assert ended["labels"] == raised["labels"] | {"severity": "warning", "action": "notify"}


def test_what_holds_is_told_again_as_long_as_it_holds():
    with serve() as hook:
        sink = WebhookSink(url=hook.url, refresh_seconds=0.2, **IDENTITY)
        sink.write_event(alert(at=1000.0))
        bodies = hook.wait_for(3)
        sink.write_event(alert("resolved", 41))
        wait_until(lambda: hook.got[-1][2][0]["annotations"] != bodies[0][0]["annotations"])
        count = len(hook.got)
        assert monotonic() - hook.asked[-1][2] < 5
        sink.close()
    assert [body[0]["labels"] for body in bodies] == [bodies[0][0]["labels"]] * len(bodies)
    assert bodies[2][0]["endsAt"] > bodies[0][0]["endsAt"]
    assert len(hook.got) == count, "nothing holds any more"


def test_json_without_a_template_is_every_word():
    with serve() as hook:
        sink = WebhookSink(url=f"{hook.url}/in", format="json", **IDENTITY)
        sink.write_event(alert(value=float("nan"), bound=float("inf")))
        sink.close()
        ((path, _, body),) = hook.got
    assert path == "/in"
    assert set(body) == set(FIELDS)
    assert (body["rule"], body["state"], body["value"], body["bound"]) == (
        "variance_collapse",
        "firing",
        "NaN",
        "Infinity",
    )


TEMPLATE = {
    "text": "*$run_name* ${rule}: $text for $$5",
    "routing_key": "${env.WEBHOOK_TEST_KEY}",
    "custom": {"step": "$step", "values": "${values}", "missing": "$expected", "list": ["$alert", 3, None, True]},
}


@pytest.mark.parametrize("given_as", [TEMPLATE, json.dumps(TEMPLATE)], ids=["nested", "text"])
def test_a_template_is_filled_with_types(monkeypatch, given_as):
    monkeypatch.setenv("WEBHOOK_TEST_KEY", "R0123")
    with serve() as hook:
        sink = WebhookSink(url=hook.url, format="json", template=given_as, **IDENTITY)
        sink.write_event(alert(expected=None, first='say "no"\n$step'))
        sink.close()
        (body,) = hook.wait_for(1)
    assert body["text"].startswith(
        "*wren* variance_collapse: variance_collapse firing at step 40, began about step 31: run"
    )
    assert body["text"].endswith("for $5")
    assert '"no"\n$step' in body["text"], "what a word holds is not a template again"
    assert body["routing_key"] == "R0123"
    assert body["custom"] == {
        "step": 40,
        "values": PAYLOAD["values"],
        "missing": None,
        "list": ["variance_collapse@40", 3, None, True],
    }


@given(st.dictionaries(st.sampled_from(["summary", "first", "message", "cause"]), st.text() | st.floats() | st.none()))
def test_any_text_gives_strict_json_and_no_new_keys(changes):
    body = JsonBodies({"a": "$summary|$first", "b": ["$text"]}, IDENTITY).of(alert(at=1.0, **changes))
    parsed = json.loads(body.decode("utf-8"), parse_constant=pytest.fail)
    assert set(parsed) == {"a", "b"}
    assert set(fields_of(alert(at=1.0, **changes), IDENTITY)) == set(FIELDS)


# ---------------------------------------------------------------- servers that fail


FAILURES = {
    "500": ["500", "500"],
    "overloaded, says when": ["429"],
    "drops the connection": ["drop", "drop"],
    "hangs": ["hang"],
    "drips": ["drip"],
}


@pytest.mark.parametrize("script", FAILURES.values(), ids=FAILURES)
def test_it_is_tried_again_until_it_arrives(script, caplog):
    caplog.set_level(logging.WARNING)
    with serve(*script) as hook:
        sink = WebhookSink(url=hook.url, timeout=0.6, **IDENTITY)
        started = monotonic()
        sink.write_event(alert())
        sink.write_event(alert("resolved", 50))
        assert monotonic() - started < 0.2, "training does not wait"
        hook.wait_for(2)
        sink.close()
        assert len(hook.asked) == len(script) + 2
    said = [record.message for record in caplog.records]
    assert len(said) == 2, said
    assert "Training goes on" in said[0]
    assert "works again" in said[1]


def test_waits_grow(caplog):
    with serve(*["500"] * 3) as hook:
        sink = WebhookSink(url=hook.url, format="json")
        sink.write_event(alert())
        hook.wait_for(1)
        sink.close()
        times = [when for _, _, when in hook.asked]
    waits = [later - earlier for earlier, later in pairwise(times)]
    assert [round(wait, 1) >= least for wait, least in zip(waits, (0.5, 1.0, 2.0), strict=True)] == [True] * 3


@pytest.mark.parametrize("act", ["hang", "drip", "500", "drop"])
def test_the_end_of_a_run_is_not_held_up(act, caplog):
    caplog.set_level(logging.WARNING)
    with serve(*[act] * 50) as hook:
        sink = WebhookSink(url=hook.url, timeout=0.5, close_within=1.0)
        sink.write_event(alert())
        started = monotonic()
        sink.close()
        assert monotonic() - started < 2.5
    assert caplog.text.count("did not get") == 1


def test_nobody_listens_and_it_is_given_up(caplog):
    caplog.set_level(logging.WARNING)
    sink = WebhookSink(url=f"http://127.0.0.1:{free_port()}", give_up_after=1.0)
    sink.write_event(alert())
    wait_until(lambda: "did not get an alert" in caplog.text, seconds=10)
    sink.close()


def test_a_redirect_is_not_followed(caplog):
    caplog.set_level(logging.WARNING)
    with serve() as other, serve("elsewhere", elsewhere=f"{other.url}/steal") as hook:
        sink = WebhookSink(url=hook.url, headers={"Authorization": "Bearer abcdefgh"})
        sink.write_event(alert())
        sink.close()
        assert (len(hook.asked), other.asked) == (1, [])
    assert "answers 307 and sends elsewhere: give the address it leads to" in caplog.text


def test_a_refusal_is_said_and_not_tried_again(caplog):
    caplog.set_level(logging.WARNING)
    with serve("404") as hook:
        sink = WebhookSink(url=hook.url)
        sink.write_event(alert())
        sink.write_event(alert(key="kl_runaway@41"))
        hook.wait_for(1)
        sink.close()
        assert len(hook.asked) == 2
    assert "it answers 404" in caplog.text


# ---------------------------------------------------------------- settings


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no address": ({"url": "alertmanager:9093"}, "http:// or https://"),
    "another scheme": ({"url": "ftp://ada:s3cr3tword@host/s3cr3tpath"}, "http:// or https://"),
    "a wrong port": ({"url": "http://ada:s3cr3tword@host:99999/s3cr3tpath"}, "wrong port"),
    "an unset variable": ({"url": "$WEBHOOK_TEST_UNSET"}, "WEBHOOK_TEST_UNSET, which is not set"),
    "a stray dollar": ({"url": "http://h/s3cr3tpath$"}, r"write `\$\$`"),
    "a header's line break": ({"url": "http://h", "headers": {"X": "s3cr3tword\r\nY: z"}}, "no line breaks"),
    "a redacted url": ({"url": "https://hooks.slack.com/***"}, "taken out of the stored config"),
    "a redacted header": ({"url": "http://h", "headers": {"X": "***"}}, "headers.X was taken out"),
    "another format": ({"url": "http://h", "format": "xml"}, "'alertmanager' or 'json'"),
    "a template for alertmanager": ({"url": "http://h", "template": {}}, "format: json"),
    "an unknown word": (
        {"url": "http://h", "format": "json", "template": {"a": "$rulez"}},
        r"\$rulez, which is none of",
    ),
    "an attribute": (
        {"url": "http://h", "format": "json", "template": ["${rule.__class__}"]},
        "begins no word|none of",
    ),
    "no json": ({"url": "http://h", "format": "json", "template": "{"}, "not JSON"),
    "no time": ({"url": "http://h", "timeout": 0.0}, "timeout is 0.0"),
}


@pytest.mark.parametrize(("settings", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_one_sentence_without_secrets(settings, message):
    with pytest.raises(ConfigError, match=message) as told:
        WebhookSink(**settings)
    assert "s3cr3t" not in str(told.value)


# ---------------------------------------------------------------- secrets


# Made anew each time: the snapshot of a run holds the sources that are not committed yet, this file too.
USER, WORD, QUERY, PATH, HEADER = SECRETS = [token_hex(12) for _ in range(5)]
SECRET_PATH = f"/services/T000/B000/{PATH}?token={QUERY}"


def secret_url(address: str) -> str:
    return f"http://{USER}:{WORD}@{address.removeprefix('http://')}{SECRET_PATH}"


def test_user_and_headers_are_sent_and_nothing_of_them_is_said(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("WEBHOOK_TEST_TOKEN", HEADER)
    with serve("echo", "drop", "500") as hook:
        monkeypatch.setenv("WEBHOOK_TEST_URL", secret_url(hook.url))
        sink = WebhookSink(url="$WEBHOOK_TEST_URL", format="json", headers={"X-Token": "Token ${WEBHOOK_TEST_TOKEN}"})
        sink.write_event(alert())
        sink.write_event(alert(step=41))
        hook.wait_for(1)
        sink.close()
        ((path, headers, _),) = hook.got
    basic = b64encode(f"{USER}:{WORD}".encode()).decode()
    assert (path, headers["X-Token"]) == (SECRET_PATH, f"Token {HEADER}")
    assert headers["Authorization"] == f"Basic {basic}"
    assert "it answers 400: bad: ***" in caplog.text
    shown = caplog.text + repr(sink) + repr(vars(sink))
    for secret in [*SECRETS, basic, "T000", "B000"]:
        assert secret not in shown


REDACTED = {
    "slack": ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/***"),
    "user": ("https://ada:pw@am.example", "https://am.example/***"),
    "query": ("https://h:8/?x=abc", "https://h:8/***"),
    "own path": ("https://h/my/secret", "https://h/***"),
    "plain": ("http://127.0.0.1:9093", "http://127.0.0.1:9093"),
    "alertmanager": ("http://127.0.0.1:9093/api/v2/alerts", "http://127.0.0.1:9093/api/v2/alerts"),
    "variable": ("$SLACK_URL", "$SLACK_URL"),
    "half a variable": ("https://h/tok$X", "https://h/***"),
}


@pytest.mark.parametrize(("url", "clean"), REDACTED.values(), ids=REDACTED)
def test_a_stored_config_keeps_the_place_only(url, clean):
    assert redact_config({"run": {"sinks": {"webhook": {"url": url}}}})["run"]["sinks"]["webhook"] == {"url": clean}


def test_a_stored_config_keeps_no_header_and_no_key_of_a_template():
    hook = {
        "timeout": 3,
        "headers": {"A": "abc", "B": "$TOKEN", "C": "Bearer ${TOKEN}"},
        "template": {"routing_key": "R0", "text": "$text", "deep": [{"api_key": "k", "token": "${env.KEY}"}]},
    }
    clean = redact_config({"webhook": hook})["webhook"]
    assert clean == {
        "timeout": 3,
        "headers": {"A": "***", "B": "$TOKEN", "C": "Bearer ${TOKEN}"},
        "template": {"routing_key": "***", "text": "$text", "deep": [{"api_key": "***", "token": "${env.KEY}"}]},
    }
    text = redact_config({"webhook": {"template": json.dumps(hook["template"])}})["webhook"]["template"]
    assert json.loads(text) == clean["template"]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("see https://hooks.slack.com/services/T0/B0/x, ok", "see https://hooks.slack.com/*** ok"),
        ("https://discord.com/api/webhooks/123/abc", "https://discord.com/api/webhooks/***"),
        ("https://x.webhook.office.com/webhookb2/a@b/c", "https://x.webhook.office.com/***"),
        ("https://api.telegram.org/bot12:AB/send", "https://api.telegram.org/***"),
        ("https://chat.example/hooks/0123456789abcdefgh", "https://chat.example/hooks/***"),
        (
            "https://github.com/o/r/tree/main/hooks/pre-commit.sh",
            "https://github.com/o/r/tree/main/hooks/pre-commit.sh",
        ),
    ],
)
def test_known_hooks_are_redacted_in_any_text(text, clean):
    assert redact_text(text) == clean


@pytest.mark.slow
def test_a_run_writes_no_secret_anywhere(tmp_path, monkeypatch, caplog, capfd):
    """A whole run with a webhook that refuses: journal, MLflow, config, evidence, terminal, log."""
    import yaml
    from support.tiny import make_tiny_model, write_prompts

    from grpo_lightning.cli.main import main

    caplog.set_level(logging.INFO)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    model, prompts = make_tiny_model(tmp_path), write_prompts(tmp_path / "train.jsonl")
    (tmp_path / "rules.yaml").write_text(
        "- {name: at_once, signal: reward_mean, above: -1.0, action: pause, severity: critical, cause: data,"
        " summary: 'it is {value}', runbook: r.md}\n"
    )
    with serve("echo") as hook:
        hooked = {"url": secret_url(hook.url), "headers": {"X-Token": HEADER}, "format": "json"}
        settings = {
            "model": {
                "model": str(model),
                "rewards": [{"path": "support.tiny:dense"}],
                "group_size": 2,
                "sampling": {"max_new_tokens": 4},
            },
            "data": {"train": str(prompts), "prompts_per_step": 4},
            "trainer": {"max_steps": 3, "accelerator": "cpu"},
            "run": {"sinks": {"webhook": hooked}},
            "health": {"rules": ["rules.yaml"]},
        }
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
        assert main(["fit", "--config", "settings.yaml"]) == 75
        assert [path for _, path, _ in hook.asked] == [SECRET_PATH]
    (tmp_path / "settings.yaml").unlink()
    found = dict(_everything(tmp_path))
    captured = "\n".join(text for place, text in found.items() if "snapshot" in place.parts)
    written = "\n".join(text for place, text in found.items() if "snapshot" not in place.parts)
    written += caplog.text + "".join(capfd.readouterr())
    assert "it answers 400: bad: ***" in written
    assert f"{hook.url}/***" in written
    assert [secret in written for secret in SECRETS] == [False] * 5
    assert "webhook" in captured
    assert [secret in captured for secret in SECRETS] == [False] * 5


def _everything(folder: Path) -> Iterator[tuple[Path, str]]:
    """Every file below `folder`; of a database the rows too."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        rows = ""
        if path.suffix in (".sqlite", ".db"):
            with sqlite3.connect(path) as db:
                rows = "\n".join(db.iterdump())
        yield path, rows + path.read_bytes().decode("latin-1")


# ---------------------------------------------------------------- a real Alertmanager


@needs_alertmanager
def test_a_real_alertmanager_shows_raises_and_resolves(tmp_path):
    mild = {"severity": "warning", "action": "notify"}

    def severities() -> list[str]:
        return sorted(found["labels"]["severity"] for found in known_to(url))

    with alertmanager(tmp_path) as url:
        sink = WebhookSink(url=url, **IDENTITY)
        sink.write_event(alert(**mild))
        wait_until(lambda: severities() == ["warning"])
        sink.write_event(alert("escalated", 50))
        wait_until(lambda: severities() == ["critical"])
        (shown,) = known_to(url)
        assert shown["labels"]["alertname"] == "variance_collapse"
        assert shown["annotations"]["summary"] == PAYLOAD["summary"]
        assert shown["status"]["state"] in ("active", "unprocessed")
        sink.write_event(alert("resolved", 60))
        wait_until(lambda: severities() == [])
        sink.write_event(alert(key="kl_runaway@70", step=70))
        sink.close()
        assert severities() == ["critical"], "a paused run's alert stays"
