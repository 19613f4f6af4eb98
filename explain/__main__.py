"""`python -m explain` is `python -m explain.cli`."""

import sys

from explain.cli import main

sys.exit(main())
