"""The report: one self-contained HTML file about a run or a log, with overview, signal health and diagnosis.

`examine_run` and `examine_log` gather what there is to say and diagnose it; `write_report` draws it; `publish_report` does both
for a run directory and hands the file on.
"""

from grpo_lightning.report.examining import Examined, examine_log, examine_run
from grpo_lightning.report.page import render_report, write_report
from grpo_lightning.report.publishing import publish_report
from grpo_lightning.report.repair import Repair, repairs_of

__all__ = [
    "Examined",
    "Repair",
    "examine_log",
    "examine_run",
    "publish_report",
    "render_report",
    "repairs_of",
    "write_report",
]
