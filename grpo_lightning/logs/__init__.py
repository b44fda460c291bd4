"""Other trainers' logs as steps of our signals. No torch, no framework: a check starts fast.

from grpo_lightning.logs import open_log

log = open_log("train.log")
for step in log:
    print(step.step, step.values.get("reward_mean"))
print(log.format, log.trainer, log.notes, log.unknown_keys)
"""

from grpo_lightning.logs.names import NAMES
from grpo_lightning.logs.reader import LogReader, from_rows, open_log
from grpo_lightning.logs.records import LogStep
from grpo_lightning.logs.sniff import FORMATS
from grpo_lightning.logs.tail import follow

__all__ = ["FORMATS", "NAMES", "LogReader", "LogStep", "follow", "from_rows", "open_log"]
