"""Rules from YAML: what is refused, in one sentence that says what would be right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import yaml

from grpo_lightning.errors import ConfigError
from grpo_lightning.health import load_rules, parse_rules, runbook_path, shipped_path, shipped_rules
from grpo_lightning.signals import signal_names

RULE = "name: r, signal: kl, summary: s"

BAD: dict[str, tuple[str, str]] = {
    "empty": ("", "list of records"),
    "a number": ("5", "list of records"),
    "an empty list": ("[]", "list of records"),
    "no record": ("[kl]", "rule 1 is 'kl'"),
    "no name": ("[{signal: kl, above: 1, summary: s}]", "rule 1 has the name None"),
    "a name that is no word": ("[{name: 'a b', signal: kl, above: 1, summary: s}]", "'a b'"),
    "a name with letters that look like others": ("[{name: кl, signal: kl, above: 1, summary: s}]", r"\\u043a"),
    "a name that is too long": (f"[{{name: {'a' * 81}, signal: kl, above: 1, summary: s}}]", "up to 80"),
    "a path for a name": ("[{name: ../../etc, signal: kl, above: 1, summary: s}]", "up to 80"),
    "two of a name": (f"[{{{RULE}, above: 1}}, {{{RULE}, above: 2}}]", "two rules are called 'r'"),
    "a key given twice": (f"[{{{RULE}, above: 1, above: 2}}]", "'above' twice"),
    "an unknown key": (f"[{{{RULE}, abov: 1}}]", "did you mean 'above'"),
    "a key that is a list": (f"[{{{RULE}, above: 1, ? [a, b] : 1}}]", "not YAML"),
    "no bound": (f"[{{{RULE}}}]", "exactly one bound and has none"),
    "two bounds": (f"[{{{RULE}, above: 1, below: 2}}]", "below and above"),
    "a bound that is text": (f"[{{{RULE}, above: high}}]", "give a number"),
    "a bound that is true": (f"[{{{RULE}, above: true}}]", "give a number"),
    "NaN": (f"[{{{RULE}, above: .nan}}]", "can never decide"),
    "infinity": (f"[{{{RULE}, above: .inf}}]", "can never decide"),
    "a number beyond doubles": (f"[{{{RULE}, above: 1{'0' * 400}}}]", "too large"),
    "a number of 5000 digits": (f"[{{{RULE}, above: 1{'0' * 5000}}}]", "not YAML"),
    "a ratio that is never below": (f"[{{{RULE}, ruler_ratio_below: 0}}]", "never holds"),
    "a jump that is never below": (f"[{{{RULE}, jump_below: -1}}]", "never holds"),
    "a share above 1": (f"[{{{RULE}, above: 1.5, statistic: zero_share}}]", "from 0 to 1"),
    "a trend over two steps": (f"[{{{RULE}, trend_above: 1, over_steps: 2}}]", "3 or more"),
    "stairs over five": (f"[{{{RULE}, stairs_above: 1, over_steps: 5}}]", "10 or more"),
    "a window of no step": (f"[{{{RULE}, above: 1, over_steps: 0}}]", "1 to 10000"),
    "a window without end": (f"[{{{RULE}, above: 1, over_steps: 10000000000}}]", "1 to 10000"),
    "half a step": (f"[{{{RULE}, above: 1, over_steps: 1.5}}]", "whole number"),
    "negative groups": (f"[{{{RULE}, above: 1, over_groups: -1}}]", "0 to 10000"),
    "an unknown statistic": (f"[{{{RULE}, above: 1, statistic: mode}}]", "use one of mean"),
    "a statistic that is a list": (f"[{{{RULE}, above: 1, statistic: [mean]}}]", "use one of mean"),
    "negative for_steps": (f"[{{{RULE}, above: 1, for_steps: -1}}]", "0 or more"),
    "endless for_steps": (f"[{{{RULE}, above: 1, for_steps: .inf}}]", "finite"),
    "before after": (f"[{{{RULE}, above: 1, after_steps: 9, before_steps: 5}}]", "it never can"),
    "missing as a rule": (f"[{{{RULE}, missing: true}}]", "when and unless"),
    "an unknown action": (f"[{{{RULE}, above: 1, action: stop}}]", "use one of notify"),
    "a repair of what can't be repaired": (f"[{{{RULE}, above: 1, action: skip_update}}]", "needs a person"),
    "a repair of too many": ("[{name: r, signal: entropy, above: 1, summary: s, action: resample}]", "needs a person"),
    "no summary": ("[{name: r, signal: kl, above: 1}]", "no summary"),
    "a long summary": (f"[{{name: r, signal: kl, above: 1, summary: {'a' * 501}}}]", "at most 500"),
    "no signal": ("[{name: r, above: 1, summary: s}]", "name one signal"),
    "a signal that is a list": ("[{name: r, signal: [kl], above: 1, summary: s}]", "name one signal"),
    "a signal with a line break": ('[{name: r, signal: "k\\nl", above: 1, summary: s}]', "name one signal"),
    "an unknown unit": (f"[{{{RULE}, above: 1, unit: 5}}]", "the unit 5"),
    "when is no list": (f"[{{{RULE}, above: 1, when: {{signal: kl, above: 1}}}}]", "give a list of conditions"),
    "when holds a word": (f"[{{{RULE}, above: 1, when: [kl]}}]", "holds 'kl'"),
    "when without a bound": (f"[{{{RULE}, above: 1, when: [{{signal: kl}}]}}]", "exactly one bound"),
    "show is a word": (f"[{{{RULE}, above: 1, show: kl}}]", "list of names"),
    "together without steps": ("[{name: r, together: [a], summary: s}]", "needs within_steps"),
    "together with a stranger": (
        f"[{{{RULE}, above: 1}}, {{name: j, together: [q], within_steps: 1, summary: s}}]",
        "'q'",
    ),
    "together with itself": ("[{name: j, together: [j], within_steps: 1, summary: s}]", "join each other"),
    "a circle": (
        "[{name: a, together: [b], within_steps: 1, summary: s}, {name: b, together: [a], within_steps: 1, summary: s}]",
        "a and b join each other|b and a join each other",
    ),
    "together and a signal": (f"[{{{RULE}, above: 1, together: [r], within_steps: 1}}]", "joins other rules or judges"),
    "an alias": ("- &a {name: r, signal: kl, above: 1, summary: s}\n- *a", "alias"),
    "billions of laughs": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "alias"),
    "a nest of lists": ("[" * 3000, "not YAML"),
    "a nest of records": ("{a: " * 3000, "not YAML"),
    "an object of Python": ("!!python/object/apply:os.system [ls]", "not YAML"),
    "a truth that is none": ("[!!bool maybe]", "not YAML"),
    "a time that is none": ("[!!timestamp never]", "not YAML"),
    "a whole number that is none": ("[!!int '']", "not YAML"),
    "two documents": ("[]\n---\n[]", "not YAML"),
    "a tab": ("-\tname: r\n\tsignal: kl", "not YAML"),
    "control characters": ("[\x00]", "not YAML"),
}

FORMATS: dict[str, tuple[str, str]] = {
    "an unknown name": ("{who}", "it may name value"),
    "an attribute": ("{value.__class__}", "may name"),
    "an item": ("{signal[0]}", "may name"),
    "a place": ("{0}", "may name"),
    "an empty name": ("{}", "may name"),
    "an open brace": ("{value", "can't be filled in"),
    "a width of a gigabyte": ("{value:1000000000}", "use one such as"),
    "a thousand digits": ("{value:.1000f}", "use one such as"),
    "a character by number": ("{step:c}", "use one such as"),
    "a format inside": ("{value:{step}}", "use one such as"),
    "a conversion": ("{value!r}", "use one such as"),
    "a number's format on text": ("{signal:.2f}", "can't be filled in"),
}


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message
    assert message.isprintable()
    assert len(message) < 900


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_bad_rules_are_one_sentence(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_rules(text)
    assert_one_sentence(str(caught.value))


@pytest.mark.parametrize(("summary", "message"), FORMATS.values(), ids=FORMATS)
def test_a_summary_can_be_filled_in_at_every_step(summary: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_rules(f"[{{name: r, signal: kl, above: 1, summary: {summary!r}}}]")
    assert_one_sentence(str(caught.value))


def test_an_unknown_signal_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'group_reward_sd', which is not known: did you mean 'group_reward_std'"):
        parse_rules("[{name: r, signal: group_reward_sd, below: 1, summary: s}]", signals=signal_names())
    for place in ("show: [{}]", "unit: {}", "when: [{{signal: {}, above: 1}}]", "relative_to: {}"):
        with pytest.raises(ConfigError, match="reads the signal"):
            parse_rules(f"[{{{RULE}, above: 1, {place.format('nothing_like_it')}}}]", signals=signal_names())


def test_signals_of_a_runs_own_rewards_are_known() -> None:
    (rule,) = parse_rules("[{name: r, signal: reward/mine_mean, below: 1, summary: s}]", signals=signal_names())
    assert rule.signals == ("reward/mine_mean",)


def test_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("[]")
    with pytest.raises(ConfigError, match=r"mine\.yaml: rules are a list"):
        load_rules(path)


FILES = {"missing": None, "not text": b"\xff\xfe\x00", "too large": b"# " + b"x" * (4 * 1024 * 1024)}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES)
def test_files_that_are_none(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "rules.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_rules(path)
    assert_one_sentence(str(caught.value))
    with pytest.raises(ConfigError):
        load_rules(tmp_path)
    with pytest.raises(ConfigError):
        load_rules("a\x00b")


def test_a_list_may_stand_under_rules() -> None:
    assert [r.name for r in parse_rules(f"rules:\n- {{{RULE}, above: 1}}")] == ["r"]


def test_a_runbook_lies_beside_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "secret.md").write_text("no")
    (tmp_path / "rules" / "kl.md").write_text("yes")
    file = tmp_path / "rules" / "mine.yaml"
    found = {}
    for link in ("kl.md", "none.md", "../secret.md", "", "."):
        (rule,) = parse_rules(f"[{{{RULE}, above: 1, runbook: '{link}'}}]")
        found[link] = runbook_path(rule, file)
    assert found.pop("kl.md") == tmp_path / "rules" / "kl.md"
    assert set(found.values()) == {None}


# ---- mutations of the shipped rules


TEXT = shipped_path().read_text(encoding="utf-8")
RECORDS = re.split(r"(?m)^(?=- name:)", TEXT)[1:]
JUNK = ["~", "true", "[]", "{}", "[[[[]]]]", "{a: {b: {c: 1}}}", "1e999", "-1e308", ".nan", "9" * 40, '"\\u202e"', "''"]
JUNK += [
    "!!int x",
    "!!python/name:os.system",
    "&a 1",
    "*a",
    "|",
    ">-",
    "? 1",
    "0x1F",
    "1_000",
    "2001-01-01",
    "\t",
    "%",
    "@",
]


def _bytes(text: str, random: Random) -> str:
    raw = bytearray(text.encode())
    for _ in range(random.randint(1, 4)):
        raw[random.randrange(len(raw))] = random.randrange(256)
    return raw.decode("utf-8", "replace")


def _lines(text: str, random: Random) -> str:
    lines = text.splitlines(keepends=True)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(lines))
        move = random.choice(("cut", "double", "move", "indent", "half"))
        line = lines.pop(place)
        if move == "double":
            lines[place:place] = [line, line]
        elif move == "move":
            lines.insert(random.randrange(len(lines) + 1), line)
        elif move == "indent":
            lines.insert(place, " " * random.randint(1, 4) + line)
        elif move == "half":
            lines.insert(place, line[: random.randrange(len(line) + 1)])
        if not lines:
            return ""
    return "".join(lines)


def _values(text: str, random: Random) -> str:
    fields = list(re.finditer(r"(\w+): ([^,}\n]+)", text))
    for field in random.sample(fields, min(len(fields), random.randint(1, 3))):
        other = random.choice(fields)
        value = random.choice((random.choice(JUNK), other[2], str(random.uniform(-1e9, 1e9))))
        text = text.replace(field[0], f"{random.choice((field[1], other[1]))}: {value}", 1)
    return text


def _nested(text: str, random: Random) -> str:
    place = random.randrange(len(text))
    return (
        text[:place] + random.choice(("[", "{", "]", "}", ":", "- ", '"', "#", "\n---\n", "{a: " * 50)) + text[place:]
    )


def mutants(count: int, seed: int, records: int) -> Iterator[str]:
    """Broken files: `records` of the shipped rules, hurt once or twice."""
    random = Random(seed)
    for _ in range(count):
        text = "".join(random.sample(RECORDS, min(records, len(RECORDS))))
        for _ in range(random.randint(1, 2)):
            text = random.choice((_bytes, _lines, _values, _nested))(text or "-", random)
        yield text


def refusals(texts: Iterator[str]) -> tuple[int, int]:
    """How many were refused in one sentence and how many loaded; anything else is raised."""
    refused = loaded = 0
    for text in texts:
        try:
            parse_rules(text, signals=signal_names())
            loaded += 1
        except ConfigError as error:
            assert_one_sentence(str(error))
            refused += 1
    return refused, loaded


def test_mutated_rules_load_or_are_one_sentence() -> None:
    refused, loaded = refusals(mutants(500, seed=1, records=1))
    assert refused > 200
    assert loaded > 30, "some mutations leave sound rules"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_ten_thousand_mutants(seed: int) -> None:
    assert sum(refusals(mutants(950, seed=seed, records=2))) == 950
    assert sum(refusals(mutants(5, seed=seed, records=99))) == 5
    assert sum(refusals(mutants(45, seed=seed, records=8))) == 45


def test_the_shipped_rules_are_sound() -> None:
    rules = load_rules(shipped_path(), signals=signal_names())
    assert rules == shipped_rules()
    assert len(yaml.safe_load(TEXT)) == len(rules)
    assert all(rule.first and rule.summary for rule in rules if not rule.quiet)
