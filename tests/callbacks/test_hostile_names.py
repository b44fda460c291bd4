"""A real run whose reward function logs hostile names and numbers, whose name is markup: everywhere, nothing lost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import make_module, record_run, steps_of

from grpo_lightning.training.data import PromptDataModule

MakeData = Callable[..., PromptDataModule]
NAMES = [
    *(
        'a"b',
        "new\nline",
        "sl/ash//x",
        "ünï/ß",
        "x" * 300,
        "é" * 200,
        "[bold red]m[/]",
        "%s{}",
        "../..",
        "a_mean",
        "sp ace",
    ),
    *("\x1b[31mred", "<script>", "\ud800", "", "a:b", "a;b", "1e5", "step", "tab\there", "NaN", "k=v", "a\\b", "日本"),
]
RUN_NAME = '[bold red]run[/] "x"\n<b>${7*7}'


def hostile(completions: list[str], log_metric: Any = None, log_extra: Any = None, **_: Any) -> list[float]:
    """Logs a number under each name, and two that are not finite."""
    for number, name in enumerate(NAMES):
        log_metric(name, number + 0.5)
    log_metric("nan", math.nan)
    log_metric("inf", math.inf)
    log_extra("said \ud800", ["\udcff\x1b[31m<script>"] * len(completions))
    return [sum(map(ord, c)) % 17 / 17 for c in completions]


def test_every_name_is_a_curve_of_its_own(
    tmp_path: Path,
    tiny_model: Path,
    make_data: MakeData,
    mlflow_store: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store)
    monkeypatch.chdir(tmp_path)
    run = record_run(
        tmp_path / "runs",
        make_module(tiny_model, f"{__file__}:hostile"),
        make_data(),
        2,
        mlflow=True,
        name=RUN_NAME,
        description="<script>alert(1)</script>\x1b[31m",
        sinks={"jsonl": {"path": str(tmp_path / "rows.jsonl")}},
        evidence_every=1,
    )
    expected = {f"reward_metric/{name}": number + 0.5 for number, name in enumerate(NAMES)}
    for row in steps_of(run):
        assert {name: row.values[name] for name in expected} == expected
        assert math.isnan(row.values["reward_metric/nan"])

    found = MlflowClient(tracking_uri=mlflow_store).get_run(run.run_id)
    arrived = {
        key: value for key, value in found.data.metrics.items() if "/reward_metric/" in key and "nonfinite" not in key
    }
    assert sorted(arrived.values()) == sorted(expected.values())
    assert found.data.metrics["nonfinite/reward_metric/nan"] == 2.0
    assert found.info.run_name == RUN_NAME

    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()]
    assert [[line["step"], *(line.get(name) for name in expected)] for line in lines] == [
        [step, *expected.values()] for step in (1, 2)
    ]

    assert len(list(run.evidence.glob("*.jsonl"))) == 2
    assert "\x1b" not in capsys.readouterr().out
