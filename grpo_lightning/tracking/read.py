"""Finding a run by what a person types, and the way to it in MLflow's UI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from grpo_lightning.errors import UsageError
from grpo_lightning.invocation import tool
from grpo_lightning.sinks import RunDirectory
from grpo_lightning.sinks.redact import redact_text
from grpo_lightning.tracking.http import reachable
from grpo_lightning.tracking.store import make_client, resolve_tracking_uri, sqlite_path

if TYPE_CHECKING:
    from mlflow.entities import Run

__all__ = [
    "RecordedRun",
    "RunRef",
    "download_snapshot",
    "metric_rows",
    "recorded_runs",
    "resolve_run",
    "ui_command",
    "ui_link",
]

_MIN_PREFIX = 4
_PAGE = 5000  # runs a query
_SNAPSHOT, _MANIFEST = "snapshot", "manifest.json"
_LOCAL_UI = "http://127.0.0.1:5000"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRef:
    """A run that was found."""

    run_id: str
    name: str
    path: Path | None  # its run directory, None when it is not on this machine
    experiment_id: str | None = None  # known when MLflow was asked


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run as MLflow lists it."""

    run_id: str
    name: str
    experiment: str
    status: str
    tags: dict[str, str]


def recorded_runs(experiment: str | None = None, *, tracking_uri: str | None = None) -> list[RecordedRun]:
    """Every run of a store, or of one experiment, oldest first. A store that does not exist yet has none."""
    uri = resolve_tracking_uri(tracking_uri)
    path = sqlite_path(uri)
    if path is not None and not path.is_file():
        return []
    client = make_client(uri)
    names = {e.experiment_id: e.name for e in client.search_experiments()}
    chosen = [key for key, name in names.items() if experiment in (None, name)]
    if not chosen:
        raise UsageError(f"There is no experiment {experiment!r} in {redact_text(uri)}.")
    found, token = [], None
    while True:
        page = client.search_runs(chosen, max_results=_PAGE, order_by=["attributes.start_time ASC"], page_token=token)
        found += [_listed(run, names) for run in page]
        token = page.token
        if not token:
            return found


def _listed(run: Run, names: dict[str, str]) -> RecordedRun:
    info = run.info
    return RecordedRun(
        run_id=info.run_id,
        name=info.run_name or info.run_id,
        experiment=names.get(info.experiment_id, info.experiment_id),
        status=str(info.status),
        tags=dict(run.data.tags),
    )


def metric_rows(run_id: str, *, tracking_uri: str | None = None) -> list[tuple[int, dict[str, float]]]:
    """A run's metrics as MLflow has them, by step; of several values at a step the one that was logged last counts.

    Raises:
        UsageError: there is no such run in the store.
    """
    from mlflow.exceptions import MlflowException

    uri = resolve_tracking_uri(tracking_uri)
    client = make_client(uri)
    try:
        names = sorted(client.get_run(run_id).data.metrics)
    except MlflowException as error:
        raise UsageError(f"There is no run {run_id!r} in {redact_text(uri)}.") from error
    rows: dict[int, dict[str, float]] = {}
    for name in names:
        for point in sorted(client.get_metric_history(run_id, name), key=lambda point: point.timestamp):
            rows.setdefault(point.step, {})[name] = point.value
    return sorted(rows.items())


