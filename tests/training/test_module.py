"""GRPOModule under a real Lightning Trainer on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.tiny import make_tiny_model, write_prompts

from grpo_lightning.errors import ConfigError
from grpo_lightning.objective import LossConfig
from grpo_lightning.rewards import RewardSpec
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.settings import (
    AdvantageSettings,
    KLSettings,
    LoraSettings,
    OptimizerSettings,
    SamplingSettings,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("data") / "train.jsonl")


def module(model_path: Path, reward: str = "support.tiny:dense", **changes: Any) -> GRPOModule:
    settings: dict[str, Any] = {
        "rewards": [RewardSpec(path=reward)],
        "group_size": 4,
        "sampling": SamplingSettings(max_new_tokens=6),
        "optimizer": OptimizerSettings(lr=1e-2),
    }
    return GRPOModule(str(model_path), **(settings | changes))


def data(model_path: Path, prompts: Path, **changes: Any) -> PromptDataModule:
    settings: dict[str, Any] = {"train": str(prompts), "model": str(model_path), "prompts_per_step": 4}
    return PromptDataModule(**(settings | changes))


def trainer(tmp_path: Path, steps: int, callbacks: list[L.Callback] | None = None, **more: Any) -> L.Trainer:
    return L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks or []),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
        default_root_dir=tmp_path,
        **more,
    )


class Records(L.Callback):
    """Keeps every step's record."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.all.append(pl_module.last_record)


def weights(m: GRPOModule) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in m.policy.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_a_learnable_reward_is_learned(tmp_path: Path, model_path: Path, prompts: Path) -> None:
    seen = Records()
    trainer(tmp_path, 40, [seen]).fit(
        module(model_path, "support.tiny:share_of_a"), datamodule=data(model_path, prompts)
    )
    means = [float(r.rewards_PG.mean()) for r in seen.all]
    assert len(means) == 40
    assert sum(means[:5]) / 5 < 0.1
    assert sum(means[-5:]) / 5 > 0.8


WINDOWS = {
    "one update": {},
    "two passes": {"num_iterations": 2},
    "two passes over two minibatches, accumulated": {
        "num_iterations": 2,
        "num_minibatches": 2,
        "micro_batch_groups": 1,
        "kl": KLSettings(use="loss"),
    },
}


