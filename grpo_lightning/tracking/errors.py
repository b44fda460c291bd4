"""What can go wrong between us and MLflow."""

from grpo_lightning.errors import GrpoError

__all__ = ["TrackingError", "TrackingRefused"]


class TrackingError(GrpoError):
    """MLflow could not be reached or did not answer: worth trying again."""


class TrackingRefused(TrackingError):  # noqa: N818 - an answer, not a fault
    """MLflow answered that it will not take this: trying again gives the same answer."""
