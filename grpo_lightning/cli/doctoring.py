"""What `doctor` looks at: one function each, from the parsed settings to findings."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from grpo_lightning.cli.doctor import Finding, existing_parent
from grpo_lightning.training.memory import StepMemory, StepShape, step_memory

__all__ = ["Plan", "accelerator", "data", "disk", "memory", "rewards", "store", "versions"]

_TIGHT = 0.9  # of what is free: beyond it the estimate's own error decides
_ADAM_STATES = 2


@dataclass(kw_only=True)
class Plan:
    """A run's settings, and what several looks need of them, found out once."""

    config: Any

    @cached_property
    def prompts(self) -> Any:
        """The data module, its prompts read."""
        from grpo_lightning.training.data import PromptDataModule

        model = self.config.model
        settings = _plain(self.config.data) | {"model": model.model, "gguf_file": model.get("gguf_file")}
        module = PromptDataModule(**settings)
        module.setup("fit")
        return module

    @cached_property
    def model_config(self) -> Any:
        """The model's transformers configuration."""
        from grpo_lightning.training.models import model_config

        return model_config(self.config.model.model, gguf_file=self.config.model.get("gguf_file"))

    @property
    def completion_tokens(self) -> int:
        """L."""
        return int(self.config.model.sampling.max_new_tokens)

    @cached_property
    def shape(self) -> StepShape:
        """Sizes from the model's configuration; no weight is read."""
        from grpo_lightning.training.models import count_weights
        from grpo_lightning.training.settings import LoraSettings

        model, sizes, prompts = (
            self.config.model,
            self.model_config.get_text_config(),
            self.config.data.prompts_per_step,
        )
        lora = LoraSettings(**_plain(model.lora)) if model.get("lora") else None
        whole, trained = count_weights(model.model, gguf_file=model.get("gguf_file"), lora=lora)
        heads = sizes.num_attention_heads
        width = getattr(sizes, "head_dim", None) or sizes.hidden_size // heads
        return StepShape(
            parameters=whole,
            trained=trained,
            bytes_per_weight=4 if model.dtype == "float32" else 2,
            layers=sizes.num_hidden_layers,
            hidden=sizes.hidden_size,
            mlp=getattr(sizes, "intermediate_size", None) or 4 * sizes.hidden_size,
            keys=width * (getattr(sizes, "num_key_value_heads", None) or heads),
            vocabulary=sizes.vocab_size,
            prompts=prompts,
            group_size=model.group_size,
            micro_groups=min(model.get("micro_batch_groups") or prompts, prompts),
            prompt_tokens=max(self.prompts.prompt_lengths),
            completion_tokens=self.completion_tokens,
            reference_copy=model.kl.use != "off" and lora is None,
        )


def versions(plan: Plan) -> Iterator[Finding]:
    """Every distribution that the package asks for, against what it asks."""
    from packaging.requirements import Requirement

    wrong = []
    for line in requires("grpo-lightning") or []:
        asked = Requirement(line)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        try:
            found = version(asked.name)
        except PackageNotFoundError:
            wrong.append(f"{asked.name} is missing")
            continue
        if not asked.specifier.contains(found, prereleases=True):
            wrong.append(f"{asked.name} is {found}, {asked.specifier} is asked for")
    shown = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers", "mlflow"))
    if wrong:
        yield Finding(
            about="versions", verdict="problem", said="; ".join(wrong), fix="pip install -r requirements/base.txt"
        )
    else:
        yield Finding(about="versions", verdict="ok", said=shown)


def accelerator(plan: Plan) -> Iterator[Finding]:
    """What there is to compute on, and whether the config asks for it."""
    import torch

    wanted = str(plan.config.trainer.accelerator)
    threads = torch.get_num_threads()
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found = f"{len(names)} CUDA: {', '.join(sorted(set(names)))}"
        yield Finding(about="accelerator", verdict="ok", said=found)
        if wanted == "cpu":
            yield Finding(
                about="accelerator",
                verdict="warning",
                said="the config trains on the CPU",
                fix="--trainer.accelerator auto",
            )
    elif wanted in ("cuda", "gpu"):
        yield Finding(
            about="accelerator",
            verdict="problem",
            said=f"the config asks for {wanted}, and torch sees none",
            fix="--trainer.accelerator cpu, or a torch build for this machine's driver",
        )
    else:
        yield Finding(about="accelerator", verdict="ok", said=f"{os.cpu_count()} CPU cores, {threads} threads of torch")


def store(plan: Plan) -> Iterator[Finding]:
    """MLflow's store can be reached and used; one that does not exist yet is not made."""
    from grpo_lightning.sinks.redact import redact_text
    from grpo_lightning.tracking import make_client, resolve_tracking_uri, sqlite_path

    if not plan.config.run.mlflow:
        yield Finding(about="MLflow", verdict="ok", said="switched off (run.mlflow: false); the journal is kept")
        return
    uri = resolve_tracking_uri()
    path = sqlite_path(uri)
    if path is not None and not path.exists():
        parent = existing_parent(path.parent)
        if not os.access(parent, os.W_OK):
            yield Finding(
                about="MLflow",
                verdict="problem",
                said=f"{path} can't be made: {parent} is not writable",
                fix="set MLFLOW_TRACKING_URI to a writable sqlite:/// path or to a server",
            )
        else:
            yield Finding(about="MLflow", verdict="ok", said=f"{path} will be made")
        return
    experiments = make_client(uri).search_experiments(max_results=1000)
    yield Finding(about="MLflow", verdict="ok", said=f"{redact_text(uri)} answers: {len(experiments)} experiments")


