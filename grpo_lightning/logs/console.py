"""Rows out of console output: TRL's and OpenRLHF's dicts, verl's lines, NeMo-RL's blocks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from grpo_lightning.logs.numbers import parse_dict, whole
from grpo_lightning.logs.records import CUT, Row, Tally
from grpo_lightning.logs.source import NESTED

__all__ = ["VERL_LINE", "dict_rows", "is_metrics", "nemo_rows", "verl_rows"]

MARKERS = frozenset(
    (
        "loss",
        "reward",
        "kl",
        "policy_loss",
        "reward_mean",
        "reward_std",
        "kl_divergence",
        "grad_norm",
        "train_runtime",
        "train_loss",
        "eval_loss",
        "eval_reward",
        "eval_accuracy",
    )
)
PREFIXES = ("actor/", "critic/", "completions/", "rewards/", "response_length/", "Training Loss")
LINE_HEAD = 500  # words are looked for in a line's beginning
_DICT = re.compile(r"\{\s*['\"][^{}]*\}")
_BAR = re.compile(rf"(?<!: )(?<!:)\d{{1,3}}%\|[^|]{{0,200}}\| *(\d{{1,9}})/(\d{{1,9}}) \[[^\]{{]{{0,80}}\](?!{NESTED})")
# a bar that bears no name ("Loading weights: 100%|") and lies in no other
_STEP_BEFORE = re.compile(r"\bstep\W{0,3}(\d{1,12})(?:/\d+)?\W{0,5}$", re.IGNORECASE)
_RESUME = re.compile(r"\bresum(?:ing|ed)\b.*\b(?:checkpoint|step)|continuing training from", re.IGNORECASE)
_LOGGING_STEPS = re.compile(r"\blogging_steps['\"]?\s*[=:]\s*(\d{1,6})\b")
VERL_LINE = re.compile(r"(?<![\w/])step:(\d{1,12}) - (?=\S)")
_NEMO_STEP = re.compile(r"=\s*Step (\d{1,12})(?:/\d+)?\s*=")
_NEMO_VALUE = re.compile(r"^\s*[•*-]\s*([^:]{1,60}):\s*(\S+)")
_NEMO_NAMES = {
    "Loss": "loss",
    "Policy Loss": "loss",
    "Generation KL Error": "gen_kl_error",
    "Avg Reward": "reward",
    "Avg Total Reward": "reward",
    "Avg Filtered Reward": "filtered_reward",
    "Mean Generation Length": "mean_gen_tokens_per_sample",
    "Total step time": "total_step_time",
    "Accuracy": "validation/accuracy",
}


def is_metrics(values: dict[str, Any]) -> bool:
    """Whether a dict holds a trainer's numbers, and not settings."""
    return not MARKERS.isdisjoint(values) or any(key.startswith(PREFIXES) for key in values)


def dict_rows(lines: Iterable[str], tally: Tally) -> Iterator[Row]:
    """Python or JSON dicts anywhere in the lines, with the progress bars or the step that stand around each."""
    bars = _Bars()
    for line in lines:
        if "{" not in line:
            yield from bars.see(line)
            if _resumes(line):
                yield from bars.take(Row({}, mark="resume"))
            elif "logging_steps" in line:
                _logging_steps(line, tally)
            continue
        end, found = 0, 0
        for match in _DICT.finditer(line):
            before, end = line[end : match.start()], match.end()
            yield from bars.see(before)
            values = parse_dict(match[0])
            if values is not None and is_metrics(values):
                found += 1
                step = _STEP_BEFORE.search(before[-60:]) if "tep" in before or "TEP" in before else None
                yield from bars.take(Row(values, int(step[1]) if step else None, bars.done, bars.total))
            elif values is None and _looks_like_metrics(match[0]):
                tally.skip()
        yield from bars.see(line[end:])
        _rest_of_line(line[end:], found, tally)
    yield from bars.rest()


class _Bars:
    """The training's progress bar, and the row that waits for the bar behind it: tqdm draws it again below what it prints.

    The bar behind is exact; the one before may lag, since fast bars are drawn ten times a second at most.
    """

    def __init__(self) -> None:
        self.done: int | None = None
        self.total: int | None = None
        self._waiting: Row | None = None

    def see(self, text: str) -> Iterator[Row]:
        """Looks for bars; the row that waited, where one is found."""
        found = _BAR.findall(text) if "/" in text and "[" in text else ()
        if not found:
            return
        if self._waiting is not None:
            yield self._waiting._replace(after=int(found[0][0]))
            self._waiting = None
        self.done, self.total = map(int, found[-1])

    def take(self, row: Row) -> Iterator[Row]:
        """Makes a row wait; the one before it comes out."""
        yield from self.rest()
        self._waiting = row

    def rest(self) -> Iterator[Row]:
        """The row that waits."""
        if self._waiting is not None:
            yield self._waiting
        self._waiting = None


def _rest_of_line(rest: str, found: int, tally: Tally) -> None:
    """A dict that was cut, or an argument list."""
    if "{'" in rest and _looks_like_metrics(rest):
        tally.skip()
    elif not found and "logging_steps" in rest:
        _logging_steps(rest, tally)


def _resumes(line: str) -> bool:
    return _RESUME.search(line[:LINE_HEAD]) is not None


def _logging_steps(line: str, tally: Tally) -> None:
    if match := _LOGGING_STEPS.search(line):
        tally.logging_steps = int(match[1]) or None


def _looks_like_metrics(text: str) -> bool:
    return any(f"{quote}{name}{quote}:" in text for name in ("loss", "reward", "grad_norm") for quote in "'\"")


def verl_rows(lines: Iterable[str], tally: Tally) -> Iterator[Row]:
    """``step:1 - actor/kl_loss:0.1 - ...``, whatever process prefix stands before it.

    A last line without an end was cut: its last value is left out.
    """
    for line in lines:
        match = VERL_LINE.search(line) if "step:" in line else None
        if match is None:
            if _resumes(line):
                yield Row({}, mark="resume")
            continue
        parts = line[match.end() :].partition(" [repeated ")[0].split(" - ")
        if tally.cut:
            parts.pop()
            tally.note(CUT)
        values: dict[str, Any] = {}
        for part in parts:
            key, colon, text = part.rpartition(":")
            if colon and key:
                values[key.strip()] = text
            else:
                tally.skip()
        yield Row(values, int(match[1]))


def nemo_rows(lines: Iterable[str], tally: Tally) -> Iterator[Row]:
    """``=== Step 3/100 ===`` and the values under it."""
    step: int | None = None
    values: dict[str, Any] = {}
    for line in lines:
        if match := _NEMO_STEP.search(line):
            if values:
                yield Row(values, step)
            step, values = whole(match[1]), {}
        elif (match := _NEMO_VALUE.match(line[:LINE_HEAD])) and match[1].strip() in _NEMO_NAMES:
            values[_NEMO_NAMES[match[1].strip()]] = match[2].rstrip("s,") if match[1] == "Total step time" else match[2]
        elif _resumes(line):
            yield Row({}, mark="resume")
    if values:
        yield Row(values, step)
