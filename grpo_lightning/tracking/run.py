"""One MLflow run: made, continued, described and ended.

Methods talk to MLflow at once and raise `TrackingError` when it is away; during training hand them to the
pump (`MetricPump.submit`), which tries again in the background.
"""

from __future__ import annotations

import colorsys
import hashlib
import json
import logging
import os
import random
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote

import yaml

from grpo_lightning.errors import UsageError
from grpo_lightning.sinks.redact import redact_config, redact_text
from grpo_lightning.tracking.errors import TrackingError, TrackingRefused
from grpo_lightning.tracking.http import brief_requests, reachable
from grpo_lightning.tracking.names import MAX_TAG, clean_key, flatten, shorten_param
from grpo_lightning.tracking.store import connect, make_client, resolve_tracking_uri, sqlite_path

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["MLflowRun", "Point", "RunStatus"]

RunStatus = Literal["running", "finished", "failed", "killed", "paused", "interrupted"]

CONFIG_ARTIFACT = "config.yaml"
DESCRIPTION_ARTIFACT = "description.md"
TABLES_TAG = "mlflow.loggedArtifacts"  # what `MlflowClient.log_table` keeps: the UI shows these as tables
KIND = {"mlflow.experimentKind": "custom_model_development"}  # the UI opens it as model training

