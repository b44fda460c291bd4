"""Two real gloo ranks against one rank on the joined batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.tiny import make_tiny_model, write_prompts

SCRIPT = """
import sys, torch, lightning as L
from pathlib import Path
from grpo_lightning.objective import LossConfig
from grpo_lightning.rewards import RewardSpec
from grpo_lightning.training.data import PromptDataModule
from grpo_lightning.training.module import GRPOModule
from grpo_lightning.training.settings import AdvantageSettings, KLSettings, OptimizerSettings, SamplingSettings

model, prompts, out, devices, loss, scale = sys.argv[1:]
torch.set_num_threads(1)

class First(L.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 0 and trainer.is_global_zero:
            torch.save({n: p.grad.clone() for n, p in module.policy.named_parameters()}, Path(out) / "grad.pt")
    def on_train_batch_end(self, trainer, module, *_):
        r = module.last_record
        torch.save({"rows": r.row_ids_P, "loss": r.loss}, Path(out) / f"rows-{trainer.global_rank}-{r.step}.pt")

module = GRPOModule(
    model, [RewardSpec(path="support.tiny:dense")], group_size=4, loss=LossConfig(loss=loss),
    sampling=SamplingSettings(max_new_tokens=6), kl=KLSettings(use="loss"), micro_batch_groups=1,
    advantages=AdvantageSettings(scale=scale), optimizer=OptimizerSettings(lr=1e-3, max_grad_norm=None),
)
trainer = L.Trainer(
    max_steps=4, max_epochs=-1, accelerator="cpu", devices=int(devices), strategy="ddp" if int(devices) > 1 else "auto",
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    use_distributed_sampler=False, callbacks=[First()], default_root_dir=out,
)
trainer.fit(module, datamodule=PromptDataModule(prompts, model=model, prompts_per_step=5))
if trainer.is_global_zero:
    torch.save(module.policy.state_dict(), Path(out) / "weights.pt")
"""


def train(tmp_path: Path, model: Path, prompts: Path, devices: int, loss: str, scale: str) -> Path:
    out = tmp_path / f"ranks-{devices}"
    out.mkdir()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {
        **os.environ,
        "PYTHONPATH": f"{Path(__file__).parents[2]}:{Path(__file__).parents[1]}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(script), str(model), str(prompts), str(out), str(devices), loss, scale]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.parametrize(("loss", "scale"), [("dapo", "group"), ("grpo", "batch")], ids=["dapo", "grpo, batch scale"])
def test_two_ranks_give_the_gradient_of_one_on_the_joined_batch(tmp_path: Path, loss: str, scale: str) -> None:
    """Batches of five prompts: three on one rank, two on the other, in micro-batches of one."""
    model = make_tiny_model(tmp_path)
    prompts = write_prompts(tmp_path / "train.jsonl", 10)
    one, two = (train(tmp_path, model, prompts, devices, loss, scale) for devices in (1, 2))
    want, got = torch.load(one / "grad.pt"), torch.load(two / "grad.pt")
    assert max(float(g.abs().max()) for g in want.values()) > 1e-3
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    for step in range(1, 5):
        joined = [torch.load(two / f"rows-{rank}-{step}.pt") for rank in (0, 1)]
        alone = torch.load(one / f"rows-0-{step}.pt")
        rows = [set(r["rows"].tolist()) for r in joined]
        assert not rows[0] & rows[1]
        assert rows[0] | rows[1] == set(alone["rows"].tolist())
        assert joined[0]["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    for name, value in torch.load(one / "weights.pt").items():
        torch.testing.assert_close(torch.load(two / "weights.pt")[name], value, atol=1e-4, rtol=1e-3, msg=name)