def download_snapshot(run_id: str, into: Path, *, tracking_uri: str | None = None) -> Path | None:
    """Fetch what a run was made of into a folder; None where MLflow has none of it.

    Raises:
        UsageError: it is there and can't be fetched.
    """
    from mlflow.exceptions import MlflowException

    client = make_client(resolve_tracking_uri(tracking_uri))
    try:
        names = {item.path for item in client.list_artifacts(run_id, _SNAPSHOT)}
        if f"{_SNAPSHOT}/{_MANIFEST}" not in names:
            return None
        return Path(client.download_artifacts(run_id, _SNAPSHOT, str(into)))
    except (MlflowException, OSError) as error:
        said = redact_text(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise UsageError(f"The snapshot of the run {run_id} can't be fetched from MLflow: {said}") from error


def resolve_run(
    text: str, *, root: str | Path = "runs", experiment: str | None = None, tracking_uri: str | None = None
) -> RunRef:
    """The run that `text` means: a run directory, a run id, its unique prefix or a unique name.

    A prefix has 4 characters or more. Run directories under `root` come first; MLflow is asked when none of
    them is meant, or when `experiment` says where to look. No run, or several, is a `UsageError`.
    """
    if (Path(text) / "journal.sqlite").is_file():
        return _from_directory(RunDirectory.open(text))
    found = [] if experiment else _local(text, Path(root))
    if not found:
        found = _recorded(text, Path(root), experiment, resolve_tracking_uri(tracking_uri))
    if not found:
        raise UsageError(_nothing(text, Path(root), experiment, resolve_tracking_uri(tracking_uri)))
    if len(found) > 1:
        listed = ", ".join(f"{ref.run_id} ({ref.name})" for ref in found[:5])
        raise UsageError(f"{text!r} means {len(found)} runs: {listed}. Give a run id, or more of it.")
    return found[0]


def ui_command(tracking_uri: str) -> str:
    """What to type to open MLflow's UI; a server is its own UI, so its address.

    >>> ui_command("sqlite:////data/mlflow.db").partition("mlflow ")[2]
    'ui --backend-store-uri sqlite:////data/mlflow.db'
    """
    shown = redact_text(tracking_uri)
    if urlsplit(tracking_uri).scheme in {"http", "https"}:
        return shown
    return f"{_quoted(tool('mlflow'))} ui --backend-store-uri {_quoted(shown)}"


def ui_link(experiment_id: str, *, tracking_uri: str = "", run_id: str | None = None) -> str:
    """The address of an experiment's charts (or of one run) in MLflow's model-training view."""
    server = redact_text(tracking_uri).rstrip("/") if tracking_uri.startswith("http") else _LOCAL_UI
    page = f"{server}/#/experiments/{quote(experiment_id, safe='')}"
    if run_id is not None:
        return f"{page}/runs/{quote(run_id, safe='')}/model-metrics"
    return f"{page}/runs?workflowType=machine_learning&compareRunsMode=CHART"


def _from_directory(directory: RunDirectory) -> RunRef:
    with directory.journal(read_only=True) as journal:
        meta = journal.meta()
    run_id = meta.get("run_id", directory.run_id)
    return RunRef(run_id=run_id, name=meta.get("name", run_id), path=directory.path)


def _local(text: str, root: Path) -> list[RunRef]:
    """Runs under `root`: the one of that id, else those of that prefix or name."""
    if _is_id(text) and (root / text / "journal.sqlite").is_file():
        return [_from_directory(RunDirectory.open(root / text))]
    folders = [journal.parent for journal in sorted(root.glob("*/journal.sqlite"))]
    return _matching(text, (_from_directory(RunDirectory.open(folder)) for folder in folders))


def _recorded(text: str, root: Path, experiment: str | None, uri: str) -> list[RunRef]:
    """Runs in MLflow. A store that does not exist or answer holds none."""
    path = sqlite_path(uri)
    if (path is not None and not path.is_file()) or not reachable(uri):
        return []
    client = make_client(uri)
    if experiment is None:
        ids = [found.experiment_id for found in client.search_experiments()]
    else:
        chosen = client.get_experiment_by_name(experiment)
        if chosen is None:
            raise UsageError(f"There is no experiment {experiment!r} in {redact_text(uri)}.")
        ids = [chosen.experiment_id]
    filters = [f"attributes.run_name = '{text}'"] if "'" not in text else []
    if _is_id(text) and len(text) >= _MIN_PREFIX:
        filters.append(f"attributes.run_id LIKE '{text}%'")
    runs = {run.info.run_id: run for rule in filters for run in client.search_runs(ids, rule, max_results=50)}
    return _matching(text, (_from_mlflow(run, root) for run in runs.values()))


def _from_mlflow(run: Run, root: Path) -> RunRef:
    run_id: str = run.info.run_id
    places = [Path(run.data.tags["grpo.run_dir"])] if "grpo.run_dir" in run.data.tags else []
    here = [place for place in (*places, root / run_id) if (place / "journal.sqlite").is_file()]
    return RunRef(
        run_id=run_id,
        name=run.info.run_name or run_id,
        path=here[0].absolute() if here else None,
        experiment_id=run.info.experiment_id,
    )


def _matching(text: str, refs: Iterator[RunRef]) -> list[RunRef]:
    known = list(refs)
    exact = [ref for ref in known if ref.run_id == text]
    prefix = len(text) >= _MIN_PREFIX
    return exact or [ref for ref in known if ref.name == text or (prefix and ref.run_id.startswith(text))]


def _is_id(text: str) -> bool:
    return bool(text) and text.replace("-", "").replace("_", "").isalnum()


def _nothing(text: str, root: Path, experiment: str | None, uri: str) -> str:
    where = f"experiment {experiment!r} of {redact_text(uri)}" if experiment else f"{root}/ and {redact_text(uri)}"
    away = "" if reachable(uri) else " That server does not answer."
    short = f" A prefix has {_MIN_PREFIX} characters or more." if len(text) < _MIN_PREFIX else ""
    return f"There is no run {text!r} in {where}.{away}{short} Give a run id, a unique name or a run directory."


def _quoted(text: str) -> str:
    return f"'{text}'" if any(character in text for character in " ?&;'()") else text
