"""How a signal is called in Prometheus.

1. ``group_reward_std`` is ``grpo_group_reward_std``, a gauge.
2. ``reward/<function>_mean`` is ``grpo_reward_function_mean{function="<function>"}``; so with ``_std``, ``_missing``,
   ``_errors`` and ``_seconds``. What functions log themselves, ``reward_metric/<name>``, is
   ``grpo_reward_metric{metric="<name>"}``.
3. Prometheus keeps the endings ``_total``, ``_count``, ``_sum``, ``_bucket``, ``_created`` and ``_info`` for other types: such
   a gauge ends with ``_value`` besides (``grpo_nonfinite_count_value``). So does one that would have a name of
   `OWN_METRICS`.
4. Other characters become ``_``, and the label ``signal`` holds the name as it was, so that no two signals ever mix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

from grpo_lightning.errors import ConfigError
from grpo_lightning.signals import signal
from grpo_lightning.signals.entries import PATTERNS

__all__ = ["OWN_METRICS", "PREFIX", "Metric", "metric_of"]

PREFIX = "grpo_"
OWN_METRICS = {
    "grpo_step": "The optimizer step that the signals are of, counted from 1",
    "grpo_segment": "The part of the run between two (re)starts, counted from 1",
    "grpo_step_timestamp_seconds": "When the step was recorded, seconds since the epoch",
    "grpo_run_info": "1; the labels name and describe the run",
    "grpo_alerts": "Alerts raised in this segment",
    "grpo_alerts_total": "Alerts raised in this segment",
    "grpo_alert_open": "Alerts of this segment whose rule still holds",
    "grpo_recoveries": "Automatic recoveries in this segment",
    "grpo_recoveries_total": "Automatic recoveries in this segment",
    "grpo_evaluation_step": "The optimizer step of the last evaluation",
}
_RESERVED = ("_total", "_count", "_sum", "_bucket", "_created", "_info")
_STATISTICS = "|".join(row[0].removeprefix("reward/<name>_") for row in PATTERNS)
_OF_FUNCTION = re.compile(rf"reward/(?P<function>.+)_(?P<statistic>{_STATISTICS})", re.DOTALL)

_METRIC = re.compile(r"reward_metric/(?P<metric>.+)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A signal as Prometheus has it."""

    name: str
    help: str  # formula, unit and reading, in one line
    labels: dict[str, str] = field(default_factory=dict)  # besides run_id and run_name


@lru_cache(maxsize=4096)
def metric_of(name: str) -> Metric:
    """The metric of the signal `name`.

    >>> metric_of("reward/exact_match_mean").name, metric_of("reward/exact_match_mean").labels
    ('grpo_reward_function_mean', {'function': 'exact_match'})
    """
    found = _OF_FUNCTION.fullmatch(name)
    if found is not None:
        text = _help(f"reward/_{found['statistic']}")
        return Metric(
            name=f"{PREFIX}reward_function_{found['statistic']}", help=text, labels={"function": found["function"]}
        )
    logged = _METRIC.fullmatch(name)
    if logged is not None:
        text = "What a reward function says about itself: the mean over its calls and the ranks"
        return Metric(name=f"{PREFIX}reward_metric", help=text, labels={"metric": logged["metric"]})
    clean = PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)
    alike = clean.endswith("_value") and _is_taken(clean.removesuffix("_value"))  # another signal may get this name
    labels = {"signal": name} if alike or clean != PREFIX + name else {}
    return Metric(name=f"{clean}_value" if _is_taken(clean) else clean, help=_help(name), labels=labels)


def _is_taken(name: str) -> bool:
    return name.endswith(_RESERVED) or name in OWN_METRICS


def _help(name: str) -> str:
    try:
        entry = signal(name.replace("reward/_", "reward/x_"))
    except ConfigError:
        return "A number of this run that is not in the catalogue"
    unit = f" [{entry.unit}]" if entry.unit else ""
    return f"{entry.formula[:1].upper()}{entry.formula[1:]}{unit}. {entry.reading}"
