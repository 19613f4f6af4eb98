"""How often are methods called "supported": controls that know no model, right maps, and methods?

    python examples/check_calibration.py controls FOLDER RESULTS.jsonl [--seeds 20] [--photos 50]
        [--all 1000]
    python examples/check_calibration.py right FOLDER RESULTS.jsonl [--seeds 20] [--photos 50]
    python examples/check_calibration.py methods PHOTOS RESULTS.jsonl [--photos 100]

FOLDER is an unpacked tiny-imagenet-200; PHOTOS has photos of ImageNet that begin with the index of
their class. `explain.evaluate` is asked for "check" with so many photos for each seed (of controls, these are
drawn from ``--all``):

- controls, with the small network: edges, the centre and local contrast of the photo; plain, gated
  (shown for the class on top, and else noise drawn from a hash of the gradient), or with such noise
  added. They say nothing of the model, so at most 5 % may be supported.
- right: linear networks, and networks that add up what they see in patches, whose exact maps are
  known; and trained networks that read planted marks (leaderboard/marks.py), for which the right map
  is where the marks are: only what is covered can be checked of these.
- methods: Grad-CAM, LRP and DeepLIFT of the default network beside the controls.

Each batch of photos is a line of RESULTS, so that the script goes on where it stopped; ``--count``
only prints the table of what is there.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain._utils.errors import muted
from explain.engine import Evidence, InputGradients, Need
from explain.methods import HiResCAM, IntegratedGradients, Method
from explain.methods.base import Style
from explain.metrics.intervals import MeanInterval
from explain.metrics.supported import EFFECTS, supports

sys.path.append(str(Path(__file__).resolve().parent / "leaderboard"))

SIDE = 64
CLASSES = 10
AT_ONCE = 5
KINDS = ("contrast", "faint", "texture", "grey", "and", "xor", "absence")
METHODS = ("gradcam", "lrp", "deeplift")
Columns = dict[str, dict[str, list[float]]]
"""The figures of photos, by method and metric."""


# Maps that know no model


def edges(images: torch.Tensor) -> torch.Tensor:
    down = F.pad(images.diff(dim=2).abs(), (0, 0, 0, 1))
    across = F.pad(images.diff(dim=3).abs(), (0, 1))
    return (down + across).sum(1)


def centre(images: torch.Tensor) -> torch.Tensor:
    rows, columns = (((torch.arange(n) + 0.5) / n - 0.5).square() for n in images.shape[2:])
    blob = torch.exp(-(rows[:, None] + columns) / (2 * 0.2**2))
    return blob.to(images).expand(len(images), -1, -1)


def contrast(images: torch.Tensor) -> torch.Tensor:
    grey = images.mean(1, keepdim=True)
    side = max(3, min(images.shape[2:]) // 10 | 1)

    def around(values: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(values, side, 1, side // 2, count_include_pad=False)

    return around((grey - around(grey)).square()).clamp(min=0).sqrt()[:, 0]


MAPS = {"edges": edges, "centre": centre, "contrast": contrast}
GATES = ("plain", "gated", "noised")


@dataclass(frozen=True)
class Control(Method):
    """A map of the photo alone, through a gate."""

    of: ClassVar[str]
    gate: ClassVar[str]
    summary: ClassVar[str] = "a map that says nothing of the model"
    style: ClassVar[Style] = "signed"
    needs: ClassVar[frozenset[Need[Any]]] = frozenset({InputGradients()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        assert evidence.logits is not None
        maps = MAPS[self.of](evidence.inputs).double()
        shown = maps / maps.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-12)
        if self.gate == "plain":
            return shown
        noise = torch.stack([hashed(g, evidence.size) for g in evidence[InputGradients()]])
        if self.gate == "noised":
            return shown + noise
        on_top = evidence.logits.argmax(1) == evidence.classes
        return torch.where(on_top[:, None, None], shown, noise)


def hashed(gradient: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Smooth noise ``(H, W)`` of length one that is drawn from a hash of a gradient."""
    digest = hashlib.blake2b(gradient.contiguous().numpy().tobytes(), digest_size=6).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    drawn = torch.randn(1, 1, 8, 8, generator=generator, dtype=torch.float64)
    noise = F.interpolate(drawn, size=list(size), mode="bicubic")[0, 0]
    return noise / noise.norm()


