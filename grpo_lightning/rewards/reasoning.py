"""The verifiers that reasoning-gym's tasks bring with them."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from typing import Any

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards.text import texts_of
from grpo_lightning.rewards.verifier import Patience, UnknownVerifier, VerifierFailed, shared_verifier

__all__ = ["ReasoningGymScore"]

_OPEN, _CLOSE = re.compile("<answer>", re.IGNORECASE), re.compile("</answer>", re.IGNORECASE)


class ReasoningGymScore:
    """The task's own score, 0 to 1, of the text in the last <answer> tags, or of the whole response without tags.

    Reads the task's name from the column `task`, else from the row's metadata, and its row from the column `entry`, else
    from `question`, `answer` and `metadata`. `reasoning_gym:` data has `task` and `entry`. The verifiers run in a helper
    process, where none of them evaluates the response as Python. Tasks that the user's own code registered run here.
    Once responses that take too long have cost a call 30 seconds, its other responses are None.

    Args:
        seconds: how long one response may take; past it, it scores 0.
    """

    __name__ = "reasoning_gym_score"

    def __init__(self, seconds: float = 2.0) -> None:
        if not seconds > 0:
            raise RewardError(f"reasoning_gym_score has {seconds} seconds: give a number above 0.")
        self._seconds = seconds
        self._helped: dict[str, bool] = {}  # whether the helper process has the task

    def __call__(self, completions: list[Any], **columns: Any) -> list[float | None]:
        """One value a response."""
        patience = Patience(most=self._seconds)
        return [self._score(*_row(columns, i), _said(text), patience) for i, text in enumerate(texts_of(completions))]

    def _score(self, task: str, entry: dict[str, Any], said: str, patience: Patience) -> float | None:
        if task not in self._helped:
            self._helped[task] = self._check(task, entry)
        if not self._helped[task]:
            return _score_here(task, entry, said)
        return patience.ask(shared_verifier(), "reasoning_gym", task, entry, said)

    def _check(self, task: str, entry: dict[str, Any]) -> bool:
        """Whether the helper has the task. A verifier that can't judge the row's own answer would give every response 0."""
        try:
            shared_verifier().ask("reasoning_gym", task, entry, None, seconds=self._seconds)
        except TimeoutError:
            return True
        except UnknownVerifier:
            _score_here(task, entry, "")
            return False
        except VerifierFailed as error:
            raise RewardError(
                f"The task {task!r} of reasoning-gym can't be scored ({error}): put its whole row in the column `entry`."
            ) from error
        return True


def _score_here(task: str, entry: dict[str, Any], said: str | None) -> float:
    """For tasks that the user's code registered in this process."""
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = get_close_matches(task, DATASETS, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "name one of its tasks in the column `task`."
        raise RewardError(f"reasoning-gym has no task {task!r}: {hint}")
    verifier = get_score_answer_fn(task)
    try:
        return float(verifier(said, entry))
    except Exception:  # noqa: BLE001 - verifiers differ in what they raise on text they can't read
        return 0.0


def _said(text: str) -> str:
    """What stands in the last pair of <answer> tags, or everything; two scans, however hostile the text."""
    *_, end = [None, *_CLOSE.finditer(text)]
    if end is None:
        return text.strip()
    *_, begin = [None, *_OPEN.finditer(text, 0, end.start())]
    return (text if begin is None else text[begin.end() : end.start()]).strip()


def _row(columns: dict[str, Any], i: int) -> tuple[str, dict[str, Any]]:
    if "entry" in columns:
        entry = _read(columns["entry"][i])
    else:
        absent = [name for name in ("question", "answer", "metadata") if name not in columns]
        if absent:
            raise RewardError(
                "reasoning_gym_score needs the column `entry`, or the columns question, answer, metadata."
            )
        entry = {name: columns[name][i] for name in ("question", "answer")}
        entry["metadata"] = _read(columns["metadata"][i])
    task = columns["task"][i] if "task" in columns else (entry.get("metadata") or {}).get("source_dataset")
    if not task:
        raise RewardError("reasoning_gym_score needs the column `task`, or metadata with `source_dataset`.")
    return str(task), entry


def _read(row: Any) -> dict[str, Any]:
    """A row, also where it was saved as JSON."""
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except json.JSONDecodeError as error:
            raise RewardError(f"reasoning_gym_score got a row that is not JSON ({error.msg}).") from error
    if not isinstance(row, dict):
        raise RewardError(f"reasoning_gym_score got a {type(row).__name__} for a row: it must be a dict.")
    return row
