"""Groups and responses of the evidence: what repeats across prompts, and which group carries the update."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from grpo_lightning.health.diagnosing.records import Finding, Number, Span

__all__ = ["evidence_findings", "shared_form"]

Row = Mapping[str, Any]
_SHORTEST_FORM = 20  # characters
_SHARE = 0.6  # of the responses
_PROMPTS = 3
_SHOWN = 80


def evidence_findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """A form that responses to different prompts share; groups of equal responses; a group that carries the update."""
    texts = {_key(row): row for row in rows if isinstance(row.get("response"), str)}
    found = list(texts.values())
    if not found:
        return
    steps = _steps(found)
    yield from _form(found, steps)
    yield from _alike(found, steps)
    yield from _dominant(found, steps)


def shared_form(rows: Sequence[Row]) -> tuple[str, int] | None:
    """The longest beginning that most responses share, over 3 prompts or more, and how many do.

    Example:
        >>> rows = [{"row_id": i, "response": f"As an expert, I am sure that it is {i}."} for i in range(4)]
        >>> shared_form(rows)
        ('As an expert, I am sure that it is ', 4)
    """
    texts = sorted((str(row["response"]).strip(), str(row.get("row_id"))) for row in rows)
    need = max(int(_SHARE * len(texts) + 0.999), _PROMPTS)
    best: tuple[str, int] | None = None
    for place in range(len(texts) - need + 1):
        window = texts[place : place + need]
        common = _common(window[0][0], window[-1][0])
        if len(common) < _SHORTEST_FORM or len({row for _, row in window}) < _PROMPTS:
            continue
        if best is None or len(common) > len(best[0]):
            best = (common, 0)
    if best is None:
        return None
    return best[0], sum(text.startswith(best[0]) for text, _ in texts)


def _common(one: str, other: str) -> str:
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _form(rows: Sequence[Row], steps: Span | None) -> Iterator[Finding]:
    form = shared_form(rows)
    if form is None:
        return
    text, count = form
    with_it = [row for row in rows if str(row["response"]).strip().startswith(text)]
    without = [row for row in rows if not str(row["response"]).strip().startswith(text)]
    mine, others = _mean(with_it, "reward"), _mean(without, "reward")
    prompts = len({str(row.get("row_id")) for row in with_it})
    yield Finding(
        name="responses_share_a_form",
        level="reward",
        strength="strong" if mine is not None and (others is None or mine > others) else "hint",
        what=f"{count} of {len(rows)} responses in the evidence, to {prompts} prompts, begin with {_cut(text)!r}.",
        numbers=(Number(signal="reward without / with this form", before=others, after=mine),),
        steps=steps,
        why="A form that comes whatever the question is was learned from the reward, not from the task.",
        first="Give the reward this form with a wrong answer, and see what it says.",
    )


def _alike(rows: Sequence[Row], steps: Span | None) -> Iterator[Finding]:
    """Groups whose responses are all the same."""
    groups = [group for group in _groups(rows).values() if len(group) > 1]
    same = [group for group in groups if len({str(row["response"]) for row in group}) == 1]
    if len(groups) >= 2 and len(same) * 2 > len(groups):
        ids = ", ".join(str(group[0].get("row_id")) for group in same[:6])
        yield Finding(
            name="responses_alike",
            level="reward",
            strength="strong",
            what=f"In {len(same)} of {len(groups)} groups of the evidence all responses are the same (rows {ids}).",
            numbers=(
                Number(signal="entropy_mean of these rollouts", before=None, after=_mean(same[0], "entropy_mean")),
            ),
            steps=steps,
            why="Equal responses get equal rewards: the advantage is 0 whatever the reward is.",
            first="Check temperature and top-p of the sampler, then the entropy.",
        )


def _dominant(rows: Sequence[Row], steps: Span | None) -> Iterator[Finding]:
    weight: dict[Any, float] = defaultdict(float)
    for key, group in _groups(rows).items():
        weight[key] = sum(a * a for row in group if (a := _number(row, "advantage")) is not None)
    total = sum(weight.values())
    if len(weight) < 4 or total <= 0:
        return
    top = max(weight, key=lambda key: weight[key])
    group = _groups(rows)[top]
    if weight[top] / total >= 0.6:
        sources = Counter(str(row.get("source")) for row in group)
        yield Finding(
            name="one_group_dominates",
            level="reward",
            strength="hint",
            what=(
                f"The group of row {group[0].get('row_id')} (source {sources.most_common(1)[0][0]}) has"
                f" {weight[top] / total:.0%} of the squared advantage in the evidence."
            ),
            numbers=(Number(signal="advantage_top_group_share", before=None, after=weight[top] / total),),
            steps=steps,
            why="One prompt makes the update: what it rewards is what is learned.",
            first="Read that group's responses and rewards.",
        )


def _groups(rows: Sequence[Row]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        groups[_key(row)[:3]].append(row)
    return groups


def _key(row: Row) -> tuple[Any, ...]:
    """A rollout may be picked for several reasons."""
    return tuple(str(row.get(name)) for name in ("step", "rank", "row_id", "rollout", "response"))


def _steps(rows: Sequence[Row]) -> Span | None:
    steps = [row["step"] for row in rows if isinstance(row.get("step"), int)]
    return Span(first=min(steps), last=max(steps)) if steps else None


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer beyond every float
        return None
    return number if math.isfinite(number) else None


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [value for row in rows if (value := _number(row, name)) is not None]
    return sum(values) / len(values) if values else None


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
