"""The generator's entry point: `python generate.py --help` lists what it can do."""

import sys

from codegen.cli import main

if __name__ == "__main__":
    sys.exit(main())
