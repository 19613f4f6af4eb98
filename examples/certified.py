"""What certified maps say, and whether attacks can make them wrong.

    python examples/certified.py shares PHOTOS... --samples 200
    python examples/certified.py attack PHOTOS... --samples 200
    python examples/certified.py attack 0 1 2 ... --networks planted
    python examples/certified.py table FILE

``shares`` prints, as lines of JSON, for each photo, network and method the share of the pixels that
are certified, what a plain Bonferroni test of the same copies certifies, and the seconds. ``attack``
looks for changes within the radius that turn most answers, by projected gradient descent through
the maps of noisy copies, and counts the answers that most of other copies of the changed photos
contradict. ``table`` sums up such lines, with 95 % intervals over photos.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist, mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import explain
from explain.layers.placement import draw
from explain.methods import Certified
from explain.methods.base import get_method
from explain.methods.certified import Votes, chances
from explain.methods.wrappers import noises

sys.path.append(str(Path(__file__).resolve().parent))
import manipulation

NETWORKS = ("tiny", "tiny-transformer")
TOGETHER = (
    ("gradcam", "gradcam++", "xgradcam", "layercam", "saliency", "inputxgradient"),
    ("guidedbackprop",),
    ("lrp",),
)
"""Methods whose maps come from the same passes."""
METHODS = tuple(name for names in TOGETHER for name in names)
ATTACKED = ("gradcam", "saliency", "inputxgradient")
ATTACKS = 16  # on each map of the small network that comes with them
FEW = 4  # on each map of the others
STEPS = 4
COPIES = 10  # noisy ones in each step
CHECKED = 100  # other copies, which judge the result
FRESH = 10**6  # the number of the first of these
CHUNK = 20  # copies that run together
MARGIN = 0.999  # of the radius: certificates hold below it


def photos_of(paths: list[str]) -> Iterator[str]:
    for path in paths:
        inside = sorted(map(str, Path(path).glob("*.jp*g")))
        yield from inside or [path]


def noisy(
    x: Tensor, noise: float, first: int, count: int, together: int = CHUNK
) -> Iterator[Tensor]:
    """Noisy copies of a photo ``(1, C, H, W)``, some at a time; ``noise`` is their deviation."""
    for start in range(first, first + count, together):
        numbers = torch.arange(start, min(start + together, first + count))
        yield x + noise * noises(0, numbers, x[0])


def in_top(maps: Tensor, share: float) -> Tensor:
    """Which places of maps ``(b, h, w)`` are larger than all but the ``share`` of the largest."""
    falling = maps.flatten(1).sort(1, descending=True).values
    return maps > falling[:, int(share * falling.shape[1])][:, None, None]


def single_tests(method: Certified, votes: Tensor, copies: int) -> float:
    """The share of places that are certified if each is tested by itself (Bonferroni)."""
    against = torch.minimum(votes, copies - votes)
    chance = chances(copies, method.agreement, votes.numel())
    allowed = int((chance <= (1 - method.confidence) / votes.numel()).sum())
    return float((against < allowed).double().mean())


@lru_cache
def planted() -> nn.Module:
    return manipulation.trained(500, manipulation.NOISE)


def network_of(name: str, photo: str) -> tuple[nn.Module, Tensor]:
    """A network and a photo as its input; "planted" is that of `manipulation`, which was trained
    in noise, and its photos are numbers."""
    if name == "planted":
        return planted(), manipulation.photos(1, int(photo))[0]
    explainer = explain.Explainer(name)
    return explainer.model, explainer.as_input(photo)[0][None]


def norms(changes: Tensor) -> Tensor:
    return changes.flatten(1).norm(dim=1)[:, None, None, None]


def shares(network: str, photo: str, samples: int) -> Iterator[dict[str, Any]]:
    model, x = network_of(network, photo)
    with torch.no_grad():
        target = int(model(x).argmax())
    certified = {name: Certified(get_method(name), samples=samples) for name in METHODS}
    votes = {name: Votes(method) for name, method in certified.items()}
    counts: dict[str, Any] = defaultdict(int)
    seconds = dict.fromkeys(METHODS, 0.0)
    noise = 0.15 * float(x.max() - x.min())
    for copies in noisy(x, noise, 0, samples):
        for names in TOGETHER:
            began = time.perf_counter()
            methods = [certified[name].method for name in names]
            maps = explain.attribute(model, copies, methods, target=target)
            took = time.perf_counter() - began
            for name, attribution in zip(names, maps.values(), strict=True):
                seconds[name] += took / len(names)
                top = in_top(attribution.heatmap, certified[name].share)
                for copy in top:
                    if not votes[name].decided:
                        votes[name].take(votes[name].taken, copy[None])
                counts[name] = counts[name] + top.sum(0)
    for name, method in certified.items():
        answers = votes[name].answers
        yield {
            "kind": "share",
            "network": network,
            "photo": Path(photo).name,
            "method": name,
            "samples": samples,
            "spent": votes[name].taken,
            "in": float((answers == 1).double().mean()),
            "out": float((answers == -1).double().mean()),
            "bonferroni": single_tests(method, counts[name], samples),
            "radius": float(method.radius(x)),
            "seconds": seconds[name],
        }


def attack(network: str, photo: str, samples: int) -> Iterator[dict[str, Any]]:
    model, x = network_of(network, photo)
    with torch.no_grad():
        target = int(model(x).argmax())
    noise = 0.15 * float(x.max() - x.min())
    count, together = (ATTACKS, CHECKED) if network == "planted" else (FEW, CHUNK)
    generator = torch.Generator().manual_seed(0)
    for name in ATTACKED:
        began = time.perf_counter()
        method = Certified(get_method(name), samples=samples)
        a = explain.attribute(model, x, method, target=target)
        answers = a.values[0]
        assert a.radius is not None
        limit = MARGIN * float(a.radius)
        changes = torch.randn(count, *x.shape[1:], generator=generator)
        changes = limit * changes / norms(changes)
        # each attack aims at all places, but at some more than at others
        weights = torch.rand(count, 1, 4, 4, generator=generator)
        aims = F.interpolate(weights, size=answers.shape, mode="bilinear")[:, 0] * answers
        for step in range(STEPS):
            moved = (x + changes).requires_grad_()
            drawn = noise * noises(2, COPIES * step + torch.arange(COPIES), x[0])
            copies = (moved[:, None] + drawn).flatten(0, 1)
            values = explain.attribute(
                model, copies, method.method, target=target, create_graph=True
            ).values
            if a.layer is None:
                maps = values.abs().amax(1) if name == "saliency" else values.sum(1).abs()
            else:
                maps = draw(values.clamp(min=0)[:, None], a.size, a.placement)[:, 0]
            falling = maps.detach().flatten(1).sort(1, descending=True).values
            border = falling[:, int(method.share * falling.shape[1])][:, None, None]
            scale = falling[:, :1, None].clamp(min=1e-12)
            # places near the border count most
            margins = (10 * (maps - border) / scale).tanh()
            (slope,) = torch.autograd.grad(
                (aims.repeat_interleave(COPIES, 0) * margins).sum(), moved
            )
            changes = changes - 0.5 * limit * slope / norms(slope).clamp(min=1e-12)
            changes = changes * (limit / norms(changes)).clamp(max=1)
        for change in changes:
            votes = torch.zeros_like(answers)
            for copies in noisy(x + change, noise, FRESH, CHECKED, together):
                maps = explain.attribute(model, copies, method.method, target=target)
                votes += in_top(maps.heatmap, method.share).sum(0)
            against = torch.where(answers > 0, CHECKED - votes, votes)[answers != 0]
            sure = CHECKED / 2 + NormalDist().inv_cdf(1 - 1e-6) * math.sqrt(CHECKED) / 2
            yield {
                "kind": "attack",
                "network": network,
                "photo": Path(photo).name,
                "method": name,
                "radius": float(a.radius),
                "moved": float(change.norm()),
                "decisions": len(against),
                "turned": int((against > CHECKED / 2).sum()),
                "surely turned": int((against > sure).sum()),
                "most against": float(against.max()) / CHECKED if len(against) else 0.0,
                "seconds": (time.perf_counter() - began) / count,
            }
            began = time.perf_counter()


def interval(values: list[float]) -> str:
    """The mean and a 95 % interval of it, by the normal distribution."""
    spread = 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{mean(values):.3f} ± {spread:.3f}"


def table(path: str) -> None:
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        groups[row["kind"], row["network"], row["method"]].append(row)
    for (kind, network, method), rows in groups.items():
        print(f"| {network} | {method} | {len(rows)} |", end="")
        if kind == "share":
            for column in ("in", "out", "bonferroni", "seconds"):
                print(f" {interval([row[column] for row in rows])} |", end="")
            print(f" {interval([row['in'] + row['out'] for row in rows])} |")
        else:
            for column in ("decisions", "turned", "surely turned"):
                print(f" {sum(row[column] for row in rows):,.0f} |", end="")
            print(f" {max(row['most against'] for row in rows):.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("shares", "attack", "table"))
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    options = parser.parse_args()
    if options.task == "table":
        table(options.paths[0])
        return
    run = shares if options.task == "shares" else attack
    for photo in photos_of(options.paths):
        for network in options.networks:
            for row in run(network, photo, options.samples):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
