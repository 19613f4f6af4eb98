"""Check maps that know nothing of the model: how often do they pass each check, and all of them?

    python examples/verdict_calibration.py FOLDER RESULTS.jsonl [--model NAME] [--photos 100]
    [--update]

The maps are noise of three scales, blobs, edges, contrast, the distance from the mean colour,
products of these, the saliency of another network, and the Grad-CAM of another photo; each as it
is, plus a random pattern, and times one. The patterns are drawn from a hash of the gradient, so
that they differ from class to class and from model to model. A map that knows nothing should pass
each check with a probability of at most 5 %, and all of them almost never. (The check of stability
is not in the table: a blob is stable, and these patterns are not, since a little noise changes the
hash.)

FOLDER is as for verdicts.py. Each photo's answers are a line of RESULTS, so that the script goes on
where it stopped; ``--count`` only prints the table of what is there, and ``--update`` writes it
into assets/tables/verdict.md. ``--small`` takes 2 photos.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from verdicts import PAGE, photos_of, updated

import explain
from explain._utils.errors import muted
from explain.engine import Evidence, InputGradients, Need
from explain.methods import Method
from explain.methods.base import Style
from explain.metrics.base import digest_of_tensor
from explain.metrics.masked_scores import photo_maps
from explain.metrics.verdict import Share, check_maps
from explain.targets import ClassTarget

sys.path.append(str(Path(__file__).resolve().parent / "leaderboard"))

PATTERNS = ("", "plus", "times")
OTHER = {"tiny": "tiny-transformer"}
"""The other network, whose saliency is one of the maps; "tiny" for all that are not listed."""


def noise(size: tuple[int, int], cells: int, seed: int) -> torch.Tensor:
    """Smooth noise ``(H, W)`` with so many independent values along each side."""
    drawn = torch.randn(1, 1, cells, cells, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(drawn, size=size, mode="bicubic")[0, 0]


known: dict[bytes, torch.Tensor] = {}


def photo_map(image: torch.Tensor, number: int) -> torch.Tensor:
    """One of the maps of a photo, all of which are computed once."""
    key = digest_of_tensor(image)
    if key not in known:
        known[key] = photo_maps(image)
    return known[key][number]


def of_photo(number: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    return lambda image, seed: photo_map(image, number)


def blob(image: torch.Tensor, seed: int) -> torch.Tensor:
    """A blob at a random place."""
    y, x = torch.rand(2, generator=torch.Generator().manual_seed(seed)).mul(0.7).add(0.15).tolist()
    rows, columns = ((torch.arange(n) + 0.5) / n for n in image.shape[1:])
    return torch.exp(-((rows[:, None] - y) ** 2 + (columns - x) ** 2) / (2 * 0.15**2))


KINDS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "noise, pixels": lambda image, seed: noise(
        (image.shape[1], image.shape[2]), min(image.shape[1:]), seed
    ),
    "noise, 8 x 8": lambda image, seed: noise((image.shape[1], image.shape[2]), 8, seed),
    "noise, 4 x 4": lambda image, seed: noise((image.shape[1], image.shape[2]), 4, seed),
    "blob in the middle": of_photo(4),
    "blob elsewhere": blob,
    "edges": of_photo(2),
    "blurred edges": of_photo(3),
    "contrast": of_photo(1),
    "contrast x blob": of_photo(6),
    "distance from the mean": of_photo(0),
    "distance x blob": of_photo(7),
    "edges x blob": lambda image, seed: photo_map(image, 2) * photo_map(image, 4),
}


@dataclass(frozen=True, eq=False)
class Uninformed(Method):
    """A map of the photo, or one that is ``given``, with a pattern."""

    given: torch.Tensor | None = field(default=None, repr=False)
    seed: int = 0

    kind: ClassVar[str] = ""
    pattern: ClassVar[str] = ""
    summary: ClassVar[str] = "a map that knows nothing of the model"
    style: ClassVar[Style] = "signed"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        found = []
        for image, gradient in zip(evidence.inputs, evidence[InputGradients()], strict=True):
            own = (
                KINDS[self.kind](image, self.seed) if self.given is None else self.given
            ).double()
            content = gradient.contiguous().numpy().tobytes() + self.name.encode()
            digest = hashlib.blake2b(content, digest_size=6).digest()
            size = (int(own.shape[0]), int(own.shape[1]))
            drawn = noise(size, 8, int.from_bytes(digest, "big")).double()
            own = own / own.norm()
            found.append(
                {"": own, "plus": own + drawn / drawn.norm(), "times": own * drawn.abs()}[
                    self.pattern
                ]
            )
        return torch.stack(found)


def uninformed(given: dict[str, torch.Tensor], seed: int) -> Iterator[Method]:
    """All maps with all patterns."""
    for kind in (*KINDS, *given):
        for pattern in PATTERNS:
            name = f"{kind} {pattern}".strip()
            body = {"name": name, "kind": kind, "pattern": pattern, "__annotations__": {}}
            made = dataclass(frozen=True, eq=False)(type("Uninformed", (Uninformed,), body))
            yield made(given=given.get(kind), seed=seed)


def plain_network(weights: Path) -> explain.Explainer:
    from plain import explainer

    return explainer(weights)


def answers(
    explainer: explain.Explainer, other: explain.Explainer, path: Path, label: int, last: Any
) -> Any:
    """Whether each map passes each check, for one photo; and its Grad-CAM, for the next one."""
    x = explainer.as_input(path)
    known.clear()
    with torch.inference_mode():
        if int(explainer.model(x).argmax()) != label:
            return None, last
    with muted():
        gradcam = explain.attribute(explainer.model, x, "gradcam", target=label).values[0]
        saliency = (
            explain.attribute(other.model, other.as_input(path), "saliency").values[0].abs().amax(0)
        )
    size = (int(x.shape[2]), int(x.shape[3]))
    given = {
        "saliency of another network": F.interpolate(
            saliency[None, None], size=size, mode="bilinear"
        )[0, 0]
    }
    if last is not None:
        given["Grad-CAM of another photo"] = F.interpolate(
            last[None, None], size=size, mode="bilinear"
        )[0, 0]
    methods = list(uninformed(given, int.from_bytes(path.name.encode()[-6:], "big")))
    with muted():
        maps = [
            (method, explain.attribute(explainer.model, x, method, target=label))
            for method in methods
        ]
        verdict = check_maps(explainer.model, x, maps, ClassTarget((label,)), "it")
    found = {
        name: {each.check: each.passed for each in results} for name, results in verdict.items()
    }
    return {"photo": path.name, "maps": found}, gradcam


def table(lines: list[Any]) -> str:
    """The share of maps that pass: by map, over all patterns; by pattern; and of all."""
    checks = ["depends_on_model", "depends_on_class", "faithful"]
    rows = [
        ["map", "maps checked", *checks, "all three (95 % interval)"],
        ["---"] * (3 + len(checks)),
    ]
    names = dict.fromkeys(name for line in lines for name in line["maps"])
    groups = {
        kind: [f"{kind} {pattern}".strip() for pattern in PATTERNS]
        for kind in names
        if not pattern_of(kind)
    }
    for pattern, label in zip(
        PATTERNS, ("as they are", "plus a pattern", "times a pattern"), strict=True
    ):
        groups[label] = [name for name in names if pattern_of(name) == pattern]
    for label, chosen in {**groups, "all of them": list(names)}.items():
        found = [line["maps"][name] for line in lines for name in chosen if name in line["maps"]]
        shares = [sum(each[check] is True for each in found) / len(found) for check in checks]
        hits = sum(all(each[check] is True for check in checks) for each in found)
        low, high = Share(hits, len(found)).interval
        every = f"{hits / len(found):.1%} ({low:.1%} to {high:.1%})"
        rows.append([label, str(len(found)), *(f"{share:.0%}" for share in shares), every])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def pattern_of(name: str) -> str:
    """The pattern in a map's name; empty where it has none."""
    return next((pattern for pattern in PATTERNS if pattern and name.endswith(f" {pattern}")), "")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument(
        "--weights",
        type=Path,
        help="those that leaderboard/plain.py trained; the model is that one",
    )
    parser.add_argument("--photos", type=int, default=100)
    parser.add_argument("--small", action="store_true", help="2 photos")
    parser.add_argument(
        "--count", action="store_true", help="only print the table of what is there"
    )
    parser.add_argument(
        "--update", action="store_true", help="write it into assets/tables/verdict.md"
    )
    options = parser.parse_args(arguments)
    there = options.results.read_text("utf-8").splitlines() if options.results.exists() else []
    done = [json.loads(line) for line in there]
    if not options.count:
        other = explain.Explainer(OTHER.get(options.model, "tiny"))
        explainer = (
            explain.Explainer(options.model)
            if options.weights is None
            else plain_network(options.weights)
        )
        known = {line["photo"] for line in done}
        last = None
        for path, label in photos_of(options.folder, explainer.categories):
            if sum("maps" in line for line in done) >= (2 if options.small else options.photos):
                break
            if path.name not in known:
                found, last = answers(explainer, other, path, label, last)
                done.append(found or {"photo": path.name})
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[-1]) + "\n")
    text = table([line for line in done if "maps" in line])
    print(text)
    if options.update:
        name = f"calibration, {options.model}"
        PAGE.write_text(updated(PAGE.read_text("utf-8"), name, text), "utf-8")


if __name__ == "__main__":
    main()
