"""Calls reward functions under a time limit.

A plain function runs on a thread of its own, an async one on an event loop that lives on a thread of its own, so that
both give control back when the time is over, also inside a notebook whose thread already runs a loop. Python can't kill
a thread: what hangs is left behind, and ends with the process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from grpo_lightning.rewards.function import RewardFunction
from grpo_lightning.rewards.values import to_numbers

__all__ = ["Answer", "OutOfTime", "call_all"]

_loop: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None


class OutOfTime(Exception):  # noqa: N818 - an outcome
    """A function took longer than its limit. The text, where there is one, says what held it up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What one call came to."""

    found: list[float] | BaseException  # N values, or why there are none
    seconds: float


def call_all(functions: list[RewardFunction], given: dict[str, Any], count: int) -> list[Answer]:
    """Plain functions one after the other, then the async ones together, as TRL does."""
    keywords = [f.keywords(given) for f in functions]
    answers: dict[int, Answer] = {}
    for i, function in enumerate(functions):
        if not function.is_async:
            answers[i] = _call(function, keywords[i], count)
    together = [i for i, f in enumerate(functions) if f.is_async]
    found = _call_together([functions[i] for i in together], [keywords[i] for i in together], count)
    answers |= dict(zip(together, found, strict=True))
    return [answers[i] for i in range(len(functions))]


def _call(function: RewardFunction, keywords: dict[str, Any], count: int) -> Answer:
    started = perf_counter()
    limit = function.spec.timeout_seconds

    def call() -> list[float]:
        return to_numbers(function.function(**keywords), count)

    found = _caught(call) if limit is None else _on_thread(call, limit, function.name)
    return Answer(found=found, seconds=perf_counter() - started)


def _caught(call: Callable[[], list[float]]) -> list[float] | BaseException:
    try:
        return call()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function raises what it likes
        return error


def _on_thread(call: Callable[[], list[float]], limit: float, name: str) -> list[float] | BaseException:
    box: list[list[float] | BaseException] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            box.append(context.run(call))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
            box.append(error)

    thread = threading.Thread(target=run, daemon=True, name=f"reward {name}")
    thread.start()
    thread.join(limit)
    return box[0] if box else OutOfTime()


def _call_together(functions: list[RewardFunction], keywords: list[dict[str, Any]], count: int) -> list[Answer]:
    if not functions:
        return []
    loop = _running_loop()
    started = perf_counter()
    futures = [
        asyncio.run_coroutine_threadsafe(_await(f, k, count), loop) for f, k in zip(functions, keywords, strict=True)
    ]
    return [_collect(future, f, loop, started) for future, f in zip(futures, functions, strict=True)]


async def _await(function: RewardFunction, keywords: dict[str, Any], count: int) -> Answer:
    started = perf_counter()
    found: list[float] | BaseException
    task = asyncio.current_task()
    if task is not None:
        task.set_name(function.name)
    try:
        found = to_numbers(await function.function(**keywords), count)
    except BaseException as error:  # noqa: BLE001 - a SystemExit here would end the loop
        found = error
    return Answer(found=found, seconds=perf_counter() - started)


def _collect(
    future: concurrent.futures.Future[Answer], function: RewardFunction, loop: asyncio.AbstractEventLoop, started: float
) -> Answer:
    limit = function.spec.timeout_seconds
    try:
        return future.result(None if limit is None else max(started + limit - perf_counter(), 0.0))
    except concurrent.futures.TimeoutError:
        future.cancel()
        return Answer(found=OutOfTime(_held_up_by(loop, function.name)), seconds=perf_counter() - started)


def _held_up_by(loop: asyncio.AbstractEventLoop, name: str) -> str:
    """Who blocks the loop, when somebody does; the loop is then given up, and the next call starts another."""
    global _loop  # noqa: PLW0603
    turned = threading.Event()
    loop.call_soon_threadsafe(turned.set)
    if turned.wait(0.5):
        return ""
    task = asyncio.current_task(loop)
    if _loop is not None and _loop[0] is loop:
        _loop = None
    who = task.get_name() if task is not None else "a callback"
    return "it blocks" if who == name else f"{who!r} blocks"


def _running_loop() -> asyncio.AbstractEventLoop:
    """One loop for the whole process, so that clients which async functions keep stay on the loop they were made on."""
    global _loop  # noqa: PLW0603
    if _loop is None or not _loop[1].is_alive():
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True, name="async rewards")
        thread.start()
        _loop = (loop, thread)
    return _loop[0]
