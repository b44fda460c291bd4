"""The judgement: rules over signals, rulers that say what is expected, alerts, and what would have fired.

No torch and no framework: rules, audits and checks of logs start fast.
"""

from grpo_lightning.health.acknowledging import CAUSES, acknowledge_command
from grpo_lightning.health.baseline import Baseline, Mark, build_baseline, load_baseline, save_baseline
from grpo_lightning.health.judge import Judge, Verdict, verdict_of
from grpo_lightning.health.loading import load_rules, parse_rules, runbook_path, shipped_path, shipped_rules
from grpo_lightning.health.records import Alert, AlertChange, Condition, Rule, Step
from grpo_lightning.health.replay import Replay, replay
from grpo_lightning.health.testing import RuleTest, load_tests, run_test, tests_path

__all__ = [
    "CAUSES",
    "Alert",
    "AlertChange",
    "Baseline",
    "Condition",
    "Judge",
    "Mark",
    "Replay",
    "Rule",
    "RuleTest",
    "Step",
    "Verdict",
    "acknowledge_command",
    "build_baseline",
    "load_baseline",
    "load_rules",
    "load_tests",
    "parse_rules",
    "replay",
    "run_test",
    "runbook_path",
    "save_baseline",
    "shipped_path",
    "shipped_rules",
    "tests_path",
    "verdict_of",
]
