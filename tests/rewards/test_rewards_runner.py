"""Loading and running reward functions: what good ones give, and every way of breaking the contract."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lightning.errors import RewardError
from grpo_lightning.rewards import BUILT_IN, RewardRunner, RewardSpec, load_reward

NAN, INF = math.nan, math.inf
PROMPTS = ["one", "two"]
COMPLETIONS = ["1", "22"]
IDS = [[5], [6, 7]]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes a function importable as `rewards_of_test:NAME` and gives that path."""
    module = ModuleType("rewards_of_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def add(function: Any, name: str = "reward") -> str:
        setattr(module, name, function)
        return f"{module.__name__}:{name}"

    return add


def score(*specs: RewardSpec, **columns: list[Any]) -> Any:
    return RewardRunner(specs).score(prompts=PROMPTS, completions=COMPLETIONS, columns=columns, completion_ids=IDS)


def raising(error: BaseException) -> Callable[[], Any]:
    def body() -> Any:
        raise error

    return body


def gives(body: Callable[[], Any], kind: str) -> Callable[..., Any]:
    """A reward function that gives what `body` gives, plain or async."""

    def plain(completions: list[str]) -> Any:
        return body()

    async def later(completions: list[str]) -> Any:
        await asyncio.sleep(0)
        return body()

    return plain if kind == "sync" else later


GOOD: dict[str, tuple[Callable[[], Any], list[float]]] = {
    "floats": (lambda: [1.0, -0.5], [1.0, -0.5]),
    "ints": (lambda: [1, 0], [1.0, 0.0]),
    "tuple": (lambda: (1.0, 2.0), [1.0, 2.0]),
    "generator": (lambda: (float(i) for i in range(2)), [0.0, 1.0]),
    "numpy scalars": (lambda: [np.float32(0.5), np.int64(3)], [0.5, 3.0]),
    "numpy bools": (lambda: [np.bool_(True), np.bool_(False)], [1.0, 0.0]),
    "numpy array": (lambda: np.array([0.25, 4]), [0.25, 4.0]),
    "tensor": (lambda: torch.tensor([0.25, 4.0]), [0.25, 4.0]),
    "tensor with grad": (lambda: torch.tensor([0.25, 4.0], requires_grad=True), [0.25, 4.0]),
    "bfloat16 tensor": (lambda: torch.tensor([0.5, 2.0], dtype=torch.bfloat16), [0.5, 2.0]),
    "list of tensors": (lambda: [torch.tensor(1.5), torch.tensor([2])], [1.5, 2.0]),
    "bools": (lambda: [True, False], [1.0, 0.0]),
    "None": (lambda: [None, 1.0], [NAN, 1.0]),
    "NaN": (lambda: [NAN, 1.0], [NAN, 1.0]),
    "infinities": (lambda: [INF, -INF], [INF, -INF]),
    "more than float32 holds": (lambda: [1e300, 1 + 1e-12], [1e300, 1 + 1e-12]),
}

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "too few": (lambda: [1.0], "gave 1 values for 2 completions"),
    "too many": (lambda: [1.0, 2.0, 3.0], "values for 2 completions"),
    "none at all": (lambda: [], "gave 0 values for 2 completions"),
    "one number": (lambda: 1.0, "gave a float"),
    "0-d tensor": (lambda: torch.tensor(1.0), "gave a float"),
    "nothing returned": (lambda: None, "gave a NoneType"),
    "dict": (lambda: {"a": 1.0, "b": 2.0}, "gave a dict"),
    "a string of the right length": (lambda: "11", "gave a str"),
    "strings": (lambda: ["1.0", "2.0"], "gave the text '1.0'"),
    "numpy strings": (lambda: np.array(["1.0", "2.0"]), "gave the text '1.0'"),
    "lists": (lambda: [[1.0], [2.0]], r"gave \[1.0\] \(list\)"),
    "two columns": (lambda: np.ones((2, 2)), r"\(list\)"),
    "tensors of two": (lambda: [torch.ones(2), torch.ones(2)], r"\(Tensor\)"),
    "complex": (lambda: [1j, 1.0], r"\(complex\)"),
    "int beyond float": (lambda: [10**400, 1.0], "gave a int too large"),
    "endless generator": (lambda: iter(int, 1), "gave more than 2 values for 2 completions"),
    "generator that raises": (lambda: (1 / i for i in range(2)), "raised ZeroDivisionError"),
    "raises": (raising(ZeroDivisionError("in\nthe   middle")), "raised ZeroDivisionError: in the middle"),
    "raises without text": (raising(KeyError()), "raised KeyError"),
}


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("on_error", ["raise", "missing"])
@pytest.mark.parametrize(("body", "want"), GOOD.values(), ids=GOOD)
def test_what_a_function_may_give(body: Any, want: list[float], on_error: Any, kind: str, register: Any) -> None:
    result = score(RewardSpec(path=register(gives(body, kind)), name="r", on_error=on_error))
    assert result.rewards_NK.dtype == torch.float64
    np.testing.assert_array_equal(result.rewards_NK.numpy(), np.array([want]).T)
    assert result.missing == {"r": sum(map(math.isnan, want))}
    assert result.errors == {"r": 0}
    assert 0 < result.seconds["r"] < 60


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(("body", "message"), BAD.values(), ids=BAD)
class TestBrokenContract:
    def test_raise_ends_the_run(self, body: Any, message: str, kind: str, register: Any) -> None:
        with pytest.raises(RewardError, match=message) as caught:
            score(RewardSpec(path=register(gives(body, kind)), name="r"))
        assert "'r'" in str(caught.value)
        assert "on_error: missing" in str(caught.value)

    def test_missing_counts_it_and_spares_the_others(self, body: Any, message: str, kind: str, register: Any) -> None:
        bad = RewardSpec(path=register(gives(body, kind)), name="bad", on_error="missing")
        good = RewardSpec(path=register(lambda completions: [1.0, 2.0], "good"), name="good")
        result = score(bad, good)
        np.testing.assert_array_equal(result.rewards_NK.numpy(), [[NAN, 1.0], [NAN, 2.0]])
        assert result.missing == {"bad": 2, "good": 0}
        assert result.errors == {"bad": 1, "good": 0}


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("on_error", ["raise", "missing"])
def test_hang_past_the_limit(kind: str, on_error: Any, register: Any) -> None:
    async def sleeps(completions: list[str]) -> list[float]:
        await asyncio.sleep(300)
        return [1.0, 1.0]

    def hangs(completions: list[str]) -> list[float]:
        time.sleep(300)  # on a thread that ends with the process
        return [1.0, 1.0]

    path = register(hangs if kind == "sync" else sleeps)
    spec = RewardSpec(path=path, name="slow", timeout_seconds=0.1, on_error=on_error)
    begin = time.perf_counter()
    with pytest.raises(RewardError, match=r"timeout_seconds of 0.1") if on_error == "raise" else nullcontext():
        result = score(spec)
        assert result.errors == {"slow": 1}
        assert result.missing == {"slow": 2}
    assert time.perf_counter() - begin < 60


