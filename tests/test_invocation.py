"""Printed commands run when they are pasted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lightning.invocation import command_line, tool


@pytest.mark.parametrize("activated", [True, False], ids=["activated", "not activated"])
def test_the_command_runs_with_this_interpreter(monkeypatch: pytest.MonkeyPatch, activated: bool) -> None:
    own = str(Path(sys.executable).parent)
    others = [p for p in os.environ["PATH"].split(os.pathsep) if p != own]
    monkeypatch.setenv("PATH", os.pathsep.join([own, *others] if activated else others))
    line = command_line("--version")
    assert line.startswith("python ") == activated
    asked = line.replace("-m grpo_lightning --version", "-c 'import sys; print(sys.prefix)'")
    done = subprocess.run(asked, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == sys.prefix
    assert (tool("pip") == "pip") == activated


def test_paths_below_the_working_directory_are_short_and_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my env" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").touch()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.chdir(tmp_path)
    assert command_line("fit", "--ckpt_path", tmp_path / "a b") == (
        f"'my env/bin/python' -m grpo_lightning fit --ckpt_path '{tmp_path}/a b'"
    )


def test_a_tool_that_is_not_there_keeps_its_name() -> None:
    assert tool("no-such-program") == "no-such-program"