# MLflow has no "paused": the tag grpo.status says it, and the run counts as ended.
_MLFLOW_STATUS = {
    "running": "RUNNING",
    "finished": "FINISHED",
    "failed": "FAILED",
    "killed": "KILLED",
    "paused": "KILLED",
    "interrupted": "KILLED",
}
_FINAL = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"}  # asking again gives the same answer
_HICCUP = 5.0  # seconds; a failure that took longer is not tried again at once
_T = TypeVar("_T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One metric row; the same point sent twice is kept once by MLflow."""

    key: str
    value: float  # finite
    time_ms: int
    step: int


class MLflowRun:
    """A run in an MLflow store. Make one with `create` or `resume`."""

    def __init__(self, client: MlflowClient, *, tracking_uri: str, run_id: str, experiment_id: str, name: str) -> None:
        self._client = client
        self.tracking_uri = tracking_uri  # may hold a password: print `redact_text` of it
        self.run_id = run_id
        self.experiment_id = experiment_id  # "" while a resumed run could not be looked up
        self.name = name
        self.deferred: list[tuple[str, Callable[[], object]]] = []  # for the pump: what resuming could not do yet

    @classmethod
    def create(
        cls,
        *,
        experiment: str,
        name: str | None = None,
        description: str = "",
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        tracking_uri: str | None = None,
    ) -> MLflowRun:
        """Start a run in `experiment`, made when missing. A store that can't be used is a `UsageError`."""
        from mlflow.tracking.context.registry import resolve_tags

        uri = resolve_tracking_uri(tracking_uri)
        client = make_client(uri)
        experiment_id = _experiment(client, uri, experiment)
        given = {"grpo.status": "running", **{key: redact_text(value) for key, value in (tags or {}).items()}}
        with _own_dice():
            made = _ask(
                uri, lambda: client.create_run(experiment_id, tags=resolve_tags(given), run_name=name), again=False
            )
        run = cls(
            client,
            tracking_uri=uri,
            run_id=made.info.run_id,
            experiment_id=experiment_id,
            name=made.info.run_name,
        )
        run.set_tags({"mlflow.runColor": run._free_color()})
        if description:
            run.describe(description)
        if config is not None:
            run.log_config(config, segment=1)
        return run

    @classmethod
    def open(cls, run_id: str, *, tracking_uri: str | None = None, recorded_uri: str | None = None) -> MLflowRun:
        """An existing run, unchanged.

        A run that is not in the store, or deleted there, is a `UsageError`; a server that is away, a `TrackingError`.
        """
        uri = resolve_tracking_uri(tracking_uri, recorded=recorded_uri)
        run = cls(connect(uri), tracking_uri=uri, run_id=run_id, experiment_id="", name=run_id)
        run._look_up()
        return run

    def _look_up(self) -> None:
        try:
            info = self._call(lambda: self._client.get_run(self.run_id)).info
        except TrackingRefused as error:
            raise UsageError(
                f"There is no run {self.run_id!r} in {redact_text(self.tracking_uri)}. Set MLFLOW_TRACKING_URI to the "
                "store that it was recorded in."
            ) from error
        if info.lifecycle_stage == "deleted":
            raise UsageError(f"The run is deleted in {redact_text(self.tracking_uri)}. {_restore(self.run_id)}")
        self.experiment_id, self.name = info.experiment_id, info.run_name

    @classmethod
    def resume(
        cls,
        run_id: str,
        *,
        segment: int,
        from_step: int,
        config: Mapping[str, Any] | None = None,
        tracking_uri: str | None = None,
        recorded_uri: str | None = None,
    ) -> MLflowRun:
        """Continue a run: RUNNING again, with a tag for the segment and one for settings that changed.

        A server that is away does not stop it: the pump does this when the server is back.
        """
        uri = resolve_tracking_uri(tracking_uri, recorded=recorded_uri)
        run = cls(connect(uri), tracking_uri=uri, run_id=run_id, experiment_id="", name=run_id)
        begin = partial(run.begin_segment, segment, from_step=from_step, config=config, time=clock.time())
        try:
            begin()
        except TrackingError as error:
            _log.warning("%s Training goes on; the journal keeps everything for later.", error)
            run.deferred.append(("the new segment", begin))
        return run

    def begin_segment(
        self, segment: int, *, from_step: int, time: float, config: Mapping[str, Any] | None = None
    ) -> None:
        """Say that the run goes on in a new segment. Doing it twice changes nothing."""
        self._look_up()
        self.set_status("running")
        self.set_tags({f"grpo.segment.{segment}": json.dumps({"from_step": from_step, "time": time})})
        if config is not None:
            self.log_config(config, segment=segment)

    # ---------------------------------------------------------------- metrics

    def log_points(self, points: Sequence[Point]) -> None:
        """Send metric rows, up to 1,000 a request. All of them arrive, or it raises."""
        from mlflow.entities import Metric

        rows = [Metric(point.key, point.value, point.time_ms, point.step) for point in points]
        try:
            self._call(lambda: self._client.log_batch(self.run_id, metrics=rows))
        except TrackingRefused as error:
            self._must_exist(error)
            raise

    def _must_exist(self, refusal: TrackingRefused) -> None:
        """Tell a refused point from a run that is deleted: that one may come back, and then gets its points."""
        try:
            stage = self._call(lambda: self._client.get_run(self.run_id)).info.lifecycle_stage
        except TrackingRefused as error:
            raise TrackingError(f"The run {self.run_id} is gone from {redact_text(self.tracking_uri)}.") from error
        if stage == "deleted":
            raise TrackingError(f"The run was deleted. {_restore(self.run_id)}") from refusal

    # ---------------------------------------------------------------- settings

    def log_config(self, config: Mapping[str, Any], *, segment: int) -> None:
        """The settings as parameters, and whole, secrets redacted, as the artifact ``config.yaml``.

        Parameters can't change in MLflow. In later segments the changed ones go to the tag
        ``grpo.segment.N.changed`` and the settings to ``config.segment-N.yaml``.
        """
        settings = redact_config(config)
        artifact = CONFIG_ARTIFACT if segment == 1 else f"config.segment-{segment}.yaml"
        text = yaml.safe_dump(json.loads(json.dumps(settings, default=str)), sort_keys=False, allow_unicode=True)
        self.log_text(text, artifact)
        params = {clean_key(key): shorten_param(key, value, artifact) for key, value in flatten(settings)}
        old = self._call(lambda: self._client.get_run(self.run_id).data.params)
        changed = {key: value for key, value in params.items() if key in old and not _same(old[key], value)}
        self._log_params({key: value for key, value in params.items() if key not in old})
        if changed:
            self._tag_changes(changed, old, segment, artifact)

    def _log_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        rows = [Param(key, value) for key, value in params.items()]
        self._call(lambda: self._client.log_batch(self.run_id, params=rows))

    def _tag_changes(self, changed: Mapping[str, str], old: Mapping[str, str], segment: int, artifact: str) -> None:
        said = json.dumps({key: [old[key], value] for key, value in changed.items()}, ensure_ascii=False)
        if len(said) > MAX_TAG:
            self.log_text(said, f"changed.segment-{segment}.json")
            said = json.dumps({"see": [f"changed.segment-{segment}.json", artifact], "count": len(changed)})
        self.set_tags({f"grpo.segment.{segment}.changed": said})

    # ---------------------------------------------------------------- words

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; URLs lose their passwords. A value over 8,000 characters is kept whole as an artifact."""
        from mlflow.entities import RunTag

        rows = [RunTag(clean_key(key), self._short_tag(key, redact_text(value))) for key, value in tags.items()]
        self._call(lambda: self._client.log_batch(self.run_id, tags=rows))

    def describe(self, markdown: str) -> None:
        """Set the run's description, the text at the top of its page."""
        text = redact_text(markdown)
        if len(text) > MAX_TAG:
            self.log_text(text, DESCRIPTION_ARTIFACT)
            pointer = f"\n\n… the whole text is in the artifact {DESCRIPTION_ARTIFACT}."
            text = text[: MAX_TAG - len(pointer)] + pointer
        self.set_tags({"mlflow.note.content": text})

    def set_status(self, status: RunStatus, *, reason: str = "") -> None:
        """RUNNING, FINISHED, FAILED or KILLED in MLflow; the exact word is the tag ``grpo.status``."""
        tags = {"grpo.status": status, "grpo.status_reason": reason}
        self.set_tags(tags)
        if status == "running":
            self._call(lambda: self._client.update_run(self.run_id, status="RUNNING"))
        else:
            self._call(lambda: self._client.set_terminated(self.run_id, status=_MLFLOW_STATUS[status]))

    # ---------------------------------------------------------------- files

    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """Copy a file to the run's artifacts."""
        self._call(lambda: self._client.log_artifact(self.run_id, str(path), folder))

    def log_text(self, text: str, name: str) -> None:
        """Write a text as the artifact `name`."""
        self._call(lambda: self._client.log_text(self.run_id, text, name))

    def log_table(self, rows: Sequence[Mapping[str, Any]], name: str) -> None:
        """Show rows as the table `name` (ends in ``.json``); a table of that name is replaced, so twice is as once."""
        import pandas as pd

        text = pd.DataFrame([dict(row) for row in rows]).to_json(orient="split", index=False)
        self.log_text(text, name)
        tags = self._call(lambda: self._client.get_run(self.run_id).data.tags)
        tables = json.loads(tags.get(TABLES_TAG, "[]"))
        entry = {"path": name, "type": "table"}
        if entry not in tables and len(said := json.dumps([*tables, entry])) <= MAX_TAG:
            self.set_tags({TABLES_TAG: said})

    def log_image(self, image: Any, key: str, *, step: int) -> None:
        """Show a PIL image or an uint8 array [height, width, 3] as `key` of a step; the UI has a slider over steps."""
        self._call(lambda: self._client.log_image(self.run_id, image, key=key, step=step, synchronous=True))

    def log_reference(self, path: str | Path, *, kind: str = "checkpoint", sha256: str | None = None) -> None:
        """Record where a big file lies instead of copying it: ``references/<kind>/<name>.json``."""
        where = Path(path).absolute()
        record = {
            "kind": kind,
            "absolute": str(where),
            "relative": _relative(where),
            "bytes": where.stat().st_size if where.is_file() else None,
            "sha256": sha256,
        }
        self.log_text(json.dumps(record, indent=2), f"references/{kind}/{where.name}.json")
        self.set_tags({f"grpo.{kind}.latest": str(where)})

    # ---------------------------------------------------------------- inside

    def _short_tag(self, key: str, value: str) -> str:
        if len(value) <= MAX_TAG:
            return value
        artifact = f"tags/{clean_key(key)}.txt"
        self.log_text(value, artifact)
        return f"{len(value)} characters: see the artifact {artifact}"

    def _call(self, action: Callable[[], _T]) -> _T:
        return _ask(self.tracking_uri, action)

    def _free_color(self) -> str:
        """The colour of our palette that is farthest from those of the newest runs beside this one."""
        recent = self._call(lambda: self._client.search_runs([self.experiment_id], max_results=20))
        others = [run.data.tags.get("mlflow.runColor", "") for run in recent if run.info.run_id != self.run_id]
        return pick_color(self.run_id, others)


def pick_color(run_id: str, others: Sequence[str]) -> str:
    """One of 36 hues, the farthest from `others` (``#rrggbb``); ties are broken by the run id."""
    taken = [_hue(color) for color in others if len(color) == 7 and color.startswith("#")]
    first = int(hashlib.sha256(run_id.encode()).hexdigest(), 16) % 36
    hues = [((first + 5 * place) % 36) / 36 for place in range(36)]
    best = max(hues, key=lambda hue: min((_apart(hue, other) for other in taken), default=1.0))
    red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(best, 0.45, 0.7))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _hue(color: str) -> float:
    try:
        red, green, blue = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    except ValueError:
        return 0.0
    return colorsys.rgb_to_hls(red, green, blue)[0]


