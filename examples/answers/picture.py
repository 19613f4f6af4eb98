"""Draw the picture of an answer in the README and the documentation: `assets/gallery/answer.jpg`.

    python examples/answers/picture.py [FILE]

It takes the model that guesses, which `shapes.py --guesses` trains in minutes. In the picture, the
second shape that it names is not there.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from shapes import GUESSES, draw, load_shapes

from explain.answers import AnswerExplainer

FILE = Path(__file__).parents[2] / "assets" / "gallery" / "answer.jpg"
SEED = 3
SCALE = 5
TILE = 190


def main(file: Path) -> None:
    torch.set_num_threads(1)
    scene = draw(SEED, guesses=True)
    side = SCALE * scene.image.width
    photo = scene.image.resize((side, side), Image.Resampling.NEAREST)
    if not GUESSES.exists():
        raise SystemExit(f"{GUESSES.name} must be there; run shapes.py --guesses, which trains it")
    answered = AnswerExplainer(load_shapes(GUESSES))(
        scene.image, "what is there ?", words="circle, blue, triangle"
    )
    sheet = replace(answered, photo=photo).sheet(TILE)  # the same photo, larger
    sheet.save(file, quality=88)
    print(f"{answered.answer}: {file}, {sheet.width} x {sheet.height}, {file.stat().st_size} bytes")
    for word in answered.words:
        print(f"  {word.text}: {word.grounding.text}; {word.summary}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=FILE)
    main(parser.parse_args().file)
