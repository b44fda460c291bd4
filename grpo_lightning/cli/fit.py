"""`fit` and `validate`."""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_lightning import shipped
from grpo_lightning.cli.config_file import check_config_files
from grpo_lightning.errors import ConfigError

__all__ = ["DEFAULT_CONFIG", "parse_fit", "run_fit", "run_validate"]

DEFAULT_CONFIG = "shipped:arithmetic/config.yaml"


_NOISE = (
    "LightningCLI's args parameter is intended to run from within Python.*",  # true of this design on purpose, or of others' code
    ".*does not have many workers.*",
    ".*treespec, LeafSpec.*",
    "Your `IterableDataset` has `__len__` defined.*",
    "Found .* module.s. in eval mode.*",
    "Using ModelCheckpoint with manual optimization.*",
    "You're resuming from a checkpoint that ended.*",  # the data module holds the position
    "Total length of `list` across ranks is zero.*",
    "Be aware that when using `ckpt_path`.*",  # `validate` needs none of the callbacks
    "The dirpath has changed.*",
    ".*is deprecated and will be removed.*",
)


def run_fit(argv: list[str]) -> int:
    """Train, or continue from a checkpoint; with no config, the shipped example or the checkpoint's own config."""
    from grpo_lightning.callbacks import requeued_checkpoint, run_callbacks
    from grpo_lightning.cli.checkpoint import checked_checkpoint
    from grpo_lightning.cli.preflight import check_before_fit
    from grpo_lightning.training.checkpoint_io import write_atomically

    cli = _build("fit", _with_config(argv))
    config = cli.config["fit"]
    if config.get("dry_run"):
        from grpo_lightning.cli.dry_run import dry_run

        return dry_run(cli.model, cli.datamodule)
    wanted = config.get("ckpt_path") or requeued_checkpoint(Path(_at_home(cli.config_init["fit"]["run"]).dir))
    ckpt_path = checked_checkpoint(wanted, cli.model, max_steps=cli.trainer.max_steps)
    cli.datamodule.accept_changes = "data" in (config.get("accept_drift") or [])
    check_before_fit(cli.model, cli.datamodule, cli.trainer)
    write_atomically(cli.trainer.strategy)
    recorder, *others = run_callbacks(
        run=_at_home(cli.config_init["fit"]["run"]),
        checkpoint=cli.config_init["fit"]["checkpoint"],
        health=cli.config_init["fit"]["health"],
        snapshot=cli.config_init["fit"]["snapshot"],
        accept_drift=config.get("accept_drift") or [],
        note=config.get("note") or "",
        config_yaml=_config_yaml(cli, "fit"),
        resume_from=ckpt_path,
    )
    cli.trainer.callbacks.extend([recorder, *others])
    cli.trainer.callbacks = cli.trainer._callback_connector._reorder_callbacks(cli.trainer.callbacks)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=ckpt_path)
    return 0


def run_validate(argv: list[str]) -> int:
    """Greedy evaluation of a checkpoint, or of the untrained model when none is named."""
    from grpo_lightning.cli.checkpoint import checked_checkpoint

    cli = _build("validate", _with_config(argv))
    ckpt_path = checked_checkpoint(cli.config["validate"].get("ckpt_path"), cli.model)
    cli.trainer.validate(cli.model, datamodule=cli.datamodule, ckpt_path=ckpt_path, verbose=False)
    if cli.trainer.is_global_zero and cli.model.last_evaluation is not None:
        _print_evaluation(cli.model.last_evaluation)
    return 0


def _at_home(run: Any) -> Any:
    return replace(run, dir=str(Path(run.dir).expanduser()))


def _print_evaluation(evaluation: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{evaluation.prompts} held-out prompts, greedy")
    table.add_column("signal")
    table.add_column("value", justify="right")
    for name, value in evaluation.values.items():
        table.add_row(name, f"{value:.4f}")
    Console().print(table)


def _build(command: str, argv: list[str]) -> Any:
    _quiet_libraries()
    from grpo_lightning.cli.parser import GrpoCLI

    class _Cli(GrpoCLI):
        """The parser and its objects; the command itself is run by the caller."""

        def _run_subcommand(self, subcommand: str) -> None:
            return None

    return _made(_Cli, command, argv)


def _made(cli_class: Any, command: str, argv: list[str]) -> Any:
    from grpo_lightning.cli.parser import GrpoParser
    from grpo_lightning.training.data import PromptDataModule
    from grpo_lightning.training.module import GRPOModule

    return cli_class(
        GRPOModule,
        PromptDataModule,
        seed_everything_default=0,
        save_config_callback=None,
        args=[command, *argv],
        parser_class=GrpoParser,
        auto_configure_optimizers=False,
        parser_kwargs={name: {"default_env": False} for name in ("fit", "validate")},
    )


def parse_fit(argv: list[str]) -> Any:
    """The checked settings of `fit`; nothing is made of them."""
    _quiet_libraries()
    from grpo_lightning.cli.parser import GrpoCLI

    class _Parsed(GrpoCLI):
        def instantiate_classes(self) -> None:
            return None

        def _run_subcommand(self, subcommand: str) -> None:
            return None

    cli = _made(_Parsed, "fit", _with_config(argv))
    return cli.config["fit"]


def _quiet_libraries() -> None:
    """What Lightning and transformers say about themselves at start-up hides what the user must read."""
    import lightning.pytorch  # noqa: F401 - it sets its loggers' levels when it is imported

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    try:
        from transformers.utils import logging as hf_logging

        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
    except ImportError:  # pragma: no cover - transformers is a dependency
        return


def _with_config(argv: list[str]) -> list[str]:
    """Put the config that a bare command means in front: the checkpoint's own, else the shipped example's."""
    check_config_files(argv)
    if any(a in ("-c", "--config") or a.startswith("--config=") for a in argv) or _asks_help(argv):
        return argv
    ckpt_path = _value_of(argv, "--ckpt_path")
    if ckpt_path is None:
        return ["--config", shipped.expand(DEFAULT_CONFIG), *argv]
    checkpoint = Path(ckpt_path).expanduser()
    own = checkpoint.resolve().parent.parent / "config.yaml"
    if not own.is_file():
        raise ConfigError(
            f"No config.yaml lies in the run directory of {ckpt_path!r}: name the run's config with --config."
        )
    return ["--config", str(own), *argv]


def _asks_help(argv: list[str]) -> bool:
    return any(a in ("-h", "--help") or a.startswith("--help") for a in argv)


def _value_of(argv: list[str], flag: str) -> str | None:
    for i, arg in enumerate(argv):
        if arg.startswith(f"{flag}="):
            return arg.split("=", 1)[1]
        if arg == flag and i + 1 < len(argv):
            return argv[i + 1]
    return None


def _config_yaml(cli: Any, command: str) -> str:
    """The resolved settings as YAML that `--config` takes."""
    parser = cli._parser(command)
    config = cli.config[command].clone()
    config.pop("config", None)
    for once in ("ckpt_path", "accept_drift", "note", "dry_run"):  # they belong to this start alone
        config.pop(once, None)
    text: str = parser.dump(config, skip_none=False, skip_check=True)
    return text


def stdout_is_terminal() -> bool:
    """Whether a person watches."""
    return sys.stdout.isatty()
