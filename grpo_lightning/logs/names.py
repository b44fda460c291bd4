"""From a trainer's names to our signals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any

from grpo_lightning.logs.numbers import number, whole
from grpo_lightning.logs.records import Kind, Parsed, Row, Tally
from grpo_lightning.logs.tables import IGNORED, NAMES, OWN, SCALES

__all__ = ["NAMES", "STEP_KEYS", "Translator", "clean_key", "knows", "trainer_of"]

STEP_KEYS = (
    "step",
    "global_step",
    "train/global_step",
    "trainer/global_step",
    "training/global_step",
    "Step",
    "global_step/max_steps",
    "iteration",
    "steps",
    "_step",
)
_STEP_RANK = {key: rank for rank, key in enumerate(STEP_KEYS)}
SUMMARY_KEYS = frozenset({"train_runtime", "train_samples_per_second"})
AVERAGED = frozenset({"eval_accuracy", "eval_reward_mean"})  # several data sets in one row
NOT_RL = frozenset({"loss", "lr", "grad_norm", "entropy", "step_seconds", "kl_coef", "policy_loss"})
UNKNOWN_AT_MOST = 100
LAYOUTS_AT_MOST = 1000
KEY_CHARS = 200  # of a longer key the beginning counts
NAN = float("nan")
_SLASH = re.compile(r"\s*/\s*")
_SIGNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("verl", re.compile(r"(actor/|critic/|response_length/|prompt_length/|val-core/).*")),
    (
        "openrlhf",
        re.compile(r"group_reward_std|response_clip_ratio|ppo_clip_ratio|vllm_kl|actor_lr|rollout/truncated_rate"),
    ),
    (
        "nemo-rl",
        re.compile(r"gen_kl_error|token_mult_prob_error|probs_ratio.*|baseline_reward/.*|mean_gen_tokens_per_sample"),
    ),
    ("ms-swift", re.compile(r"global_step/max_steps|train_speed\(.*|memory\(GiB\)|remaining_time")),
    (
        "grpo-lightning",
        re.compile(r"dead_group_fraction|[123]_(overview|health|diagnosis)/.*|clip_(low|high)_fraction"),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How rows with the same keys are read."""

    kind: Kind
    step_key: str | None
    place: tuple[str | None, str | None, str | None]  # the keys of epoch, tokens so far and learning rate
    columns: tuple[tuple[str, str, float], ...]  # key, signal, scale
    several: tuple[tuple[str, tuple[str, ...]], ...]  # signal and its keys: a mean, or the greatest absolute value


class Translator:
    """Reads rows by one trainer's table and collects the keys that no table knows."""

    def __init__(self, trainer: str) -> None:
        self.trainer = trainer
        self.unknown: dict[str, str | None] = {}
        self._layouts: dict[tuple[str, ...], Layout] = {}

    def parse(self, row: Row, tally: Tally) -> Parsed | None:
        """The row in our names; None where it says nothing that counts."""
        raw = row.values
        layout = self._layout(raw)
        values: dict[str, float] = {}
        for key, signal, scale in layout.columns:
            value = raw[key]
            if type(value) is not float:
                value = _number(value, tally)
                if value is None:
                    continue
            values[signal] = value if scale == 1.0 else value * scale
        for signal, keys in layout.several:
            _combine(values, signal, [found for key in keys if (found := number(raw[key])) is not None])
        step = row.step if layout.step_key is None or row.step is not None else whole(raw[layout.step_key])
        if not values and layout.kind != "summary":
            return None
        return Parsed(layout.kind, step, row.bar, row.total, row.after, _place(raw, layout), values)

    def _layout(self, raw: Mapping[str, Any]) -> Layout:
        keys = tuple(raw)
        found = self._layouts.get(keys)
        if found is None:
            if len(self._layouts) >= LAYOUTS_AT_MOST:
                self._layouts.clear()
            found = self._layouts[keys] = self._new_layout(raw)
        return found

    def _new_layout(self, raw: Mapping[str, Any]) -> Layout:
        best: dict[str, list[tuple[int, str]]] = {}
        for key in raw:
            cleaned = clean_key(key)
            entry = _lookup(self.trainer, cleaned)
            if entry is not None:
                best.setdefault(entry[0], []).append((entry[1], key))
            elif not _ignored(self.trainer).fullmatch(cleaned) and number(raw[key]) is not None:
                self._note_unknown(key, cleaned)
        single, several = _columns(best)
        return Layout(
            kind=_kind(raw, best),
            step_key=min((key for key in raw if key in _STEP_RANK), key=_STEP_RANK.__getitem__, default=None),
            place=(
                _first(raw, "epoch", "train/epoch"),
                _first(raw, "num_tokens", "train/num_tokens"),
                _first(raw, "learning_rate"),
            ),
            columns=single,
            several=several,
        )

    def _note_unknown(self, key: str, cleaned: str) -> None:
        if len(self.unknown) < UNKNOWN_AT_MOST:
            self.unknown["".join(sign if sign.isprintable() else "?" for sign in key[:120])] = _near(cleaned)


