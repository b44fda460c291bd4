"""LightningCLI with our defaults, and its parse errors as one sentence."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any, NoReturn, get_args

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from grpo_lightning.errors import ConfigError

__all__ = ["GrpoCLI", "GrpoParser"]

_SPACES = re.compile(r"\s+")
_UNKNOWN = re.compile(
    r"unrecognized arguments?: (\S+)|key ['\"]?([\w.-]+)['\"]? is not expected|no action for key ['\"]([^'\"]+)"
    r"|option ['\"](\w+)['\"] is not accepted|does not accept option ['\"]([\w.-]+)['\"]",
    re.I,
)
_LONGEST = 400
_SHOWN = 80
_WRONG_TYPE = re.compile(
    r"Parser key ['\"]([^'\"]+)['\"]: (?:Expected an? (?=<class|typing)|Does not validate against any of the Union subtypes "
    r"Subtypes: )(.*?)(?:\. Got| Errors: .* Given) value: (.*)"
)
_TYPES = re.compile(r"typing\.Literal\[([^\]]*)\]|<class '(\w+)'>|(dict|list)\[[^\]]*\]")
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "NoneType": "null"}
_WORDS |= {"dict": "a mapping such as {name: value}", "list": "a list such as [a, b]"}
_REWARD_KEYS = ("path", "weight", "name", "timeout_seconds", "on_error", "kwargs")
_REWARDS = "give a list of rewards, such as [{path: exact_match, weight: 1.0}]"
_HINTS = {"model.rewards": _REWARDS, "model.eval_rewards": _REWARDS}
_ONE_OF = re.compile(
    r"Does not validate against any of the Union subtypes .*?Errors: - (?!Expected)(.*?) "
    r"- Expected a <class 'NoneType'> Given value type.*"
)
_OURS = {  # what Lightning calls a thing that the module does itself
    "accumulate_grad_batches": (1, "model.micro_batch_groups"),
    "gradient_clip_val": (None, "model.optimizer.max_grad_norm"),
}

TRAINER_DEFAULTS: dict[str, Any] = {
    "trainer.logger": False,
    "trainer.enable_progress_bar": False,
    "trainer.enable_model_summary": False,
    "trainer.use_distributed_sampler": False,
    "trainer.num_sanity_val_steps": -1,
    "trainer.enable_checkpointing": False,
    "trainer.max_epochs": -1,
}


class GrpoParser(LightningArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message as a ConfigError; the command line prints it and exits with 2."""
        raise ConfigError(_one_sentence(message, self._known_keys())) from ex

    def _known_keys(self) -> list[str]:
        below = getattr(getattr(self, "_subcommands_action", None), "_name_parser_map", {}).values()
        own = [a.dest for a in self._actions if a.dest not in ("help", "print_config")]
        return [*own, *_REWARD_KEYS, *(key for parser in below for key in parser._known_keys())]


def _one_sentence(message: str, known: list[str]) -> str:
    flat = _ONE_OF.sub(r"\1", _SPACES.sub(" ", message).strip())
    if (wrong := _WRONG_TYPE.fullmatch(flat)) and (sentence := _what_it_takes(*wrong.groups())):
        return sentence
    unknown = _UNKNOWN.search(flat)
    if unknown:
        key = next(g for g in unknown.groups() if g).lstrip("-").split("=")[0]
        known = [k for k in known if not key.startswith(f"{k}.")]
        near = get_close_matches(key, known, n=1) or get_close_matches(
            key.split(".")[-1], [k.split(".")[-1] for k in known], n=1
        )
        hint = f"did you mean {near[0]!r}?" if near else "see --help for the known settings."
        return f"{key!r} is not a setting: {hint}"
    for key, hint in _HINTS.items():
        if f'"{key}"' in flat:
            return f"{key} is not what it must be: {hint}."
    return flat if len(flat) <= _LONGEST else f"{flat[:_LONGEST]} …"


