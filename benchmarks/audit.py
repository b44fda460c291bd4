"""`audit` of many runs against listing them with MLflow and hashing their files alone.

    python benchmarks/audit.py [--runs 1000]

One real run of a tiny model is trained, and copied into as many run directories, each registered in one MLflow store. Then in
turn, on the same threads: MLflow lists the runs and every file of theirs is hashed; and the full audit, which reads manifests,
checkpoints tensor by tensor, journals and judgements besides. The least of three rounds counts. The last line is JSON: `runs`,
`ratio` = audit / baseline.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sqlite3
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

CONFIG = {
    "data.limit_train": 64,
    "data.val": "null",
    "trainer.max_steps": 4,
    "checkpoint.every_n_steps": 0,
    "snapshot.lock": "off",
}
THREADS = 4
ROUNDS = 3


def train(folder: Path) -> Path:
    """The directory of one run of the shipped example."""
    from grpo_lightning.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()):
        code = main(["fit", *(f"--{name}={value}" for name, value in CONFIG.items())])
    if code:
        raise SystemExit(f"the run ended with {code}")
    (path,) = (folder / "runs").iterdir()
    return path


def copy_run(first: Path, run_id: str) -> None:
    """A run directory like the first, with an id of its own everywhere."""
    from grpo_lightning.callbacks.checkpoint import file_record

    path = first.parent / run_id
    shutil.copytree(first, path)
    with sqlite3.connect(path / "journal.sqlite") as db:
        db.execute("UPDATE meta SET value = ? WHERE key = 'run_id'", (run_id,))
    for checkpoint in path.glob("checkpoints/*.ckpt"):
        saved = torch.load(checkpoint, weights_only=True)
        saved["grpo_run"]["run_id"] = run_id
        torch.save(saved, checkpoint)
        health = checkpoint.with_name(f"{checkpoint.stem}.health.json")
        record = {"run_id": run_id, "file": file_record(checkpoint)}
        health.write_text(json.dumps(json.loads(health.read_text()) | record))


def register(store: Path, first: str, ids: list[str], root: Path) -> None:
    """Rows of MLflow's tables like the first run's, for each id."""
    with sqlite3.connect(store) as db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(runs)")]
        (row,) = db.execute("SELECT * FROM runs WHERE run_uuid = ?", (first,)).fetchall()
        tags = db.execute("SELECT key, value FROM tags WHERE run_uuid = ?", (first,)).fetchall()
        at = columns.index("run_uuid")
        for run_id in ids:
            values = [*row[:at], run_id, *row[at + 1 :]]
            db.execute(f"INSERT INTO runs VALUES ({','.join('?' * len(values))})", values)
            own = [(k, v.replace(str(root / first), str(root / run_id)), run_id) for k, v in tags]
            db.executemany("INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)", own)


def baseline(root: Path) -> int:
    """List the runs, and hash every file of each."""
    from run_snapshot.digests.files import digest_file

    from grpo_lightning.tracking import recorded_runs

    def of_run(run: Any) -> int:
        files = [p for p in (root / run.run_id).rglob("*") if p.is_file()]
        return sum(bool(digest_file(p).sha256) for p in files)

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(of_run, recorded_runs()))


def audit(root: Path) -> int:
    """The whole audit; how many runs have findings."""
    from grpo_lightning.cli.audit import candidates
    from grpo_lightning.registry.audit import audit_runs

    return sum(bool(found.problems) for found in audit_runs(candidates(None, root, {})))


def timed(work: Any, root: Path) -> tuple[float, int]:
    """Seconds, and what it gave."""
    started = perf_counter()
    found = work(root)
    return perf_counter() - started, found


def main() -> None:
    """Make the runs, measure, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        first = train(Path(folder))
        ids = [uuid.uuid4().hex for _ in range(args.runs - 1)]
        for run_id in ids:
            copy_run(first, run_id)
        register(Path(folder) / "mlflow.db", first.name, ids, first.parent)
        rounds = [(timed(baseline, first.parent), timed(audit, first.parent)) for _ in range(ROUNDS)]
        os.chdir("/")
    alone, whole = (min(r[i][0] for r in rounds) for i in range(2))
    files, problems = rounds[0][0][1], rounds[0][1][1]
    print(f"{args.runs} runs, {files} files; {problems} runs with findings")
    print(f"list and hash {alone:8.2f} s")
    print(f"audit         {whole:8.2f} s")
    print(f"ratio         {whole / alone:8.2f}")
    print(json.dumps({"runs": args.runs, "ratio": round(whole / alone, 3)}))


if __name__ == "__main__":
    main()
