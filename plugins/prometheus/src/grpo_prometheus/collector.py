"""What a scrape of one run sees: the signals of its last step, its alerts, its recoveries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from threading import Event, Lock
from typing import Any

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from grpo_lightning.errors import ConfigError
from grpo_lightning.signals import signal
from grpo_lightning.sinks import EventRow, StepRow
from grpo_prometheus.names import OWN_METRICS, metric_of

__all__ = ["RunCollector"]

_SELDOM = ("data", "evaluation", "probe")  # measured every N steps: a scrape sees the last measurement
_Labels = tuple[tuple[str, str], ...]


class RunCollector(Collector):
    """Holds the run's newest numbers; `collect` may be called from any thread.

    A signal that the last step did not measure is absent, never 0; those that are measured every N steps only
    (evaluation, probe, data) stay until the next measurement. NaN and ±Inf are shown as such.
    """

    def __init__(self, *, run_id: str = "", run_name: str = "", description: str = "") -> None:
        self._run_id, self._run_name, self._description = run_id, run_name, description
        self._lock = Lock()
        self._step: StepRow | None = None
        self._seldom: dict[str, float] = {}
        self._evaluation_step: int | None = None
        self._raised: Counter[_Labels] = Counter()
        self._seen: set[str] = set()  # alerts' ids
        self._open: dict[str, _Labels] = {}  # by the alert's id
        self._shown = Event()  # a scrape has seen the newest alert
        self._recoveries: Counter[_Labels] = Counter()

    def step(self, row: StepRow) -> None:
        """The run's newest step."""
        with self._lock:
            self._run_id = self._run_id or row.run_id
            self._step = row
            self._seldom.update({name: value for name, value in row.values.items() if _is_seldom(name)})

    def event(self, row: EventRow) -> None:
        """An alert, a recovery or an evaluation; notes have no number."""
        with self._lock:
            self._run_id = self._run_id or row.run_id
            if row.kind == "alert":
                self._alert(row)
            elif row.kind == "recovery":
                self._recoveries[(("kind", row.name),)] += 1
            elif row.kind == "evaluation":
                self._evaluation_step = row.step
                self._seldom.update(_numbers(row.payload))

    def _alert(self, row: EventRow) -> None:
        """Count an alert once, however often its row comes: it may rise in severity, and ends with `resolved`."""
        told = row.payload
        labels = (
            ("rule", str(told.get("rule", row.name))),
            ("severity", str(told.get("severity", ""))),
            ("action", str(told.get("action", ""))),
        )
        if row.key not in self._seen:
            self._raised[labels] += 1
        self._seen.add(row.key)
        if told.get("state") == "resolved":
            self._open.pop(row.key, None)
        else:
            self._open[row.key] = labels
        self._shown.clear()

    def wait_until_shown(self, seconds: float) -> None:
        """Wait for a scrape where an open alert pauses the run and none has seen it: the run is about to end."""
        with self._lock:
            pausing = any(("action", "pause") in labels for labels in self._open.values())
        if pausing:
            self._shown.wait(seconds)

    def collect(self) -> Iterator[Family]:
        """The families of one scrape."""
        with self._lock:
            row, seldom = self._step, dict(self._seldom)
            raised, open_now = dict(self._raised), Counter(self._open.values())
            recoveries, evaluated = dict(self._recoveries), self._evaluation_step
            self._shown.set()
        yield from self._about_the_run(row, evaluated)
        yield from self._signals({**seldom, **(row.values if row else {})})
        yield self._family("grpo_alerts", "counter", raised)
        yield self._family("grpo_alert_open", "gauge", open_now)
        yield self._family("grpo_recoveries", "counter", recoveries)

    def _about_the_run(self, row: StepRow | None, evaluated: int | None) -> Iterator[Family]:
        if self._run_id:
            yield self._family("grpo_run_info", "gauge", {(("description", self._description),): 1})
        if row is not None:
            yield self._family("grpo_step", "gauge", {(): row.step})
            yield self._family("grpo_segment", "gauge", {(): row.segment})
            yield self._family("grpo_step_timestamp_seconds", "gauge", {(): row.time})
        if evaluated is not None:
            yield self._family("grpo_evaluation_step", "gauge", {(): evaluated})

    def _signals(self, values: Mapping[str, float]) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for name, value in values.items():
            metric = metric_of(name)
            family = families.setdefault(metric.name, Family(metric.name, metric.help, "gauge"))
            family.add_sample(metric.name, self._labels(metric.labels), float(value))
        yield from families.values()

    def _family(self, name: str, kind: str, samples: Mapping[Any, float]) -> Family:
        family = Family(name, OWN_METRICS[name], kind)
        sample = f"{name}_total" if kind == "counter" else name
        for labels, value in samples.items():
            family.add_sample(sample, self._labels(dict(labels)), value)
        return family

    def _labels(self, more: Mapping[str, str]) -> dict[str, str]:
        labels = {"run_id": self._run_id, "run_name": self._run_name or self._run_id, **more}
        return {key: value.encode("utf-8", "backslashreplace").decode() for key, value in labels.items()}


@lru_cache(maxsize=4096)
def _is_seldom(name: str) -> bool:
    try:
        return signal(name).family in _SELDOM
    except ConfigError:
        return False


def _numbers(payload: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in payload.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
