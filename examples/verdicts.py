"""Check maps of many photos, and count which are supported: does the verdict say what is known of
the methods?

    python examples/verdicts.py FOLDER RESULTS.jsonl [--model NAME] [--photos 100] [--method
    NAME]... [--update]

The photos are named ``INDEX_....jpg`` after their class, or FOLDER is an unpacked Tiny-ImageNet,
whose validation photos are taken. Only those count that the model gets right. Each photo's answers
are a line of RESULTS, so that the script goes on where it was stopped, and ``--count`` only prints
the table of what is there; ``--update`` writes it into assets/tables/verdict.md, too. ``--small`` takes 4
photos.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import explain
from explain._utils.errors import muted

PAGE = Path(__file__).resolve().parents[1] / "assets" / "tables" / "verdict.md"
METHODS = ["gradcam", "guidedgradcam", "guidedbackprop", "randomcam"]
WORDS = ("depends_on_model", "depends_on_class", "faithful", "stable")


def photos_of(folder: Path, categories: Any) -> Iterator[tuple[Path, int]]:
    """The photos of a folder in a fixed random order, each with the index of its class."""
    listed = folder / "val" / "val_annotations.txt"
    if listed.exists():
        names = [line.split("\t")[:2] for line in listed.read_text("utf-8").splitlines()]
        classes = sorted((folder / "wnids.txt").read_text("utf-8").split())
        words = dict(
            line.split("\t")
            for line in (folder / "words.txt").read_text("utf-8").splitlines()
            if line
        )
        known = {name: index_of(words[name], categories) for name in classes}
        found = [
            (listed.parent / "images" / name, known[kind])
            for name, kind in names
            if known[kind] is not None
        ]
    else:
        paths = sorted(
            path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png")
        )
        found = [(path, int(path.name.split("_")[0])) for path in paths]
    random.Random(0).shuffle(found)
    yield from found


def clustered(hits: Sequence[Sequence[bool]]) -> tuple[float, float, float]:
    """The share of hits among maps, and its 95 % interval by Wilson's formula.

    ``hits`` has the maps of each photo, which are no independent draws: the number of maps is
    divided by how much more the shares of photos vary than those of independent maps would.
    """
    counts = [len(of_photo) for of_photo in hits if of_photo]
    total = sum(counts)
    if not total:
        return math.nan, 0.0, 1.0
    share = sum(map(sum, hits)) / total
    left = sum((sum(of_photo) - share * len(of_photo)) ** 2 for of_photo in hits)
    independent = total * share * (1 - share)
    design = max(1.0, left / independent) if independent > 0 else 1.0
    low, high = interval(share, total / design)
    return share, low, high


def interval(share: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of so many independent draws."""
    z = 1.96**2 / count
    half = math.sqrt(z * share * (1 - share) + z * z / 4)
    low = max(0.0, (share + z / 2 - half) / (1 + z))
    high = min(1.0, (share + z / 2 + half) / (1 + z))
    return low, high


def index_of(words: str, categories: Any) -> int | None:
    """Which of the categories has one of these names."""
    names = [name.strip().lower() for name in words.split(",")]
    return next((i for i, label in enumerate(categories) if str(label).lower() in names), None)


def check(
    explainer: explain.Explainer, path: Path, index: int, methods: list[str]
) -> dict[str, Any] | None:
    """The answers about a photo's maps; None where the model names another class."""
    with torch.inference_mode():
        logits = explainer.model(explainer.as_input(path))
    if int(logits.argmax()) != index:
        return None
    start = time.process_time()
    with muted():
        explanation = explainer(path, methods)
        verdict = explanation.check()
    seconds = round(time.process_time() - start, 2)
    probability = explanation.predictions[0][1]
    return {"photo": path.name, "probability": probability, "seconds": seconds, **verdict.to_dict()}


def table(lines: list[dict[str, Any]]) -> str:
    """How many of the photos' maps are supported, not shown and contradicted, and how many each
    check supports."""
    rows = [["method", "photos", "supported (95 % interval)", "not shown", "contradicted", *WORDS]]
    for method in dict.fromkeys(name for line in lines for name in line["methods"]):
        maps = [line["methods"][method] for line in lines if method in line["methods"]]
        answers = [of_map["answer"] for of_map in maps]
        share, low, high = clustered([[answer == "supported"] for answer in answers])
        shares = [answers.count(answer) / len(maps) for answer in ("not shown", "contradicted")]
        for word in WORDS:
            supported = [of_map["answers"][word]["answer"] == "supported" for of_map in maps]
            shares.append(sum(supported) / len(maps))
        cells = [method, str(len(maps)), f"{share:.0%} ({low:.0%} to {high:.0%})"]
        rows.append([*cells, *(f"{share:.0%}" for share in shares)])
    return "\n".join(
        f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    )


def updated(page: str, name: str, text: str) -> str:
    """The page with the table of a name replaced."""
    start = f"<!-- table: {name} -->\n"
    end = "<!-- end -->"
    if start not in page:
        raise SystemExit(f"verdicts.py: {PAGE.name} has no place for a table of {name}")
    before, rest = page.split(start, 1)
    return f"{before}{start}{text}\n{end}{rest.split(end, 1)[1]}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", default="efficientnet-lite0")
    parser.add_argument("--photos", type=int, default=100)
    parser.add_argument(
        "--method", action="append", help="other methods; --update knows a table of theirs"
    )
    parser.add_argument("--small", action="store_true", help="4 photos")
    parser.add_argument(
        "--count", action="store_true", help="only print the table of what is there"
    )
    parser.add_argument(
        "--update", action="store_true", help="write it into assets/tables/verdict.md"
    )
    options = parser.parse_args(arguments)
    done = (
        [json.loads(line) for line in options.results.read_text("utf-8").splitlines()]
        if options.results.exists()
        else []
    )
    if not options.count:
        explainer = explain.Explainer(options.model)
        most = 4 if options.small else options.photos
        there = {line["photo"] for line in done}
        for path, index in photos_of(options.folder, explainer.categories):
            if len([line for line in done if "methods" in line]) >= most:
                break
            if path.name in there:
                continue
            found = check(explainer, path, index, options.method or METHODS)
            done.append(found or {"photo": path.name})
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[-1], ensure_ascii=False) + "\n")
    found = table([line for line in done if "methods" in line])
    print(found)
    if options.update:
        name = options.model if options.method is None else f"{options.model}, other methods"
        PAGE.write_text(updated(PAGE.read_text("utf-8"), name, found), "utf-8")


if __name__ == "__main__":
    main()
