"""The built-in rewards, each as a table of responses."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards import RewardRunner, RewardSpec, load_reward
from grpo_lightning.rewards.text import text_of
from grpo_lightning.rewards.verifier import Patience, Verifier


def one(path: str, completion: Any, kwargs: dict[str, Any] | None = None, **columns: Any) -> float | None:
    """What a built-in gives one completion; None where missing."""
    runner = RewardRunner([RewardSpec(path=path, kwargs=kwargs or {})])
    ids = columns.pop("completion_ids", [[1]])
    result = runner.score(
        prompts=["p"], completions=[completion], columns={k: [v] for k, v in columns.items()}, completion_ids=ids
    )
    value = float(result.rewards_NK[0, 0])
    return None if math.isnan(value) else value


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([{"role": "assistant", "content": "chat"}], "chat"),
        ([{"role": "assistant", "content": "first"}, {"role": "assistant", "content": "last"}], "last"),
        ([], ""),
        ("", ""),
    ],
    ids=["plain", "chat", "turns", "no message", "empty"],
)
def test_text_of(completion: Any, text: str) -> None:
    assert text_of(completion) == text


@pytest.mark.parametrize(
    ("completion", "answer", "want"),
    [
        ("42", "42", 1.0),
        (" 42\n", "42 ", 1.0),
        ("42", 42, 1.0),
        ("42.0", "42", 0.0),
        ("it is 42", "42", 0.0),
        ("None", None, None),
        ("", "42", 0.0),
        ([{"role": "assistant", "content": "42"}], "42", 1.0),
    ],
)
def test_exact_match(completion: Any, answer: Any, want: float | None) -> None:
    assert one("exact_match", completion, answer=answer) == want


NUMBERS: dict[str, tuple[str, Any, float | None]] = {
    "same": ("42", "42", 1.0),
    "last number counts": ("first 41, then 42.", "42", 1.0),
    "first number does not": ("42, or rather 41", "42", 0.0),
    "decimals": ("it is 42.0", 42, 1.0),
    "sign": ("-42", "42", 0.0),
    "negative": ("it is -42", -42, 1.0),
    "thousands": ("$1,234,567", "1234567", 1.0),
    "exponent": ("1.5e3", "1500", 1.0),
    "fraction": ("1/4", "0.25", 1.0),
    "fraction with spaces": ("so 2 / 8", "1/4", 1.0),
    "answer in words": ("18", "#### 18", 1.0),
    "within tolerance": ("0.3333333", "1/3", 1.0),
    "beyond tolerance": ("0.333", "1/3", 0.0),
    "relative tolerance": ("1000000.5", "1000000", 1.0),
    "beyond relative tolerance": ("1000002", "1000000", 0.0),
    "no number said": ("none", "42", 0.0),
    "no number wanted": ("42", "none", None),
    "answer None": ("42", None, None),
    "divided by zero": ("1/0", "0", 0.0),
    "huge exponent": ("1e999999999", "1", 0.0),
    "longer huge exponent": ("1e" + "9" * 30, "9", 0.0),
    "a run of digits is one number": ("1" * 401 + "9", "9", 0.0),
    "so is a very long one": ("1" * 30_000 + "9", "9", 0.0),
    "400 digits": ("7" * 400, "7" * 400, 1.0),
    "many decimals": ("0." + "3" * 900, "1/3", 1.0),
    "leading dot": (".5", "0.5", 1.0),
}


@pytest.mark.parametrize(("completion", "answer", "want"), NUMBERS.values(), ids=NUMBERS)
def test_numeric_match(completion: str, answer: Any, want: float | None) -> None:
    assert one("numeric_match", completion, answer=answer) == want


def test_numeric_match_takes_a_tolerance() -> None:
    assert one("numeric_match", "3.1", {"tolerance": 0.05}, answer="3") == 1.0
    assert one("numeric_match", "3.2", {"tolerance": 0.05}, answer="3") == 0.0


MATHS: dict[str, tuple[str, str, float | None]] = {
    "number": ("The answer is 42.", "42", 1.0),
    "boxed fraction": (r"so $\boxed{\frac{1}{2}}$", "$0.5$", 1.0),
    "same set": (r"$\{2, 1\}$", r"$\{1,2\}$", 1.0),
    "same expression": ("$x^2 + 2x + 1$", "$2x + 1 + x^2$", 1.0),
    "other": (r"$\boxed{3}$", "$4$", 0.0),
    "nothing said": ("", "$4$", 0.0),
    "no answer to read": ("4", "", None),
}


@pytest.mark.parametrize(("completion", "answer", "want"), MATHS.values(), ids=MATHS)
def test_math_verify(completion: str, answer: str, want: float | None) -> None:
    assert one("math_verify", completion, answer=answer) == want


HOSTILE = {
    "tower": "$9^{9^{9^{9}}}$",
    "double factorial": r"\boxed{99999!!}",
    "deep brackets": "$" + "(" * 5_000 + "1" + ")" * 5_000 + "$",
    "half a surrogate": "\ud800 $4",
    "NUL": "$\0$",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_math_verify_survives_hostile_text(text: str) -> None:
    reward = load_reward(RewardSpec(path="math_verify", kwargs={"seconds": 0.5}))
    begin = time.perf_counter()
    assert reward(completions=["$3$", text, "$3$"], answer=["3", "3", "4"]) == [1.0, 0.0, 0.0]
    assert time.perf_counter() - begin < 60


def test_a_killed_verifier_starts_again() -> None:
    verifier = Verifier()
    assert verifier.ask("math_verify", "3", "$3$", seconds=30.0) == 1.0
    first = verifier._process
    assert first is not None
    begin = time.perf_counter()
    with pytest.raises(TimeoutError):
        verifier.ask("math_verify", "3", "$9^{9^{9^{9}}}$", seconds=0.3)
    assert time.perf_counter() - begin < 60
    first.kill()
    first.wait()
    assert verifier.ask("math_verify", "3", "$3$", seconds=30.0) == 1.0
    assert verifier._process is not first
    verifier.close()


class SlowVerifier(Verifier):
    """Takes the whole limit for each text, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[Any] = []

    def ask(self, kind: str, *arguments: Any, seconds: float) -> float | None:
        self.now += seconds
        self.asked.append(arguments)
        raise TimeoutError


