"""Rules from YAML, checked record by record: one sentence names what is wrong, where, and what would be right."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from grpo_lightning.errors import ConfigError
from grpo_lightning.health.records import Condition, Rule

__all__ = ["RECOVERABLE", "load_rules", "parse_rules", "read_records", "runbook_path", "shipped_path", "shipped_rules"]

_T = TypeVar("_T", Rule, Condition)
_FOLDER = Path(__file__).parent / "shipped"
_BOUNDS = (
    "below", "above", "not_finite", "missing", "ruler_ratio_below", "ruler_ratio_above", "ruler_z_below", "ruler_z_above",
    "trend_below", "trend_above", "jump_below", "jump_above", "stairs_above",
)  # fmt: skip
_FACTS = {"value": 0.0, "bound": 0.0, "steps": 0, "expected": 0.0, "signal": "", "step": 0, "onset": 0}
_LARGEST_FILE = 4 * 1024 * 1024
_LONGEST_WINDOW = 10_000  # steps or groups; a window is kept in memory
_LONGEST_TEXT = 500
_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")  # it becomes part of ids, files, tags and labels
_FORMAT = re.compile(r"[-+ ]?,?(\.\d{1,2})?[eEfFgG%]?")  # no widths: a million of blanks is a format too
# The two faults that repair themselves, by the signals that show them.
RECOVERABLE: dict[str, tuple[str, ...]] = {
    "skip_update": ("updates_skipped", "grad_norm", "grad_norm_ratio", "nonfinite_count_grad_norm", "loss"),
    "resample": ("rollouts_resampled", "empty_fraction", "truncated_fraction", "nonfinite_count_rewards"),
}


def shipped_path() -> Path:
    """The file of the shipped rules."""
    return _FOLDER / "rules.yaml"


def shipped_rules() -> list[Rule]:
    """The rules that a run is judged by unless it names others."""
    return load_rules(shipped_path())


def runbook_path(rule: Rule, file: str | Path | None = None) -> Path | None:
    """Where a rule's runbook lies, None where there is none; links that leave the rules' folder are none."""
    folder = (Path(file) if file is not None else shipped_path()).resolve().parent
    path = (folder / rule.runbook).resolve()
    inside = rule.runbook and path.is_relative_to(folder)
    return path if inside and path.is_file() else None


def load_rules(path: str | Path, *, signals: Collection[str] | None = None) -> list[Rule]:
    """The rules in a YAML file, a list of records.

    Args:
        path: the file.
        signals: the names that signals may have; others are refused, with the nearest name. Not checked when None.

    Raises:
        ConfigError: one sentence, with the file and the rule.
    """
    text = _text(Path(path))
    try:
        return parse_rules(text, signals=signals)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_rules(text: str, *, signals: Collection[str] | None = None) -> list[Rule]:
    """The rules in a YAML text; see `load_rules`."""
    content = _parsed(text)
    if isinstance(content, Mapping) and set(content) == {"rules"}:
        content = content["rules"]
    if not isinstance(content, list) or not content:
        raise ConfigError("rules are a list of records (`- name: ...`), and not an empty one.")
    rules = [_rule(record, position) for position, record in enumerate(content, 1)]
    names: set[str] = set()
    for rule in rules:
        if rule.name in names:
            raise ConfigError(f"two rules are called {rule.name!r}: names must be unique.")
        names.add(rule.name)
    _check_together(rules, names)
    for rule in rules if signals is not None else ():
        _check_signals(rule, signals or ())
    return rules


def read_records(path: str | Path) -> list[Any]:
    """A YAML file's list of records, whatever they are.

    Raises:
        ConfigError: one sentence, with the file.
    """
    try:
        content = _parsed(_text(Path(path)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from error
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{path} is not a list of records (`- name: ...`).")
    return content


def _text(file: Path) -> str:
    try:
        if not file.is_file():
            raise ConfigError(f"{file} is no file: name a YAML file.")
        if file.stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"{file} has more than 4 MiB: it can't be a file of rules.")
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}.") from error


def _parsed(text: str) -> Any:
    """What a YAML text holds. Its library breaks in many ways on what is none (`!!bool x` is a KeyError)."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ConfigError(f"this is not YAML: {_flat(error)}.") from error


def _flat(error: BaseException) -> str:
    return ascii(" ".join(str(error).split()))[1:-1][:300] or type(error).__name__


