"""``python -m grpo_lightning COMMAND``."""

from grpo_lightning.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
