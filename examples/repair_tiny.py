"""Repair a real finding: the small model recognises volleyballs by their surroundings. What is left
without them?

    python examples/repair_tiny.py path/to/tiny-imagenet-200 [--output FOLDER]

All validation photos of volleyballs in Tiny-ImageNet, and five of each other class, are explained
with Grad-CAM. In docs/runs.md, the class volleyball looks away from its object: the ball has 3%
of the evidence. Both repairs are
made: at once and by training. The mark is everything but the objects. The figures are printed, and
written to assets/insight/repair-volleyball.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from insight_tiny import ASSETS, CLASSES, listed

import explain
from explain.insight import RunPhotos, repair

TARGET = "volleyball"
OTHERS = 5


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the unpacked data set")
    parser.add_argument("--output", type=Path, default=ASSETS)
    options = parser.parse_args(arguments)
    made = explain.Explainer("tiny")
    number = list(made.categories or ()).index(TARGET)
    with tempfile.TemporaryDirectory() as where:
        place = Path(where) / "list.json"
        every = json.loads(listed(options.folder, 50 * CLASSES, place).read_text())
        few = json.loads(listed(options.folder, OTHERS * CLASSES, place).read_text())
        rows = [row for row in every if row["label"] == number] + [
            row for row in few if row["label"] != number
        ]
        place.write_text(json.dumps(rows))
        run = explain.run(place, made, "gradcam", output=Path(where) / "run.sqlite", workers=0)
        finding = run.insight().finding(TARGET)
        found = {}
        for how in ("project", "train"):
            repaired = repair(finding, RunPhotos(run, made), how=how, steps=60)
            print(repaired, flush=True)
            found[how] = repaired.to_dict()
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "repair-volleyball.json").write_text(
        json.dumps(found, indent=1) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
