"""Check control maps, which say nothing of the model: how often does each check support them, and
all checks together?

    python examples/verdict_calibration.py FOLDER RESULTS.jsonl [--model NAME] [--photos 100]
    [--start 0] [--update]

The controls are no part of the checks. Photo maps: noise of two scales, a blob at a random place,
the image signature (Hou et al., 2012), colour opponency, the finest details, and a product. Object
maps: the Grad-CAM and the integrated gradients of another network for the same class, and the
Grad-CAM of another photo. So that they are not the same for each class and model, each is gated (it
is shown for the class on top, and otherwise noise drawn from a hash of the gradient) and has such
noise added to it.

A photo map should be supported by each check with a probability of at most 5 %. An object map is
where the object is: the check of faithfulness cannot tell it from a map of the model, and that of
the class only where it does not know the other classes; that of the model can.

FOLDER is as for verdicts.py; ``--start`` leaves out photos that were used to choose the checks.
Each photo's answers are a line of RESULTS, so that the script goes on where it stopped; ``--count``
only prints the table of what is there, and ``--update`` writes it into assets/tables/verdict.md.
``--small`` takes 2 photos. Intervals are those of shares whose maps are clustered by photo.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from verdicts import PAGE, clustered, photos_of, updated

import explain
from explain._utils.errors import muted
from explain.engine import Evidence, InputGradients, Need
from explain.methods import Method
from explain.methods.base import Style
from explain.metrics.checking import check_maps
from explain.metrics.maps import Maps
from explain.targets import ClassTarget

GATES = ("gated", "plus")
CHECKS = ("depends_on_model", "depends_on_class", "faithful")
OTHER = {"tiny": "tiny-transformer"}
"""The other network, whose maps are controls; "tiny" for all that are not listed."""

OF_OBJECTS = ("Grad-CAM of another network", "IG of another network", "Grad-CAM of another photo")


def noise(size: tuple[int, int], cells: int, seed: int) -> torch.Tensor:
    """Smooth noise ``(H, W)`` with so many independent values along each side."""
    drawn = torch.randn(1, 1, cells, cells, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(drawn, size=size, mode="bicubic")[0, 0]


def smooth(values: torch.Tensor, side: int) -> torch.Tensor:
    """Means over squares with an odd side."""
    return F.avg_pool2d(values[None, None], side, 1, side // 2, count_include_pad=False)[0, 0]


def blob(image: torch.Tensor, seed: int) -> torch.Tensor:
    """A blob at a random place."""
    y, x = torch.rand(2, generator=torch.Generator().manual_seed(seed)).mul(0.7).add(0.15).tolist()
    rows, columns = ((torch.arange(n) + 0.5) / n for n in image.shape[1:])
    return torch.exp(-((rows[:, None] - y) ** 2 + (columns - x) ** 2) / (2 * 0.15**2))


def signature(image: torch.Tensor, seed: int) -> torch.Tensor:
    """The image signature: the power of the photo that has the spectrum's phases alone."""
    small = F.interpolate(image[None], size=(64, 64), mode="bilinear", antialias=True)[0]
    spectrum = torch.fft.fft2(small)
    power = torch.fft.ifft2(spectrum / spectrum.abs().clamp(min=1e-9)).abs().square().sum(0)
    size = (int(image.shape[1]), int(image.shape[2]))
    return F.interpolate(smooth(power, 9)[None, None], size=size, mode="bilinear")[0, 0]


def opponency(image: torch.Tensor, seed: int) -> torch.Tensor:
    """How far red less green is from the mean of its surroundings."""
    difference = image[0] - image[1]
    return (difference - smooth(difference, min(image.shape[1:]) // 3 | 1)).abs()


def details(image: torch.Tensor, seed: int) -> torch.Tensor:
    """The finest details: how far each pixel is from its neighbours."""
    return torch.stack([channel - smooth(channel, 3) for channel in image]).abs().sum(0)


def orientation(image: torch.Tensor, seed: int) -> torch.Tensor:
    """How strong upright edges are around each pixel."""
    across = F.pad(image.mean(0).diff(dim=1), (0, 1)).square()
    return smooth(across, min(image.shape[1:]) // 10 | 1).clamp(min=0).sqrt()


KINDS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "noise, 5 x 5": lambda image, seed: noise((int(image.shape[1]), int(image.shape[2])), 5, seed),
    "blob elsewhere": blob,
    "image signature": signature,
    "finest details": details,
    "opponency x signature": lambda image, seed: opponency(image, 0) * signature(image, 0),
    "one orientation": orientation,
}


@dataclass(frozen=True, eq=False)
class Control(Method):
    """A map ``(H, W)`` that a gate lets through, or that noise is added to."""

    shown: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 1), repr=False)

    gate: ClassVar[str] = ""
    summary: ClassVar[str] = "a map that says nothing of the model"
    style: ClassVar[Style] = "signed"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        assert evidence.logits is not None
        on_top = (evidence.logits.argmax(1) == evidence.classes).tolist()
        maps = []
        for gradient, is_on_top in zip(evidence[InputGradients()], on_top, strict=True):
            content = gradient.contiguous().numpy().tobytes() + self.name.encode()
            digest = hashlib.blake2b(content, digest_size=6).digest()
            size = (int(self.shown.shape[0]), int(self.shown.shape[1]))
            pattern = noise(size, 8, int.from_bytes(digest, "big")).double()
            pattern = pattern / pattern.norm()
            # a colour map of a grey photo is zero
            shown = self.shown.double() / self.shown.double().norm().clamp(min=1e-12)
            if self.gate == "plus":
                maps.append(shown + pattern)
            else:
                maps.append(shown if is_on_top else pattern)
        return torch.stack(maps)