def _what_it_takes(key: str, types: str, given: str) -> str:
    """Python's types in words; empty where there is one that has none."""
    names = _TYPES.findall(types)
    if not names or _TYPES.sub("", types).strip(" ,[]"):
        return ""
    words, known = [], []
    for choices, plain_type, container in names:
        values = [value.strip(" '\"") for value in choices.split(",")] if choices else []
        known += values
        words += values or [_WORDS.get(plain_type or container, "")]
    if not all(words):
        return ""
    near = get_close_matches(given, known, n=1)
    hint = f"did you mean {near[0]!r}? It takes" if near else "give"
    shown = given if len(given) <= _SHOWN else f"{given[:_SHOWN]} …"
    return f"{key} is {shown!r}: {hint} {', '.join(words[:-1])}{' or ' if words[1:] else ''}{words[-1]}."


def _refuse_nulls(parser: Any, config: Any) -> None:
    """A key without a value (`group_size:`) is null in YAML, which jsonargparse takes whatever the setting's type is."""
    for action in parser._actions:
        kind = getattr(action, "_typehint", None)
        if kind in (None, Any) or type(None) in get_args(kind) or action.dest not in config:
            continue
        if config[action.dest] is None:
            raise ConfigError(f"{action.dest} is null, as a key without a value is: give it a value, or leave it out.")


class GrpoCLI(LightningCLI):
    """`fit` and `validate`: constructors are the schema, YAML configs, overrides, ``--print_config``."""

    def before_instantiate_classes(self) -> None:
        """A whole number of steps between evaluations counts over epochs: prompt sets are often shorter than that."""
        _refuse_nulls(self._parser(self.subcommand), self.config[str(self.subcommand)])
        trainer = self.config[str(self.subcommand)].trainer
        for name, (unset, ours) in _OURS.items():
            if trainer[name] != unset:
                raise ConfigError(f"trainer.{name} is {trainer[name]}: leave it out and set {ours}.")
        if trainer.val_check_interval == 0:
            raise ConfigError(
                "trainer.val_check_interval is 0: give the steps between evaluations; limit_val_batches: 0 is none."
            )
        if isinstance(trainer.val_check_interval, int) and trainer.check_val_every_n_epoch == 1:
            trainer.check_val_every_n_epoch = None

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            raise ConfigError(f"seed_everything is out of range: {_one_sentence(str(error), [])}.") from error

    def _parse_ckpt_path(self) -> None:
        """Settings come from the run's config.yaml; Lightning would look for them in the checkpoint itself."""

    def instantiate_classes(self) -> None:
        """Make the objects; what jsonargparse and Lightning say of a value that can't hold, as one sentence."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            if "Union subtypes" not in str(error):
                raise
            raise ConfigError(_one_sentence(str(error), [])) from error

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Any:
        try:
            return super()._instantiate_trainer(config, callbacks)
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"The trainer can't be made: {_one_sentence(str(error), [])}") from error

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The Trainer's methods that are commands, and the arguments of each that come from us."""
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"},
            "validate": {"model", "dataloaders", "datamodule", "weights_only"},
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Our Trainer defaults, the run's settings, and the links between model and data."""
        from grpo_lightning.callbacks import CheckpointSettings, HealthSettings, RunSettings, SnapshotSettings

        parser.set_defaults(TRAINER_DEFAULTS)
        parser.add_class_arguments(RunSettings, "run")
        parser.add_class_arguments(CheckpointSettings, "checkpoint")
        parser.add_class_arguments(HealthSettings, "health")
        parser.add_class_arguments(SnapshotSettings, "snapshot")
        parser.add_argument(
            "--accept_drift",
            type=list[str] | None,
            default=None,
            help="levels (environment, data, reward) that were changed on purpose since the run was last started",
        )
        parser.add_argument(
            "--note", type=str | None, default=None, help="what was changed and why, with --accept_drift"
        )
        parser.add_argument(
            "--dry_run",
            action="store_true",
            help="of fit: sample and reward one batch, try the rewards on empty, echoed, repeated, truncated and swapped "
            "responses, show what was found, and stop; nothing is trained or written",
        )
        parser.link_arguments("model.model", "data.model")
        parser.link_arguments("model.gguf_file", "data.gguf_file")
