"""The side-by-side measurement: what counts as found, what the series are, what each package is fed, how logs are scored."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import peer_adapters  # noqa: E402
import peers  # noqa: E402
import real_logs  # noqa: E402
import series  # noqa: E402
import series_held_out  # noqa: E402
from peer_adapters import Alarm, Tool  # noqa: E402

LOGS = ROOT / "tests" / "logs" / "data"
KEYS = ["pause_detected", "pause_delay", "healthy_paused", "warn_detected", "healthy_warned", "injected", "healthy"]
PEERS = {tool.name: tool for tool in peer_adapters.TOOLS if tool.version is not None}


# ---- what counts as found


@pytest.mark.parametrize(
    ("alarms", "twin", "level", "step"),
    [
        ([("a", 120, True)], [], "pausing", 120),
        ([("a", 99, True)], [], "pausing", None),
        ([("a", 100, True)], [], "pausing", 100),
        ([("a", 120, False)], [], "pausing", None),
        ([("a", 120, False)], [], "warning", 120),
        ([("a", 130, True), ("b", 120, True)], [], "pausing", 120),
        ([("a", 120, True)], [("a", 110, True)], "pausing", None),
        ([("a", 120, True)], [("a", 121, True)], "pausing", 120),
        ([("a", 120, True), ("b", 140, True)], [("a", 120, True)], "pausing", 140),
        ([("a", 120, True)], [("a", 50, False)], "pausing", 120),
        ([("a", 120, True)], [("a", 50, False)], "warning", None),
        ([], [], "warning", None),
    ],
    ids=[
        "after the onset",
        "before the onset",
        "at the onset",
        "a warning pauses nothing",
        "a warning warns",
        "the first counts",
        "the twin raised it too",
        "the twin raised it later",
        "another rule finds it",
        "the twin only warned",
        "the twin warned as well",
        "silence",
    ],
)
def test_detection_needs_an_alarm_that_the_twin_lacks(
    alarms: list[tuple[str, int, bool]], twin: list[tuple[str, int, bool]], level: str, step: int | None
) -> None:
    def made(rows: list[tuple[str, int, bool]]) -> list[Alarm]:
        return [Alarm(rule=rule, step=at, pause=pause) for rule, at, pause in rows]

    found = peers.detection(made(alarms), made(twin), 100, level)
    assert (found.step if found else None) == step


def test_measured_counts_both_levels_and_takes_the_median() -> None:
    def one(fault: str, pause: int | None, warn: int | None) -> peers.Found:
        alarms = [None if at is None else Alarm(rule="r", step=at, pause=True) for at in (pause, warn)]
        return peers.Found(fault=fault, name=fault, seed=0, onset=100, pause=alarms[0], warn=alarms[1])

    plain = series.healthy(series.FAMILIES[0], 0)
    alarms = [[], [Alarm(rule="r", step=5, pause=False)], [Alarm(rule="r", step=5, pause=True)]]
    made = peers.Measured(
        tool="t",
        found=[one("x", 110, 102), one("x", 120, 104), one("y", None, 106), one("y", None, None)],
        healthy=[(plain, raised) for raised in alarms],
    )
    assert made.to_dict() == dict(zip(KEYS, [2, 15.0, 1, 3, 2, 4, 3], strict=True))
    text = peers.table([made], "pausing")
    assert "| x | 2 of 2, 15 |" in text
    assert "| y | 0 of 2 |" in text
    assert "| **healthy, alarmed** | 1 of 3 |" in text
    assert "rule r" not in peers.details(made)
    assert "y, seed 0, onset 100: warned after 6 by r" in peers.details(made)
    other = peers.Measured(
        tool="u",
        found=[one("x", None, None), one("x", None, None), one("y", 101, 101), one("y", None, 101)],
        healthy=[(plain, raised) for raised in reversed(alarms)],
    )
    assert peers.together([made, other]) == "t, u together, pausing: 3 of 4 found, 2 of 3 healthy alarmed"


# ---- the series


def _pair(fault: str, *, held_out: bool = False) -> series.Pair:
    kind = list(series.FAULTS).index(fault)
    if held_out:
        return series_held_out._pair(fault, kind, 0, 0)
    family = series.FAMILIES[kind]
    return series.Pair(fault=fault, series=series.faulty(fault, family, 0), twin=series.healthy(family, 0))


@pytest.mark.parametrize("held_out", [False, True], ids=["tuned", "held out"])
@pytest.mark.parametrize("fault", list(series.FAULTS))
def test_a_faulty_series_is_its_twin_until_the_onset_and_differs_after_it(held_out: bool, fault: str) -> None:
    pair = _pair(fault, held_out=held_out)
    before = (pair.series.onset - 1) // pair.series.every
    changed = set()
    for name, values in pair.series.values.items():
        np.testing.assert_array_equal(values[:before], pair.twin.values[name][:before], err_msg=name)
        if not np.array_equal(values[before:], pair.twin.values[name][before:], equal_nan=True):
            changed.add(name)
    assert changed
    assert pair.twin.onset is None


def test_the_families_cover_what_healthy_runs_are() -> None:
    families = series.FAMILIES
    defaults = peers._arguments([])
    assert len(families) * defaults.healthy >= 40
    assert defaults.seeds == len(series.FAULTS) == len(series_held_out.FAULTS) == 10
    assert (min(f.entropy for f in families), max(f.entropy for f in families)) == (0.6, 2.4)
    assert (min(f.kl_scale for f in families), max(f.kl_scale for f in families)) == (1.0, 40.0)
    assert (min(f.dead for f in families), max(f.dead for f in families)) == (0.1, 0.6)
    assert (min(f.group for f in families), max(f.group for f in families)) == (2, 16)
    assert (min(f.prompts for f in families), max(f.prompts for f in families)) == (1, 32)
    for trait in ("spikes", "dip", "solved", "late"):
        assert {getattr(f, trait) for f in families} == {True, False}


def test_held_out_settings_range_over_lengths_dips_and_logs() -> None:
    settings = [series_held_out.draw_setting(number) for number in range(200)]
    dips = [dip for setting in settings for dip in setting.dips]
    assert {setting.dress for setting in settings} == set(series_held_out.DRESSES)
    assert all(200 <= setting.steps <= 1000 for setting in settings)
    assert {setting.curve for setting in settings} == set(series_held_out.CURVES)
    assert min(steps for _, steps, _, _ in dips) == 15
    assert max(steps for _, steps, _, _ in dips) == 45
    assert all(0.3 <= depth <= 0.6 for _, _, depth, _ in dips)


def test_draws_are_repeatable_and_different() -> None:
    same, again, other = (series_held_out._pair("NaN loss", 5, 0, draw).series for draw in (0, 0, 1))
    np.testing.assert_array_equal(same.values["entropy"], again.values["entropy"])
    assert (same.seed, same.name) != (other.seed, other.name)


def test_rows_of_five_steps_average_them_and_count_optimizer_steps() -> None:
    setting = series_held_out.replace(series_held_out.draw_setting(3), dress="trl", steps=200)
    every = series_held_out.make(setting, 3)
    rows = series_held_out.make(series_held_out.replace(setting, dress="trl every 5"), 3)
    assert (rows.every, rows.steps, every.steps) == (5, 200, 200)
    assert [number for number, _ in rows.rows()][:3] == [5, 10, 15]
    np.testing.assert_allclose(rows.values["kl"][7], every.values["kl"][35:40].mean())
    assert [number for number, row in rows.rows() if "eval_accuracy" in row][:2] == [25, 50]
    assert set(rows.values) == set(series_held_out.TRL)


# ---- what the packages are fed


@given(
    mean=st.floats(-5, 5),
    spread=st.floats(0.1, 10),
    dead=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    size=st.sampled_from([2, 8, 16, 128]),
)
def test_reward_samples_have_the_mean_and_spread_of_the_row(mean: float, spread: float, dead: float, size: int) -> None:
    row = {"reward_mean": mean, "reward_std": spread, "dead_group_fraction": dead}
    samples = peer_adapters.reward_samples(row, size)
    assert len(samples) == size
    assert samples.mean() == pytest.approx(mean, abs=1e-9)
    assert samples.std() == pytest.approx(spread)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"reward_mean": 0.25, "reward_std": math.sqrt(0.1875), "dead_group_fraction": 0.5}, [1, 0, 0, 0]),
        ({"reward_mean": 0.6, "reward_std": 0.0, "dead_group_fraction": 1.0}, [0.6] * 4),
        ({"reward_mean": 0.6, "reward_std": 0.002, "dead_group_fraction": 1.0}, [0.6] * 4),
        ({"reward_mean": 0.5, "reward_std": 0.3, "dead_group_fraction": 1.0}, [0.2, 0.8, 0.2, 0.8]),
    ],
    ids=["right and wrong answers", "all equal", "a vanished spread", "groups differ, none is live"],
)
def test_reward_samples_are_the_answers_that_were_drawn(row: dict[str, float], expected: list[float]) -> None:
    np.testing.assert_allclose(peer_adapters.reward_samples(row, 4), expected)


@pytest.mark.parametrize("kl", [0.0, 1e-4, 0.02, 1.0, 30.0, 250.0, 900.0])
def test_two_tokens_have_the_kl_of_the_series(kl: float) -> None:
    d = peer_adapters._logit(kl)
    # -1/2 ln(4 q (1 - q)) with q = 1 / (1 + exp(-d)): ln q (1 - q) = -|d| - 2 ln(1 + exp(-|d|))
    got = 0.5 * (abs(d) + 2 * math.log1p(math.exp(-abs(d)))) - math.log(2)
    assert got == pytest.approx(kl, abs=1e-9)


def test_a_nan_loss_reaches_the_packages_that_watch_gradients() -> None:
    assert math.isnan(peer_adapters.rldoctor_row({"loss": math.nan, "grad_norm": 1.0})["grad_norm"])
    assert peer_adapters.rldoctor_row({"loss": 0.1, "grad_norm": 1.0, "kl": 2.0}) == {
        "loss": 0.1,
        "grad_norm": 1.0,
        "kl": 2.0,
    }


def test_every_name_that_a_package_is_given_is_one_of_the_series() -> None:
    names = set(series.healthy(series.FAMILIES[0], 0).values)
    assert set(peer_adapters.RLDOCTOR_NAMES) <= names
    assert set(peer_adapters.RLPROBE_NAMES) <= names
    assert set(series_held_out.TRL) <= names


def test_a_package_that_is_not_installed_is_not_measured() -> None:
    absent = Tool(name="no-such-distribution-here", version="1.2", alarms=peer_adapters.ours)
    assert absent.missing == "pip install no-such-distribution-here==1.2"
    assert peer_adapters.TOOLS[0].missing is None


@pytest.mark.parametrize(
    ("name", "fault", "rule", "delay"),
    [
        ("rldoctor", "NaN loss", "gradient_pathology", 25),
        ("rlprobe", "NaN loss", "GRAD_PATHOLOGY", 25),
        ("rlprobe", "KL explosion", "KL_BLOWUP", 60),
        ("stabilityguard", "NaN loss", "gradient NaN", 0),
        ("stabilityguard", "gradient explosion", "gradient spike", 20),
        ("stabilityguard", "variance collapse", "Reward model collapse", 40),
        ("stabilityguard", "KL explosion", "KL divergence explosion", 60),
    ],
)
def test_a_package_gets_what_it_needs_to_find_its_faults(name: str, fault: str, rule: str, delay: int) -> None:
    tool = PEERS[name]
    if tool.missing is not None:
        pytest.skip(tool.missing)
    pair = _pair(fault)
    found = peers.measure([tool], [], [pair])[0].found[0]
    assert found.pause is not None
    assert found.pause.rule == rule
    assert 0 <= found.pause.step - pair.series.onset <= delay


def test_ours_finds_a_nan_in_the_loss_alone_at_once_and_leaves_its_twin_alone() -> None:
    pair = _pair("NaN loss")
    made = peers.measure([peer_adapters.TOOLS[0]], [pair.twin], [pair])[0]
    assert [alarms for _, alarms in made.healthy] == [[]]
    assert made.found[0].delay("pausing") == 0


def test_the_last_line_is_json_per_tool(capsys: pytest.CaptureFixture[str]) -> None:
    tools = "ours,stabilityguard" if importlib.util.find_spec("stabilityguard") is None else "ours"
    assert peers.main(["--only", tools, "--seeds", "1", "--healthy", "0", "--faults", "NaN loss", "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    last = json.loads(lines[-1])
    assert list(last["ours"]) == KEYS
    assert last["ours"]["pause_detected"] == last["ours"]["injected"] == 1
    assert last.get("stabilityguard", None) is None
    assert ("stabilityguard" in tools) == any("pip install stabilityguard==0.3.0" in line for line in lines)


# ---- real logs


@pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        ("TRL (logging_steps=5, so row=5 steps)", 5),
        ("TRL console (progress bars interleaved; every 20 steps)", 20),
        ("TRL trainer_state (every 2)", 2),
        ("TRL console, every step", None),
        ("verl console", None),
    ],
)
def test_logging_steps_are_read_from_the_index(trainer: str, steps: int | None) -> None:
    assert real_logs.logging_steps(trainer) == steps


def test_score_counts_agreement_and_the_two_grave_errors() -> None:
    called = [("healthy", "healthy"), ("healthy", "unhealthy"), ("unhealthy", "healthy"), ("unhealthy", "warning")]
    assert real_logs.score(called) == {
        "agree": 1,
        "total": 4,
        "healthy_called_unhealthy": 1,
        "unhealthy_called_healthy": 1,
    }


def test_the_index_names_every_log() -> None:
    entries = real_logs.read_index(LOGS)
    assert len(entries) == len(list(LOGS.glob("*.csv.gz"))) == 35
    assert {entry.expected for entry in entries} == {"healthy", "warning", "unhealthy"}


def test_logs_are_judged_against_the_index_packed_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gzip

    wanted = ("10", "24", "53")  # no signal at all; healthy; cut from the first step on
    head, *rows = (LOGS / "index.tsv").read_text(encoding="utf-8").splitlines()
    (tmp_path / "tidy").mkdir()
    kept = [row for row in rows if row.split("\t")[0] in wanted]
    (tmp_path / "index.tsv").write_text("\n".join([head, *kept]), encoding="utf-8")
    for n in wanted[:2]:
        (tmp_path / "tidy" / f"{n}.csv").write_bytes(gzip.decompress((LOGS / f"{n}.csv.gz").read_bytes()))
    shutil.copy(LOGS / "53.csv.gz", tmp_path)
    assert real_logs.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == {
        "agree": 3,
        "total": 3,
        "healthy_called_unhealthy": 0,
        "unhealthy_called_healthy": 0,
    }
    assert any(line.startswith("| 10 | unhealthy | unhealthy ") for line in lines)


def test_a_log_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "index.tsv").write_text("n\texpected\ttrainer\twhat\n99\thealthy\tTRL\tx\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no log 99"):
        real_logs.read_index(tmp_path)
