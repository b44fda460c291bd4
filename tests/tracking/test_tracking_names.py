"""Names and values that MLflow takes, with nothing lost and nothing merged."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name, _validate_param_name

from grpo_lightning.tracking.names import clean_key, flatten, metric_key, nonfinite_key, shorten_param


@pytest.mark.parametrize("name", ["kl", "reward/format_mean", "eval_pass.1", "loss β", "a-b", "x" * 200])
def test_a_name_that_mlflow_takes_stays(name):
    assert clean_key(name) == name


# Lightning's logger drops the refused characters: the two of each pair become one name.
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("loss@1", "loss1"),
        ("loss@1", "loss=1"),
        ("loss@1", "loss_1"),
        ("c:d", "cd"),
        ("a//b", "a/b"),
        ("/a", "a"),
        ("a/", "a"),
        ("../a", "a"),
        ("a/./b", "a/b"),
        ("", "_"),
        ("x" * 400, "x" * 399),
        ("x" * 400 + "a", "x" * 400 + "b"),
    ],
)
def test_refused_names_do_not_collide(one, other):
    assert clean_key(one) != clean_key(other)


def test_a_name_made_to_look_cleaned_does_not_collide():
    assert clean_key(clean_key("loss@1")) != clean_key("loss@1")


@given(st.text(max_size=300))
def test_mlflow_takes_every_cleaned_name(name):
    for key in (metric_key(name, lambda _: "3_diagnosis"), nonfinite_key(name)):
        _validate_metric_name(key)
        _validate_param_name(clean_key(name))
        assert len(key) <= 250


@given(st.lists(st.text(alphabet="ab@:=/._-0", max_size=12), unique=True, max_size=40))
def test_cleaning_is_one_to_one(names):
    assert len({clean_key(name) for name in names}) == len(names)


def test_pages():
    pages = {"kl": "1_overview"}
    assert metric_key("kl", pages.get) == "1_overview/kl"
    assert metric_key("mine", pages.get) == "2_health/mine"
    assert metric_key("mine", pages.__getitem__) == "2_health/mine"


def test_flatten_keeps_every_setting():
    settings = {
        "optimizer": {"lr": 1e-6, "betas": [0.9, 0.95]},
        "callbacks": [{"class_path": "A"}, {"class_path": "B"}],
        "nothing": None,
        "empty": {},
        "on": True,
    }
    assert dict(flatten(settings)) == {
        "optimizer.lr": "1e-06",
        "optimizer.betas": "[0.9, 0.95]",
        "callbacks.0.class_path": "A",
        "callbacks.1.class_path": "B",
        "nothing": "None",
        "empty": "{}",
        "on": "True",
    }


@pytest.mark.parametrize("length", [250, 251, 6000])
def test_up_to_6000_characters_stay(length):
    assert shorten_param("k", "x" * length, "config.yaml") == "x" * length


def test_longer_ones_become_a_digest_and_a_pointer():
    one, other = (shorten_param("prompt", text, "config.yaml") for text in ("x" * 6001, "x" * 6000 + "y"))
    assert one != other
    assert re.fullmatch(
        r"sha256:[0-9a-f]{64} \(6001 characters; the whole text is at 'prompt' in the artifact config.yaml\)",
        one,
    )
