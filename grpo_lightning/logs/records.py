"""What a log is read into, and what passes between the parts of the reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = ["CUT", "Kind", "LogStep", "Parsed", "Row", "Tally"]

Kind = Literal["train", "other", "eval", "summary"]
# train: a step of RL; other: losses without a reward (an SFT phase); eval: evaluation only; summary: the totals at a run's end
NOTES = 40
CUT = "the last line is cut, or still being written"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogStep:
    """One logged row, in our signals' names."""

    step: int  # optimizer step, the last one that the row averages over
    values: dict[str, float]  # short signal name -> number; NaN and inf are kept, what was not logged is absent
    groups: float | None  # prompts per optimizer step where they can be told from the log


class Row(NamedTuple):
    """What one line, table row or object of a log says, in its trainer's names."""

    values: Mapping[str, Any]
    step: int | None = None  # where it stands outside the values: "step:7 - ", "Global step 7: {"
    bar: int | None = None  # the progress bar before it: bar/total
    total: int | None = None
    after: int | None = None  # the progress bar behind it
    mark: str = ""  # "resume": not a row, but the words that training resumes from a checkpoint


class Parsed(NamedTuple):
    """A row in our names."""

    kind: Kind
    step: int | None
    bar: int | None
    total: int | None
    after: int | None
    place: tuple[
        float, float, float
    ]  # epoch, tokens so far, learning rate; NaN where missing: where a row without a step belongs
    values: dict[str, float]


@dataclass(kw_only=True, slots=True)
class Tally:
    """What could not be read, and what there is to say."""

    unread: int = 0
    notes: list[str] = field(default_factory=list)
    logging_steps: int | None = None  # printed by the trainer among its arguments
    cut: bool = False  # the last line has no end

    def skip(self) -> None:
        """Counts something that could not be read."""
        self.unread += 1
        if self.cut:
            self.note(CUT)

    def note(self, sentence: str) -> None:
        """Adds a sentence, once."""
        if sentence not in self.notes and len(self.notes) < NOTES:
            self.notes.append(sentence)
