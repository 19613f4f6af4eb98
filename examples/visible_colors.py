"""Print which share of the pixels of small pictures has a visible colour: signed maps of the default
model, summed before they are drawn, and pixel by pixel.

python examples/visible_colors.py [PHOTO ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

import explain
from explain.render.styles import Signed, edges

ASSETS = Path(__file__).resolve().parents[1] / "assets"
PHOTOS = ("chelsea.png", "coffee.png", "astronaut.png", "grace_hopper.jpg", "rocket.jpg")
METHODS = ("integratedgradients", "deeplift", "inputxgradient")
SIDES = (110, 224)  # pixels
VISIBLE = 20  # chroma in CIELAB; the photo below is grey, and has none


def visible_share(picture: Image.Image, side: int) -> float:
    """The share of the pixels with a visible colour, once a picture is this wide and high."""
    small = picture.resize((side, side), Image.Resampling.LANCZOS)
    lab = cv2.cvtColor(np.asarray(small, np.float32) / 255, cv2.COLOR_RGB2LAB)
    return float((np.hypot(lab[..., 1], lab[..., 2]) > VISIBLE).mean())


def main(photos: list[Path]) -> None:
    explainer = explain.Explainer()
    styles = {"summed": Signed(), "pixel by pixel": Signed(spread=0)}
    columns = [f"{name}, {side} px" for name in styles for side in SIDES]
    print(f"{'photo':18}{'method':22}" + "".join(f"{column:>24}" for column in columns))
    for photo in photos:
        explanation = explainer(photo, list(METHODS))
        seen = edges(explanation.box, explanation.photo.size)
        for method in METHODS:
            pictures = [
                explanation.overlay(method, style=style).crop(seen) for style in styles.values()
            ]
            shares = [visible_share(picture, side) for picture in pictures for side in SIDES]
            print(f"{photo.name:18}{method:22}" + "".join(f"{share:24.1%}" for share in shares))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", nargs="*", type=Path, metavar="PHOTO")
    main(parser.parse_args().photos or [ASSETS / name for name in PHOTOS])
