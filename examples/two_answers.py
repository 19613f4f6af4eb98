"""Draw the first picture of the README: one photo, two answers, and the map of each.

python examples/two_answers.py [FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

import explain

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "assets" / "gallery" / "two_answers.jpg"
WIDTH = 1200
ANSWERS = ["space shuttle", "football helmet"]


def side_by_side(pictures: list[Image.Image], gap: int = 12) -> Image.Image:
    """Put pictures next to each other on white, at their upper edges."""
    width = sum(picture.width for picture in pictures) + gap * (len(pictures) - 1)
    sheet = Image.new("RGB", (width, max(picture.height for picture in pictures)), "white")
    left = 0
    for picture in pictures:
        sheet.paste(picture, (left, 0))
        left += picture.width + gap
    return sheet


def main(file: Path = FILE) -> None:
    photo = ROOT / "assets" / "astronaut.png"
    explanation = explain.Explainer(crop="whole")(photo, targets=ANSWERS)
    with Image.open(photo) as opened:
        pictures = [opened.convert("RGB")]
    pictures += [
        explanation.overlay(target=answer, caption=True).convert("RGB") for answer in ANSWERS
    ]
    sheet = side_by_side(pictures)
    sheet.resize((WIDTH, round(sheet.height * WIDTH / sheet.width))).save(file, quality=88)
    print(f"wrote {file}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=FILE, help="the JPEG to write (in assets/gallery)"
    )
    main(parser.parse_args().file)
