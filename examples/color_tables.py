"""Write the colours of the default colour maps to a file, so that pictures need no matplotlib.

python examples/color_tables.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib import colormaps

from explain.render.styles import HEAT, INTENSITY, SIGNED

FILE = Path(__file__).resolve().parents[1] / "explain" / "render" / "colormaps.json"


def digits(name: str) -> str:
    """The 256 colours of a colour map, six hexadecimal digits each."""
    table: np.ndarray = colormaps[name](np.arange(256) / 255, bytes=True)[:, :3]
    return table.tobytes().hex()


def main() -> None:
    FILE.write_text(
        json.dumps({name: digits(name) for name in (HEAT, INTENSITY, SIGNED)}, indent=1) + "\n",
        "utf-8",
    )
    print(f"wrote {FILE}")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
