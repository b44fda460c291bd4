"""AdamW, its schedule, and gradient clipping that reports what it did."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from grpo_lightning.errors import ConfigError
from grpo_lightning.training.settings import OptimizerSettings

__all__ = ["build_optimizer", "check_eps", "clip_gradients"]


def build_optimizer(policy: nn.Module, settings: OptimizerSettings, *, total_steps: int) -> dict[str, Any]:
    """What Lightning's `configure_optimizers` returns: AdamW over trainable parameters and a per-step schedule."""
    from transformers import get_scheduler

    parameters = [p for p in policy.parameters() if p.requires_grad]
    beta1, beta2 = settings.betas
    optimizer = torch.optim.AdamW(
        parameters,
        lr=settings.lr,
        betas=(beta1, beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    name = "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=settings.warmup_steps, num_training_steps=max(total_steps, 1)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def clip_gradients(policy: nn.Module, max_norm: float | None) -> tuple[float, float]:
    """Scale the gradient down to `max_norm`. Returns its L2 norm before and after, over all trainable parameters."""
    parameters = [p for p in policy.parameters() if p.requires_grad and p.grad is not None]
    limit = float("inf") if max_norm is None else max_norm
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, limit)
    before = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    return before, before if not before > limit else limit


def check_eps(policy: nn.Module, eps: float) -> None:
    """Raise where AdamW's eps is 0 in the trained weights' dtype: 0 / 0 then puts NaN into every weight without gradient."""
    for dtype in {p.dtype for p in policy.parameters() if p.requires_grad}:
        if not torch.tensor(eps, dtype=dtype) > 0:
            raise ConfigError(
                f"optimizer.eps is {eps}, which is 0 in {str(dtype).removeprefix('torch.')}, the dtype of the trained weights: "
                f"train in float32 or bfloat16, or raise eps above {torch.finfo(dtype).tiny:.0e}."
            )
