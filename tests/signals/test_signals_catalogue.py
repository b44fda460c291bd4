"""The catalogue names everything that is measured, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
from signal_records import make_record, of_groups

from grpo_lightning.errors import ConfigError
from grpo_lightning.signals import CATALOGUE, TemporalState, UpdateSize, finish, measure, page_of, signal
from grpo_lightning.signals.temporal import _LEAST_NORMS

ELSEWHERE = {"monitor_seconds", "probe_seconds", "eval_accuracy", "environment_drift", "data_drift", "reward_drift"}


def _everything() -> set[str]:
    record = make_record(
        [[0.0, 1.0]] * 2,
        ids=[[[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [1, 2, 3, 4]]],
        tokens={"ref": -1.5},
        seconds=dict.fromkeys(("step", "rollout", "reward", "score", "update"), 1.0),
        reward_errors={"f0": 0},
        reward_seconds={"f0": 0.1},
        kl_loss=0.1,
        kl_coef=0.1,
        advantages=[[1.0, -0.5], [0.5, -0.5]],
    )
    update = UpdateSize(update_squares=1.0, weight_squares=4.0)
    parts = [measure(of_groups(record, [g]), update=update) for g in (0, 1)]
    values = finish([part.pack() for part in parts], parts[0], record)
    state = TemporalState(source_ruler=[1.0, 1.0])
    for _ in range(max(20, _LEAST_NORMS)):
        derived = state.update(values, sources=[2.0, 2.0])
    return set(values) | set(derived)


def test_what_is_measured_and_the_catalogue_agree() -> None:
    measured = _everything()
    assert {name for name in measured if not name.startswith("reward/")} | ELSEWHERE == set(CATALOGUE)
    assert {n for n in measured if n.startswith("reward/")} == {
        f"reward/f0_{what}" for what in ("mean", "std", "missing", "errors", "seconds")
    }


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_entry_says_what_it_is_and_how_to_read_it(name: str) -> None:
    entry = signal(name)
    assert entry.name == name
    assert entry.formula
    assert entry.reading.endswith(".")


def test_no_name_stands_twice() -> None:
    from grpo_lightning.signals.entries import SIGNALS

    assert len(SIGNALS) == len(CATALOGUE)


@pytest.mark.parametrize(
    ("name", "page", "sense"),
    [
        ("reward_mean", "1_overview", "low"),
        ("group_reward_std", "2_health", "low"),
        ("prompt_length_mean", "3_diagnosis", "both"),
        ("reward/my_reward_mean_mean", "1_overview", "low"),
        ("reward/format_errors", "1_overview", "high"),
        ("eval_reward_mean", "1_overview", "none"),
        ("probe_entropy", "3_diagnosis", "both"),
        ("probe_reward/my_reward_mean", "3_diagnosis", "low"),
        ("reward_metric/parsed share", "3_diagnosis", "none"),
    ],
)
def test_pages_and_senses(name: str, page: str, sense: str) -> None:
    assert (page_of(name), signal(name).page, signal(name).sense) == (page, page, sense)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("group_reward_stdd", "group_reward_std"),
        ("entropi", "entropy"),
        ("probe_entropi", "not a signal"),
        ("reward/f0_median", "not a signal"),
        ("reward/_mean", "not a signal"),
        ("eval_", "not a signal"),
    ],
)
def test_an_unknown_name_raises_with_near_ones(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        signal(name)


def test_a_foreign_number_lands_on_the_health_page() -> None:
    assert page_of("my_own_number") == "2_health"


@pytest.mark.parametrize("name", ["loss", "policy_loss"])
def test_the_loss_is_said_to_be_no_health_signal(name: str) -> None:
    assert "no health signal" in signal(name).reading


def test_the_catalogue_loads_without_torch() -> None:
    code = "import sys; from grpo_lightning.signals import signal; signal('kl'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("first", ["finish", "join", "measure"])
def test_functions_are_no_modules_whichever_loads_first(first: str) -> None:
    code = f"from grpo_lightning.signals import {first}; from grpo_lightning import signals; signals.measure.__call__"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
