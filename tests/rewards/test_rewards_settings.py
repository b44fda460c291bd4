"""Settings of the built-ins, of specs, and of what functions are given."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards import BUILT_IN, RewardRunner, RewardSpec, loading


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes a function importable and gives its path."""
    module = ModuleType("rewards_of_settings_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def add(function: Any, name: str = "reward") -> str:
        setattr(module, name, function)
        return f"{module.__name__}:{name}"

    return add


def score(spec: RewardSpec, *completions: Any, **given: Any) -> Any:
    columns = {k: [v] * len(completions) for k, v in given.pop("columns", {}).items()}
    prompts = [""] * len(completions)
    return RewardRunner([spec]).score(prompts=prompts, completions=list(completions), columns=columns, **given)


def one(path: str, completion: Any, kwargs: dict[str, Any] | None = None, **columns: Any) -> float:
    result = score(RewardSpec(path=path, kwargs=kwargs or {}), completion, columns=columns)
    return float(result.rewards_NK[0, 0])


EXACT: dict[str, tuple[dict[str, Any], str, str, float]] = {
    "capitals matter": ({}, "Paris", "paris", 0.0),
    "casefold": ({"casefold": True}, "PARIS", "paris", 1.0),
    "casefold beyond lower": ({"casefold": True}, "STRASSE", "straße", 1.0),
    "group": ({"pattern": r"<a>(.*?)</a>"}, "so <a> 4 </a>.", "4", 1.0),
    "last match": ({"pattern": r"<a>(.*?)</a>"}, "<a>4</a><a>5</a>", "4", 0.0),
    "all without a group": ({"pattern": r"\d+"}, "so 41 or 42 it is", "42", 1.0),
    "no match": ({"pattern": r"<a>(.*?)</a>"}, "4", "4", 0.0),
    "no match, empty answer": ({"pattern": r"<a>(.*?)</a>"}, "4", "", 0.0),
    "group that took no part": ({"pattern": r"a(b)?"}, "a", "", 1.0),
    "across lines": ({"pattern": r"<a>(.*)</a>"}, "<a>4\n5</a>", "4\n5", 1.0),
}


@pytest.mark.parametrize(("kwargs", "completion", "answer", "want"), EXACT.values(), ids=EXACT)
def test_exact_match_settings(kwargs: dict[str, Any], completion: str, answer: str, want: float) -> None:
    assert one("exact_match", completion, kwargs, answer=answer) == want


NUMBERS: dict[str, tuple[str, Any, float]] = {
    "a comma between numbers": ("(1,2)", 2, 1.0),
    "no thousands": ("1,2345", 2345, 1.0),
    "a difference has no sign": ("5-3", 3, 1.0),
    "a range": ("3-4", 4, 1.0),
    "a date": ("2024-01-05", 5, 1.0),
    "sign after an equals sign": ("x=-5", -5, 1.0),
    "typographic minus": ("it is \u22125", -5, 1.0),
    "end of a sentence": ("It is 5.", 5, 1.0),
    "version": ("1.2.3", 3, 1.0),
    "LaTeX fraction": (r"$-\dfrac{3}{4}$", "-0.75", 1.0),
    "decimals in a fraction": ("1.5/2.5", 0.6, 1.0),
    "nan": ("nan", 0, 0.0),
    "inf": ("inf", 0, 0.0),
    "infinity after a number": ("4 or Infinity", 4, 1.0),
    "float answer": ("0.1", 0.1, 1.0),
    "percent": ("50%", 50, 1.0),
    "more digits than Python reads": ("7" * 5_000, 7, 0.0),
    "exponent of many digits": ("1e" + "9" * 5_000, 1, 0.0),
}


@pytest.mark.parametrize(("completion", "answer", "want"), NUMBERS.values(), ids=NUMBERS)
def test_numeric_match_reads(completion: str, answer: Any, want: float) -> None:
    assert one("numeric_match", completion, answer=answer) == want


@pytest.mark.parametrize("answer", ["nan", "inf", "1/0", "", float("nan"), float("inf")], ids=repr)
def test_numeric_match_is_missing_without_an_answer(answer: Any) -> None:
    assert score(RewardSpec(path="numeric_match"), "0", columns={"answer": answer}).missing == {"numeric_match": 1}


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf")])
def test_tolerances_that_can_not_hold(tolerance: float) -> None:
    with pytest.raises(RewardError, match="tolerance"):
        RewardRunner([RewardSpec(path="numeric_match", kwargs={"tolerance": tolerance})])


def test_repetition_by_tokens_sees_text_without_spaces() -> None:
    words, tokens = (RewardSpec(path="repetition_penalty", kwargs={"n": 2, "unit": u}) for u in ("words", "tokens"))
    ids = [[7, 8, 7, 8, 7]]  # 78, 87, 78, 87: 2 of 4
    assert score(words, "abab", completion_ids=ids).rewards_NK.item() == 0.0
    assert score(tokens, "abab", completion_ids=ids).rewards_NK.item() == -0.5
    with pytest.raises(RewardError, match="needs completion_ids"):
        score(tokens, "abab")


ROW = {"question": "1 + 1", "answer": "2", "metadata": {"source_dataset": "basic_arithmetic"}}


@pytest.mark.parametrize(
    "columns",
    [
        {"entry": ROW, "task": "basic_arithmetic"},
        {"entry": ROW},
        {"entry": json.dumps(ROW)},
        ROW,
        ROW | {"metadata": json.dumps(ROW["metadata"])},
    ],
    ids=["entry and task", "entry", "entry as JSON", "columns", "metadata as JSON"],
)
def test_reasoning_gym_finds_its_row(columns: dict[str, Any]) -> None:
    assert one("reasoning_gym_score", "<answer>2</answer>", **columns) == 1.0
    assert one("reasoning_gym_score", "<answer>3</answer>", **columns) == 0.0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"answer": "2"}, "needs the column `entry`"),
        ({"entry": {"answer": "2"}}, "needs the column `task`"),
        ({"entry": "{"}, "not JSON"),
        ({"entry": "[]"}, "got a list for a row"),
        ({"entry": {"question": ""}, "task": "countdown"}, "KeyError: 'answer'"),
    ],
    ids=["no row", "no task", "no JSON", "no dict", "a row that its verifier can't read"],
)
def test_rows_that_reasoning_gym_can_not_score(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        one("reasoning_gym_score", "2", **columns)


class TestNames:
    def test_other_distributions_add_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        point = EntryPoint("mine", "grpo_lightning.rewards.matching:ExactMatch", loading.ENTRY_POINTS)
        monkeypatch.setattr(loading, "entry_points", lambda group: [point] if group == loading.ENTRY_POINTS else [])
        assert RewardRunner([RewardSpec(path="mine")]).names == ["exact_match"]

    @pytest.mark.parametrize("others", [["exact_match"], ["mine", "mine"]], ids=["a built-in's", "twice"])
    def test_a_name_taken_twice_is_refused(self, others: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        points = [EntryPoint(name, f"package_{i}:f", loading.ENTRY_POINTS) for i, name in enumerate(others)]
        monkeypatch.setattr(loading, "entry_points", lambda group: points)
        with pytest.raises(RewardError, match=f"'{others[-1]}' is taken twice"):
            RewardRunner([RewardSpec(path=others[-1])])

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "a\nb"], ids=repr)
    def test_names_that_signals_can_not_have(self, name: str) -> None:
        with pytest.raises(RewardError, match="give it a `name`"):
            RewardRunner([RewardSpec(path="exact_match", name=name)])

    def test_a_lambda_needs_a_name(self, register: Any) -> None:
        path = register(lambda completions: [0.0])
        with pytest.raises(RewardError, match="'<lambda>': give it a `name`"):
            RewardRunner([RewardSpec(path=path)])
        assert RewardRunner([RewardSpec(path=path, name="zero")]).names == ["zero"]

    def test_on_error_is_one_of_two(self) -> None:
        with pytest.raises(RewardError, match="'ignore': give raise or missing"):
            RewardRunner([RewardSpec(path="exact_match", on_error="ignore")])  # type: ignore[arg-type]

    def test_none_at_all(self) -> None:
        with pytest.raises(RewardError, match="at least one"):
            RewardRunner([])


