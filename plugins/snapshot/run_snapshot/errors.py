"""The exceptions that users meet.

::

    SnapshotError             anything that run_snapshot raises on purpose
    ├── UsageError            wrong use or bad input: exit code 2, one sentence, no traceback
    ├── DigestError           a tensor, a row or a file that has no digest under the current specification
    └── GitError              git is missing, refused, failed or took too long

A message names the value, the rule that it broke and the fix.
"""

__all__ = ["DigestError", "GitError", "SnapshotError", "UsageError"]


class SnapshotError(Exception):
    """Anything that run_snapshot raises on purpose."""


class UsageError(SnapshotError):
    """Wrong use or bad input. The command line prints the message and exits with 2."""


class DigestError(SnapshotError):
    """A tensor, a row or a file that has no digest under the current specification."""


class GitError(SnapshotError):
    """Git is missing, refused, failed or took too long."""