class _Loader(yaml.SafeLoader):
    """YAML without what a file of rules needs not: aliases, which can blow up, and keys that are given twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("an alias (*name) is not allowed in rules")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys if len(set(keys)) < len(keys) else ():
            if keys.count(key) > 1:
                line = node.start_mark.line + 1
                raise yaml.YAMLError(f"the record at line {line} has the key {_shown(key)} twice")
        return super().construct_mapping(node, deep=deep)


# Numbers as people write them: 1e-6 is one, and 0x30 (48 in YAML) is thirty zeros of a test's series.
_INT = r"[-+]?(?:0|[1-9]\d*)"
_FLOAT = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in found if not tag.endswith((":int", ":float"))]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"{_INT}$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"(?:{_FLOAT})$"), list("-+.0123456789"))


# ---- records


def _rule(record: Any, position: int) -> Rule:
    if not isinstance(record, Mapping):
        raise ConfigError(
            f"rule {position} is {_shown(record)}: give a record with name, signal, a bound and an action."
        )
    name = record.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"rule {position} has the name {_shown(name)}: give up to 80 of a-z, A-Z, 0-9, _ and -.")
    where = f"rule {name}"
    own = {field.name for field in fields(Rule)} - {"condition"}
    known = own | {field.name for field in fields(Condition)} - {"optional"}
    _check_keys(record, known, where)
    given: dict[str, Any] = {k: v for k, v in record.items() if k in own}
    for part in ("when", "unless", "milder_when"):
        if part in given:
            given[part] = _conditions(given[part], f"{where}, {part}")
    if "together" in given:
        given["together"] = _names(given["together"], where)
    if "show" in given:
        given["show"] = _names(given["show"], where)
    rest = {k: v for k, v in record.items() if k not in own}
    if "together" in given and rest:
        raise ConfigError(
            f"{where} has together and {_shown(next(iter(rest)))}: it joins other rules or judges a signal."
        )
    given["condition"] = None if "together" in given else _condition(rest, where)
    if given["condition"] is None and "within_steps" not in given:
        raise ConfigError(f"{where} needs within_steps: how many steps its parts may lie apart.")
    rule = _built(Rule, given, where)
    _check_rule(rule, where)
    return rule


def _conditions(records: Any, where: str) -> tuple[Condition, ...]:
    if not isinstance(records, list) or not records:
        raise ConfigError(f"{where} is {_shown(records)}: give a list of conditions (`- signal: ...`).")
    made = []
    for record in records:
        if not isinstance(record, Mapping):
            raise ConfigError(f"{where} holds {_shown(record)}: give a record with signal and a bound.")
        _check_keys(record, {field.name for field in fields(Condition)}, where)
        made.append(_condition(record, where))
    return tuple(made)


def _condition(record: Mapping[str, Any], where: str) -> Condition:
    for key in ("signal", "else_signal", "unit", "else_unit", "relative_to"):
        name = record.get(key)
        if (name is not None or key == "signal") and not _is_signal(name):
            raise ConfigError(f"{where} has the {key} {_shown(name)}: name one signal.")
    bounds = [key for key in _BOUNDS if record.get(key) is not None and record.get(key) is not False]
    if len(bounds) != 1:
        found = " and ".join(bounds) if bounds else "none"
        raise ConfigError(f"{where} needs exactly one bound and has {found}: give one of {', '.join(_BOUNDS)}.")
    condition = _built(Condition, dict(record), where)
    if condition.missing and "," not in where:
        raise ConfigError(f"{where} has missing: it is a condition for when and unless; a rule needs a value to judge.")
    _check_condition(condition, bounds[0], where)
    return condition


def _is_signal(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() and name == name.strip()


def _check_condition(condition: Condition, bound: str, where: str) -> None:
    if condition.kind not in ("not_finite", "missing") and not math.isfinite(condition.bound):
        raise ConfigError(f"{where} has {bound}: {condition.bound}, which can never decide: give a finite number.")
    for name in ("over_steps", "recent_steps"):
        if not 1 <= getattr(condition, name) <= _LONGEST_WINDOW:
            raise ConfigError(f"{where} has {name}: {_shown(getattr(condition, name))}: give 1 to {_LONGEST_WINDOW}.")
    if not 0 <= condition.over_groups <= _LONGEST_WINDOW:
        raise ConfigError(f"{where} has over_groups: {_shown(condition.over_groups)}: give 0 to {_LONGEST_WINDOW}.")
    if bound.startswith("trend") and condition.over_steps < 3:
        raise ConfigError(f"{where} has a trend over {condition.over_steps} steps: give over_steps of 3 or more.")
    if bound in ("ruler_ratio_below", "jump_below") and condition.bound <= 0:
        raise ConfigError(f"{where} has {bound}: {condition.bound}: a ratio below that never holds; give more than 0.")
    if condition.statistic == "zero_share" and condition.kind == "level" and not 0 <= condition.bound <= 1:
        raise ConfigError(f"{where} has {bound}: {condition.bound}: a share is from 0 to 1.")
    if bound == "stairs_above" and condition.over_steps < 10:
        raise ConfigError(f"{where} counts stairs over {condition.over_steps} steps: give over_steps of 10 or more.")


def _check_rule(rule: Rule, where: str) -> None:
    for name in (
        "for_steps",
        "for_samples",
        "for_minutes",
        "for_groups",
        "after_steps",
        "min_groups",
        "keep_firing_steps",
        "within_steps",
    ):
        value = getattr(rule, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{where} has {name}: {value}: give a finite number, 0 or more.")
    if rule.before_steps <= rule.after_steps:
        raise ConfigError(f"{where} speaks after step {rule.after_steps} and before {rule.before_steps}: it never can.")
    if not rule.quiet and not rule.summary:
        raise ConfigError(f"{where} has no summary: say in a sentence what its alert means.")
    _check_summary(rule, where)
    allowed = RECOVERABLE.get(rule.action)
    if allowed is not None and (rule.condition is None or rule.condition.signal not in allowed):
        raise ConfigError(
            f"{where} has the action {rule.action}, which repairs one known fault and is allowed on "
            f"{', '.join(allowed)} only: everything else needs a person, so give pause or notify."
        )


def _check_summary(rule: Rule, where: str) -> None:
    """The summary can be filled in, now and later, and to a sentence."""
    for name, text in (("summary", rule.summary), ("first", rule.first), ("runbook", rule.runbook)):
        if len(text) > _LONGEST_TEXT:
            raise ConfigError(f"{where} has a {name} of {len(text)} characters: give at most {_LONGEST_TEXT}.")
    try:
        parts = list(string.Formatter().parse(rule.summary))
        unknown = [name for _, name, _, _ in parts if name is not None and name not in _FACTS]
        odd = [form or convert for _, _, form, convert in parts if convert or not _FORMAT.fullmatch(form or "")]
        if not unknown and not odd:
            rule.summary.format(**_FACTS)
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{where} has a summary that can't be filled in ({error}): {_shown(rule.summary)}."
        ) from error
    if unknown:
        raise ConfigError(f"{where} has {_shown(unknown[0])} in its summary: it may name {', '.join(_FACTS)}.")
    if odd:
        raise ConfigError(f"{where} has the format {_shown(odd[0])} in its summary: use one such as .2f, .3g or .0%.")


def _check_together(rules: Sequence[Rule], names: Collection[str]) -> None:
    for rule in rules:
        for part in rule.together:
            if part not in names:
                raise ConfigError(f"rule {rule.name} names the rule {_shown(part)}, which {_near(part, names)}.")
    try:
        TopologicalSorter({rule.name: rule.together for rule in rules}).prepare()
    except CycleError as error:
        raise ConfigError(
            f"the rules {' and '.join(dict.fromkeys(error.args[1]))} join each other: they never can hold."
        ) from error


def _check_signals(rule: Rule, signals: Collection[str]) -> None:
    for name in rule.signals:
        if name not in signals and not _patterned(name, signals):
            raise ConfigError(f"rule {rule.name} reads the signal {_shown(name)}, which {_near(name, signals)}.")


def _patterned(name: str, signals: Collection[str]) -> bool:
    """True for names like `reward/mine_mean` where the signals hold `reward/<name>_mean`."""
    patterns = [re.escape(s).replace("<name>", "[^/]+") for s in signals if "<name>" in s]
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _near(name: str, names: Collection[str]) -> str:
    near = get_close_matches(name[:80], names, n=1)
    return f"is not known: did you mean {near[0]!r}?" if near else "is not known"


def _check_keys(record: Mapping[Any, Any], known: Collection[str], where: str) -> None:
    for key in record:
        if key not in known:
            raise ConfigError(f"{where} has the key {_shown(key)}, which {_near(str(key), known)}.")


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(map(_is_signal, value)):
        raise ConfigError(f"{where} has {_shown(value)}: give a list of names.")
    return tuple(value)


# ---- types


def _built(kind: type[_T], given: dict[str, Any], where: str) -> _T:
    types = get_type_hints(kind)
    for name, value in given.items():
        if name not in ("condition", "when", "unless", "milder_when", "together", "show"):
            given[name] = _typed(value, types[name], f"{where} has {name}: {_shown(value)}")
    missing = [
        f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING and f.name not in given
    ]
    if missing:
        raise ConfigError(f"{where} lacks {missing[0]}.")
    return kind(**given)


def _typed(value: Any, kind: Any, said: str) -> Any:
    if get_origin(kind) is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise ConfigError(f"{said}: use one of {', '.join(get_args(kind))}.")
        return value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    wants = set(get_args(kind) or (kind,))
    if float in wants and number:
        return _float(value, said)
    if int in wants and number and _float(value, said).is_integer():
        return int(value)
    if bool in wants and isinstance(value, bool):
        return value
    if str in wants and isinstance(value, str):
        return value
    name = (
        "a number"
        if float in wants
        else "a whole number"
        if int in wants
        else "true or false"
        if bool in wants
        else "text"
    )
    raise ConfigError(f"{said}: give {name}.")


def _float(value: float, said: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(f"{said}: the number is too large.") from error


def _shown(value: Any) -> str:
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; a nest of thousands of lists
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 80 else text[:77] + "..."
