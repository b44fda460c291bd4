"""What the reading commands share: a parser whose errors are one sentence, and JSON that is JSON."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any, NoReturn

from grpo_lightning.errors import UsageError

__all__ = ["Parser", "dumps"]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise the message; the command line prints it and exits with 2."""
        raise UsageError(f"{message}; see {self.prog} --help.")


def dumps(content: Any) -> str:
    """JSON; numbers that it lacks are the words NaN, Infinity and -Infinity."""
    return json.dumps(_plain(content), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
