"""GRPO fine-tuning on Lightning and MLflow that judges whether the training signal is healthy."""

__version__ = "0.1.0.dev0"

__all__ = ["__version__"]
