"""Commands to type, as this machine understands them: what is printed must run when it is pasted."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["command_line", "tool"]


def command_line(*arguments: str | Path) -> str:
    """`python -m grpo_lightning …`, quoted, with the interpreter that runs this process.

    >>> command_line("fit", "--ckpt_path", "my runs/last.ckpt").partition(" -m ")[2]
    "grpo_lightning fit --ckpt_path 'my runs/last.ckpt'"
    """
    return shlex.join([tool("python"), "-m", "grpo_lightning", *map(str, arguments)])


def tool(name: str) -> str:
    """A program that lies beside this interpreter: its name where the shell finds it there, else its path."""
    folder = Path(sys.executable).parent
    found = shutil.which(name)
    if found is not None and Path(found).parent == folder:
        return name
    own = Path(sys.executable) if name == "python" else folder / name
    return _short(own) if own.exists() else name


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