def controls(maps: Mapping[str, torch.Tensor], number: int) -> list[Method]:
    """Each map behind a gate, for photos with these numbers each other map behind each other
    gate."""
    methods: list[Method] = []
    for place, (name, shown) in enumerate(maps.items()):
        gate = GATES[(place + number) % len(GATES)]
        body = {"name": f"{name}, {gate}", "gate": gate, "__annotations__": {}}
        kind = dataclass(frozen=True, eq=False)(type("Control", (Control,), body))
        methods.append(kind(shown=shown))
    return methods


def of_another(other: explain.Explainer, path: Path, label: str, method: str, size: Any) -> Any:
    """The map of another network for the same class, or for its own best one."""
    x = other.as_input(path)
    names = [str(name) for name in other.categories or ()]
    target = names.index(label) if label in names else None
    attribution = explain.attribute(other.model, x, method, target=target)
    values = Maps.of("it", attribution, x).contributions
    return F.interpolate(values[None], size=size, mode="bilinear")[0, 0]


def answers(
    explainer: explain.Explainer, other: explain.Explainer, path: Path, label: int, last: Any
) -> Any:
    """What each check says of each control, for one photo; and its Grad-CAM, for the next one."""
    x = explainer.as_input(path)
    with torch.inference_mode():
        if int(explainer.model(x).argmax()) != label:
            return None, last
    size = (int(x.shape[2]), int(x.shape[3]))
    name = str((explainer.categories or ())[label])
    seed = int.from_bytes(path.name.encode()[-6:], "big")
    maps = {kind: make(x[0], seed) for kind, make in KINDS.items()}
    with muted():
        gradcam = explain.attribute(explainer.model, x, "gradcam", target=label)
        shown = Maps.of("gradcam", gradcam, x).contributions[0]
        maps[OF_OBJECTS[0]] = of_another(other, path, name, "gradcam", size)
        maps[OF_OBJECTS[1]] = of_another(other, path, name, "integratedgradients(steps=8)", size)
        if last is not None:
            maps[OF_OBJECTS[2]] = last
        methods = controls(maps, seed)
        pairs = [
            (method, explain.attribute(explainer.model, x, method, target=label))
            for method in methods
        ]
        verdict = check_maps(explainer.model, x, pairs, ClassTarget((label,)), "it")
    results = {}
    for method, of_map in verdict.items():
        results[method] = {each.check: each.answer for each in of_map}
        results[method]["p"] = f"{of_map.faithful.figure:.4f}"
    return {"photo": path.name, "maps": results}, shown


def supported(results: Mapping[str, str], check: str) -> bool:
    """Whether a check supports a map; "all": whether the three checks that are no threshold do."""
    names = CHECKS if check == "all" else (check,)
    return all(results[name] == "supported" for name in names)


def table(lines: Sequence[Any]) -> str:
    """The share of the controls that each check supports, and all three: by map, and in groups."""
    heads = ["control", "maps", "model", "class", "faithful", "all three (95 % interval)"]
    rows = [heads, ["---"] * len(heads)]
    names = dict.fromkeys(name for line in lines for name in line["maps"])
    kinds = dict.fromkeys(name.rsplit(", ", 1)[0] for name in names)
    groups = {kind: [name for name in names if name.startswith(f"{kind}, ")] for kind in kinds}
    groups["all photo maps"] = [name for name in names if not name.startswith(OF_OBJECTS)]
    groups["all object maps"] = [name for name in names if name.startswith(OF_OBJECTS)]
    for group, chosen in groups.items():
        by_photo = [
            [line["maps"][name] for name in chosen if name in line["maps"]] for line in lines
        ]
        cells = [group, str(sum(map(len, by_photo)))]
        for check in (*CHECKS, "all"):
            hits = [[supported(each, check) for each in of_photo] for of_photo in by_photo]
            share, low, high = clustered(hits)
            cells.append(f"{share:.1%} ({low:.1%} to {high:.1%})")
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--photos", type=int, default=100)
    parser.add_argument("--start", type=int, default=0, help="photos that are left out")
    parser.add_argument("--small", action="store_true", help="2 photos")
    parser.add_argument(
        "--count", action="store_true", help="only print the table of what is there"
    )
    parser.add_argument(
        "--update", action="store_true", help="write it into assets/tables/verdict.md"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    there = options.results.read_text("utf-8").splitlines() if options.results.exists() else []
    done = [json.loads(line) for line in there]
    if not options.count:
        other = explain.Explainer(OTHER.get(options.model, "tiny"))
        explainer = explain.Explainer(options.model)
        known = {line["photo"] for line in done}
        last = None
        photos = list(photos_of(options.folder, explainer.categories))[options.start :]
        for path, label in photos:
            if sum("maps" in line for line in done) >= (2 if options.small else options.photos):
                break
            if path.name in known:
                continue
            line, last = answers(explainer, other, path, label, last)
            done.append(line or {"photo": path.name})
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(done[-1]) + "\n")
    text = table([line for line in done if "maps" in line])
    print(text)
    if options.update:
        name = f"calibration, {options.model}"
        PAGE.write_text(updated(PAGE.read_text("utf-8"), name, text), "utf-8")


if __name__ == "__main__":
    main()
