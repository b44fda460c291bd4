"""Health signals: from a step's tensors to named numbers, and the catalogue that says what each means."""

from grpo_lightning.signals.catalogue import CATALOGUE, Signal, page_of, signal
from grpo_lightning.signals.measure import finish, measure

__all__ = ["CATALOGUE", "Signal", "finish", "measure", "page_of", "signal"]
