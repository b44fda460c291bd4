"""Faults around the training: what lies on the disk changes while the run goes on, and what the sampler hands out.

They need a run of its own files, with a snapshot: `Project` makes them in the run's folder.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
from injections import Fault, _From

from grpo_lightning import shipped
from grpo_lightning.training import ranks

__all__ = ["SURROUNDINGS", "Project"]

_REWARD = """\
def right(completions, answer, **_):
    return [float(c.strip() == str(a)) for c, a in zip(completions, answer)]
"""
_DISTRIBUTION = "Metadata-Version: 2.1\nName: faultbench-demo\nVersion: {version}\n"
_LONG_SHARE = 0.08  # of the prompts: another sum stands before the one that is asked


class Project:
    """A reward's file, a data file with some long prompts, and an installed distribution, all in one folder."""

    def __init__(self, folder: Path) -> None:
        self.reward = folder / "my_reward.py"
        self.data = folder / "prompts.jsonl"
        self.site = folder / "site"

    def write(self, seed: int) -> None:
        """Make the files; the folder of the distribution goes onto the import path."""
        self.reward.write_text(_REWARD)
        lines = Path(shipped.expand("shipped:arithmetic/train.jsonl")).read_text().splitlines(keepends=True)
        dice = random.Random(seed)
        self.data.write_text("".join(_long(line, dice) if dice.random() < _LONG_SHARE else line for line in lines))
        self.install("1.0")
        sys.path.append(str(self.site))

    def install(self, version: str) -> None:
        """The distribution in this version, and in no other."""
        for old in self.site.glob("*.dist-info"):
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
        info = self.site / f"faultbench_demo-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(_DISTRIBUTION.format(version=version))
        (info / "RECORD").write_text("")

    def leave(self) -> None:
        """Take the folder off the import path."""
        sys.path.remove(str(self.site))


def _long(line: str, dice: random.Random) -> str:
    """The same sum behind another one."""
    return line.replace('"prompt": "', f'"prompt": "{dice.randrange(10, 100)}+{dice.randrange(10, 100)}=')


def _on_disk(change: Callable[[Project], object]) -> Callable[[int], L.Callback]:
    def make(onset: int) -> L.Callback:
        return _From(onset, act=lambda module: change(Project(Path(module.trainer.default_root_dir))))

    return make


def _edit_reward(project: Project) -> None:
    project.reward.write_text(_REWARD.replace("float(", "2 * float("))


def _append(project: Project) -> None:
    with project.data.open("a") as file:
        file.write(project.data.read_text().splitlines(keepends=True)[0])


def _handed_out(change: Callable[[Any, Any], Any]) -> Callable[[int], L.Callback]:
    """Every batch from the onset on is another one, under the same number."""

    def make(onset: int) -> L.Callback:
        def act(module: Any) -> None:
            collector = module.collector
            own = collector.collect

            def collect(policy: Any, reference: Any, batch: Any, **given: Any) -> Any:
                other = change(module, batch)
                return own(
                    policy, reference, replace(other, epoch=batch.epoch, index=batch.index, final=batch.final), **given
                )

            collector.collect = collect

        return _From(onset, act=act)

    return make


def _long_ones(module: Any, batch: Any) -> Any:
    """The longest prompts there are, as many as there were."""
    prompts = module.trainer.datamodule._train
    longest = sorted(range(len(prompts)), key=lambda row: -prompts.lengths[row])
    start = batch.index * len(batch) % 200
    return prompts.batch(tuple(longest[start : start + len(batch)])).to(batch.ids_PS.device)


def _of_rank_0(module: Any, batch: Any) -> Any:
    return ranks.broadcast_object(batch)


SURROUNDINGS: dict[str, Fault] = {
    "reward code edited": Fault(inject=_on_disk(_edit_reward), actions=("notify",), causes=("reward",), project=True),
    "distribution upgraded": Fault(
        inject=_on_disk(lambda project: project.install("2.0")),
        actions=("notify",),
        causes=("environment",),
        project=True,
    ),
    "data file appended": Fault(inject=_on_disk(_append), actions=("notify",), causes=("data",), project=True),
    "long prompts bunched": Fault(inject=_handed_out(_long_ones), actions=("pause",), causes=("data",), project=True),
    "overlapping rank shards": Fault(
        inject=_handed_out(_of_rank_0), actions=("pause",), causes=("data",), project=True, ranks=2
    ),
}
