"""Draw the pictures of the README: every photo with five methods, one photo with all of them, and concepts.

python examples/gallery.py [folder]
"""

from __future__ import annotations

import sys
from pathlib import Path

import explain
from explain.errors import ExplainError
from explain.images import EXTENSIONS
from explain.render import sheet

ASSETS = Path(__file__).resolve().parents[1] / "assets"


METHODS = ["gradcam", "guidedbackprop", "guidedgradcam", "inputxgradient", "saliency"]
CONCEPTS = {"chelsea.png": 4, "coffee.png": 3}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    explainer, methods = explain.Explainer("tiny"), METHODS
    rows, titles = [], []
    for path in sorted(p for p in ASSETS.iterdir() if p.suffix in EXTENSIONS):
        explanation = explainer(path, methods)
        rows.append([explanation.photo, *(explanation.overlay(method) for method in methods)])
        (label, probability), *others = explanation.predictions
        titles.append([f"{label}, {probability:.0%}", *(f"{name}, {share:.0%}" for name, share in others)])
        print(path.name, *(f"{name} {share:.2f}" for name, share in explanation.predictions), sep="\n    ")
    drawn = sheet(rows, columns=["photo", *methods], titles=[row[:1] for row in titles], tile=260)
    drawn.save(folder / "gallery.jpg", quality=88)
    print(f"every photo with five methods written to {folder / 'gallery.jpg'}")
    title = explainer(ASSETS / "chelsea.png", methods)
    title.overlay("gradcam", caption=True).save(folder / "chelsea-gradcam.png")
    print(f"one overlay written to {folder / 'chelsea-gradcam.png'}")
    pictures = [title.photo, *(title.overlay(method) for method in methods)]
    names = ["{}, {:.0%}".format(*title.predictions[0]), *methods]
    halves = [slice(0, 3), slice(3, None)]
    hero = sheet([pictures[half] for half in halves], titles=[names[half] for half in halves], tile=320)
    hero.save(folder / "chelsea.jpg", quality=90)
    print(f"one photo with five methods written to {folder / 'chelsea.jpg'}")
    explainer(ASSETS / "chelsea.png", "all").sheet(tile=240).save(folder / "family.jpg", quality=88)
    print(f"one photo with all methods written to {folder / 'family.jpg'}")
    concepts = [explainer.concepts(ASSETS / name, count)[0] for name, count in CONCEPTS.items()]
    sheet([concepts], tile=420).save(folder / "concepts.jpg", quality=90)
    print(f"concepts written to {folder / 'concepts.jpg'}")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else ASSETS / "gallery")
    except (ExplainError, OSError) as error:
        sys.exit(f"gallery.py: {error}")