class TestLimits:
    @pytest.mark.parametrize("on_error", ["raise", "missing"])
    def test_async_function_that_blocks_its_loop(self, on_error: Any, register: Any) -> None:
        async def blocks(completions: list[str]) -> list[float]:
            time.sleep(300)
            return [1.0, 1.0]

        async def fine(completions: list[str]) -> list[float]:
            return [1.0, 2.0]

        bad = RewardSpec(path=register(blocks, "blocks"), timeout_seconds=0.2, on_error=on_error)
        begin = time.perf_counter()
        with pytest.raises(RewardError, match=r"'blocks' .*timeout_seconds") if on_error == "raise" else nullcontext():
            result = score(bad)
            assert result.errors == {"blocks": 1}
        assert time.perf_counter() - begin < 60
        after = score(RewardSpec(path=register(fine, "fine")))  # on a loop of its own
        assert after.rewards_NK[:, 0].tolist() == [1.0, 2.0]
        assert time.perf_counter() - begin < 120

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_own_timeout_error_is_not_our_limit(self, kind: str, register: Any) -> None:
        for error in (TimeoutError(), TimeoutError("the judge is away")):
            with pytest.raises(RewardError, match="raised TimeoutError") as caught:
                score(RewardSpec(path=register(gives(raising(error), kind))))
            assert "timeout_seconds" not in str(caught.value)

    @pytest.mark.parametrize("limit", [0, -1.0, NAN, INF])
    def test_what_is_no_limit(self, limit: float) -> None:
        with pytest.raises(RewardError, match=r"timeout_seconds .* above 0, or null"):
            RewardRunner([RewardSpec(path="exact_match", timeout_seconds=limit)])

    def test_the_loop_stays_between_calls(self, register: Any) -> None:
        loops = []

        async def reward(completions: list[str]) -> list[float]:
            loops.append(asyncio.get_running_loop())  # a client that it keeps is bound to this
            return [1.0, 1.0]

        for _ in range(2):
            score(RewardSpec(path=register(reward)))
        assert loops[0] is loops[1]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_function_that_exits_does_not_end_the_run(kind: str, register: Any) -> None:
    path = register(gives(raising(SystemExit(3)), kind))
    assert score(RewardSpec(path=path, name="r", on_error="missing")).errors == {"r": 1}
    with pytest.raises(RewardError, match="raised SystemExit"):
        score(RewardSpec(path=path))


