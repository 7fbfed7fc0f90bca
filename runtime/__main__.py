"""The `normforge` command as `python -m normforge`, where no script was installed for it."""

from __future__ import annotations

import sys

from .tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
