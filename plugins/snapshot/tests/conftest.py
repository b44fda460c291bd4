"""The fixtures of `snapshot_support`, for every test here."""

from snapshot_support import *  # noqa: F403 - fixtures are found by name
