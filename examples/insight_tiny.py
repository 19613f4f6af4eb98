"""Explain the validation photos of Tiny-ImageNet with the small model, and check what insight
finds.

    python examples/insight_tiny.py path/to/tiny-imagenet-200 [--run RUN] [--photos 10000] [--output
    FOLDER] python examples/insight_tiny.py --page

All photos are explained with Grad-CAM, with their labels and boxes; the run goes on where it
stopped. The first findings of each kind in `run.insight()` are checked by covering parts of their
photos, and of a fifth of all photos:

- a tenth of the pixels, where the maps are highest, is blurred, and as much elsewhere;
- for classes that look away from the object, the object itself is blurred, and then all else;
- of mistakes, what spoke for the wrong class is blurred: how many are still made, how many answers
  become right?

The page has each with its control, an equal area elsewhere, and probabilities that are corrected
for all tests.

Then each class is asked: does covering the object change the more answers, the more of the evidence
is on it?

The figures go to assets/insight/tiny.json with pictures of mean maps (the photos may not be
published), and from there into docs/runs.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import explain
from explain.insight import Insight, RunPhotos, corrected, removed
from explain.insight.ablation import AblationResult

HOME = Path(__file__).resolve().parent.parent
ASSETS = HOME / "assets" / "insight"
PAGE = HOME / "docs" / "runs.md"
CLASSES = 200
FIRST = 6  # findings of each kind that are checked
EVERY = 5  # one photo of so many shows what is usual
LEAST = 20  # photos of a class that is compared with the others
PARTS = ("evidence", "object")  # what is tested of each class
NAMED = 7  # classes with the least on the object that are named in the figure

Key = tuple[str, str]


def listed(folder: Path, most: int, place: Path) -> Path:
    """Write the list of photos with labels and boxes; of each class as many."""
    wnids = (folder / "wnids.txt").read_text().split()  # in the order of the model's classes
    rows = [
        line.split("\t")
        for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()
    ]
    counts: dict[str, int] = {}
    found = []
    for name, wnid, x0, y0, x1, y1 in sorted(rows):
        counts[wnid] = counts.get(wnid, 0) + 1
        if counts[wnid] > most // CLASSES:
            continue
        path = str((folder / "val" / "images" / name).resolve())
        box = [int(x0), int(y0), int(x1) + 1, int(y1) + 1]  # the data set's ends are inclusive
        found.append({"path": path, "label": wnids.index(wnid), "boxes": [box]})
    place.write_text(json.dumps(found))
    return place


class Checks:
    """Photos with a part covered: the object in all; the evidence, and all else, in those of
    findings and a sample."""

    def __init__(self, found: Insight, photos: RunPhotos) -> None:
        self.maps = found.maps
        self.keys = list(zip(self.maps.names, self.maps.targets, strict=True))
        self.sample = set(self.keys[::EVERY])
        chosen = [self.maps.of_target[look.target] for look in found.looks[:FIRST]]
        chosen += [cluster.rows for cluster in found.reasons[:FIRST]]
        some = self.sample | {self.keys[i] for numbers in chosen for i in numbers.tolist()}
        self.parts = {}
        for what, wanted in (("evidence", some), ("background", some), ("object", self.keys)):
            self.parts[what] = removed(photos, found.method, wanted, what, as_predicted=True)
            print(what, self.of(what, self.sample), flush=True)

    def of(self, what: str, keys: Collection[Key]) -> dict[str, Any]:
        """What covering a part of some photos did to the answers, and to the accuracy."""
        return self.parts[what].of(keys).to_dict()

    def of_class(self, target: str) -> list[Key]:
        return [self.keys[i] for i in self.maps.of_target[target].tolist()]


def checked(found: Insight, photos: RunPhotos) -> dict[str, Any]:
    """The first findings of each kind, and what covering did; the same of all photos, and of each
    class."""
    checks = Checks(found, photos)
    looks = [
        {
            **_plain(look.to_dict()),
            **{what: checks.of(what, checks.of_class(look.target)) for what in checks.parts},
        }
        for look in found.looks[:FIRST]
    ]
    clusters = [
        {
            **_plain(each.to_dict()),
            "evidence": checks.of("evidence", [checks.keys[i] for i in each.rows.tolist()]),
        }
        for each in found.reasons[:FIRST]
    ]
    mistakes = [
        {**_plain(pair.to_dict()), "corrected": corrected(photos, pair, found.method).to_dict()}
        for pair in found.pairs[:FIRST]
    ]
    return {
        "all": {what: checks.of(what, checks.sample) for what in checks.parts},
        "looks": looks,
        "reasons": clusters,
        "mistakes": mistakes,
        "classes": of_classes(found, checks.parts["object"]),
    }


def of_classes(found: Insight, objects: AblationResult) -> dict[str, Any]:
    """For each class, the share of the evidence on the object, and how many answers go with the
    object."""
    maps = found.maps
    rows = []
    keys = list(zip(maps.names, maps.targets, strict=True))
    for target, numbers in maps.of_target.items():
        own = {keys[i] for i in numbers.tolist()} & set(objects.keys)
        if len(own) < LEAST:
            continue
        removal = objects.of(own)
        inside = [i for i in numbers.tolist() if keys[i] in own]
        rows.append(
            {
                "class": _short(target),
                "photos": removal.photos,
                "covered": round(removal.share, 4),
                "on_object": round(float(maps.on_object[inside].mean()), 4),
                "kept": round(removal.after, 4),
                "control": round(removal.control, 4),
            }
        )
    rows.sort(key=lambda row: (row["on_object"], row["class"]))
    columns = {
        name: torch.tensor([row[name] for row in rows]) for name in ("on_object", "covered", "kept")
    }
    return {
        "rows": rows,
        "agreement": round(ranks_agree(columns["on_object"], -columns["kept"]), 3),
        "of_size": round(ranks_agree(columns["covered"], -columns["kept"]), 3),
    }


def ranks_agree(one: torch.Tensor, other: torch.Tensor) -> float:
    """Spearman's correlation.

    >>> round(ranks_agree(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.1, 0.2, 0.3])), 6)
    1.0
    """
    if len(one) < 3:
        return float("nan")
    ranks = torch.stack([_ranks(each) for each in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """The rank of each value; equal ones share theirs."""
    return (values[:, None] > values).double().sum(1) + (values[:, None] == values).double().sum(
        1
    ) / 2


def drawn(classes: Mapping[str, Any]) -> Figure:
    """A point for each class: the evidence on the object, and the answers that stay without it."""
    rows = classes["rows"]
    found = Figure(figsize=(8, 5.4), layout="constrained")
    axes = found.subplots()
    sizes = [30 + 400 * row["covered"] for row in rows]
    axes.scatter(
        [row["on_object"] for row in rows],
        [row["kept"] for row in rows],
        sizes,
        alpha=0.45,
        edgecolors="none",
    )
    others = [row for row in rows[NAMED:] if row["on_object"] > 0.5]
    ends = [*rows[:NAMED], *sorted(others, key=lambda row: -row["kept"])[:4]]
    for number, row in enumerate(ends):
        place = (6, 5 if number % 2 else -12)
        axes.annotate(
            row["class"],
            (row["on_object"], row["kept"]),
            place,
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(
        xlabel="share of the evidence on the object",
        ylabel="answers that stay when the object is blurred",
        xlim=(0, 1),
        ylim=(-0.02, 1.02),
        title=f"{len(rows)} classes of Tiny-ImageNet; larger points are larger objects",
    )
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    return found


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Without maps, and photos by the names that the data set gives them."""
    return {name: _by_name(value) for name, value in found.items() if name != "map"}