@lru_cache(maxsize=4096)
def clean_key(key: str) -> str:
    """A key without what an export adds: ``train/kl`` and ``completions / mean_length`` and ``2_health/kl``."""
    text = _SLASH.sub("/", key[:KEY_CHARS].strip())
    for prefix in ("train/", "1_overview/", "2_health/", "3_diagnosis/"):
        text = text.removeprefix(prefix)
    text = {"Training Loss": "loss", "Validation Loss": "eval_loss"}.get(text, text)
    return "eval_" + text.removeprefix("eval/") if text.startswith("eval/") else text


def trainer_of(keys: Iterable[str], likely: str = "trl") -> str:
    """The trainer whose names these are; the likely one, or TRL, where nothing in them shows it."""
    keys = list(keys)
    cleaned = [clean_key(key) for key in keys]
    for trainer, sign in _SIGNS:
        if any(sign.fullmatch(key) for key in (*cleaned, *keys)):
            return trainer
    return max((likely, "trl"), key=lambda trainer: sum(_has(trainer, key) for key in cleaned))


def _has(trainer: str, key: str) -> bool:
    exact, patterns = _compiled(trainer)
    return key in exact or any(pattern.fullmatch(key) for pattern, _, _ in patterns)


def knows(key: str) -> bool:
    """Whether any table has the key."""
    cleaned = clean_key(key)
    return key in _STEP_RANK or any(_lookup(trainer, cleaned) for trainer in NAMES)


@lru_cache(maxsize=8192)
def _lookup(trainer: str, key: str) -> tuple[str, int] | None:
    """The signal of a key and its rank in the table; other trainers' and our own names count too, after its own."""
    for place, name in enumerate((trainer, "grpo-lightning", *NAMES)):
        exact, patterns = _compiled(name)
        if key in exact:
            return exact[key][0], place * 1000 + exact[key][1]
        for pattern, signal, rank in patterns:
            if match := pattern.fullmatch(key):
                return signal.replace("<fn>", _safe(match.groupdict().get("fn") or "")), place * 1000 + rank
    return None


@cache
def _compiled(trainer: str) -> tuple[dict[str, tuple[str, int]], list[tuple[re.Pattern[str], str, int]]]:
    exact: dict[str, tuple[str, int]] = {}
    patterns: list[tuple[re.Pattern[str], str, int]] = []
    for rank, (key, (signal, _)) in enumerate(NAMES[trainer].items()):
        if "<" in key:
            text = re.escape(key).replace("<fn>", r"(?P<fn>[^/]+?)").replace("<data>", ".+?").replace("<n>", r"\d+")
            patterns.append((re.compile(text), signal, rank))
        else:
            exact[key] = (signal, rank)
    return exact, patterns


@cache
def _ignored(trainer: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in IGNORED[trainer]))


def _safe(name: str) -> str:
    """A reward function's name, fit for a signal's."""
    return re.sub(r"[^\w.\- ]", "_", name.strip())[:80] or "_"


def _columns(best: dict[str, list[tuple[int, str]]]) -> tuple[Any, Any]:
    """One key per signal, the first in its table, and the signals that several keys make."""
    several = {
        signal: tuple(key for _, key in sorted(found))
        for signal, found in best.items()
        if (signal in AVERAGED and len(found) > 1) or signal == "advantage_abs_max"
    }
    single = [(min(found)[1], signal) for signal, found in best.items() if signal not in several]
    return tuple((key, signal, SCALES.get(clean_key(key), 1.0)) for key, signal in single), tuple(several.items())


def _kind(raw: Mapping[str, Any], signals: Iterable[str]) -> Kind:
    if any(clean_key(key) in SUMMARY_KEYS and number(raw[key]) is not None for key in raw):
        return "summary"
    ours = set(signals)
    if any(not signal.startswith("eval_") for signal in ours):
        training = {signal for signal in ours if not signal.startswith("eval_")}
        return "other" if training <= NOT_RL else "train"
    return "eval"


def _number(value: Any, tally: Tally) -> float | None:
    found = number(value)
    if (
        found is None
        and isinstance(value, str)
        and value.strip().lower() not in ("", "no log", "none", "null", "-", "n/a")
    ):
        tally.skip()
    return found


def _combine(values: dict[str, float], signal: str, found: list[float]) -> None:
    if not found:
        return
    if signal in AVERAGED:
        values[signal] = sum(found) / len(found)
    else:
        values[signal] = NAN if any(map(math.isnan, found)) else max(abs(value) for value in found)


def _place(raw: Mapping[str, Any], layout: Layout) -> tuple[float, float, float]:
    epoch, tokens, rate = ((NAN if key is None else number(raw[key])) for key in layout.place)
    return (NAN if epoch is None else epoch, NAN if tokens is None else tokens, NAN if rate is None else rate)


def _first(raw: Mapping[str, Any], *keys: str) -> str | None:
    return next((key for key in keys if key in raw), None)


@lru_cache(maxsize=1024)
def _near(key: str) -> str | None:
    """The signal that an unknown key might be, by its words."""
    words = _words(key)
    known = _known_words()
    if words in known:
        return known[words]
    close = get_close_matches(words, known, n=1, cutoff=0.8)
    return known[close[0]] if close else None


@cache
def _known_words() -> dict[str, str]:
    known = {_words(name): name for name in OWN}
    for table in NAMES.values():
        for key, (signal, _) in table.items():
            if "<" not in key:
                known.setdefault(_words(key), signal)
    return known


def _words(key: str) -> str:
    return " ".join(sorted(re.findall(r"[a-z0-9]+", key.lower())))
