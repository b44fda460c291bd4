"""Sinks that meet what nobody wished for: pipes without reader, full disks, terminals that go away, sinks that exit."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from grpo_lightning.callbacks.sinks import BackgroundSink, open_sinks
from grpo_lightning.errors import ConfigError
from grpo_lightning.sinks import EventRow, JsonLines, SinkError, StepRow, base

ROOT = Path(__file__).parents[2]


def row(step: int) -> StepRow:
    return StepRow(run_id="r", segment=1, step=step, time=0.0, values={"kl": float(step)})


# ---------------------------------------------------------------- named pipes


def steps_in(reader: int) -> list[int]:
    """The steps of the whole lines that wait in a pipe."""
    return [json.loads(line)["step"] for line in os.read(reader, 65536).splitlines()]


def test_a_pipe_that_nobody_reads_holds_up_nothing_and_gets_rows_once_somebody_does(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    sink = JsonLines(pipe)
    with pytest.raises(SinkError, match=r"pipe: .*No such device"):
        sink.write_step(row(1))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for step in (1, 2):
        sink.write_step(row(step))
    assert steps_in(reader) == [1, 2]
    os.close(reader)
    with pytest.raises(SinkError, match="Broken pipe"):
        sink.write_step(row(3))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    sink.write_step(row(3))
    sink.close()
    assert steps_in(reader) == [3], "a new reader begins with a whole line"
    os.close(reader)


# ---------------------------------------------------------------- a disk that is full for a while

_FULL = """
import resource, sys
from grpo_lightning.sinks import JsonLines, SinkError, StepRow
sink = JsonLines(sys.argv[1])
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
refused = 0
for step in range(1, 7):
    row = StepRow(run_id="r", segment=1, step=step, time=0.0, values={"kl": 1.0})
    limit(150)
    for _ in range(3):
        try:
            sink.write_step(row)
            break
        except SinkError:
            refused += 1
    else:
        limit(most)
        sink.write_step(row)
print(refused)
"""


def test_a_disk_that_was_full_has_every_line_once_and_what_was_cut_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(path)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3
    whole = []
    for line in path.read_text().splitlines():
        try:
            whole.append(json.loads(line)["step"])
        except ValueError:
            assert '{"run_id": "r", "segment": 1, "step": '.startswith(line[:20]), line
    assert whole == [1, 2, 3, 4, 5, 6]


# ---------------------------------------------------------------- sinks that end their thread


class Exits:
    """Calls `sys.exit` at the rows of some steps, the first time."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.got, self.closed = list(steps), list[int](), threading.Event()

    def write_step(self, taken: StepRow) -> None:
        if taken.step in self.steps:
            self.steps.remove(taken.step)
            sys.exit(3)
        self.got.append(taken.step)

    def write_event(self, taken: EventRow) -> None:
        """None come."""

    def close(self) -> None:
        self.closed.set()
        raise KeyboardInterrupt


def test_a_sink_that_exits_is_said_once_and_gets_every_row(caplog: pytest.LogCaptureFixture) -> None:
    inner = Exits(2)
    sink = BackgroundSink(inner, name="mine")
    for step in range(1, 6):
        sink.write_step(row(step))
    sink.close()
    assert inner.got == [1, 2, 3, 4, 5]
    assert inner.closed.is_set()
    said = [record.getMessage() for record in caplog.records]
    assert sum("The sink mine failed: 3. Training goes on" in text for text in said) == 1
    assert sum("could not be closed" in text for text in said) == 1