def _by_name(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _by_name(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_by_name(each) for each in value]
    return Path(value).name if isinstance(value, str) and value.endswith(".JPEG") else value


def section(found: Mapping[str, Any]) -> str:
    """The table of the page: whether the evidence of the classes that stand out most is what the
    model uses, beside the control. The probabilities are corrected for the tests of all that stood
    out: classes, clusters and mistakes."""
    tests = [each[what] for each in found["looks"] for what in PARTS]
    tests += [each["evidence"] for each in found["reasons"]]
    tests += [each["corrected"] for each in found["mistakes"]]
    chances = holm([each["chance"] for each in tests])
    head = (
        "class",
        "photos",
        "evidence on the object",
        "share of the object",
        "predictions kept with the evidence blurred",
        "with an equal area elsewhere blurred",
        "p",
    )
    rows = [head, ("---",) * len(head)]
    for number, each in enumerate(found["looks"]):
        rows.append(
            (
                _short(each["target"]),
                str(each["photos"]),
                f"{each['on_object']['mean']:.0%}",
                f"{each['object_size']['mean']:.0%}",
                f"{each['evidence']['after']:.0%}",
                f"{each['evidence']['control']:.0%}",
                _chance(chances[len(PARTS) * number + PARTS.index("evidence")]),
            )
        )
    usual = found["all"]["evidence"]
    rows.append(
        (
            "*all classes*",
            f"{usual['photos']:,}",
            f"{found['on_object']:.0%}",
            f"{found['object_size']:.0%}",
            f"{usual['after']:.0%}",
            f"{usual['control']:.0%}",
            "–",
        )
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def holm(chances: Sequence[float]) -> list[float]:
    """Correct the probabilities of several tests (Holm, Scandinavian Journal of Statistics 1979).

    >>> holm([0.04, 0.01, 0.5])
    [0.08, 0.03, 0.5]
    """
    least = 0.0
    found = [0.0] * len(chances)
    for number, place in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        least = max(least, min(1.0, (len(chances) - number) * chances[place]))
        found[place] = least
    return found


def _chance(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.2g}"


def _short(label: str) -> str:
    return label.split(",")[0]


def write_page() -> None:
    """Bring the figures of assets/insight/tiny.json into the page."""
    found = json.loads((ASSETS / "tiny.json").read_text("utf-8"))
    text = PAGE.read_text("utf-8")
    new = f"<!-- begin tiny -->\n{section(found)}\n<!-- end tiny -->"
    PAGE.write_text(
        re.sub(r"<!-- begin tiny -->.*<!-- end tiny -->", lambda _: new, text, flags=re.DOTALL),
        "utf-8",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="the unpacked data set")
    parser.add_argument("--run", type=Path, default=Path("tiny-run.sqlite"))
    parser.add_argument("--photos", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--output", type=Path, default=ASSETS)
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args(arguments)
    if options.page:
        write_page()
        return
    made = explain.Explainer("tiny")
    source = listed(options.folder, options.photos, options.run.with_suffix(".json"))
    run = explain.run(source, made, "gradcam", output=options.run, workers=options.workers)
    found = run.insight(explainer=made)
    print(found)
    options.output.mkdir(parents=True, exist_ok=True)
    (right,) = next(run.query("SELECT avg(label_class = prediction_class) FROM photos"))
    maps = found.maps
    about = {
        "photos": run.photos,
        "accuracy": round(right, 4),
        "on_object": round(float(maps.on_object.nanmean()), 4),
        "object_size": round(float(maps.object_size.nanmean()), 4),
        **checked(found, RunPhotos(run, made)),
    }
    (options.output / "tiny.json").write_text(
        json.dumps(about, indent=1, ensure_ascii=False) + "\n", "utf-8"
    )
    for name, picture in found.pictures(photos=False).items():
        picture.save(options.output / f"tiny-{name}.png")
    drawn(about["classes"]).savefig(options.output / "tiny-objects.png", dpi=110)
    # with photos: to look at, not to publish
    found.save(options.run.with_suffix(""), overwrite=True)


if __name__ == "__main__":
    main()
