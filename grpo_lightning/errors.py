"""The exceptions that users meet.

::

    GrpoError                 anything that grpo-lightning raises on purpose
    ├── UsageError            wrong use or bad input: exit code 2, one sentence, no traceback
    │   ├── ConfigError       a setting that can't hold
    │   ├── DataError         a dataset or a row that can't be used
    │   └── RewardError       a reward function that can't be loaded, or that broke its contract
    └── RunPaused             the run was paused by an alert: exit code 75

A message names the value, the rule that it broke and the fix.
"""

__all__ = ["ConfigError", "DataError", "GrpoError", "RewardError", "RunPaused", "UsageError"]


class GrpoError(Exception):
    """Anything that grpo-lightning raises on purpose."""


class UsageError(GrpoError):
    """Wrong use or bad input. The command line prints the message and exits with 2."""


class ConfigError(UsageError):
    """A setting that can't hold."""


class DataError(UsageError):
    """A dataset, a column or a row that can't be used."""


class RewardError(UsageError):
    """A reward function that can't be loaded, or that broke its contract."""


class RunPaused(GrpoError):  # noqa: N818 - a state, not a fault
    """The run was paused by an alert. The command line exits with 75."""
