"""Draw the default run's curve from the journals of one or several runs.

python docs/figures/default_run.py RUN_DIRECTORY... -o docs/figures/default_run.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl

from grpo_lightning.sinks import RunDirectory

mpl.use("svg")
import matplotlib.pyplot as plt


def main() -> None:
    """Evaluation accuracy above, mean reward of the sampled rollouts below, a line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    mpl.rcParams["svg.hashsalt"] = "grpo-lightning"
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 4.6), sharex=True, layout="constrained")
    for path in args.runs:
        with RunDirectory.open(path).journal(read_only=True) as journal:
            evaluations = journal.evaluations()
            reward = journal.series("reward_mean")
        accuracy = [e.payload["eval_accuracy"] for e in evaluations]
        top.plot([e.step for e in evaluations], accuracy, marker="o")
        bottom.plot(reward.steps, reward.values, linewidth=1)
    top.axhline(0.9, color="grey", linewidth=0.8, linestyle="--")
    top.set(ylabel="held-out accuracy", ylim=(0, 1))
    bottom.set(ylabel="reward, mean", xlabel="optimizer step", ylim=(0, 1))
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
