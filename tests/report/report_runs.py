"""Run directories to report on, made through the journal as a run makes them; text in them may be hostile."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from grpo_lightning.sinks import EventRow, RunDirectory, StepRow

HOSTILE = (
    "<script>window.pwned = 1</script>",
    '"><img src=x onerror="window.pwned=2">',
    "</script><script>window.pwned = 3</script>",
    "'><svg onload=window.pwned=4>",
    "{{ 7 * 7 }}{% for x in ().__class__.__mro__ %}{% endfor %}",
    "<a href=\"javascript:window.pwned=5\">x</a><iframe srcdoc='<script>parent.pwned=6</script>'></iframe>",
    "--></style></title><body onload=window.pwned=7>",
    "\x1b[31mred\x1b[0m \u202egnp.exe \x00 end",
)
USUAL = {
    "reward_mean": 0.5, "reward_std": 0.4, "group_reward_std": 0.3, "dead_group_fraction": 0.3, "kl": 0.05, "entropy": 1.2,
    "response_length_mean": 200.0, "grad_norm": 0.5, "rollout_seconds": 1.5, "update_seconds": 1.0, "group_reward_std_p50": 0.3,
}  # fmt: skip


def make_run(
    root: Path,
    *,
    name: str = "tidy-run",
    description: str = "what it is for",
    steps: int = 80,
    onset: int | None = 60,
    rule: str = "kl_runaway",
    evidence: list[dict[str, Any]] | None = None,
    signals: dict[str, float] | None = None,
    checkpoints: tuple[int, ...] = (25, 50, 75),
    summary: str = "KL is 20 times its usual.",
) -> RunDirectory:
    """A run whose kl rises at the onset, with the alert, evidence and checkpoints that such a run has."""
    directory = RunDirectory.create(root, "a1b2c3d4e5f6")
    noise = random.Random(0)
    with directory.journal() as journal:
        journal.set_meta(name=name, description=description)
        segment = journal.start_segment(from_step=0, time=1000.0)
        for step in range(1, steps + 1):
            values = {k: v * math.exp(noise.gauss(0, 0.05)) for k, v in (USUAL | (signals or {})).items()}
            values["nonfinite_count"] = 0.0
            if onset is not None and step >= onset:
                values["kl"] *= 20
            row = StepRow(run_id=directory.run_id, segment=segment, step=step, time=1000.0 + step, values=values)
            journal.write_step(row)
            if step % 20 == 0:
                journal.write_event(_event(directory, "evaluation", "val", step, {"eval_accuracy": 0.5 + step / 1000}))
        if onset is not None:
            journal.write_event(_event(directory, "alert", rule, onset + 5, _alert(rule, onset, summary)))
            journal.write_event(_event(directory, "recovery", "resample", 30, {"summary": "4 groups sampled again"}))
        journal.end_segment("paused" if onset is not None else "finished", time=1100.0)
    for step in checkpoints:
        (directory.checkpoints / f"step-{step:07d}.ckpt").write_bytes(b"")
    if evidence is not None:
        lines = "".join(json.dumps(row) + "\n" for row in evidence)
        (directory.evidence / f"step-{(onset or 60) + 5:06d}-{rule}.jsonl").write_text(lines)
    return directory


def _alert(rule: str, onset: int, summary: str) -> dict[str, Any]:
    return {
        "id": f"{rule}@{onset + 5}", "rule": rule, "step": onset + 5, "onset_step": onset, "severity": "critical",
        "action": "pause", "cause": "algorithm", "signal": "kl", "value": 20.0, "bound": 5.0, "expected": "nan",
        "summary": summary, "first": "Look at the reward.", "runbook": "runbooks/kl.md", "values": {"kl": 1.0},
        "state": "firing", "evidence": f"/elsewhere/evidence/step-{onset + 5:06d}-{rule}.jsonl",
        "checkpoint_before_onset": None, "message": "…",
    }  # fmt: skip


def _event(directory: RunDirectory, kind: Any, name: str, step: int, payload: dict[str, Any]) -> EventRow:
    return EventRow(
        run_id=directory.run_id, segment=1, step=step, time=1000.0 + step, kind=kind, name=name, payload=payload
    )


def evidence_row(row_id: int, rollout: int, *, text: str = "the answer is 4", **more: Any) -> dict[str, Any]:
    """A row as the evidence callback writes it."""
    return {
        "run_id": "a1b2c3d4e5f6", "segment": 1, "step": 65, "reason": "kl_runaway", "rank": 0, "why": "largest spread",
        "value": 0.5, "row_id": row_id, "source": "math", "rollout": rollout, "prompt": f"What is {row_id} + 2?",
        "response": text, "reward": float(rollout % 2), "rewards": {"exact": float(rollout % 2), "format": None},
        "advantage": 1.0 if rollout % 2 else -1.0, "length": 5, "truncated": rollout == 3, "entropy_mean": 0.4, "extras": {},
    } | more  # fmt: skip


def hostile_run(root: Path) -> RunDirectory:
    """Every text in it is an attack."""
    rows = [
        evidence_row(i, g, text=text) | {"prompt": text, "why": text, "source": text}
        for i, text in enumerate(HOSTILE)
        for g in range(2)
    ]
    rows[0]["rewards"] = dict.fromkeys(HOSTILE, 1.0)
    rows[2]["response"] = "half an emoji: \ud83d"  # a lone surrogate
    rows[1]["reward"], rows[1]["row_id"], rows[1]["rollout"] = HOSTILE[1], HOSTILE[1], HOSTILE[1]
    signals = {f"reward/{text}_mean": 0.4 for text in HOSTILE} | {f"reward/{text}_std": 0.4 for text in HOSTILE[:3]}
    directory = make_run(
        root, name=HOSTILE[0] + HOSTILE[1], description=" ".join(HOSTILE), rule="kl_runaway", evidence=rows,
        signals=signals, summary=" ".join(HOSTILE),
    )  # fmt: skip
    with directory.journal() as journal:
        for place, text in enumerate(HOSTILE):
            payload = _alert(text, 60, text) | {
                "signal": f"kl,{text}",
                "cause": text,
                "action": text,
                "runbook": text,
                "first": text,
            }
            journal.write_event(_event(directory, "alert", text, 61 + place, payload))
            journal.write_event(_event(directory, "note", text, 40 + place, {"message": text}))
        journal.acknowledge(f"{HOSTILE[1]}@62", cause=HOSTILE[2], note=HOSTILE[3])
    return directory
