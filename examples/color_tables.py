"""Write the colours of the default colour maps to a file, so that pictures need no matplotlib.

python examples/color_tables.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import cv2
import numpy as np
from matplotlib import colormaps

from explain.render.styles import HEAT, INTENSITY, PRINT, PRINT_ONE_SIDED, SIGNED

FILE = Path(__file__).resolve().parents[1] / "explain" / "render" / "colormaps.json"


PRINTED = {
    PRINT: ((0, 40, 110), (150, 150, 150), (255, 222, 60)),
    PRINT_ONE_SIDED: ((0, 20, 60), (140, 140, 140), (255, 250, 205)),
}
"""The first, middle and last colours of the colour maps for print: in grey, dark, medium and light;
of signed maps, those for -1, 0 and 1."""


def printed(ends: tuple[tuple[int, int, int], ...]) -> np.ndarray:
    """The 256 colours of a colour map for print: straight lines in CIELAB between three colours."""
    lightness_and_hue = cv2.cvtColor(np.array([ends], np.float32) / 255, cv2.COLOR_RGB2LAB)[0]
    places = np.linspace(-1, 1, 256)
    channels = [np.interp(places, (-1, 0, 1), channel) for channel in lightness_and_hue.T]
    lines = np.stack(channels, axis=1).astype(np.float32)
    colors = cv2.cvtColor(lines[None], cv2.COLOR_LAB2RGB)[0]
    return (255 * colors.clip(0, 1)).round().astype(np.uint8)


def digits(name: str) -> str:
    """The 256 colours of a colour map, six hexadecimal digits each."""
    if name in PRINTED:
        return printed(PRINTED[name]).tobytes().hex()
    table: np.ndarray = colormaps[name](np.arange(256) / 255, bytes=True)[:, :3]
    return table.tobytes().hex()


def main() -> None:
    FILE.write_text(
        json.dumps({name: digits(name) for name in (HEAT, INTENSITY, SIGNED, *PRINTED)}, indent=1)
        + "\n",
        "utf-8",
    )
    print(f"wrote {FILE}")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
