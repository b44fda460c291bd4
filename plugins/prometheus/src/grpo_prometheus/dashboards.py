"""Grafana dashboards from the catalogue: one a page, with the run as the first filter and alerts as annotations.

Built with Grafana's own grafana-foundation-sdk, for Grafana 10.1 and later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, get_args

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models

from grpo_lightning.signals import CATALOGUE, Signal, signal
from grpo_lightning.signals.entries import PATTERNS, Page
from grpo_prometheus.names import PREFIX, metric_of

__all__ = ["TITLES", "build_dashboards", "unit_of"]

TITLES: dict[Page, str] = {
    "1_overview": "GRPO 1: overview",
    "2_health": "GRPO 2: health",
    "3_diagnosis": "GRPO 3: diagnosis",
}
_OF_RUN = '{run_id=~"$run_id"}'
_LEGEND = "{{run_name}} ({{run_id}})"
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_UNITS = {"": "short", "s": "s", "1/s": "suffix: /s", "tokens": "suffix: tokens"}
_SHARES = ("_fraction", "_share", "_repetition", "_agreement", "_accuracy")
_BAD = {"low": "Low is bad.", "high": "High is bad.", "both": "Both directions are bad.", "none": ""}


def build_dashboards() -> dict[str, dict[str, Any]]:
    """The JSON of each page's dashboard, by page."""
    return {page: _page(page) for page in get_args(Page)}


def _page(page: Page) -> dict[str, Any]:
    made = _frame(page)
    if page == "1_overview":
        _add_run_row(made)
    for family, entries in groupby(_signals_of(page), key=lambda entry: entry.family):
        made.with_row(dashboard.Row(family))
        for entry in entries:
            made.with_panel(_panel(entry))
    if page != "2_health":
        prefix = "eval_" if page == "1_overview" else "probe_"
        made.with_row(dashboard.Row("evaluation" if page == "1_overview" else "probe"))
        made.with_panel(_repeated(prefix))
    built: dict[str, Any] = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    _describe_alerts(built)
    return built


def _signals_of(page: Page) -> Iterator[Signal]:
    """The page's signals in the catalogue's order; evaluation and probe are repeated panels of their own."""
    yield from (s for s in CATALOGUE.values() if s.page == page and s.family != "evaluation")
    if page == "1_overview":
        yield from (signal(row[0].replace("<name>", "$function")) for row in PATTERNS)


def _frame(page: Page) -> dashboard.Dashboard:
    run_id = (
        dashboard.QueryVariable("run_id")
        .label("run")
        .datasource(_SOURCE)
        .query("label_values(grpo_step, run_id)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_DESC)
        .multi(True)
        .include_all(True)
    )
    source = dashboard.DatasourceVariable("datasource").label("data source").type("prometheus")
    pages = dashboard.DashboardLink("GRPO").type(models.DashboardLinkType.DASHBOARDS).tags(["grpo-lightning"])
    alerts = (
        dashboard.AnnotationQuery()
        .name("alerts")
        .datasource(_SOURCE)
        .enable(True)
        .icon_color("red")
        .expr(f"grpo_alert_open{_OF_RUN} > 0")
    )
    made = (
        dashboard.Dashboard(TITLES[page])
        .uid(f"grpo-lightning-{page.replace('_', '-')}")
        .tags(["grpo-lightning", page])
        .time("now-6h", "now")
        .refresh("30s")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(run_id)
        .with_variable(source)
        .annotation(alerts)
        .link(pages.include_vars(True).keep_time(True))
    )
    return made if page == "2_health" else made.with_variable(_names("eval_" if page == "1_overview" else "probe_"))


def _names(prefix: str) -> dashboard.QueryVariable:
    """The metrics that begin with `prefix`, one panel each."""
    return (
        dashboard.QueryVariable(prefix.rstrip("_"))
        .datasource(_SOURCE)
        .query(f'label_values({{__name__=~"{PREFIX}{prefix}.+", run_id=~"$run_id"}}, __name__)')
        .hide(models.VariableHide.HIDE_VARIABLE)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )


def _query(expr: str, legend: str = _LEGEND) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expr).legend_format(legend).datasource(_SOURCE).ref_id("A")


def _add_run_row(made: dashboard.Dashboard) -> None:
    made.with_row(dashboard.Row("run"))
    for title, expr, unit in (
        ("step", f"grpo_step{_OF_RUN}", "none"),
        ("open alerts", f"sum by (run_id, run_name) (grpo_alert_open{_OF_RUN}) or 0 * grpo_step{_OF_RUN}", "none"),
        ("since the last step", f"time() - grpo_step_timestamp_seconds{_OF_RUN}", "s"),
    ):
        panel = stat.Panel().title(title).datasource(_SOURCE).unit(unit).height(4).span(4)
        made.with_panel(panel.with_target(_query(expr).instant()))
    alerts = prometheus.Dataquery().expr(f"grpo_alert_open{_OF_RUN} > 0").instant().datasource(_SOURCE).ref_id("A")
    alerts.format(_table_format())
    made.with_panel(table.Panel().title("alerts").datasource(_SOURCE).height(4).span(12).with_target(alerts))


def _table_format() -> Any:
    from grafana_foundation_sdk.models.prometheus import PromQueryFormat

    return PromQueryFormat.TABLE


def _panel(entry: Signal) -> timeseries.Panel:
    """One signal over time, a line a run (and a reward function)."""
    metric = metric_of(entry.name)
    legend = "{{function}}, " + _LEGEND if metric.labels else _LEGEND
    title = entry.name.replace("$function", "<function>")
    return _plot(title, unit_of(entry)).description(_text(entry)).with_target(_query(f"{metric.name}{_OF_RUN}", legend))


def _repeated(prefix: str) -> timeseries.Panel:
    variable = prefix.rstrip("_")
    expr = f'{{__name__="${variable}", run_id=~"$run_id"}}'
    panel = _plot(f"${variable}", "short").with_target(_query(expr))
    return panel.repeat(variable).repeat_direction("h").span(8)


def _plot(title: str, unit: str) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(shapes.LegendDisplayMode.LIST).show_legend(True)
    legend = legend.placement(shapes.LegendPlacement.BOTTOM)
    return (
        timeseries.Panel()
        .title(title)
        .datasource(_SOURCE)
        .unit(unit)
        .height(7)
        .span(8)
        .line_width(1)
        .span_nulls(False)
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.NONE))
    )


def unit_of(entry: Signal) -> str:
    """Grafana's name of a signal's unit: shares of a whole are percentages."""
    if not entry.unit and any(part in entry.name for part in _SHARES):
        return "percentunit"
    return _UNITS.get(entry.unit, f"suffix: {entry.unit}")


def _text(entry: Signal) -> str:
    unit = f" ({entry.unit})" if entry.unit else ""
    return f"{entry.formula}{unit}\n\n{entry.reading} {_BAD[entry.sense]}".strip()


def _describe_alerts(built: dict[str, Any]) -> None:
    """What the SDK has no setters for: the words of a Prometheus annotation."""
    for annotation in built["annotations"]["list"]:
        annotation |= {"titleFormat": "{{rule}}", "textFormat": _LEGEND, "tagKeys": "severity,action", "step": "15s"}
