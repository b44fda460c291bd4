"""`python -m run_snapshot` is the command `run-snapshot`."""

import sys

from run_snapshot.cli import main

sys.exit(main())
