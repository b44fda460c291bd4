"""The files that ship with the package: the default example's model and data.

A path that begins with ``shipped:`` means a file in this folder, wherever the package is installed, so that one
config works from a checkout and from site-packages: ``shipped:arithmetic/train.jsonl``.
"""

from __future__ import annotations

from pathlib import Path

from grpo_lightning.errors import ConfigError

__all__ = ["SCHEME", "expand"]

SCHEME = "shipped:"
_ROOT = Path(__file__).resolve().parent


def expand(path: str) -> str:
    """The absolute path behind a ``shipped:`` path; any other string as it is."""
    if not path.startswith(SCHEME):
        return path
    found = (_ROOT / path.removeprefix(SCHEME)).resolve()
    if not found.is_relative_to(_ROOT) or not found.exists():
        names = ", ".join(sorted(p.name for p in _ROOT.iterdir() if p.is_dir() and not p.name.startswith("_")))
        raise ConfigError(f"{path!r} does not ship with grpo-lightning: give a path of your own, or one below {names}.")
    return str(found)