def data(plan: Plan) -> Iterator[Finding]:
    """The prompts can be read, tokenized, and fit the model's context."""
    lengths = plan.prompts.prompt_lengths
    said = f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens"
    if plan.prompts.held_out:
        said += f", {plan.prompts.held_out} held out"
    if plan.prompts.dropped:
        said += f"; {plan.prompts.dropped} over the limit are dropped"
    if len(lengths) < plan.config.data.prompts_per_step:
        yield Finding(
            about="data",
            verdict="warning",
            said=f"{said}: fewer than data.prompts_per_step ({plan.config.data.prompts_per_step})",
            fix="an epoch is then a single batch; lower data.prompts_per_step",
        )
    else:
        yield Finding(about="data", verdict="ok", said=said)
    context, need = getattr(plan.model_config, "max_position_embeddings", None), max(lengths) + plan.completion_tokens
    if context is not None and need > context:
        yield Finding(
            about="data",
            verdict="problem",
            said=f"prompts and completions need {need} positions, the model has {context}",
            fix="lower data.max_prompt_tokens or model.sampling.max_new_tokens",
        )


def rewards(plan: Plan) -> Iterator[Finding]:
    """The reward functions can be loaded. `fit --dry_run` tries them."""
    from grpo_lightning.rewards import RewardRunner, RewardSpec

    for key in ("rewards", "eval_rewards"):
        specs = plan.config.model.get(key)
        if specs:
            runner = RewardRunner([RewardSpec(**_plain(spec)) for spec in specs])
            said = ", ".join(f"{n} x {w:g}" for n, w in zip(runner.names, runner.weights, strict=True))
            yield Finding(about=key.replace("_", " "), verdict="ok", said=said)


def memory(plan: Plan) -> Iterator[Finding]:
    """The step's needs by formula against what is free."""
    shape = plan.shape
    need = step_memory(shape)
    free, where = _free_memory(plan)
    parts = ", ".join(f"{k} {_size(v)}" for k, v in _parts(need).items() if v >= 0.01 * need.total)
    said = (
        f"about {_size(need.total)} a rank for {shape.parameters / 1e6:.1f} M weights ({shape.trained / 1e6:.1f} M "
        f"trained): {parts}; {_size(free)} free on {where}"
    )
    if need.total > _TIGHT * free:
        yield Finding(about="memory", verdict="problem", said=said, fix=_smaller(need, shape))
    else:
        yield Finding(about="memory", verdict="ok", said=said)


def disk(plan: Plan) -> Iterator[Finding]:
    """Room for the checkpoints that are kept, and one more while it is written."""
    folder = existing_parent(Path(plan.config.run.dir))
    shape = plan.shape
    each = (shape.parameters + _ADAM_STATES * shape.trained) * shape.bytes_per_weight
    keep = plan.config.checkpoint.keep
    saves = max(int(plan.config.trainer.max_steps), 1) // max(plan.config.checkpoint.every_n_steps, 1)
    copies = (keep if keep > 0 else max(saves, 1)) + 2  # the last one, and one that is being written
    need, free = each * copies, shutil.disk_usage(folder).free
    said = f"{copies} checkpoints of {_size(each)}, {_size(free)} free in {folder}"
    if not os.access(folder, os.W_OK):
        yield Finding(about="disk", verdict="problem", said=f"{folder} is not writable", fix="--run.dir elsewhere")
    elif need > free:
        yield Finding(about="disk", verdict="problem", said=said, fix="checkpoint.keep: 1, or --run.dir elsewhere")
    else:
        yield Finding(about="disk", verdict="ok", said=said)


def _plain(settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = settings.as_dict() if hasattr(settings, "as_dict") else dict(settings)
    return found


def _size(count: float) -> str:
    """Bytes as a person reads them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"


def _free_memory(plan: Plan) -> tuple[int, str]:
    import psutil
    import torch

    if torch.cuda.is_available() and str(plan.config.trainer.accelerator) != "cpu":
        free, _ = torch.cuda.mem_get_info()
        return int(free), torch.cuda.get_device_name()
    return int(psutil.virtual_memory().available), "this machine"


def _parts(need: StepMemory) -> dict[str, int]:
    names = ("weights", "gradients", "optimizer", "reference", "activations", "logits", "sampling")
    return {name: getattr(need, name) for name in names}


def _smaller(need: StepMemory, shape: StepShape) -> str:
    """The setting that gives most."""
    passing = need.activations + need.logits
    if passing > max(need.sampling, need.total - passing) and shape.micro_groups > 1:
        return f"model.micro_batch_groups: {max(shape.micro_groups // 4, 1)} (the same update in smaller parts)"
    if need.sampling > passing:
        return "lower data.prompts_per_step or model.sampling.max_new_tokens"
    if shape.trained == shape.parameters:
        return "model.lora: {r: 8} trains adapters only; model.dtype: bfloat16 halves the weights"
    return "a smaller model, model.dtype: bfloat16, or model.gradient_checkpointing: true"