def _apart(one: float, other: float) -> float:
    distance = abs(one - other)
    return round(min(distance, 1 - distance), 3)


def _ask(uri: str, action: Callable[[], _T], *, again: bool = True) -> _T:
    """Run `action`, and once more after a hiccup; what MLflow raises comes out as a `TrackingError`, redacted."""
    if not reachable(uri):
        raise TrackingError(f"No MLflow server answers at {redact_text(uri)}.")
    started = clock.monotonic()
    try:
        with brief_requests():
            return action()
    except Exception as error:  # requests, SQLAlchemy, OSError: MLflow passes all of them on
        kind = TrackingRefused if getattr(error, "error_code", "") in _FINAL else TrackingError
        if again and kind is TrackingError and clock.monotonic() - started < _HICCUP:
            clock.sleep(0.5)
            return _ask(uri, action, again=False)
        raise kind(f"MLflow at {redact_text(uri)}: {redact_text(str(error))}") from error


@contextmanager
def _own_dice() -> Iterator[None]:
    """MLflow makes up names with `random`, which a run's seed sets: every run would have the same one."""
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


def _restore(run_id: str) -> str:
    return f"Restore it: mlflow runs restore --run-id {run_id}"


def _experiment(client: MlflowClient, uri: str, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = _ask(uri, lambda: client.get_experiment_by_name(name))
    if found is None:
        try:
            return client.create_experiment(name, artifact_location=_artifacts(uri, name), tags=dict(KIND))
        except MlflowException as error:
            found = _ask(uri, lambda: client.get_experiment_by_name(name))  # another process was faster
            if found is None:
                raise UsageError(f"Can't make the experiment {name!r}: {redact_text(str(error))}") from error
    if found.lifecycle_stage == "deleted":
        raise UsageError(
            f"The experiment {name!r} is deleted in {redact_text(uri)}. Choose another name, or restore it: "
            f"mlflow experiments restore --experiment-id {found.experiment_id}"
        )
    experiment_id: str = found.experiment_id
    for key, value in KIND.items():
        if key not in found.tags:
            _ask(uri, partial(client.set_experiment_tag, experiment_id, key, value))
    return experiment_id


def _artifacts(uri: str, experiment: str) -> str | None:
    """Beside the SQLite store, as an absolute URI; a server chooses its own place."""
    path = sqlite_path(uri)
    if path is None:
        return None
    return (path.parent / "mlartifacts" / quote(clean_key(experiment).replace("/", "_"), safe="")).as_uri()


def _same(old: str, new: str) -> bool:
    """True for equal values; a long one is recorded with the artifact's name, which differs by segment."""
    return old == new or (old.startswith("sha256:") and old.partition(" (")[0] == new.partition(" (")[0])


def _relative(path: Path) -> str:
    return os.path.relpath(path, Path.cwd())