@pytest.mark.parametrize("stop", [1, 3, 6, 7])
@pytest.mark.parametrize("changes", WINDOWS.values(), ids=WINDOWS.keys())
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    tmp_path: Path, model_path: Path, prompts: Path, changes: dict[str, Any], stop: int
) -> None:
    whole = module(model_path, **changes)
    trainer(tmp_path / "a", 8).fit(whole, datamodule=data(model_path, prompts))

    saver = ModelCheckpoint(dirpath=tmp_path / "b", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer(tmp_path / "b", stop, [saver]).fit(module(model_path, **changes), datamodule=data(model_path, prompts))
    resumed = module(model_path, **changes)
    seen = Records()
    trainer(tmp_path / "b", 8, [seen]).fit(
        resumed,
        datamodule=data(model_path, prompts),
        ckpt_path=str(tmp_path / "b" / f"step={stop}.ckpt"),
        weights_only=True,
    )
    assert [r.step for r in seen.all] == list(range(stop + 1, 9))
    assert same(weights(whole), weights(resumed))


def test_micro_batches_do_not_change_the_update(tmp_path: Path, model_path: Path, prompts: Path) -> None:
    results = []
    for micro in (None, 1, 3):
        m = module(
            model_path,
            micro_batch_groups=micro,
            kl=KLSettings(use="loss"),
            loss=LossConfig(loss="dapo"),
            optimizer=OptimizerSettings(lr=1e-2, eps=1e-6),  # Adam magnifies gradients of the size of its eps
        )
        trainer(tmp_path, 2).fit(m, datamodule=data(model_path, prompts))
        results.append(weights(m))
    for other in results[1:]:
        for key, value in results[0].items():
            torch.testing.assert_close(other[key], value, atol=2e-5, rtol=1e-4)


def test_a_nan_loss_skips_the_update_and_is_recorded_as_nan(
    tmp_path: Path, model_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = module(model_path)
    before = weights(m)
    seen = Records()
    real = GRPOModule.manual_backward

    def poisoned(self: GRPOModule, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        real(self, loss * float("nan"), *args, **kwargs)

    monkeypatch.setattr(GRPOModule, "manual_backward", poisoned)
    t = trainer(tmp_path, 2, [seen])
    t.fit(m, datamodule=data(model_path, prompts))
    assert [r.update_skipped for r in seen.all] == [True, True]
    assert all(r.grad_norm != r.grad_norm for r in seen.all)
    assert t.global_step == 2
    assert same(before, weights(m))


def test_lora_changes_only_its_adapter_and_measures_kl_against_the_base(
    tmp_path: Path, model_path: Path, prompts: Path
) -> None:
    m = module(model_path, lora=LoraSettings(r=2), kl=KLSettings(use="loss"))
    before = weights(m)
    seen = Records()
    trainer(tmp_path, 3, [seen]).fit(m, datamodule=data(model_path, prompts))
    changed = {k for k, v in weights(m).items() if not torch.equal(v, before[k])}
    assert changed
    assert all("lora_" in k for k in changed)
    first, last = seen.all[0], seen.all[-1]
    torch.testing.assert_close(first.logprobs_PGL, first.ref_logprobs_PGL, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(last.logprobs_PGL, last.ref_logprobs_PGL, atol=1e-4)


def test_the_sampler_and_the_trainer_agree_on_log_probs(tmp_path: Path, model_path: Path, prompts: Path) -> None:
    seen = Records()
    trainer(tmp_path, 1, [seen]).fit(
        module(model_path, sampling=SamplingSettings(max_new_tokens=6, temperature=0.7)),
        datamodule=data(model_path, prompts),
    )
    record = seen.all[0]
    mask = record.rollouts.completion_mask_PGL
    torch.testing.assert_close(
        record.rollouts.sampler_logprobs_PGL[mask], record.logprobs_PGL[mask], atol=1e-5, rtol=1e-5
    )


def test_reading_the_number_of_steps_keeps_the_position_of_the_data(
    tmp_path: Path, model_path: Path, prompts: Path
) -> None:
    """A schedule reads `estimated_stepping_batches` in `configure_optimizers`, which makes the loader early."""
    settings = {"optimizer": OptimizerSettings(lr=1e-3, schedule="cosine", warmup_steps=1)}
    seen = Records()
    trainer(tmp_path / "a", 5, [seen]).fit(module(model_path, **settings), datamodule=data(model_path, prompts))
    saver = ModelCheckpoint(dirpath=tmp_path / "b", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer(tmp_path / "b", 2, [saver]).fit(module(model_path, **settings), datamodule=data(model_path, prompts))
    after = Records()
    trainer(tmp_path / "b", 5, [after]).fit(
        module(model_path, **settings),
        datamodule=data(model_path, prompts),
        ckpt_path=str(tmp_path / "b" / "step=2.ckpt"),
    )
    assert [r.row_ids_P.tolist() for r in after.all] == [r.row_ids_P.tolist() for r in seen.all[2:]]


BAD = {
    "group of one": ({"group_size": 1}, r"group_size is 1.*at least 2"),
    "no rewards": ({"rewards": []}, r"rewards is empty"),
    "zero passes": ({"num_iterations": 0}, r"num_iterations is 0"),
    "an infinite coefficient": (lambda: {"kl": KLSettings(use="loss", coef=float("inf"))}, r"kl.coef is inf"),
    "a negative interval": (lambda: {"kl": KLSettings(reference_sync_steps=-2)}, r"reference_sync_steps is -2"),
    "no eps": (lambda: {"optimizer": OptimizerSettings(eps=0.0)}, r"optimizer.eps is 0"),
    "a negative warm-up": (lambda: {"optimizer": OptimizerSettings(warmup_steps=-1)}, r"warmup_steps is -1"),
    "a negative decay": (lambda: {"optimizer": OptimizerSettings(weight_decay=-1.0)}, r"weight_decay is -1"),
    "a negative scale of LoRA": (lambda: {"lora": LoraSettings(alpha=-1)}, r"lora.alpha is -1"),
    "a seed beyond int64": ({"seed": 2**63}, r"model.seed is 9223372036854775808"),
    "context too short": ({"sampling": SamplingSettings(max_new_tokens=500)}, r"500.*64|64.*500"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_settings_that_cannot_hold_say_so(
    tmp_path: Path, model_path: Path, prompts: Path, changes: Any, message: str
) -> None:
    def fit() -> None:
        given = changes() if callable(changes) else changes
        trainer(tmp_path, 1).fit(module(model_path, **given), datamodule=data(model_path, prompts))

    with pytest.raises(ConfigError, match=message):
        fit()


def test_batch_scaling_and_kl_in_the_reward_train(tmp_path: Path, model_path: Path, prompts: Path) -> None:
    m = module(
        model_path,
        advantages=AdvantageSettings(scale="batch", mask_truncated=True, overlong_cache_tokens=2),
        kl=KLSettings(use="reward", coef=0.1, adaptive_bound=1e-9),
        num_iterations=2,
    )
    seen = Records()
    trainer(tmp_path, 4, [seen]).fit(m, datamodule=data(model_path, prompts))
    assert all(torch.isfinite(torch.tensor(r.loss)) for r in seen.all)
    assert seen.all[-1].kl_coef > 0.1


def test_the_record_says_where_the_loss_really_clips(tmp_path: Path, model_path: Path, prompts: Path) -> None:
    """cispo clips weights above cispo_max and never below: the signals must not count clips that don't happen."""
    seen = Records()
    m = module(model_path, loss=LossConfig(loss="cispo", cispo_max=5.0))
    trainer(tmp_path, 1, [seen]).fit(m, datamodule=data(model_path, prompts))
    assert (seen.all[0].clip_low, seen.all[0].clip_high) == (1.0, 4.0)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_precisions_train(tmp_path: Path, model_path: Path, prompts: Path, precision: Any) -> None:
    """The -true ones change torch's default dtype, and the sampler keeps its log-probs in float32 whatever that is."""
    seen = Records()
    t = trainer(tmp_path, 3, [seen], precision=precision)
    t.fit(module(model_path, kl=KLSettings(use="loss")), datamodule=data(model_path, prompts))
    for record in seen.all:
        assert record.rollouts.sampler_logprobs_PGL.dtype == torch.float32
        assert not record.update_skipped
        mask = record.rollouts.completion_mask_PGL
        gap = (record.rollouts.sampler_logprobs_PGL - record.logprobs_PGL.float())[mask].abs().max()
        assert gap < (1e-4 if precision == "64-true" else 0.1)


def test_training_without_an_end_goes_on_until_it_is_stopped(tmp_path: Path, model_path: Path, prompts: Path) -> None:
    seen = Records()
    t = trainer(tmp_path, -1, [seen], max_time={"seconds": 1})
    t.fit(module(model_path), datamodule=data(model_path, prompts))
    assert len(seen.all) > 3