def test_an_interrupt_is_not_swallowed(register: Any) -> None:
    spec = RewardSpec(path=register(gives(raising(KeyboardInterrupt()), "sync")), timeout_seconds=None)
    with pytest.raises(KeyboardInterrupt):
        score(spec)


class TestKeywords:
    def test_named_ones_only(self, register: Any) -> None:
        def reward(answer: list[str], completion_ids: list[list[int]]) -> list[float]:
            return [len(ids) + int(a) for ids, a in zip(completion_ids, answer, strict=True)]

        result = score(RewardSpec(path=register(reward)), answer=["10", "20"], unused=[0, 0])
        assert result.rewards_NK[:, 0].tolist() == [11.0, 22.0]

    def test_all_of_them(self, register: Any) -> None:
        seen: dict[str, Any] = {}

        def reward(**everything: Any) -> list[float]:
            seen.update(everything)
            return [0.0, 0.0]

        runner = RewardRunner([RewardSpec(path=register(reward))])
        state = SimpleNamespace(global_step=3)
        columns = {"answer": ["a", "b"]}
        runner.score(prompts=PROMPTS, completions=COMPLETIONS, columns=columns, completion_ids=IDS, trainer_state=state)
        assert callable(seen.pop("log_metric"))
        assert callable(seen.pop("log_extra"))
        assert seen == {
            "prompts": PROMPTS,
            "completions": COMPLETIONS,
            "answer": ["a", "b"],
            "completion_ids": IDS,
            "trainer_state": state,
        }

    def test_settings_of_a_function(self, register: Any) -> None:
        def reward(completions: list[str], scale: float = 1.0) -> list[float]:
            return [scale * len(c) for c in completions]

        assert score(RewardSpec(path=register(reward), kwargs={"scale": 3.0})).rewards_NK[:, 0].tolist() == [3.0, 6.0]

    def test_settings_of_a_class(self, register: Any) -> None:
        class Scaled:
            def __init__(self, scale: float) -> None:
                self.scale = scale

            def __call__(self, completions: list[str]) -> list[float]:
                return [self.scale * len(c) for c in completions]

        path = register(Scaled)
        runner = RewardRunner([RewardSpec(path=path, kwargs={"scale": 2.0})])
        assert runner.names == ["Scaled"]
        result = runner.score(prompts=PROMPTS, completions=COMPLETIONS, columns={})
        assert result.rewards_NK[:, 0].tolist() == [2.0, 4.0]
        with pytest.raises(RewardError, match="skale"):
            RewardRunner([RewardSpec(path=path, kwargs={"skale": 2.0})])

    @pytest.mark.parametrize("form", ["instance", "partial", "async instance", "async partial", "async method"])
    def test_settings_of_every_callable(self, form: str, register: Any) -> None:
        def plain(completions: list[str], scale: float = 1.0) -> list[float]:
            return [scale * len(c) for c in completions]

        async def later(completions: list[str], scale: float = 1.0) -> list[float]:
            return plain(completions, scale)

        class Plain:
            def __call__(self, completions: list[str], scale: float = 1.0) -> list[float]:
                return plain(completions, scale)

        class Later:
            async def __call__(self, completions: list[str], scale: float = 1.0) -> list[float]:
                return plain(completions, scale)

        forms: dict[str, Any] = {
            "instance": Plain(),
            "partial": functools.partial(plain),
            "async instance": Later(),
            "async partial": functools.partial(later, scale=7.0),
            "async method": Later().__call__,
        }
        spec = RewardSpec(path=register(forms[form]), kwargs={"scale": 3.0})
        assert score(spec).rewards_NK[:, 0].tolist() == [3.0, 6.0]
        with pytest.raises(RewardError, match=r"no setting 'skale': did you mean 'scale'.* completions, scale"):
            RewardRunner([RewardSpec(path=register(forms[form]), kwargs={"skale": 3.0})])

    @pytest.mark.parametrize("path", ["exact_match", "numeric_match", "math_verify", "reasoning_gym_score"])
    def test_settings_that_a_built_in_does_not_have(self, path: str) -> None:
        with pytest.raises(RewardError, match=rf"{path}.*no_such_setting"):
            RewardRunner([RewardSpec(path=path, kwargs={"no_such_setting": 1})])

    def test_a_column_that_is_not_there(self) -> None:
        with pytest.raises(RewardError, match=r"asks for 'answer'.*did you mean 'answers'"):
            score(RewardSpec(path="exact_match"), answers=["1", "2"])

    def test_a_function_that_changes_its_lists_spoils_nobody_elses(self, register: Any) -> None:
        def empties(completions: list[str]) -> list[float]:
            completions.clear()
            return [0.0, 0.0]

        specs = [RewardSpec(path=register(empties)), RewardSpec(path="exact_match")]
        assert score(*specs, answer=["1", "2"]).rewards_NK.tolist() == [[0.0, 1.0], [0.0, 0.0]]


