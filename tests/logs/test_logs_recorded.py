"""Every recorded run in every dress: steps and values are those of its table."""

import gzip
import math
from pathlib import Path

import pytest
from log_renderers import DATA, FORMATS, RUNS, agree, expected, read, trl_console, trl_every_5

from grpo_lightning.logs import open_log


def write(tmp_path: Path, text: str, name: str = "log", encoding: str = "utf-8") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("dress", FORMATS)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("rows", [100, pytest.param(None, marks=pytest.mark.slow)], ids=["first 100", "all"])
def test_steps_and_values_are_the_tables(run, dress, rows, tmp_path):
    render, format, printed, digits = FORMATS[dress]
    rows = read(run)[:rows]
    reader = open_log(write(tmp_path, render(rows)))
    wanted = expected(run, rows, printed=printed, digits=digits)
    found = list(reader)
    if dress == "verl-console":
        found = found[: len(wanted)]  # the cut line holds a step more
    assert reader.format == format
    assert [step.step for step in found] == [step for step, _ in wanted]
    for step, (_, values) in zip(found, wanted, strict=True):
        wrong = {
            name: (step.values.get(name), value)
            for name, value in values.items()
            if not agree(step.values.get(name, math.inf), value)
        }
        assert not wrong, f"step {step.step}"
    assert reader.unread == 0 or dress == "verl-console"
    assert not reader.unknown_keys
    assert reader.runs == 1


@pytest.mark.parametrize("run", ["01", "10", "33", "37", "61"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig", "utf-32"])
def test_other_encodings_hold_the_same_steps(run, encoding, tmp_path):
    text = trl_console(read(run))
    plain, other = open_log(write(tmp_path, text, "plain")), open_log(write(tmp_path, text, "other", encoding))
    assert list(other) == list(plain)
    assert len(list(plain)) >= 40


def test_latin_1_names_are_read(tmp_path):
    text = trl_console(read("01")).replace("reward_fn", "prämie").replace("█", "#")
    reader = open_log(write(tmp_path, text, encoding="latin-1"))
    assert "reward/prämie_mean" in next(iter(reader)).values
    assert any("cp1252" in note for note in reader.notes)


@pytest.mark.parametrize("run", ["01", "30", "39", "55"])
def test_progress_bars_tell_the_steps(run, tmp_path):
    reader = open_log(write(tmp_path, trl_every_5(read(run))))
    steps = [step.step for step in reader]
    assert steps == [5 * (place + 1) for place in range(len(steps))]
    assert reader.interval == 5.0


@pytest.mark.parametrize("run", ["01", "13", "42", "33", "34", "37", "57"])
def test_of_steps_repeated_after_a_restart_the_later_count(run, tmp_path):
    rows = [row for row in read(run) if "reward" in row or "reward_mean" in row]
    again = [{name: value * 1.01 for name, value in row.items()} for row in rows[-10:]]
    text = trl_console(rows) + "Resuming from checkpoint\n" + trl_console(again)
    reader = open_log(write(tmp_path, text))
    found = list(reader)
    name = "reward" if "reward" in rows[0] else "reward_mean"
    assert [step.step for step in found] == list(range(1, len(rows) + 1))
    assert [step.values["reward_mean"] for step in found] == [row[name] for row in rows[:-10] + again]
    assert any("restarted once" in note for note in reader.notes)


def test_a_trainers_console_tells_what_its_state_tells(tmp_path):
    """TRL 1.16, ten steps and six more after resuming from step 10, logged every 2: the steps are so short that bars lag,
    and evaluation, loading and saving draw bars of their own. The state holds the truth."""
    console, state = (tmp_path / name for name in ("trl_1_16_resumed.log", "trl_1_16_resumed.json"))
    for path in (console, state):
        path.write_bytes(gzip.decompress((DATA / f"{path.name}.gz").read_bytes()))
    found, wanted = list(open_log(console)), list(open_log(state))
    assert [step.step for step in found] == [step.step for step in wanted] == list(range(2, 17, 2))
    for one, other in zip(found, wanted, strict=True):
        assert one.values == pytest.approx(other.values, rel=1e-3)


@pytest.mark.parametrize(
    ("run", "groups"),
    [("01", 10), ("09", 4), ("33", 1), ("10", None)],
    ids=["tenths over a row", "twentieths over 5 steps", "only 0 and 1, often", "not logged"],
)
def test_groups_per_step_are_told_by_the_dead_fractions(run, groups, tmp_path):
    render = FORMATS["trainer-state"][0]
    assert {step.groups for step in open_log(write(tmp_path, render(read(run))))} == {groups}


def test_repeated_values_are_said(tmp_path):
    reader = open_log(write(tmp_path, FORMATS["json-list"][0](read("34"))))
    assert reader.repeats == 10
    assert any("repeated on 10 rows" in note for note in reader.notes)
    assert open_log(write(tmp_path, FORMATS["json-list"][0](read("10")))).repeats == 1  # a dead run is not repetition
