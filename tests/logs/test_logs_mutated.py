"""Broken logs: whatever is done to a file, it is read or refused with DataError, in bounded time."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from log_renderers import FORMATS, RUNS, read

from grpo_lightning.errors import DataError
from grpo_lightning.logs import FORMATS as NAMES
from grpo_lightning.logs import LogStep, open_log

ROWS = 30
HUGE = (
    "9" * 400,
    "9" * 6000,
    "1e400",
    "-1e400",
    "NaN",
    "inf",
    "1e-400",
    "0x1F",
    "1_000",
    "--1",
    "1e",
    "٣",
    "None",
    "'",
    "{",
    "",
)
TEXTS = (
    "{" * 5000,
    "[" * 5000,
    "}" * 500,
    '{"a":' * 3000,
    "\x00" * 5000,
    "\r" * 3000,
    "step:1 - ",
    "'" * 999,
    "\x1b[" * 500,
    "<table>" * 99,
)


def _cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def _behead(data: bytes, dice: random.Random) -> bytes:
    return data[dice.randrange(len(data) + 1) :]


def _splice(data: bytes, dice: random.Random) -> bytes:
    other = _rendered(dice)
    return _cut(data, dice) + other[dice.randrange(len(other)) :]


def _shuffle(data: bytes, dice: random.Random) -> bytes:
    lines = data.split(b"\n")
    dice.shuffle(lines)
    return b"\n".join(lines)


def _numbers(data: bytes, dice: random.Random) -> bytes:
    share = dice.choice((0.01, 0.2, 1.0))
    return re.sub(rb"\d+(?:\.\d+)?", lambda m: dice.choice(HUGE).encode() if dice.random() < share else m[0], data)


def _encode(data: bytes, dice: random.Random) -> bytes:
    text = data.decode("utf-8", "replace")
    return text.encode(
        dice.choice(("utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252", "utf-7", "utf-8-sig")),
        "replace",
    )


def _flip(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 10, 500))):
        changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def _insert(data: bytes, dice: random.Random) -> bytes:
    place = dice.randrange(len(data) + 1)
    return data[:place] + dice.choice(TEXTS).encode() + data[place:]


def _repeat(data: bytes, dice: random.Random) -> bytes:
    start = dice.randrange(len(data))
    return data[: start + 500] + data[start:] * dice.randrange(1, 4)


def _quotes(data: bytes, dice: random.Random) -> bytes:
    return data.replace(
        *dice.choice(((b"'", b'"'), (b'"', b"'"), (b":", b"="), (b"\n", b" "), (b",", b";"), (b"{", b"{{")))
    )


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _cut, _behead, _splice, _shuffle, _numbers, _encode, _flip, _insert, _repeat, _quotes,
)  # fmt: skip
_TEXTS: dict[tuple[str, str], bytes] = {}


def _rendered(dice: random.Random) -> bytes:
    key = dice.choice(RUNS), dice.choice(list(FORMATS))
    if key not in _TEXTS:
        _TEXTS[key] = FORMATS[key[1]][0](read(key[0])[:ROWS]).encode()
    return _TEXTS[key]


def _mutated(seed: int) -> tuple[bytes, str | None]:
    dice = random.Random(seed)
    data = _rendered(dice)
    for mutate in dice.choices(MUTATIONS, k=dice.choice((1, 1, 2, 3))):
        data = mutate(data, dice) or b" "
    return data, dice.choice(NAMES) if dice.random() < 0.2 else None


def _check(seeds: range, path: Path) -> int:
    return sum(_reads(seed, path) for seed in seeds)


def _reads(seed: int, path: Path) -> bool:
    data, format = _mutated(seed)
    path.write_bytes(data)
    try:
        _is_sound(list(open_log(path, format=format)), seed)
    except DataError:
        return False
    except Exception as error:
        raise AssertionError(f"seed {seed}") from error
    return True


def _is_sound(steps: list[LogStep], seed: int) -> None:
    numbers = [step.step for step in steps]
    assert numbers == sorted(set(numbers)), f"seed {seed}"
    assert all(type(value) is float for step in steps for value in step.values.values()), f"seed {seed}"


def test_mutated_logs_are_read_or_refused(tmp_path):
    assert _check(range(300), tmp_path / "log") > 150


@pytest.mark.slow
@pytest.mark.parametrize("start", range(300, 5300, 500))
def test_five_thousand_mutated_logs(start, tmp_path):
    assert _check(range(start, start + 500), tmp_path / "log") > 250


@pytest.mark.parametrize(
    "text",
    [
        "resuming " * 60_000,
        "{'loss': float(" + " " * 60_000 + "}",
        "float(float(" * 20_000,
        "{'" * 100_000,
        "{'loss': 1, " * 40_000,
        "- " + " " * 600_000,
        '[{"a": ' * 40_000,
        "[" + '{"loss": ' * 40_000,
        "<table><tr><td>" * 1000,
        "\x1b[" * 100_000,
        '"' * 400_000,
        "step,reward\n" + '"' + "1," * 200_000,
        "1/2 [" * 80_000,
        '{"' + "k" * 600_000 + '": 1, "loss": 1}',
        str({"loss": 0.1, **{f"k{i}": 1.0 for i in range(10_000)}}),
    ],
    ids=range(15),
)
@pytest.mark.timeout(60)
def test_hostile_lines_take_linear_time(text, tmp_path):
    path = tmp_path / "log"
    for format in (None, *NAMES):
        path.write_text(text + "\n{'loss': 0.1, 'reward': 1.0}\n")
        try:
            list(open_log(path, format=format))
        except DataError:
            continue
