"""Runs of grpo-lightning in Prometheus and Grafana: a sink, alert rules, dashboards."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_prometheus.dashboards import build_dashboards
    from grpo_prometheus.names import Metric, metric_of
    from grpo_prometheus.sink import PrometheusSink

__all__ = ["Metric", "PrometheusSink", "build_dashboards", "metric_of"]

_HOMES = {"Metric": "names", "PrometheusSink": "sink", "build_dashboards": "dashboards", "metric_of": "names"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
