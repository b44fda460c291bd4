"""What `fit` looks at before it writes anything: settings that each hold and together can't train."""

from __future__ import annotations

from typing import Any

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import check_overlong_cache
from grpo_lightning.rollout import check_context, check_vocabulary

__all__ = ["check_before_fit"]


def check_before_fit(module: Any, datamodule: Any, trainer: Any) -> None:
    """Raise when this run could not make a step. Reads the prompts, which `fit` then has already."""
    _check_trainer(trainer, datamodule.prompts_per_step)
    cache, max_new_tokens = module.collector.advantages.overlong_cache_tokens, module.collector.sampling.max_new_tokens
    if cache:
        check_overlong_cache(max_new_tokens, cache)
    datamodule.setup("fit")
    check_context(module.policy, datamodule.longest_prompt, max_new_tokens)
    check_vocabulary(module.policy, datamodule.largest_token)
    module.reward_runner.check_columns(datamodule.train_columns)
    if datamodule.held_out:
        module.evaluator.rewards.check_columns(datamodule.val_columns)


def _check_trainer(trainer: Any, prompts_per_step: int) -> None:
    for name, value in (("max_steps", trainer.max_steps), ("max_epochs", trainer.max_epochs)):
        if value == 0:
            raise ConfigError(f"trainer.{name} is 0, so nothing would be trained: give 1 or more, or -1 for no limit.")
    if prompts_per_step < trainer.world_size:  # before the other ranks are started
        raise ConfigError(
            f"data.prompts_per_step is {prompts_per_step} for {trainer.world_size} ranks: give one each or more."
        )
