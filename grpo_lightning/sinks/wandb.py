"""Weights & Biases: the same numbers in the same three sections, behind the extra ``grpo-lightning[wandb]``.

Deviation: W&B keeps one row a write and can't take one back, so a resumed run's repeated steps are in its history twice;
charts run over ``step``, and the journal says which one counts.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from grpo_lightning.errors import ConfigError
from grpo_lightning.signals import page_of
from grpo_lightning.sinks.base import EventRow, SinkError, StepRow

__all__ = ["WandbSink"]

_log = logging.getLogger(__name__)

_COLUMNS = ["step", "rule", "state", "severity", "action", "value", "bound", "summary"]


class WandbSink:
    """Send a run's rows to a W&B run of the same id and name.

    The W&B run starts with the first row, not with the sink: the recorder hands rows over from a thread, so that neither
    a login nor a slow network holds up training. The API key comes from ``wandb login`` or the environment.

    Args:
        project: the W&B project.
        entity: the user or team; W&B's default when not given.
        mode: ``offline`` writes to `dir` only (``wandb sync`` sends it later); by default ``WANDB_MODE`` or online.
        dir: the folder that holds W&B's own ``wandb/``; the working directory when not given.
        tags: of the W&B run.
        run_id: the run's id.
        run_name: the run's name.
        description: what the run is for; W&B's notes.
    """

    def __init__(
        self,
        *,
        project: str = "grpo-lightning",
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        dir: str | Path | None = None,
        tags: Sequence[str] = (),
        run_id: str = "",
        run_name: str = "",
        description: str = "",
    ) -> None:
        if mode not in (None, "online", "offline"):
            raise ConfigError(f"The W&B mode is {mode!r}: give 'online' or 'offline'.")
        self._wandb = _import_wandb()
        self._online = (mode or os.environ.get("WANDB_MODE") or "online") == "online"
        if self._online and not self._wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "W&B has no API key: run `wandb login`, set WANDB_API_KEY, or give the sink `mode: offline`."
            )
        self._settings: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "mode": mode,
            "dir": None if dir is None else str(Path(dir).absolute()),
            "tags": list(tags),
            "name": run_name or None,
            "notes": description or None,
        }
        self._run_id = run_id
        self._run: Any = None
        self._alerts: list[list[Any]] = []
        self._recoveries: Counter[str] = Counter()
        self._closed = False

    def write_step(self, row: StepRow) -> None:
        """Send one step's signals."""
        values = {_key(name): value for name, value in row.values.items()}
        self._started(row).log({**values, "step": row.step, "segment": row.segment})

    def write_event(self, row: EventRow) -> None:
        """Send an alert, an evaluation or the count of a recovery; notes stay in the journal."""
        run, where = self._started(row), {"step": row.step, "segment": row.segment}
        if row.kind == "alert":
            self._alert(run, row)
        elif row.kind == "evaluation":
            run.log({**{_key(name): value for name, value in row.payload.items()}, **where})
        elif row.kind == "recovery":
            self._recoveries[row.name] += 1
            run.log({f"2_health/recoveries/{row.name}": self._recoveries[row.name], **where})

    def close(self) -> None:
        """Send the table of alerts and end the W&B run."""
        run, self._run = self._run, None
        self._closed = True
        if run is None:
            return
        if self._alerts:
            run.log({"alerts": self._wandb.Table(columns=_COLUMNS, data=self._alerts)})
        run.finish()

    def _started(self, row: StepRow | EventRow) -> Any:
        if self._closed:
            raise SinkError("Can't write to W&B: the sink is closed.")
        if self._run is None:
            self._run = self._start(self._run_id or row.run_id)
        return self._run

    def _start(self, run_id: str) -> Any:
        """A W&B run of its own, even beside others in this process. The snapshot records code, so W&B need not."""
        quiet = self._wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        resume = "allow" if self._online else None
        run = self._wandb.init(**self._settings, id=run_id, resume=resume, reinit="create_new", settings=quiet)
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        _log.info("The run %s is on W&B: %s", run_id, run.url if self._online else run.dir)
        return run

    def _alert(self, run: Any, row: EventRow) -> None:
        told: Mapping[str, Any] = row.payload
        summary = str(told.get("summary", ""))
        known = {**told, "step": row.step, "rule": row.name, "summary": summary}
        self._alerts.append([_cell(known.get(column)) for column in _COLUMNS])
        if told.get("state") == "resolved":
            return
        level = self._wandb.AlertLevel.ERROR if told.get("severity") == "critical" else self._wandb.AlertLevel.WARN
        title = f"{run.name or run.id}: {row.name} at step {row.step}"  # W&B sends one title once a minute at most
        run.alert(title=title, text=f"{summary} (run {run.id})", level=level)


def _key(name: str) -> str:
    """A signal below its page; half a surrogate pair, which W&B can't send, written out."""
    key = f"{page_of(name)}/{name}"
    return key if key.isascii() else key.encode("utf-8", "backslashreplace").decode()


def _cell(value: Any) -> str | None:
    return None if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _import_wandb() -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError("The sink 'wandb' needs W&B: pip install 'grpo-lightning[wandb]'.") from error