def test_many_hostile_texts_stay_below_the_limit_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, patience = SlowVerifier(), Patience(most=2.0)
    monkeypatch.setattr("grpo_lightning.rewards.verifier.perf_counter", lambda: verifier.now)
    values = [patience.ask(verifier, "math_verify", "3", str(i)) for i in [*range(1000), 0]]
    assert 25 < verifier.now < 35  # RewardSpec's timeout_seconds is 60
    judged = len(verifier.asked)
    assert values == [0.0] * judged + [None] * (1000 - judged) + [0.0]


def test_equal_questions_are_asked_once() -> None:
    verifier, patience = SlowVerifier(), Patience(most=2.0)
    assert [patience.ask(verifier, "math_verify", "3", text) for text in "aba"] == [0.0, 0.0, 0.0]
    assert verifier.asked == [("3", "a"), ("3", "b")]


def test_patience_gives_less_time_after_slow_texts() -> None:
    patience = Patience(most=1.0, least=0.05)
    assert patience.limit() == 1.0
    for _ in range(1000):
        patience.spend(0.01)  # quick ones are free
    assert patience.limit() == 1.0
    patience.spend(25.0)
    assert patience.limit() == pytest.approx(0.5)  # a tenth of the 5 seconds left
    patience.spend(10.0)
    assert patience.limit() == 0.05


def test_hostile_regex() -> None:
    reward = load_reward(RewardSpec(path="regex_format", kwargs={"pattern": "((a|aa)+)$"}))
    begin = time.perf_counter()
    assert reward(completions=["aa", "a" * 60 + "!", "a"]) == [1.0, 0.0, 1.0]
    assert time.perf_counter() - begin < 60


def test_regex_backtracking_of_the_textbook() -> None:
    reward = load_reward(RewardSpec(path="regex_format", kwargs={"pattern": "(a+)+b"}))
    begin = time.perf_counter()
    assert reward(completions=["a" * 5_000, "aab"]) == [0.0, 1.0]
    assert time.perf_counter() - begin < 60


def test_regex_reads_the_whole_response() -> None:
    reward = load_reward(RewardSpec(path="regex_format", kwargs={"pattern": "<a>.*</a>"}))
    texts = ["<a>" + "x" * size + "</a>" for size in (30_000, 99_993, 99_994)]
    assert reward(completions=[*texts, "y" + texts[0]]) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("pattern", "completion", "want"),
    [
        (r"<think>.*</think>\s*<answer>.*</answer>", "<think>a\nb</think>\n<answer>4</answer>", 1.0),
        (r"<think>.*</think>\s*<answer>.*</answer>", "<answer>4</answer>", 0.0),
        (r"a+", "xaaa", 0.0),
        (r"a+", "aaax", 0.0),
        (r"a*", "", 1.0),
        (r"a+", [{"role": "assistant", "content": "aa"}], 1.0),
    ],
)
def test_regex_format(pattern: str, completion: Any, want: float) -> None:
    assert one("regex_format", completion, {"pattern": pattern}) == want


def test_regex_format_refuses_what_is_no_pattern() -> None:
    with pytest.raises(RewardError, match=r"'\(a' is not a regular expression"):
        load_reward(RewardSpec(path="regex_format", kwargs={"pattern": "(a"}))


@pytest.mark.parametrize(("tokens", "want"), [(0, 0.0), (4, 0.0), (5, -0.25), (6, -0.5), (8, -1.0), (9, -1.0)])
def test_length_penalty(tokens: int, want: float) -> None:
    kwargs = {"start": 4, "limit": 8}
    assert one("length_penalty", "x", kwargs, completion_ids=[[1] * tokens]) == want


