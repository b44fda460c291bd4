"""A project in a git repository, and real runs of it in a store of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml
from support.tiny import make_tiny_model

from grpo_lightning.cli.main import main
from grpo_lightning.sinks import RunDirectory

REWARD = "from {helper} import size\n\n\ndef length(completions, **_):\n    return [float(size(c) % 3) for c in completions]\n"
HELPER = "def size(text):\n    return len(text)\n"


class Project:
    """A model, prompts, a reward with a helper, all committed but the data; the store lies beside.

    `helper` names the module: it is imported once a process.
    """

    def __init__(self, folder: Path, template: Path, *, helper: str) -> None:
        self.folder = folder / "project"
        self.folder.mkdir()
        make_tiny_model(self.folder)
        self.rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(24)]
        self.data.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        (self.folder / "my_reward.py").write_text(REWARD.format(helper=helper))
        (self.folder / f"{helper}.py").write_text(HELPER)
        (self.folder / "notes.py").write_text("A = 1\n")
        (self.folder / ".gitignore").write_text("runs/\ntrain.jsonl\nrun_*.yaml\n__pycache__/\n")
        shutil.copy(template, folder / "store.db")
        self.git("init", "-q")
        self.commit("all")

    @property
    def data(self) -> Path:
        return self.folder / "train.jsonl"

    @property
    def store(self) -> str:
        return f"sqlite:///{self.folder.parent / 'store.db'}"

    def git(self, *words: str) -> None:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *who, *words], cwd=self.folder, check=True, capture_output=True)

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", message)

    def run(self, name: str, *, data: str = "train.jsonl", extra: Sequence[str] = ()) -> RunDirectory:
        """Train four steps; the working directory is the project's."""
        settings = {
            "seed_everything": 0,
            "model": {
                "model": "tiny-llama",
                "rewards": [{"path": "my_reward.py:length"}],
                "group_size": 4,
                "sampling": {"max_new_tokens": 4},
                "optimizer": {"lr": 1e-3},
            },
            "data": {"train": data, "prompts_per_step": 4},
            "trainer": {"max_steps": 4, "accelerator": "cpu"},
            "checkpoint": {"every_n_steps": 2},
            "run": {"name": name, "experiment": "registry"},
            "snapshot": {"lock": "off"},
        }
        config = self.folder / f"run_{name}.yaml"
        config.write_text(yaml.safe_dump(settings))
        before = set(self.folder.glob("runs/*"))
        assert main(["fit", "--config", str(config), *extra]) == 0
        (path,) = set(self.folder.glob("runs/*")) - before
        return RunDirectory.open(path)


class Kept:
    """A copy of a folder that puts back what a test has done to it, times included."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.copy = folder, folder.with_name(f"{folder.name}-kept")
        shutil.copytree(folder, self.copy, symlinks=True)

    def put_back(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.copy, self.folder, symlinks=True)


def same_times(path: Path, content: bytes) -> None:
    """Change a file and keep its size and time."""
    status = path.stat()
    assert len(content) == status.st_size
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
