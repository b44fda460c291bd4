"""The dashboards: every signal once, on its page, with a query that Prometheus takes."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard
from grpo_prometheus import build_dashboards, metric_of
from grpo_prometheus.dashboards import unit_of

from grpo_lightning.signals import CATALOGUE, signal

BUILT = build_dashboards()
PAGES = ("1_overview", "2_health", "3_diagnosis")


def panels(page: str) -> list[dict[str, Any]]:
    return [panel for panel in BUILT[page]["panels"] if panel["type"] != "row"]


def queries(page: str) -> Iterator[str]:
    for panel in panels(page):
        for target in panel["targets"]:
            yield target["expr"]
    for annotation in BUILT[page]["annotations"]["list"]:
        yield annotation["expr"]


def test_three_pages_in_order_that_link_to_each_other() -> None:
    assert tuple(BUILT) == PAGES
    assert [d["title"] for d in BUILT.values()] == ["GRPO 1: overview", "GRPO 2: health", "GRPO 3: diagnosis"]
    assert len({d["uid"] for d in BUILT.values()}) == 3
    for board in BUILT.values():
        (link,) = board["links"]
        assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True)
        assert set(link["tags"]) <= set(board["tags"])


@pytest.mark.parametrize("page", PAGES)
def test_the_run_is_the_first_filter_and_every_query_uses_it(page: str) -> None:
    first, source, *_ = BUILT[page]["templating"]["list"]
    assert (first["name"], first["type"], first["query"]) == ("run_id", "query", "label_values(grpo_step, run_id)")
    assert first["multi"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    for expr in queries(page):
        assert 'run_id=~"$run_id"' in expr
    for panel in panels(page):
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("page", PAGES)
def test_every_signal_of_the_page_has_one_panel_with_its_metric_unit_and_reading(page: str) -> None:
    shown = {
        panel["title"]: panel for panel in panels(page) if panel["type"] == "timeseries" and panel["title"][0] != "$"
    }
    wanted = [s for s in CATALOGUE.values() if s.page == page and s.family != "evaluation"]
    functions = {f"reward/<function>_{s}" for s in ("mean", "std", "missing", "errors", "seconds")}
    assert set(shown) == {s.name for s in wanted} | (functions if page == "1_overview" else set())
    for entry in wanted:
        panel = shown[entry.name]
        (target,) = panel["targets"]
        assert target["expr"] == f'{metric_of(entry.name).name}{{run_id=~"$run_id"}}'
        assert target["legendFormat"] == "{{run_name}} ({{run_id}})"
        assert panel["fieldConfig"]["defaults"]["unit"] == unit_of(entry)
        assert entry.formula in panel["description"]
        assert entry.reading in panel["description"]


def test_reward_functions_evaluation_and_probe_have_their_panels() -> None:
    by_title = {panel["title"]: panel for page in PAGES for panel in panels(page)}
    mean = by_title["reward/<function>_mean"]["targets"][0]
    assert mean["expr"] == 'grpo_reward_function_mean{run_id=~"$run_id"}'
    assert mean["legendFormat"].startswith("{{function}}")
    for name, page in (("eval", "1_overview"), ("probe", "3_diagnosis")):
        assert by_title[f"${name}"]["repeat"] == name
        assert by_title[f"${name}"]["targets"][0]["expr"] == f'{{__name__="${name}", run_id=~"$run_id"}}'
        (variable,) = [v for v in BUILT[page]["templating"]["list"] if v["name"] == name]
        assert f"grpo_{name}_.+" in variable["query"]


UNITS = [
    ("dead_group_fraction", "percentunit"),
    ("step_seconds", "s"),
    ("tokens_per_second", "suffix: /s"),
    ("response_length_mean", "suffix: tokens"),
    ("kl", "suffix: nats"),
    ("reward_mean", "short"),
    ("advantage_top_group_share", "percentunit"),
]


@pytest.mark.parametrize(("name", "unit"), UNITS)
def test_units(name: str, unit: str) -> None:
    assert unit_of(signal(name)) == unit


@pytest.mark.parametrize("page", PAGES)
def test_panels_lie_inside_the_grid_without_overlap(page: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BUILT[page]["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert all(0 <= x < 24 for x, _ in cells)
        taken |= cells


@pytest.mark.parametrize("page", PAGES)
def test_alerts_are_annotations(page: str) -> None:
    (alerts,) = BUILT[page]["annotations"]["list"]
    assert alerts["enable"]
    assert alerts["expr"] == 'grpo_alert_open{run_id=~"$run_id"} > 0'
    assert (alerts["titleFormat"], alerts["tagKeys"]) == ("{{rule}}", "severity,action")


@pytest.mark.parametrize("page", PAGES)
def test_the_schema_reads_back_what_was_written(page: str) -> None:
    text = json.dumps(BUILT[page])
    read = Dashboard.from_json(json.loads(text))
    assert (read.title, read.uid) == (BUILT[page]["title"], BUILT[page]["uid"])
    assert read.panels is not None
    assert len(read.panels) == len(BUILT[page]["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
def test_prometheus_takes_every_query(tmp_path: Path) -> None:
    exprs = [e.replace("$run_id", "r1").replace("$eval", "a").replace("$probe", "b") for p in PAGES for e in queries(p)]
    rules = [{"record": f"q{i}", "expr": expr} for i, expr in enumerate(exprs)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
