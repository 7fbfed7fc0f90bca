"""The generator's door: `python generate.py --help` says what it can do."""

import sys

from codegen.cli import main

if __name__ == "__main__":
    sys.exit(main())
