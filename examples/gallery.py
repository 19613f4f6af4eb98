"""Draw the pictures of the gallery: photos with five methods, in four styles, with many methods,
and concepts.

Beside them, gallery.html is a page to look at all photos with all methods of at most a dozen
passes.

    python examples/gallery.py [folder]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from PIL import Image

import explain
from explain import ExplainError
from explain.attribution.selection import select
from explain.methods.base import title_of
from explain.render.sheets import Tile, table
from explain.render.styles import CHOICES

ASSETS = Path(__file__).resolve().parents[1] / "assets"
A_DOZEN = 12
METHODS = ["gradcam", "guidedbackprop", "guidedgradcam", "inputxgradient", "saliency"]
CONCEPTS = {"chelsea.png": 4, "coffee.png": 3}
# What each photo shows, and the answers that are right; for astronauts and rockets there is no
# class.
SHOWN = {
    "astronaut.png": ("an astronaut", ()),
    "chelsea.png": ("a tabby cat", ("tabby cat",)),
    "coffee.png": ("an espresso", ("espresso", "cup")),
    "grace_hopper.jpg": ("a rear admiral in uniform", ("military uniform",)),
    "rocket.jpg": ("a rocket", ()),
}


def answer(explanation: explain.Explanation, name: str) -> Tile:
    """The photo with the model's answer, and what it shows instead where that is wrong."""
    label, probability = explanation.predictions[0]
    shows, right = SHOWN[name]
    remark = "" if label in right else f"wrong: {shows}"
    return Tile(explanation.photo, f"{label}, {probability:.0%}".replace("%", " %"), remark=remark)


def cheap(explainer: explain.Explainer, photo: Path) -> list[str]:
    """The methods that can explain the model in fewer than 200 passes."""
    return list(select(explainer.model, explainer.as_input(photo)).methods)


def beside(pictures: list[Image.Image], height: int = 520, gap: int = 20) -> Image.Image:
    """Put pictures of one height next to each other on white."""
    scaled = [each.resize((round(each.width * height / each.height), height)) for each in pictures]
    drawn = Image.new("RGB", (sum(each.width + gap for each in scaled) - gap, height), "white")
    left = 0
    for each in scaled:
        drawn.paste(each, (left, 0))
        left += each.width + gap
    return drawn


def put(picture: Image.Image, file: Path, what: str) -> None:
    picture.save(file, **({"quality": 90} if file.suffix == ".jpg" else {"optimize": True}))
    print(f"{what} written to {file}")


def page(explainer: explain.Explainer, file: Path) -> None:
    """Every photo with all methods of at most a dozen passes that fit the model, as a page for any
    browser."""
    file = file.absolute()
    with contextlib.chdir(ASSETS.parent):  # the records tell paths within the repository
        photos = [Path(ASSETS.name) / name for name in SHOWN]
        costs = select(explainer.model, explainer.as_input(photos[0])).costs
        few = [name for name, cost in costs.items() if cost <= A_DOZEN]
        explanations = explainer(photos, list(dict.fromkeys([METHODS[0], *few])))
    truth = [right[0] if right else None for _, right in SHOWN.values()]
    title = f"{len(photos)} photos, {len(explanations[0])} methods"
    explain.report.sheet(
        explanations, file, truth=truth, metrics=["sparseness"], title=title, overwrite=True
    )
    print(f"a page of all of them written to {file}, {file.stat().st_size / 1e6:.2f} MB")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    explainer = explain.Explainer(crop="whole")
    found = {name: explainer(ASSETS / name, METHODS) for name in SHOWN}
    rows = [
        [answer(each, name), *(Tile(each.overlay(method)) for method in METHODS)]
        for name, each in found.items()
    ]
    put(
        table(rows, ["photo", *map(title_of, METHODS)], 260),
        folder / "gallery.jpg",
        "every photo with five methods",
    )
    rows = [
        [answer(each, name), *(Tile(each.overlay("gradcam", style=style)) for style in CHOICES)]
        for name, each in found.items()
    ]
    put(table(rows, ["photo", *CHOICES], 300), folder / "styles.jpg", "every photo in four styles")
    cat = found["chelsea.png"]
    put(cat.overlay("gradcam", caption=True), folder / "chelsea-gradcam.png", "one overlay")
    put(cat.sheet(320), folder / "chelsea.jpg", "one photo with five methods")
    espresso = explainer(ASSETS / "coffee.png", ["gradcam", "guidedbackprop", "saliency"])
    put(espresso.sheet(320), folder / "coffee.jpg", "the picture of README")
    family = explainer(ASSETS / "chelsea.png", cheap(explainer, ASSETS / "chelsea.png"))
    put(family.sheet(240), folder / "family.jpg", "one photo with all methods of few passes")
    page(explainer, folder / "gallery.html")
    concepts = [
        explainer.concepts(ASSETS / name, count).picture for name, count in CONCEPTS.items()
    ]
    put(beside(concepts), folder / "concepts.jpg", "concepts")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=ASSETS / "gallery",
        help="where they go (assets/gallery)",
    )
    try:
        main(parser.parse_args().folder)
    except (ExplainError, OSError) as error:
        sys.exit(f"gallery.py: {error}")
