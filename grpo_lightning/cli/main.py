"""The command line: looks a command up, runs it, and turns what it raises into an exit code.

0 fine; 1 findings; 2 wrong use or bad input (one sentence, no traceback); 75 the run was paused by an alert; 130 and 143
ended by Ctrl-C and by SIGTERM.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module

from grpo_lightning.errors import RunPaused, UsageError

__all__ = ["COMMANDS", "main"]

EXIT_USAGE = 2
EXIT_PAUSED = 75
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def _fit(argv: list[str]) -> int:
    from grpo_lightning.cli.fit import run_fit

    return run_fit(argv)


def _validate(argv: list[str]) -> int:
    from grpo_lightning.cli.fit import run_validate

    return run_validate(argv)


def _export(argv: list[str]) -> int:
    from grpo_lightning.cli.export import run_export

    return run_export(argv)


def _lazy(module: str, function: str) -> Callable[[list[str]], int]:
    """A command whose module is imported when it is run."""

    def run(argv: list[str]) -> int:
        command: Callable[[list[str]], int] = getattr(import_module(f"grpo_lightning.cli.{module}"), function)
        return command(argv)

    return run


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "fit": (_fit, "train with GRPO; with no config, the shipped example"),
    "validate": (_validate, "greedy evaluation of a checkpoint"),
    "doctor": (_lazy("doctor", "run_doctor"), "before a long run: versions, accelerator, store, disk, memory"),
    "status": (_lazy("alerts", "run_status"), "one screen about a run: health, open alerts, last values"),
    "diagnose": (_lazy("diagnose", "run_diagnose"), "where to look first: environment, data, reward, algorithm"),
    "report": (_lazy("report", "run_report"), "one HTML file: overview, signal health, diagnosis"),
    "acknowledge": (_lazy("alerts", "run_acknowledge"), "close an alert by saying what caused it"),
    "compare": (_lazy("compare", "run_compare"), "what differs between two runs, environment first"),
    "audit": (_lazy("audit", "run_audit"), "every registered run against what is recorded of it"),
    "snapshot": (_lazy("snapshot", "run_snapshot"), "what a run was made of: show, verify, diff, restore"),
    "check": (_lazy("check", "run_check"), "the health verdict on another trainer's log"),
    "rules": (_lazy("rules", "run_rules"), "check, test and replay health rules"),
    "baseline": (_lazy("baseline", "run_baseline"), "rulers made of earlier runs"),
    "export": (_export, "dashboards for Grafana, alert rules for Prometheus"),
}

_HELP = """\
usage: grpo-lightning COMMAND [options]     (also: python -m grpo_lightning COMMAND)

{commands}

examples:
  grpo-lightning fit                                        the shipped example, a few minutes on 2 CPU cores
  grpo-lightning doctor --config my.yaml                    whether this machine and this config can carry a long run
  grpo-lightning fit --config my.yaml --dry_run             one batch: spread, and whether the reward is easily won
  grpo-lightning fit --config my.yaml --trainer.max_steps 100
  grpo-lightning fit --ckpt_path runs/RUN/checkpoints/last.ckpt     continue a run
  grpo-lightning validate --ckpt_path runs/RUN/checkpoints/last.ckpt
  grpo-lightning status RUN
  grpo-lightning diagnose RUN                               where to look first
  grpo-lightning report RUN                                 runs/RUN/report.html
  grpo-lightning compare RUN_A RUN_B                        what made the difference
  grpo-lightning audit --experiment E                       every run of an experiment
  grpo-lightning snapshot verify RUN                        whether what it was made of still holds
  grpo-lightning check train.log                            a log of TRL, verl, ms-swift, ...

`grpo-lightning COMMAND --help` lists a command's options.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_help())
        return 0
    if args[0] == "--version":
        from grpo_lightning import __version__

        print(__version__)
        return 0
    return _guarded(args[0], args[1:])


def _guarded(name: str, rest: list[str]) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return _command(name)(rest)
    except UsageError as error:
        return _refused(error)
    except RunPaused as pause:
        print(pause, file=sys.stderr)
        return EXIT_PAUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as end:
        return _exit_code(end)
    except Exception as error:
        if type(error).__name__ != "MisconfigurationException":  # Lightning's word for a setting that can't hold
            raise
        return _refused(error)


def _refused(error: Exception) -> int:
    """On one line, and plain: the text of a model or a file may be in it."""
    from grpo_lightning.sinks.terminal import plain

    print(f"error: {plain(' '.join(str(error).split()))}", file=sys.stderr)
    return EXIT_USAGE


def _exit_code(end: SystemExit) -> int:
    """Lightning ends an interrupted fit by an exit of 1, and one that got SIGTERM by a `SIGTERMException` without a code."""
    if type(end).__name__ == "SIGTERMException":
        return EXIT_TERMINATED
    if isinstance(end.__context__, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def _command(name: str) -> Callable[[list[str]], int]:
    if name in COMMANDS:
        return COMMANDS[name][0]
    near = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(COMMANDS)}."
    raise UsageError(f"{name!r} is not a command: {hint}")


def _help() -> str:
    width = max(map(len, COMMANDS))
    return _HELP.format(commands="\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()))
