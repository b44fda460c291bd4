"""`report RUN`: one self-contained HTML file about a run or a log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_lightning.cli.arguments import Parser
from grpo_lightning.cli.diagnose import Asked, examine, examine_source
from grpo_lightning.cli.sources import Source
from grpo_lightning.errors import UsageError
from grpo_lightning.health import Baseline, Rule
from grpo_lightning.report import Examined, write_report
from grpo_lightning.sinks import RunDirectory

__all__ = ["report_source", "run_report"]

_EPILOG = """\
examples:
  grpo-lightning report RUN                    runs/RUN/report.html, and in MLflow's artifacts
  grpo-lightning report RUN -o review.html     elsewhere
  grpo-lightning report train.log -o review.html
"""


def run_report(argv: list[str]) -> int:
    """Write the report and say where it is."""
    parser = Parser(
        prog="grpo-lightning report", description="One HTML file: overview, health, diagnosis.", epilog=_EPILOG
    )
    parser.add_argument("run", metavar="RUN", help="a run's id, name or directory, or another trainer's log")
    parser.add_argument(
        "-o", "--out", metavar="F", help="the file (default: report.html in the run directory, and in MLflow)"
    )
    parser.add_argument("--step", type=int, metavar="N", help="diagnose around this step")
    parser.add_argument("--root", default="runs", help="the folder of run directories (default: %(default)s)")
    parser.add_argument("--baseline", metavar="F", help="a ruler made by `baseline build`")
    parser.add_argument("--logging-steps", type=int, metavar="N", help="optimizer steps per row, where a log has none")
    args = parser.parse_args(argv)
    found = examine(
        Asked(what=args.run, root=args.root, step=args.step, baseline=args.baseline, logging_steps=args.logging_steps)
    )
    path = write_report(found, _target(args.out, found))
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB, {found.verdict})")
    if args.out is None and found.directory is not None:
        _tell_mlflow(RunDirectory.open(found.directory), path)
    return 0


def report_source(source: Source, out: str, *, rules: Sequence[Rule], baseline: Baseline | None) -> None:
    """The report of what `check` has judged, for `check --report`."""
    write_report(examine_source(source, rules=rules, baseline=baseline), out)


def _target(out: str | None, found: Examined) -> Path:
    if out is not None:
        return Path(out)
    if found.directory is None:
        raise UsageError("A log has no run directory to put the report into: say where with -o FILE.")
    return RunDirectory.open(found.directory).report


def _tell_mlflow(directory: RunDirectory, path: Path) -> None:
    """Beside the run's other artifacts, where MLflow answers."""
    from grpo_lightning.tracking import MLflowRun, TrackingError

    with directory.journal(read_only=True) as journal:
        uri = journal.meta().get("tracking_uri")
    if uri is None:
        return
    try:
        MLflowRun.open(directory.run_id, recorded_uri=uri).log_artifact(path)
    except (TrackingError, UsageError, OSError) as error:
        print(f"MLflow did not take it ({str(error)[:200]}); the file is there.")