class TestTogether:
    def test_columns_names_and_weights_in_the_order_given(self, register: Any) -> None:
        async def first(completions: list[str]) -> list[float]:
            return [1.0, 1.0]

        paths = [register(first, "a"), register(lambda completions: [2.0, 2.0], "b"), register(first, "c")]
        specs = [RewardSpec(path=p, name=p[-1], weight=w) for p, w in zip(paths, [0.5, -2, 0], strict=True)]
        runner = RewardRunner(specs)
        assert (runner.names, runner.weights) == (["a", "b", "c"], [0.5, -2.0, 0.0])
        result = runner.score(prompts=PROMPTS, completions=COMPLETIONS, columns={})
        assert result.rewards_NK.tolist() == [[1.0, 2.0, 1.0], [1.0, 2.0, 1.0]]  # unweighted

    def test_async_ones_overlap(self, register: Any) -> None:
        begun: list[int] = []

        async def reward(completions: list[str]) -> list[float]:
            begun.append(1)
            while len(begun) < 5:  # one after the other, the first would wait until its time is over
                await asyncio.sleep(0.01)
            return [1.0, 1.0]

        result = score(*(RewardSpec(path=register(reward), name=f"r{i}") for i in range(5)))
        assert result.rewards_NK.tolist() == [[1.0] * 5] * 2

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_inside_a_running_loop(self, kind: str, register: Any) -> None:
        spec = RewardSpec(path=register(gives(lambda: [1.0, 2.0], kind)))

        async def main() -> Any:
            return score(spec)

        assert asyncio.run(main()).rewards_NK[:, 0].tolist() == [1.0, 2.0]

    def test_two_of_one_name(self, register: Any) -> None:
        path = register(gives(lambda: [1.0, 2.0], "sync"))
        with pytest.raises(RewardError, match="Two rewards are called 'plain'"):
            RewardRunner([RewardSpec(path=path), RewardSpec(path=path)])
        assert RewardRunner([RewardSpec(path=path), RewardSpec(path=path, name="b")]).names == ["plain", "b"]


@pytest.mark.parametrize("weight", [NAN, INF, -INF])
def test_weights_must_be_finite(weight: float) -> None:
    with pytest.raises(RewardError, match="finite"):
        RewardRunner([RewardSpec(path="exact_match", weight=weight)])


@pytest.mark.parametrize("name", ["weight", "on_error", "kwargs"])
def test_a_setting_without_a_value_says_so(name: str) -> None:
    with pytest.raises(RewardError, match=f"The {name} of the reward 'exact_match' is null"):
        RewardRunner([RewardSpec(path="exact_match", **{name: None})])  # type: ignore[arg-type]


COLUMNS: dict[str, tuple[list[str], str]] = {
    "there": (["answer", "other"], ""),
    "lacking": (["anser"], r"asks for 'answer'.*did you mean 'anser'\?"),
    "what is kept back": (["completion", "prompt"], "asks for 'answer'"),
}


@pytest.mark.parametrize(("columns", "message"), COLUMNS.values(), ids=COLUMNS)
def test_columns_are_asked_for_before_the_first_call(columns: list[str], message: str, register: Any) -> None:
    def reward(
        completions: list[str], prompts: list[str], answer: list[str], trainer_state: Any, log_extra: Any
    ) -> Any:
        raise AssertionError

    runner = RewardRunner(
        [RewardSpec(path=register(reward)), RewardSpec(path="length_penalty", kwargs={"start": 1, "limit": 9})]
    )
    with pytest.raises(RewardError, match=message) if message else nullcontext():
        runner.check_columns(columns)


UNKNOWN = {
    "misspelt built-in": ("exact_macth", "did you mean 'exact_match'"),
    "nothing like it": ("zzz", "package.module:function"),
    "empty": ("", "is not known"),
    "no function": ("math:", "is not known"),
    "no module": ("no_such_module_1:f", "'no_such_module_1', which does not exist"),
    "no submodule": ("json.nothing:f", "'json.nothing', which does not exist"),
    "misspelt function": ("math:sqrtt", "did you mean sqrt"),
    "misspelt function, dotted": ("math.sqrtt", "did you mean sqrt"),
    "not a function": ("math:pi", "is a float"),
    "no file": ("nowhere.py:f", "'nowhere.py', which does not exist"),
}


