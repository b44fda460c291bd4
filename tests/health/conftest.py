"""What tests of the judgement share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SERIES = Path(__file__).parents[2] / "benchmarks" / "series.py"


@pytest.fixture(scope="session")
def generated() -> ModuleType:
    """The benchmarks' generated series."""
    spec = importlib.util.spec_from_file_location("generated_series", SERIES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generated_series"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
