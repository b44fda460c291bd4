"""What a config file must be before anything reads settings out of it: the parser takes some files for less than they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from grpo_lightning.errors import ConfigError

__all__ = ["check_config_files"]

_SECTIONS = ("model", "data", "trainer", "run", "checkpoint", "health", "snapshot")
_MOST_NODES = 100_000  # with every alias written out
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_config_files(argv: list[str]) -> None:
    """Raise for a config file that is no mapping of settings, names one twice, or grows without end by its aliases."""
    for name in _named(argv):
        path = Path(name).expanduser()
        if path.is_file():
            _check(path)


def _named(argv: list[str]) -> Iterator[str]:
    for i, arg in enumerate(argv):
        if arg in ("-c", "--config") and i + 1 < len(argv):
            yield argv[i + 1]
        elif arg.startswith("--config="):
            yield arg.removeprefix("--config=")


def _check(path: Path) -> None:
    begin = f"The config {str(path)!r}"
    root = _composed(path, begin)
    if root is None:
        raise ConfigError(f"{begin} is empty: write settings into it, such as model: and data:.")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{begin} is a {_kind(root)}: it must be a mapping of settings, such as model: and data:.")
    _check_size(root, begin)
    _check_keys(root, begin, "")
    for key, value in root.value:
        if key.value in _SECTIONS and not _may_be_section(value):
            raise ConfigError(
                f"{begin}, line {value.start_mark.line + 1}: {key.value} is a {_kind(value)}: it must hold settings, each on a "
                f"line below it."
            )


def _composed(path: Path, begin: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{begin} is not UTF-8 text (byte {error.start}): give a YAML file.") from error
    except OSError as error:
        raise ConfigError(f"{begin} can't be read: {error.strerror or error}.") from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{begin}{where} is not YAML ({said}): repair it there.") from error
    return node


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "list"
    return "mapping" if isinstance(node, yaml.MappingNode) else f"single value ({node.value[:40]})"


def _may_be_section(node: yaml.Node) -> bool:
    """A mapping, or a text: the name of a file that holds one."""
    return isinstance(node, yaml.MappingNode) or node.tag == "tag:yaml.org,2002:str"


def _check_size(root: yaml.Node, begin: str) -> None:
    try:
        size = _size(root, {}, ())
    except RecursionError:
        size = _MOST_NODES + 1
    if size > _MOST_NODES:
        raise ConfigError(
            f"{begin} has over {_MOST_NODES:,} values when its aliases are written out: it is no config of a run."
        )


def _size(node: yaml.Node, known: dict[int, int], above: tuple[int, ...]) -> int:
    """Values in a node with its aliases written out; an alias of a node above it has no end."""
    if id(node) in above:
        return _MOST_NODES + 1
    if id(node) not in known:
        parts = _parts(node)
        known[id(node)] = 1 + sum(_size(part, known, (*above, id(node))) for part in parts)
    return known[id(node)]


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _check_keys(node: yaml.Node, begin: str, above: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            name = f"{above}{key.value}" if isinstance(key, yaml.ScalarNode) else ""
            if name and name in seen:
                raise ConfigError(f"{begin}, line {key.start_mark.line + 1}: {name} stands there twice: leave one out.")
            seen.add(name)
            _check_keys(value, begin, f"{name}.")
    elif isinstance(node, yaml.SequenceNode):
        for part in node.value:
            _check_keys(part, begin, above)
