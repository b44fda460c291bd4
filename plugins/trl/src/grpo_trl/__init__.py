"""TRL's `GRPOTrainer`, watched: the same signals, rules, evidence and pause as a grpo-lightning run.

>>> from grpo_trl import watch  # doctest: +SKIP
>>> watch(trainer)  # doctest: +SKIP
>>> trainer.train()  # doctest: +SKIP
"""

from grpo_trl.watching import Watcher, watch

__all__ = ["Watcher", "watch"]
