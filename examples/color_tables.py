"""Write down the colour maps that pictures are drawn in by default, so that drawing them needs no matplotlib.

python examples/color_tables.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib import colormaps

from explain.render.colors import HEAT, INTENSITY, SIGNED

FILE = Path(__file__).resolve().parents[1] / "explain" / "render" / "tables.py"
PER_LINE = 17  # colours

HEAD = '''"""Colours of matplotlib's colour maps as numbers, for those that pictures are drawn in by default.

Made by examples/color_tables.py: red, green and blue of the 256 colours, in hexadecimal digits.
"""

from __future__ import annotations

TABLES: dict[str, str] = {
'''


def digits(name: str) -> str:
    """The 256 colours of a colour map, six hexadecimal digits each."""
    table: np.ndarray = colormaps[name](np.arange(256) / 255, bytes=True)[:, :3]
    return table.tobytes().hex()


def main() -> None:
    lines = [HEAD]
    for name in (HEAT, INTENSITY, SIGNED):
        found, step = digits(name), 6 * PER_LINE
        lines.append(f'    "{name}": (\n')
        lines += [f'        "{found[start : start + step]}"\n' for start in range(0, len(found), step)]
        lines.append("    ),\n")
    FILE.write_text("".join([*lines, "}\n"]), "utf-8")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
