#!/usr/bin/env bash
# Build the documentation: docs/build.sh [folder]. Needs the extra "docs" (pip install -e ".[docs]"). Warnings are errors.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-$([ -x ../.venv/bin/python ] && echo ../.venv/bin/python || echo python3)}
exec "$python" -m sphinx --fail-on-warning --keep-going -q -b html . "${1:-_build}"
