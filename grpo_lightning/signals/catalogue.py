"""The catalogue: every signal's name, page, family, unit, formula, sense, merge kind and reading. No torch.

A short name is the same everywhere: rules and journal ``group_reward_std``, MLflow ``2_health/group_reward_std``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType

from grpo_lightning.errors import ConfigError
from grpo_lightning.signals.entries import PATTERNS, SIGNALS, Page, Sense, Signal

__all__ = ["CATALOGUE", "Page", "Sense", "Signal", "page_of", "signal", "signal_names"]

CATALOGUE: Mapping[str, Signal] = MappingProxyType({s.name: s for s in SIGNALS})
_OF_FUNCTION = {row[0].removeprefix("reward/<name>"): row for row in PATTERNS}
_REWARD_NAME = re.compile(rf"reward/(.+)({'|'.join(_OF_FUNCTION)})", re.DOTALL)


def signal(name: str) -> Signal:
    """The catalogue's entry; an unknown name raises with the nearest ones.

    Patterned names have entries too: ``reward/<name>_mean``, ``_std``, ``_missing``, ``_errors`` and ``_seconds`` of a reward
    function, ``reward_metric/<name>`` of what it logs, ``probe_<signal>`` and ``eval_<anything>``.
    """
    if name in CATALOGUE:
        return CATALOGUE[name]
    found = _of_function(name) or _of_metric(name) or _of_probe(name) or _of_evaluation(name)
    if found is not None:
        return found
    near = get_close_matches(name, CATALOGUE, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else "see the catalogue's names."
    raise ConfigError(f"{name!r} is not a signal: {hint}")


def signal_names() -> frozenset[str]:
    """Every name, the patterned ones with `<name>` in the place of what varies: for checking rules."""
    patterns = {row[0] for row in PATTERNS} | {
        "reward_metric/<name>",
        "probe_<name>",
        "eval_<name>",
        "eval_reward/<name>",
    }
    return frozenset(CATALOGUE) | patterns


def page_of(name: str) -> Page:
    """The MLflow page of a signal; numbers that are not in the catalogue belong to health."""
    try:
        return signal(name).page
    except ConfigError:
        return "2_health"


def _of_function(name: str) -> Signal | None:
    match = _REWARD_NAME.fullmatch(name)
    if match is None:
        return None
    _, unit, formula, sense, merge, reading = _OF_FUNCTION[match[2]]
    return Signal(
        name=name,
        page="1_overview",
        family="reward",
        unit=unit,
        formula=formula,
        sense=sense,
        merge=merge,
        reading=reading,
    )


def _of_metric(name: str) -> Signal | None:
    if not re.fullmatch(r"reward_metric/.+", name, re.DOTALL):
        return None
    return Signal(
        name=name,
        page="3_diagnosis",
        family="reward",
        unit="",
        formula=f"{name.removeprefix('reward_metric/')!r} as reward functions log it (log_metric), mean over calls and ranks",
        sense="none",
        merge="mean",
        reading="What the reward function says about itself.",
    )


def _of_probe(name: str) -> Signal | None:
    of_name = name.removeprefix("probe_")
    of = (CATALOGUE.get(of_name) or _of_function(of_name)) if of_name != name else None
    if of is None:
        return None
    return replace(
        of, name=name, page="3_diagnosis", family="probe", formula=f"{of.formula}; on frozen prompts and seeds"
    )


def _of_evaluation(name: str) -> Signal | None:
    if not re.fullmatch(r"eval_\w[\w./-]*", name):
        return None
    return Signal(
        name=name,
        page="1_overview",
        family="evaluation",
        unit="",
        formula=f"{name.removeprefix('eval_').replace('_', ' ')} of greedy answers to held-out prompts",
        sense="none",
        merge="mean",
        reading="Compare with the same signal of training.",
    )
