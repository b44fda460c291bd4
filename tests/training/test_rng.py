"""Random states go between ranks and through checkpoints."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import torch

from grpo_lightning.training import rng


def _draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_state_survives_pickling_and_a_checkpoint(tmp_path: Path) -> None:
    """Ranks exchange it pickled, and torch can't unpickle a tensor of NumPy's unsigned words."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    np.random.randn()  # leaves a second normal value behind
    state = rng.capture()
    expected = (*_draws(), np.random.randn())
    torch.save(state, tmp_path / "state.pt")
    for kept in (pickle.loads(pickle.dumps(state)), torch.load(tmp_path / "state.pt", weights_only=True)):
        rng.restore(kept)
        assert (*_draws(), np.random.randn()) == expected