def controls() -> list[Method]:
    """Each map through each gate."""
    made = []
    for of in MAPS:
        for gate in GATES:
            body = {"name": f"{of}, {gate}", "of": of, "gate": gate}
            made.append(dataclass(frozen=True)(type("Control", (Control,), body))())
    return made


# Networks whose exact maps are known


class Linear(nn.Module):
    """Scores that are linear in the pixels, by smooth weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.head = nn.Linear(3 * SIDE * SIDE, CLASSES)
        self.head.weight.data = smooth((CLASSES, 3), seed, SIDE).flatten(1) / 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(x.flatten(1))
        return scores


class Patches(nn.Module):
    """Scores that are sums over the patches of a photo, of what a small network sees in each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.see = nn.Sequential(nn.Conv2d(3, 48, 8, 8), nn.ReLU(), nn.Conv2d(48, 48, 1), nn.ReLU())
        self.say = nn.Linear(48, CLASSES)
        self.say.weight.data *= 60

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.say(self.see(x).mean((2, 3)))
        return scores


def smooth(shape: tuple[int, ...], seed: int, side: int) -> torch.Tensor:
    drawn = torch.randn(*shape, side // 8, side // 8, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(drawn, size=(side, side), mode="bilinear")


RIGHT: Mapping[str, Any] = {
    "linear": (Linear, IntegratedGradients(steps=2, baseline="mean")),  # type: ignore[arg-type]
    "patches": (Patches, HiResCAM(relu=False)),
}


def planted(kind: str, seeds: int, count: int) -> Iterator[Columns]:
    """The figures of right maps of a network that reads marks of a kind; for each seed."""
    from marks import batch, explained
    from networks import accuracy, trained

    side = 32
    model = trained(kind, "residual", side, 0)
    if accuracy(model, *batch(kind, side, "test", 200, 0)) < 0.9:
        raise SystemExit(f"the network for {kind} must learn its rule; train it longer")
    scenes = explained(kind, side, 0)
    for _ in range(seeds):
        xs: list[torch.Tensor] = []
        maps: list[torch.Tensor] = []
        while len(xs) < count:
            scene = next(scenes)
            x = scene.image()
            if int(model(x[None]).argmax()) == scene.label:
                xs.append(x)
                maps.append(scene.mask.float())
        yield figures(model, torch.stack(xs), {kind: torch.stack(maps)}, EFFECTS)


# Figures and tables


def figures(model: Any, x: torch.Tensor, methods: Any, metrics: Any, target: Any = None) -> Columns:
    with muted():
        table = explain.evaluate(model, x, methods, metrics, target=target)
    return {name: {key: of.tolist() for key, of in row.items()} for name, row in table.items()}


def photos_of(folder: Path, part: str, count: int) -> Iterator[tuple[Path, int]]:
    """Photos that begin with the index of their class; or those of Tiny-ImageNet, which have none:
    the network's own best class is explained."""
    listed = folder / "val" / "images"
    paths = sorted((listed if listed.exists() else folder).iterdir())
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(paths), generator=generator)[:count].tolist()
    for number in order:
        yield paths[number], -1 if part != "methods" else int(paths[number].name.split("_")[0])


