"""`python -m explain.cli` is `explain`."""

import sys

from explain.cli import main

if __name__ == "__main__":
    sys.exit(main())
