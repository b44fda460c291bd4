"""The terminal: safe text, sparklines, the panel of the first fifty steps, a line a step afterwards."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from grpo_lightning.sinks.console import PANEL_STEPS, ConsoleSink
from grpo_lightning.sinks.panel import MAIN_SIGNALS, TimeLeft, duration
from grpo_lightning.sinks.terminal import plain, sparkline

# ---------------------------------------------------------------- text

HOSTILE = [
    ("\x1b[31mred", "\\x1b[31mred"),
    ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
    ("a\rb\x08c", "a\\rb\\x08c"),
    ("\u202eabc", "\\u202eabc"),
    ("\x9b2J", "\\x9b2J"),
    ("\ud800", "\\ud800"),
    ("[bold]x[/bold] :smile:", "[bold]x[/bold] :smile:"),
    ("two\nlines\tand ä 日本 🙂", "two\nlines\tand ä 日本 🙂"),
]


@pytest.mark.parametrize(("text", "shown"), HOSTILE)
def test_text_can_not_move_the_cursor(text: str, shown: str) -> None:
    assert plain(text) == shown
    out = io.StringIO()
    sink = ConsoleSink(total_steps=None, console=Console(file=out, force_terminal=True, width=100, highlight=False))
    sink.say(text)
    assert out.getvalue() == shown.expandtabs() + "\n"


# ---------------------------------------------------------------- sparklines


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([0.5, 0.5], "▄▄"),
        ([], ""),
        ([None, None], "  "),
        ([1.0, None, 0.0], "█ ▁"),
        ([0.0, math.nan, math.inf, -math.inf, 1.0], "▁!!!█"),
        ([-1e308, 1e308], "▁█"),
        ([5e-324, 0.0], "▄▄"),
    ],
    ids=["rising", "flat", "none", "absent", "gap", "not-finite", "huge", "denormal"],
)
def test_a_sparkline_spans_its_values(values: list[float | None], line: str) -> None:
    assert sparkline(values, 20) == line


def test_a_sparkline_shows_the_last_values_and_has_an_ascii_form() -> None:
    assert sparkline([9.0, 0.0, 1.0], 2) == "▁█"
    assert sparkline([0.0, 1.0], 2, ascii_only=True) == "_#"


@given(st.lists(st.floats() | st.none(), max_size=60), st.integers(1, 50))
def test_any_values_make_a_line(values: list[float | None], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    finite = [(v, c) for v, c in zip(values[-width:], line, strict=True) if v is not None and math.isfinite(v)]
    ordered = [c for _, c in sorted(finite, key=lambda pair: pair[0])]
    assert ordered == sorted(ordered), "a higher value never has a lower block"


# ---------------------------------------------------------------- time left


def test_time_left_is_the_median_step_times_what_is_left() -> None:
    left = TimeLeft(total=10)
    left.step(0, 0.0)
    assert left.left is None
    for step, now in [(1, 2.0), (2, 4.0), (3, 60.0), (4, 62.0)]:  # one slow step: an evaluation
        left.step(step, now)
    assert left.left == 6 * 2.0
    left.step(10, 74.0)
    assert left.left == 0.0


def test_time_left_of_a_resumed_run_counts_its_own_steps() -> None:
    left = TimeLeft(total=110)
    left.step(100, 5.0)
    left.step(102, 9.0)
    assert left.left == 8 * 2.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3671, "1:01:11"), (360000, "100:00:00")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---------------------------------------------------------------- the sink


def values_of(step: int) -> dict[str, float]:
    return {name: step / 4 + i for i, name in enumerate(MAIN_SIGNALS)} | {"tokens_per_second": 1234.4}


def ticking() -> Callable[[], float]:
    now = iter(range(10_000))
    return lambda: float(next(now))


def run(steps: int, *, first: int = 0, live: bool | None = None, terminal: bool = True, title: str = "") -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, height=40, highlight=False, color_system=None)
    sink = ConsoleSink(total_steps=100, first_step=first, console=console, live=live, clock=ticking(), title=title)
    for step in range(first + 1, first + steps + 1):
        sink.step(step, values_of(step))
    sink.close()
    return out.getvalue()


def test_lines_only_where_nobody_watches() -> None:
    lines = run(3, terminal=False).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/100", "step 2/100", "step 3/100"]
    assert "reward 0.750" in lines[2]
    assert "1234 tok/s" in lines[2]
    assert lines[2].endswith("0:01:37 left")


def test_the_panel_shows_every_main_signal_with_its_last_value_and_the_time_left() -> None:
    out = run(3, title="first [run]\x1b[2J")
    frame = out[out.rindex("╭") :]
    assert "first [run]\\x1b[2J" in frame
    assert "step 3/100  1234 tok/s  0:01:37 left" in frame
    rows = [line for line in frame.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == list(MAIN_SIGNALS)
    assert [row.split()[2:4] for row in rows] == [["▁▅█", f"{0.75 + i:.4g}"] for i in range(len(MAIN_SIGNALS))]


def test_a_signal_that_is_not_measured_has_no_row_and_one_that_went_away_no_value() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    sink = ConsoleSink(total_steps=None, console=console)
    sink.step(1, {"reward_mean": 0.5, "entropy": 1.0})
    sink.step(2, {"reward_mean": math.nan})
    sink.evaluation(2, {"eval_accuracy": 0.75})
    sink.step(3, {"reward_mean": 0.7})
    sink.close()
    frame = out.getvalue()[out.getvalue().rindex("╭") :]
    assert "kl" not in frame
    assert re.search(r"reward_mean +▁!█ +0\.7 ", frame)
    assert re.search(r"entropy +▄ +- ", frame)
    assert re.search(r"eval_accuracy +0\.75 ", frame)
    assert "evaluation at step 2: eval_accuracy 0.750" in out.getvalue()
    assert "left" not in frame


def test_after_fifty_steps_it_is_a_line_a_step() -> None:
    out = run(PANEL_STEPS + 3)
    assert re.findall(r"step (\d+)/100  reward", out[out.rindex("╰") :]) == ["51", "52", "53"]
    assert "step 50/100  reward" not in out


def test_a_run_resumed_past_its_first_steps_has_no_panel() -> None:
    assert "╭" not in run(3, first=PANEL_STEPS)
    assert "╭" in run(3, first=PANEL_STEPS - 1)


def test_forced_colour_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    sink = ConsoleSink(total_steps=2)
    sink.step(1, values_of(1))
    sink.close()
    assert "╭" not in capsys.readouterr().out


def test_a_sink_closed_before_its_first_step_prints_nothing() -> None:
    assert run(0) == ""


_CHILD = """
from grpo_lightning.sinks.console import ConsoleSink
sink = ConsoleSink(total_steps=52, title="pty")
sink.say("hello \\x1b[2J there")
for step in range(1, 53):
    if step == 7:
        print("a print from a reward function")
    sink.step(step, {"reward_mean": step / 52, "kl": 0.1})
sink.close()
print("after")
"""


def through_a_pty(term: str) -> str:
    reader, writer = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "TTY_INTERACTIVE")}
    env |= {"TERM": term, "COLUMNS": "100", "LINES": "30"}
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdout=writer, stderr=writer, env=env)
    os.close(writer)
    seen = bytearray()
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:  # the child has gone
            break
        if not part:
            break
        seen += part
    os.close(reader)
    assert child.wait(30) == 0
    return seen.decode()


def test_on_a_real_terminal_the_panel_moves_and_text_stays() -> None:
    seen = through_a_pty("xterm-256color")
    assert seen.count("╭") >= PANEL_STEPS
    assert "\x1b[1A" in seen, "frames are drawn over one another"
    assert "hello \\x1b[2J there" in seen
    assert "\x1b[2J" not in seen
    assert "a print from a reward function" in seen
    assert re.findall(r"step (\d+)/52  reward", seen) == ["51", "52"]
    assert seen.rstrip().endswith("after")
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l"), "the cursor is given back"


def test_a_dumb_terminal_gets_lines() -> None:
    seen = through_a_pty("dumb")
    assert "╭" not in seen
    assert len(re.findall(r"step \d+/52", seen)) == 52