@pytest.mark.parametrize(
    ("text", "n", "want"),
    [
        ("a b c d", 2, 0.0),
        ("a a a a", 1, -0.75),  # 1 of 4
        ("a b a b", 2, -1 / 3),  # ab, ba, ab: 2 of 3
        ("a b", 3, 0.0),
        ("", 1, 0.0),
    ],
)
def test_repetition_penalty(text: str, n: int, want: float) -> None:
    assert one("repetition_penalty", text, {"n": n}) == pytest.approx(want)


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [
        ("length_penalty", {"start": 8, "limit": 8}),
        ("length_penalty", {"start": -1, "limit": 8}),
        ("length_penalty", {"start": 1}),
        ("repetition_penalty", {"n": 0}),
        ("regex_format", {}),
        ("reward_model", {"model": "/no/such/folder"}),
    ],
)
def test_settings_that_can_not_hold(path: str, kwargs: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=path.replace("_", "[_ ]")):
        load_reward(RewardSpec(path=path, kwargs=kwargs))


ENTRY = {"question": "1 + 1", "answer": "2", "metadata": {}}


@pytest.mark.parametrize(
    ("completion", "want"),
    [
        ("<answer>2</answer>", 1.0),
        ("<answer>3</answer> no, <ANSWER>\n2\n</ANSWER>", 1.0),
        ("<answer>2</answer> no, <answer>3</answer>", 0.0),
        ("2", 1.0),
    ],
    ids=["tags", "last tags", "last is wrong", "no tags"],
)
def test_reasoning_gym_score(completion: str, want: float) -> None:
    assert one("reasoning_gym_score", completion, task="basic_arithmetic", entry=ENTRY) == want


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("basic_arithmetics", "did you mean basic_arithmetic"),
        ("zzzzzz", "has no task 'zzzzzz'"),
        ("composite", "can't be"),
    ],
    ids=["misspelt", "nothing like it", "a task without a verifier"],
)
def test_reasoning_gym_tasks_it_does_not_have(task: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        one("reasoning_gym_score", "2", task=task, entry=ENTRY)


def test_reasoning_gym_task_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym import factory

    class Own:
        def __init__(self, config: Any) -> None: ...

        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            return 0.25 if int(answer) == int(entry["answer"]) else 0.0

    monkeypatch.setitem(factory.DATASETS, "own_task", (Own, dict))
    assert one("reasoning_gym_score", "2", task="own_task", entry=ENTRY) == 0.25
    assert one("reasoning_gym_score", "two", task="own_task", entry=ENTRY) == 0.0


def test_reasoning_gym_survives_hostile_text() -> None:
    entry = {"question": "", "answer": "3", "metadata": {"numbers": [9, 9, 9, 9], "target": 3}}
    begin = time.perf_counter()
    assert one("reasoning_gym_score", "9**9**9**9", {"seconds": 0.5}, task="countdown", entry=entry) == pytest.approx(
        0, abs=0.05
    )
    assert time.perf_counter() - begin < 60


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of random classifiers with one and with two outputs, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "a", "b", "c", "d"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")

    def save(outputs: int) -> Path:
        folder = tmp_path_factory.mktemp(f"classifier-{outputs}")
        torch.manual_seed(0)
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=len(words), num_labels=outputs, **sizes)
        LlamaForSequenceClassification(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


class TestRewardModel:
    def test_logit_of_prompt_and_response(self, classifier: Any) -> None:
        from transformers import LlamaForSequenceClassification

        folder = classifier(1)
        reward = load_reward(RewardSpec(path="reward_model", kwargs={"model": str(folder), "batch_size": 2}))
        got = reward(prompts=["a b ", "a ", "d "], completions=["c", "b c d", "a"])
        model = LlamaForSequenceClassification.from_pretrained(folder).eval()
        with torch.no_grad():  # each alone, without padding
            want = [float(model(torch.tensor([ids])).logits) for ids in ([2, 3, 4], [2, 3, 4, 5], [5, 2])]
        assert got == pytest.approx(want, abs=1e-5)
        assert len({round(v, 6) for v in got}) == 3

    def test_long_texts_keep_the_response(self, classifier: Any) -> None:
        kwargs = {"model": str(classifier(1)), "max_tokens": 2}
        reward = load_reward(RewardSpec(path="reward_model", kwargs=kwargs))
        assert reward(prompts=["a a a "], completions=["c d"]) == pytest.approx(
            reward(prompts=["c "], completions=["d"])
        )

    def test_chats(self, classifier: Any) -> None:
        reward = load_reward(RewardSpec(path="reward_model", kwargs={"model": str(classifier(1))}))
        chat = [[{"role": "user", "content": "a"}]], [[{"role": "assistant", "content": "b"}]]
        assert reward(prompts=chat[0], completions=chat[1]) == pytest.approx(
            reward(prompts=["user: a\n"], completions=["assistant: b"])
        )

    def test_two_outputs(self, classifier: Any) -> None:
        with pytest.raises(RewardError, match="has 2 outputs"):
            load_reward(RewardSpec(path="reward_model", kwargs={"model": str(classifier(2))}))