def test_a_sink_that_can_not_be_made_closes_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Exits] = []

    def works() -> Exits:
        made.append(Exits())
        return made[-1]

    def refuses() -> Exits:
        raise ConfigError("the port 1 is in use")

    monkeypatch.setattr(sys.modules[__name__], "works", works, raising=False)
    monkeypatch.setattr(sys.modules[__name__], "refuses", refuses, raising=False)
    points = [EntryPoint(name, f"{__name__}:{name}", base.SINK_GROUP) for name in ("works", "refuses")]
    monkeypatch.setattr(base, "entry_points", lambda group: points)
    with pytest.raises(ConfigError, match="the port 1 is in use"):
        open_sinks({"works": {}, "refuses": {}}, run_id="r", run_name="n", description="")
    assert made[0].closed.is_set()


# ---------------------------------------------------------------- terminals

_SHOW = """
import os, sys
from grpo_lightning.sinks.console import ConsoleSink
sink = ConsoleSink(total_steps=90, title="ünï [bold]x[/bold]")
sink.say("begin ünï")
sys.stdin.readline()
for step in range(1, 80):
    sink.step(step, {"reward_mean": step / 80})
sink.evaluation(80, {"eval_accuracy": 0.5})
sink.close()
print("the end", file=sys.stderr)
sys.exit(75)
"""


def show(out: int, **env: str) -> subprocess.Popen[bytes]:
    """The terminal's sink in a process of its own, writing to `out`; goes on after a line on stdin."""
    command = [sys.executable, "-c", _SHOW]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE, cwd=ROOT, env=os.environ | env
    )


@pytest.mark.parametrize("kind", ["pipe", "pty", "dumb pty"])
def test_a_terminal_that_goes_away_ends_nothing(kind: str) -> None:
    """The exit code is the program's own: Python's is 120 where its last flush fails."""
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    process = show(writer, TERM="dumb" if kind == "dumb pty" else "xterm-256color")
    os.close(writer)
    assert b"begin" in os.read(reader, 1000)
    os.close(reader)
    _, err = process.communicate(b"go\n", timeout=120)
    assert process.returncode == 75, err.decode()
    assert err.decode().count("Can't write to the terminal: ") == 1
    assert "Traceback" not in err.decode()
    assert err.decode().endswith("the end\n")


def test_a_full_disk_behind_stdout_ends_nothing() -> None:
    with Path("/dev/full").open("wb") as full:
        process = show(full.fileno())
    _, err = process.communicate(b"go\n", timeout=120)
    assert err.decode().count("Can't write to the terminal: ") == 1
    assert "the end\n" in err.decode()


def all_of(reader: int) -> Iterator[bytes]:
    """What comes until the end, which a pty makes an error."""
    with suppress(OSError):
        while part := os.read(reader, 65536):
            yield part


@pytest.mark.parametrize("kind", ["pipe", "pty"])
def test_what_an_ascii_terminal_can_not_show_is_written_out(kind: str) -> None:
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    process = show(writer, PYTHONIOENCODING="ascii", TERM="xterm")
    os.close(writer)
    parts: list[bytes] = []
    reading = threading.Thread(target=lambda: parts.extend(all_of(reader)))
    reading.start()
    _, err = process.communicate(b"go\n", timeout=120)
    reading.join(60)
    shown = b"".join(parts)
    os.close(reader)
    assert "Can't write" not in err.decode()
    assert b"begin \\xfcn\\xef" in shown
    assert b"step 79/90" in shown


def test_a_terminal_that_works_again_gets_lines_again(caplog: pytest.LogCaptureFixture) -> None:
    import io

    from rich.console import Console

    from grpo_lightning.sinks.console import ConsoleSink

    class Sometimes(io.StringIO):
        broken = False

        def write(self, text: str) -> int:
            if self.broken:
                raise OSError(28, "No space left on device")
            return super().write(text)

    caplog.set_level(logging.WARNING)
    out = Sometimes()
    sink = ConsoleSink(total_steps=None, console=Console(file=out), live=False)
    for number, broken in enumerate((False, True, True, False, True)):
        out.broken = broken
        sink.say(str(number))
    assert out.getvalue() == "0\n3\n"
    assert sum("Can't write to the terminal" in record.getMessage() for record in caplog.records) == 2