def lines_of(options: argparse.Namespace, done: Sequence[Any]) -> Iterator[Any]:
    """Yield the lines that are not there yet: a group, its number, and the figures of its photos."""
    known = Counter(line["group"] for line in done)
    if options.part == "methods":
        explainer = explain.Explainer()
        paths = list(photos_of(options.folder, options.part, 10_000))
        right = [(path, label) for path, label in paths if best(explainer, path) == label]
        chosen = right[known["methods"] * AT_ONCE : options.photos]
        for start in range(0, len(chosen), AT_ONCE):
            some = chosen[start : start + AT_ONCE]
            x = torch.cat([explainer.as_input(path) for path, _ in some])
            methods = [*METHODS, *controls()]
            labels = [label for _, label in some]
            yield {
                "group": "methods",
                "figures": figures(explainer.model, x, methods, "check", labels),
            }
        return
    explainer = explain.Explainer("tiny")
    paths = [path for path, _ in photos_of(options.folder, options.part, 10_000)]
    if options.part == "controls":
        for start in range(known["controls"] * AT_ONCE, options.all, AT_ONCE):
            x = torch.cat([explainer.as_input(path) for path in paths[start : start + AT_ONCE]])
            yield {
                "group": "controls",
                "figures": figures(explainer.model, x, controls(), "check"),
            }
    for seed in range(options.seeds):
        some = paths[seed * options.photos : (seed + 1) * options.photos]
        for name, (make, method) in RIGHT.items() if options.part == "right" else ():
            if seed >= known[name]:
                x = torch.cat([explainer.as_input(path) for path in some])
                x = F.interpolate(x, (SIDE, SIDE), mode="bilinear")
                made = make(seed).eval()
                yield {"group": name, "figures": figures(made, x, {name: method}, "check")}
    for kind in KINDS if options.part == "right" else ():
        for line in planted(kind, options.seeds - known[kind], options.photos):
            yield {"group": kind, "figures": line}


def best(explainer: explain.Explainer, path: Path) -> int:
    with torch.inference_mode():
        return int(explainer.model(explainer.as_input(path)).argmax())


def is_supported(columns: Mapping[str, Sequence[float]]) -> bool:
    """Whether the figures of a method support it; of a map without a method, what is covered
    alone."""
    tensors = {name: torch.tensor(values) for name, values in columns.items()}
    found = supports({"it": tensors})
    least = torch.stack([tensors[name] for name in EFFECTS]).amin(0)
    return found["it"].supported if found else MeanInterval.of(least).low > 0


def joined(lines: Sequence[Any]) -> Columns:
    """The figures of all lines together."""
    columns: Columns = {}
    for line in lines:
        for name, row in line["figures"].items():
            for metric, values in row.items():
                columns.setdefault(name, {}).setdefault(metric, []).extend(values)
    return columns


def batches(lines: Sequence[Any], seeds: int, photos: int) -> Iterator[Columns]:
    """Yield the figures of so many photos at a time: of controls, draws from all photos; of right
    maps, a line for each seed."""
    if lines[0]["group"] != "controls":
        yield from (line["figures"] for line in lines)
        return
    columns = joined(lines)
    count = len(next(iter(next(iter(columns.values())).values())))
    for seed in range(seeds):
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:photos]
        yield {
            name: {metric: [values[i] for i in drawn.tolist()] for metric, values in row.items()}
            for name, row in columns.items()
        }


def table(lines: Sequence[Any], seeds: int, photos: int) -> str:
    """How often each control or right map is supported; of methods, their figures."""
    rows = []
    if any(line["group"] == "methods" for line in lines):
        tensors = {
            name: {metric: torch.tensor(values) for metric, values in row.items()}
            for name, row in joined(lines).items()
        }
        rows.append(["map", "photos", "model", "class", "more than the best control", "supported"])
        for name, support in supports(tensors).items():
            figures = [support.intervals[key] for key in ("mprt-upper", "randomlogit", "best")]
            answer = "yes" if support.supported else "no"
            rows.append([name, str(figures[-1].count), *map(str, figures), answer])
    else:
        hits = defaultdict(list)
        for columns in batches(lines, seeds, photos):
            for name, row in columns.items():
                hits[name].append(is_supported(row))
        rows.append(["map", "batches", "supported"])
        for name, found in hits.items():
            rows.append([name, str(len(found)), f"{sum(found)} ({sum(found) / len(found):.0%})"])
        total = [each for found in hits.values() for each in found]
        rows.append(["all", str(len(total)), f"{sum(total)} ({sum(total) / len(total):.1%})"])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("controls", "right", "methods"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--photos", type=int, default=50)
    parser.add_argument("--all", type=int, default=1000, help="of which photos are drawn")
    parser.add_argument("--count", action="store_true", help="only print the table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    there = options.results.read_text("utf-8").splitlines() if options.results.exists() else []
    done = [json.loads(line) for line in there]
    for line in () if options.count else lines_of(options, done):
        done.append(line)
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    print(table(done, options.seeds, options.photos))


if __name__ == "__main__":
    main()
