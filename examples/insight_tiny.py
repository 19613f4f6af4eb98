"""Explain the validation photos of Tiny-ImageNet with the small model, and check what insight finds.

    python examples/insight_tiny.py path/to/tiny-imagenet-200 [--run RUN] [--photos 10000] [--output FOLDER]
    python examples/insight_tiny.py --page

All photos are explained with Grad-CAM, with their labels and boxes; the run goes on where it stopped. Of what
`run.insight()` says, the first of each kind are checked by removing the evidence: a tenth of the pixels, where the maps
are highest, is blurred. If what was found is true, more answers change than if the same area elsewhere is blurred.

The figures go to assets/insight/tiny.json with pictures of mean maps (the photos may not be published), and from there
into docs/insight.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import explain
from explain.runs.insight import Insight, Photos, removed

HOME = Path(__file__).resolve().parent.parent
ASSETS, PAGE = HOME / "assets" / "insight", HOME / "docs" / "insight.md"
FIRST = 5  # findings of each kind that are checked
SHARE = 0.1


def listed(folder: Path, most: int, place: Path) -> Path:
    """Write the list of photos with labels and boxes; of each class as many."""
    wnids = (folder / "wnids.txt").read_text().split()  # in the order of the model's classes
    rows = [line.split("\t") for line in (folder / "val" / "val_annotations.txt").read_text().splitlines()]
    counts: dict[str, int] = {}
    found = []
    for name, wnid, x0, y0, x1, y1 in sorted(rows):
        counts[wnid] = counts.get(wnid, 0) + 1
        if counts[wnid] > most // 200:
            continue
        path = str((folder / "val" / "images" / name).resolve())
        box = [int(x0), int(y0), int(x1) + 1, int(y1) + 1]  # the data set's ends are inclusive
        found.append({"path": path, "label": wnids.index(wnid), "boxes": [box]})
    place.write_text(json.dumps(found))
    return place


def checked(found: Insight, photos: Photos) -> dict[str, list[dict[str, Any]]]:
    """The first findings of each kind, and what removing the evidence did."""
    maps = found.maps
    keys = list(zip(maps.names, maps.targets, strict=True))
    looks = [
        {
            **_without_map(look.to_json()),
            "removal": _removed(photos, [keys[i] for i in maps.of_target[look.target].tolist()], as_predicted=True),
        }
        for look in found.looks[:FIRST]
    ]
    clusters = [
        {**_without_map(each.to_json()), "removal": _removed(photos, [keys[i] for i in each.rows.tolist()], True)}
        for each in found.reasons[:FIRST]
    ]
    query = "SELECT name FROM photos WHERE label_class = ? AND prediction_class = ?"
    mistakes = []
    for pair in found.pairs[:FIRST]:
        names = [name for (name,) in photos.run.query(query, (pair.label_class, pair.prediction_class))]
        chosen = [(name, pair.prediction) for name in names]
        mistakes.append({**_without_map(pair.to_json()), "removal": _removed(photos, chosen, True)})
    return {"looks": looks, "reasons": clusters, "mistakes": mistakes}


def _removed(photos: Photos, wanted: Sequence[tuple[str, str]], as_predicted: bool) -> dict[str, Any]:
    return removed(photos, "gradcam", wanted, share=SHARE, as_predicted=as_predicted).to_json()


def _without_map(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "map"}


def section(found: dict[str, Any]) -> str:
    """What was found, as tables for the page."""
    lines = [f"{found['photos']} photos, of which the model knows {found['accuracy']:.0%}.", ""]
    lines += ["| looks away from its object | photos | on the object | the object is | keeps the answer | … without "
              "the evidence | … without as much elsewhere |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for each in found["looks"]:
        figures = f"{each['on_object']['mean']:.0%} | {each['object_size']['mean']:.0%}"
        lines.append(f"| {_short(each['target'])} | {each['photos']} | {figures} | {_kept(each)} |")
    lines += ["", "| cluster of reasons | photos | of the class | stands out | keeps the answer | … without the "
              "evidence | … without as much elsewhere |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for each in found["reasons"]:
        figures = f"{each['size']} | {each['share']:.0%} | {each['stands_out']:.2f}"
        lines.append(f"| {_short(each['target'])} | {figures} | {_kept(each)} |")
    lines += ["", "| mistake | photos | of | keeps the wrong answer | … without the evidence | … without as much "
              "elsewhere |", "|---|---|---|---|---|---|"]  # fmt: skip
    for each in found["mistakes"]:
        pair = f"{_short(each['label'])} taken for {_short(each['prediction'])}"
        lines.append(f"| {pair} | {each['count']} | {each['of']} | {_kept(each)} |")
    return "\n".join(lines)


def _kept(each: dict[str, Any]) -> str:
    removal = each["removal"]
    return f"{removal['before']:.0%} | {removal['after']:.0%} | {removal['control']:.0%}"


def _short(label: str) -> str:
    return label.split(",")[0]


def write_page() -> None:
    """Bring the figures of assets/insight/tiny.json into the page."""
    found = json.loads((ASSETS / "tiny.json").read_text("utf-8"))
    text = PAGE.read_text("utf-8")
    new = f"<!-- begin tiny -->\n{section(found)}\n<!-- end tiny -->"
    PAGE.write_text(re.sub(r"<!-- begin tiny -->.*<!-- end tiny -->", lambda _: new, text, flags=re.DOTALL), "utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    found = run.insight()
    print(found)
    options.output.mkdir(parents=True, exist_ok=True)
    (right,) = next(run.query("SELECT avg(label_class = prediction_class) FROM photos"))
    about = {"photos": run.photos, "accuracy": round(right, 4), **checked(found, Photos(run, made))}
    (options.output / "tiny.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", "utf-8")
    for name, picture in found.pictures(photos=False).items():
        picture.save(options.output / f"tiny-{name}.png")
    found.save(options.run.with_suffix(""), overwrite=True)  # with photos: to look at, not to publish


if __name__ == "__main__":
    main()