@pytest.mark.parametrize(("path", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_paths(path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load_reward(RewardSpec(path=path))


class TestFiles:
    def test_function_of_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "my_rewards.py"
        file.write_text("def size(completions):\n    return [len(c) for c in completions]\n")
        runner = RewardRunner([RewardSpec(path=f"{file}:size")])
        assert runner.names == ["size"]
        result = runner.score(prompts=PROMPTS, completions=COMPLETIONS, columns={})
        assert result.rewards_NK[:, 0].tolist() == [1.0, 2.0]

    def test_the_module_has_the_same_name_in_every_process(self, tmp_path: Path) -> None:
        file = tmp_path / "named.py"
        file.write_text("def f(completions):\n    return [0.0 for c in completions]\n")
        digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]  # hash() differs between processes
        assert load_reward(RewardSpec(path=f"{file}:f")).__module__ == f"grpo_reward_named_{digest}"

    def test_module_in_the_working_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "rewards_in_cwd.py").write_text("def f(completions):\n    return [0.0 for c in completions]\n")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
        assert load_reward(RewardSpec(path="rewards_in_cwd.f")).__name__ == "f"

    @pytest.mark.parametrize(
        ("source", "message"),
        [("1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError"), ("import no_such_module_2", "no_such_module_2")],
        ids=["raises", "no Python", "needs a module"],
    )
    def test_a_file_that_fails(self, source: str, message: str, tmp_path: Path) -> None:
        file = tmp_path / "broken.py"
        file.write_text(source)
        with pytest.raises(RewardError, match=message):
            load_reward(RewardSpec(path=f"{file}:f"))

    def test_a_module_that_needs_another(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "rewards_with_need.py").write_text("import no_such_module_3")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(RewardError, match="needs the module 'no_such_module_3': install it"):
            load_reward(RewardSpec(path="rewards_with_need:f"))


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_ins_resolve(name: str) -> None:
    module, _, attribute = BUILT_IN[name].partition(":")
    assert callable(getattr(__import__(module, fromlist=[attribute]), attribute))


def trl_rewards(functions: list[Callable[..., Any]], columns: dict[str, list[Any]]) -> torch.Tensor:
    """The same functions through TRL's own code."""
    import threading

    trl = pytest.importorskip("trl")
    from accelerate import PartialState

    PartialState(cpu=True)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu")),
        args=SimpleNamespace(report_to=[]),
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=[f"r{i}" for i in range(len(functions))],
        state=SimpleNamespace(global_step=1),
        _log_completion_extra=lambda *_: None,
        _log_metric=lambda *_: None,
        _metrics={"train": {}},
        model=SimpleNamespace(training=True),
        environments=None,
        async_loop=loop,
    )
    inputs = [{"prompt": p, **{k: v[i] for k, v in columns.items()}} for i, p in enumerate(PROMPTS)]
    calculate = trl.GRPOTrainer._calculate_rewards
    calculate = getattr(calculate, "__wrapped__", calculate)
    rewards: torch.Tensor = calculate(trainer, inputs, PROMPTS, COMPLETIONS, IDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)
    loop.close()
    return rewards


def test_same_numbers_as_trl(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    grpo = pytest.importorskip("trl.trainer.grpo_trainer")
    monkeypatch.setattr(grpo, "profiling_context", contextmanager(lambda *_: iter([None])))

    def lengths(completions: list[str], **_: Any) -> list[float]:
        return [len(c) / 3 for c in completions]

    async def half_missing(prompts: list[str], answer: list[str], **_: Any) -> list[float | None]:
        return [None if a == "1" else 7.5 for a in answer]

    def state(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[int]:
        return [trainer_state.global_step * sum(ids) for ids in completion_ids]

    functions = [lengths, half_missing, state, load_reward(RewardSpec(path="exact_match"))]
    specs = [RewardSpec(path=register(f, f"f{i}"), name=f"r{i}") for i, f in enumerate(functions)]
    columns = {"answer": ["1", "2"]}
    ours = RewardRunner(specs).score(
        prompts=PROMPTS,
        completions=COMPLETIONS,
        columns=columns,
        completion_ids=IDS,
        trainer_state=SimpleNamespace(global_step=1),
    )
    theirs = trl_rewards(functions, columns)
    assert theirs.shape == (2, 4)
    torch.testing.assert_close(ours.rewards_NK.float(), theirs, rtol=0, atol=0, equal_nan=True)