class TestFilesAndModules:
    def test_a_file_without_a_function(self, tmp_path: Path) -> None:
        with pytest.raises(RewardError, match=r"names no function: write it as .*\.py:function"):
            RewardRunner([RewardSpec(path=str(tmp_path / "my_rewards.py"))])

    def test_relative_to_the_working_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "relative_rewards.py").write_text(
            "from relative_helper import VALUE\ndef f(completions):\n    return [VALUE for _ in completions]\n"
        )
        (tmp_path / "own" / "relative_helper.py").write_text("VALUE = 0.5\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        assert score(RewardSpec(path="own/relative_rewards.py:f"), "a").rewards_NK.item() == 0.5

    def test_two_rewards_of_a_file_share_its_module(self, tmp_path: Path) -> None:
        file = tmp_path / "shared_rewards.py"
        file.write_text(
            "seen = []\ndef f(completions):\n    seen.append(1)\n    return [len(seen) for _ in completions]\ng = f\n"
        )
        specs = [RewardSpec(path=f"{file}:f", name="f"), RewardSpec(path=f"{file}:g", name="g")]
        result = RewardRunner(specs).score(prompts=[""], completions=["a"], columns={})
        assert result.rewards_NK.tolist() == [[1.0, 2.0]]

    def test_a_file_that_exits_does_not_end_the_run(self, tmp_path: Path) -> None:
        (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
        with pytest.raises(RewardError, match="SystemExit"):
            RewardRunner([RewardSpec(path=f"{tmp_path / 'exits.py'}:f")])

    def test_a_constructor_that_fails(self, register: Any) -> None:
        class Fails:
            def __init__(self) -> None:
                raise OSError("no such judge")

        with pytest.raises(RewardError, match=r"can.t be made .*OSError: no such judge"):
            RewardRunner([RewardSpec(path=register(Fails))])


class TestWhatFunctionsGet:
    def test_state_as_trl_gives_it(self, register: Any) -> None:
        def reward(completions: list[str], trainer_state: Any) -> list[float]:
            return [trainer_state.global_step for _ in completions]

        result = score(RewardSpec(path=register(reward)), "a", trainer_state={"global_step": 7, "epoch": 0})
        assert result.rewards_NK.item() == 7.0

    def test_what_they_log(self, register: Any) -> None:
        def reward(completions: list[str], log_metric: Any, log_extra: Any) -> list[float]:
            log_metric("share", 0.25)
            log_metric("share", 0.75)
            log_extra("said", [c.upper() for c in completions])
            return [0.0 for _ in completions]

        result = score(RewardSpec(path=register(reward)), "a", "b")
        assert result.metrics == {"share": 0.5}
        assert result.extras == {"said": ["A", "B"]}

    def test_further_keywords(self, register: Any) -> None:
        def reward(completions: list[str], environments: list[int]) -> list[float]:
            return [float(e) for e in environments]

        assert score(RewardSpec(path=register(reward)), "a", environments=[3]).rewards_NK.item() == 3.0

    def test_trl_keeps_back_prompt_and_completion(self, register: Any) -> None:
        def reward(completions: list[str], **rest: Any) -> list[float]:
            return [float("prompt" in rest or "completion" in rest)]

        spec = RewardSpec(path=register(reward))
        assert score(spec, "a", columns={"prompt": "p", "completion": "c"}).rewards_NK.item() == 0.0

    def test_chat_completions(self) -> None:
        chat = [{"role": "assistant", "content": "4"}]
        tools = [{"role": "assistant", "content": None}]
        parts = [{"role": "assistant", "content": [{"type": "text", "text": "4"}, {"type": "image"}]}]
        result = score(RewardSpec(path="exact_match"), chat, tools, parts, [], columns={"answer": "4"})
        assert result.rewards_NK[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(("limit", "on_main"), [(None, 1.0), (5.0, 0.0)])
def test_no_limit_means_the_calling_thread(limit: float | None, on_main: float, register: Any) -> None:
    def reward(completions: list[str]) -> list[float]:
        return [float(threading.current_thread() is threading.main_thread())]

    assert score(RewardSpec(path=register(reward), timeout_seconds=limit), "a").rewards_NK.item() == on_main


def test_a_function_that_needs_the_main_thread_says_so(register: Any) -> None:
    def reward(completions: list[str]) -> list[float]:
        signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))
        return [1.0]

    with pytest.raises(RewardError, match="timeout_seconds: null"):
        score(RewardSpec(path=register(reward)), "a")
    assert score(RewardSpec(path=register(reward), timeout_seconds=None), "a").rewards_NK.item() == 1.0


def test_a_plain_function_that_gives_a_coroutine(register: Any) -> None:
    async def later(completions: list[str]) -> list[float]:
        return [1.0]

    with pytest.raises(RewardError, match="declare it with `async def`"):
        score(RewardSpec(path=register(lambda completions, **_: later(completions)), name="r"), "a")


def test_async_functions_blocked_by_another_name_it(register: Any) -> None:
    async def blocks(completions: list[str]) -> list[float]:
        time.sleep(2.5)
        return [1.0]

    async def waits(completions: list[str]) -> list[float]:
        return [1.0]

    specs = [
        RewardSpec(path=register(blocks, "blocks"), on_error="missing", timeout_seconds=0.3),
        RewardSpec(path=register(waits, "waits"), timeout_seconds=0.2),
    ]
    with pytest.raises(RewardError, match=r"'waits' took longer .*'blocks' blocks the event loop"):
        RewardRunner(specs).score(prompts=[""], completions=["a"], columns={})


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, json, grpo_lightning.rewards; print(json.dumps(list(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"transformers", "reasoning_gym", "math_verify", "regex", "lightning", "mlflow"} & set(json.loads(found))


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"reward_model"}))
def test_built_ins_are_called_what_they_are_loaded_by(name: str) -> None:
    needed = {"regex_format": {"pattern": "a"}, "length_penalty": {"start": 1, "limit": 2}}
    assert RewardRunner([RewardSpec(path=name, kwargs=needed.get(name, {}))]).names == [name]


def test_no_completions_at_all() -> None:
    specs = [RewardSpec(path="exact_match"), RewardSpec(path="numeric_match")]
    result = RewardRunner(specs).score(prompts=[], completions=[], columns={"answer": []})
    assert result.rewards_NK.shape == torch.Size([0, 2])
