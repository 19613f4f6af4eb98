"""Networks and photos that were made to show false maps, and what tells these from honest ones.

    python examples/manipulation.py make FILE
    python examples/manipulation.py make FILE --network tiny --folder PHOTOS --steps 100
    python examples/manipulation.py measure FILE > figures.jsonl
    python examples/manipulation.py table figures.jsonl

``make`` trains a small network to find a faint mark, its class, in synthetic photos; or takes a
network that comes along, and a folder of photos, of which it measures those that the network is
surest about and trains on the others. It makes copies of the network that answer as before, but
show a frame in gradients, or nothing or one corner in Grad-CAM (Heo et al. 2019; Anders et al.
2020). ``measure`` moves photos too, by no more than 16/255 of the range at any pixel, until the map
of a method is that of another photo (Ghorbani et al. 2019; Dombrowski et al. 2019): those of this
network, and of one that was trained in noise. It writes lines of JSON: how far maps became what was
wanted, whether the check marks them with ✓ on covering, and what is certified. ``table`` sums up as Markdown, in per
cent with 95 % intervals over maps. A map is false if it is more like the one that was wanted than
like the honest one, by the correlation of what is seen in squares; where nothing was wanted, if it
is zero.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import explain
from explain.attribution.result import Attribution
from explain.methods import Certified
from explain.methods.base import get_method
from explain.metrics import Covering, MeanInterval
from explain.metrics.checking import AHEAD

METHODS = (
    *("saliency", "inputxgradient", "integratedgradients(steps=4)", "smoothgrad(samples=4)"),
    *("guidedbackprop", "lrp", "gradcam", "occlusion(window=16, stride=16)"),
)
SIDE = 32  # pixels, of photos
MARK = 8
KINDS = 4
CONTRAST = 0.4  # of marks, of the range
SQUARES = 8  # a side, in which maps are compared
BATCH = 32
NOISE = 0.15  # of the range of the photos that a network is trained on, at most
KEPT = 0.5  # the weight of answers beside that of maps, where networks are trained to show others
LIMIT = 16 / 255  # the largest change of a pixel, of the range
BETA = 20.0  # of the softplus that stands for a ReLU: it has second derivatives
COPIES = 100  # noisy ones, for certificates


# The network, and its photos


def photos(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Clouds of colours ``(N, 3, 32, 32)`` with one of four marks at a random place, which is the
    class ``(N,)``."""
    generator = torch.Generator().manual_seed(seed)
    clouds = torch.zeros(count, 3, SIDE, SIDE)
    for cells in (4, 8, 32):
        noise = torch.randn(count, 3, cells, cells, generator=generator)
        clouds += F.interpolate(noise, size=SIDE, mode="bilinear") / 3
    x = 0.5 + 0.25 * clouds
    ramp = torch.arange(MARK)
    lines = ramp // 2 % 2 == 0
    patterns = torch.stack(
        [
            lines[:, None].expand(MARK, MARK),
            lines[None, :].expand(MARK, MARK),
            lines[:, None] ^ lines,
            (ramp[:, None] - ramp).abs() < 2,
        ]
    ).float()
    labels = torch.randint(0, KINDS, (count,), generator=generator)
    places = torch.randint(0, SIDE - MARK + 1, (count, 2), generator=generator).tolist()
    for i, (top, left) in enumerate(places):
        x[i, :, top : top + MARK, left : left + MARK] += CONTRAST * (patterns[labels[i]] - 0.5)
    return x.clamp(0, 1), labels


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((3, 16, 1), (16, 32, 2), (32, 64, 2), (64, 64, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, KINDS))


def trained(steps: int, most_noise: float) -> nn.Module:
    """A network that finds the mark; with noise in its photos, as usual for certificates."""
    torch.manual_seed(0)
    model = network()
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        x, labels = photos(BATCH, 1000 + step)
        noise = most_noise * torch.rand(BATCH, 1, 1, 1) * torch.randn_like(x)
        loss = F.cross_entropy(model(x + noise), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval().requires_grad_(False)


# False maps


def frame(height: int, width: int) -> Tensor:
    """Where a network shall show everything, ``(H, W)`` of 0 and 1: a quarter of the photo."""
    down = (torch.arange(height) + 0.5) / height
    across = (torch.arange(width) + 0.5) / width
    middle = ((down - 0.5).abs() < 7 / 16)[:, None] & ((across - 0.5).abs() < 7 / 16)
    return (~middle).float()


def corner(height: int, width: int) -> Tensor:
    """A seventh of the photo, upper left, ``(H, W)`` of 0 and 1."""
    down = (torch.arange(height) + 0.5) / height
    across = (torch.arange(width) + 0.5) / width
    return ((down < 3 / 8)[:, None] & (across < 3 / 8)).float()


WANTED: dict[str, tuple[str, Callable[[int, int], Tensor]]] = {
    "frame": ("saliency", frame),
    "nothing": ("gradcam(relu=False)", torch.zeros),
    "corner": ("gradcam(relu=False)", corner),
}
"""What networks are trained to show, and in whose maps."""
SHIFT = "shift"
"""The network whose logits are shifted."""


def strengths(
    model: nn.Module, x: Tensor, method: str, target: Tensor, graph: bool = True
) -> Tensor:
    """What a map shows at each place, ``(N, h, w)``, with its graph."""
    values = explain.attribute(model, x, method, target=target, create_graph=graph).values
    return values if values.ndim == 3 else values.abs().sum(1)


def fooled(
    model: nn.Module, name: str, batch: Callable[[int], Tensor], steps: int, rate: float
) -> nn.Module:
    """A copy of a network that shows what is wanted, and answers as before, on batches of photos
    by their number. Where it is wanted, maps shall be as large as they are on average; and
    elsewhere as far below zero, or zero if they have no signs."""
    method, wanted = WANTED[name]
    false = deepcopy(model).requires_grad_()
    optimiser = torch.optim.Adam(false.parameters(), lr=rate)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for step in range(steps):
        x = batch(step)
        with torch.no_grad():
            answers = model(x)
        target = answers.argmax(1)
        map_ = strengths(false, x, method, target)
        values = map_ / map_.abs().mean((1, 2), keepdim=True).clamp(min=1e-12)
        there = wanted(*map_.shape[1:])
        slack = torch.where(there > 0, 1 - values, 1 + values).relu()
        weights = there / there.sum().clamp(min=1) + (1 - there) / (1 - there).sum()
        off = (slack * weights).sum((1, 2)).mean()  # both parts count the same
        kept = F.kl_div(false(x).log_softmax(1), answers.softmax(1), reduction="batchmean")
        loss = off + KEPT * kept
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        falling.step()
        if step % 20 == 19:
            told = f"off the wanted map {off.item():.3f}, off the answers {kept.item():.4f}"
            print(f"{name}, step {step + 1}: {told}", flush=True)
    return false.requires_grad_(False)


def shifted(model: nn.Module) -> nn.Module:
    """A copy whose logits are all lower by the same weighted sum of the last features, so that
    probabilities stay. The weight of each feature is below zero then for every class, and Grad-CAM
    of a logit shows nothing; without any training."""
    false = deepcopy(model)
    last = [module for module in false.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        last.weight -= last.weight.amax(0) + last.weight.abs().mean()
    return false


def smooth(model: nn.Module) -> nn.Module:
    """A copy of a network with softplus in place of each ReLU."""
    copy = deepcopy(model)
    for parent in list(copy.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.ReLU):
                setattr(parent, name, nn.Softplus(beta=BETA))
    return copy


def seen(maps: Tensor) -> Tensor:
    """Maps ``(N, h, w)`` by their means in squares."""
    return F.adaptive_avg_pool2d(maps, SQUARES)


def alike(maps: Tensor, others: Tensor) -> Tensor:
    """The correlation of each map ``(N, h, w)`` with another: ``(N,)``; 0 for one that is flat."""
    a, b = (each.flatten(1) - each.flatten(1).mean(1, keepdim=True) for each in (maps, others))
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp(min=1e-12)


def moved(model: nn.Module, x: Tensor, method: str, steps: int, limit: float = LIMIT) -> Tensor:
    """Photos ``(N, C, H, W)``, changed by at most ``limit`` of the range at any pixel so that each
    one's map is that of the next photo, while answers stay."""
    with torch.no_grad():
        answers = model(x)
    target = answers.argmax(1)
    wanted = seen(strengths(model, x, method, target, graph=False)).roll(-1, 0)
    surrogate = smooth(model)
    largest = limit * float(x.max() - x.min())
    change = torch.zeros_like(x)
    best = change.clone()
    best_value = torch.full((len(x),), -torch.inf)
    for step in range(steps + 1):
        maps = strengths(model, x + change, method, target, graph=False)
        value = alike(seen(maps), wanted)
        value[model(x + change).argmax(1) != target] = -torch.inf
        is_better = value > best_value
        best[is_better] = change[is_better]
        best_value[is_better] = value[is_better]
        if step == steps:
            break
        inputs = (x + change).requires_grad_()
        maps = strengths(surrogate, inputs, method, target)
        told = surrogate(inputs).log_softmax(1)
        away = F.kl_div(told, answers.softmax(1), reduction="sum")
        loss = away - 4 * alike(seen(maps), wanted).sum()
        (slope,) = torch.autograd.grad(loss, inputs)
        rate = 0.2 if step < steps // 2 else 0.05
        change = (change - rate * largest * slope.sign()).clamp(-largest, largest)
    return x + best


# What tells them from honest ones


@dataclass(frozen=True)
class Case:
    """A manipulation: the network and the photos ``(N, C, H, W)`` before and after it, and the maps
    ``(N, H, W)`` that were wanted."""

    name: str
    honest: tuple[nn.Module, Tensor]
    false: tuple[nn.Module, Tensor]
    wanted: Tensor


def cases(networks: dict[str, nn.Module], x: Tensor, method: str, steps: int) -> Iterator[Case]:
    """The manipulations of a method's maps; of photos only where maps have a gradient."""
    plain = networks["plain"]
    shapes = {name: shape for name, (_, shape) in WANTED.items()} | {SHIFT: torch.zeros}
    for name in [name for name in shapes if name in networks]:
        wanted = shapes[name](*x.shape[2:]).expand(len(x), -1, -1)
        yield Case(name, (plain, x), (networks[name], x), wanted)
    if method.startswith("occlusion"):
        return
    for name in ("plain", "noisy"):
        if name not in networks:
            continue
        model = networks[name]
        target = model(x).argmax(1)
        wanted = explain.attribute(model, x, method, target=target).heatmap.roll(-1, 0)
        changed = moved(model, x, method, steps)
        yield Case(f"photo, {name}", (model, x), (model, changed), wanted)


def covered(model: nn.Module, x: Tensor, a: Attribution) -> list[bool]:
    """Whether the check marks each photo's map with ✓ on covering; never one of zeros."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", explain.ExplainWarning)
        parts = explain.evaluate(model, x, {"map": a}, Covering()).results["map"]["covering"].parts
    ahead = (parts["marked"][:, None] < parts["others"]).double().mean(1) >= AHEAD
    return (ahead & (a.values.flatten(1).abs().amax(1) > 0)).tolist()


def measured(manipulated: Iterable[Case], method: str, certified: int) -> Iterator[dict[str, Any]]:
    """Figures of each manipulation and photo; of those that move, the first are certified."""
    surely = Certified(get_method(method), samples=COPIES)
    before: dict[nn.Module, tuple[Attribution, list[bool]]] = {}
    for case in manipulated:
        (model, photo), (false, changed) = case.honest, case.false
        answers, others = model(photo).softmax(1), false(changed).softmax(1)
        target = answers.argmax(1)
        if model not in before:
            a = explain.attribute(model, photo, method, target=target)
            before[model] = a, covered(model, photo, a)
        a, is_covered = before[model]
        b = explain.attribute(false, changed, method, target=target)
        is_covered_now = covered(false, changed, b)
        honest, shown = a.heatmap, b.heatmap
        to_honest, to_wanted, at_first = (
            alike(seen(one), seen(other)).tolist()
            for one, other in (
                (shown, honest),
                (shown, case.wanted),
                (honest, case.wanted),
            )
        )
        count = 0 if false is not model else certified
        if count:
            sure, sure_now = (
                explain.attribute(model, x[:count], surely, target=target[:count]).values
                for x in (photo, changed)
            )
        for i in range(len(photo)):
            # nearer to what was wanted than to the honest map
            is_false = to_wanted[i] > to_honest[i] if case.wanted[i].any() else not shown[i].any()
            row = {
                "case": case.name,
                "method": method.split("(")[0],
                "photo": i,
                "same answer": float(others[i].argmax() == target[i]),
                "change of the answer": float((others[i] - answers[i]).abs().max()),
                "norm": float((changed[i] - photo[i]).norm()),
                "to honest": to_honest[i],
                "to wanted": to_wanted[i],
                "at first": at_first[i],
                "false": bool(is_false),
                "before": is_covered[i],
                "after": is_covered_now[i],
            }
            if i < count:
                was, is_now = sure[i], sure_now[i]
                opposite = (was * is_now < 0).sum() / (was != 0).sum().clamp(min=1)
                row["certified before"] = float((was != 0).double().mean())
                row["certified after"] = float((is_now != 0).double().mean())
                row["opposite"] = float(opposite)
            yield row


def percent(values: list[float]) -> str:
    """The mean of some shares and its 95 % interval, in per cent; Wilson's, of truth values."""
    count = len(values)
    if not count:
        return "–"
    mean = sum(values) / count
    if not isinstance(values[0], bool):
        interval = MeanInterval.of(torch.tensor(values))
        return f"{100 * mean:.0f} ± {100 * interval.half:.0f}"
    middle = (mean + 1.92 / count) / (1 + 3.84 / count)
    half = 1.96 * (mean * (1 - mean) / count + 0.96 / count**2) ** 0.5 / (1 + 3.84 / count)
    return f"{100 * mean:.0f} ({100 * max(0, middle - half):.0f}–{100 * min(1, middle + half):.0f})"


WHEN = ("after", "before")  # a photo or its network was manipulated


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How many maps are false, by method and manipulation; and what is said of the false ones."""
    names = list(dict.fromkeys(row["case"] for row in rows))
    figures = {
        "certified": "certified before",
        "of a moved photo": "certified after",
        "turned": "opposite",
    }
    if not any("opposite" in row for row in rows):
        figures = {}
    head = ("method", *names, *figures)
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for method in dict.fromkeys(row["method"] for row in rows):
        group = [row for row in rows if row["method"] == method]
        shares = [[row["false"] for row in group if row["case"] == name] for name in names]
        sure = [row for row in group if "opposite" in row and row["case"] == "photo, plain"]
        cells = [percent(share) for share in shares]
        cells += [percent([row[figure] for row in sure]) for figure in figures.values()]
        yield f"| {method} | {' | '.join(cells)} |"
    yield ""
    head = (
        *("manipulated", "answers kept", "false maps", "✓ covering", "their honest twins"),
        *("✓ of the other maps", "before"),
    )
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for name in names:
        group = [row for row in rows if row["case"] == name]
        false = [row for row in group if row["false"]]
        others = [row for row in group if not row["false"]]
        marks = [percent([row[w] for row in of]) for of in (false, others) for w in WHEN]
        kept = percent([bool(row["same answer"]) for row in group])
        yield f"| {' | '.join((name, kept, str(len(false)), *marks))} |"


def copies(
    networks: dict[str, nn.Module],
    batch: Callable[[int], Tensor],
    steps: dict[str, int],
    rate: float,
) -> dict[str, nn.Module]:
    """The networks, and copies of the plain one that show what is wanted, or have other logits."""
    plain = networks["plain"]
    false = {name: fooled(plain, name, batch, steps[name], rate) for name in WANTED}
    return networks | false | {SHIFT: shifted(plain)}


def synthetic(count: int, steps: int) -> tuple[dict[str, nn.Module], Tensor]:
    """A small network, one trained in noise, and copies, with photos to measure on."""
    networks = {"plain": trained(steps, 0.0), "noisy": trained(steps, NOISE)}

    def batch(step: int) -> Tensor:
        return photos(BATCH, 10**6 + step)[0]

    of_each = {"frame": round(1.6 * steps), "nothing": steps, "corner": steps}
    return copies(networks, batch, of_each, 2e-3), photos(count, 7)[0]


def real(network: str, folder: Path, count: int, steps: int) -> tuple[dict[str, nn.Module], Tensor]:
    """A network that comes along, and copies, with those photos that it is surest about."""
    explainer = explain.Explainer(network)
    model = explainer.model.eval().requires_grad_(False)
    x = torch.stack([explainer.as_input(str(path))[0] for path in sorted(folder.glob("*.jp*g"))])
    order = model(x).softmax(1).amax(1).argsort(descending=True)
    measured_on, others = x[order[:count]], x[order[count:]]
    generator = torch.Generator().manual_seed(0)

    def batch(_: int) -> Tensor:
        some = others[torch.randperm(len(others), generator=generator)[: BATCH // 4]]
        is_turned = torch.rand(len(some), 1, 1, 1, generator=generator) < 0.5
        return torch.where(is_turned, some.flip(3), some)

    return copies({"plain": model}, batch, dict.fromkeys(WANTED, steps), 5e-4), measured_on


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("make", "measure", "table"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument("--network", help="that comes along, such as tiny")
    parser.add_argument("--folder", type=Path, help="of the photos of this network")
    parser.add_argument("--photos", type=int, default=30, help="to measure on")
    parser.add_argument("--moves", type=int, default=60, help="steps by which photos are moved")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--certified", type=int, default=20, help="photos, of these")
    options = parser.parse_args()
    if bool(options.network) != bool(options.folder):
        parser.error("--network and --folder go together")
    if options.task == "make":
        if options.network:
            made = real(options.network, options.folder, options.photos, options.steps)
        else:
            made = synthetic(options.photos, options.steps)
        torch.save(made, options.file)
    elif options.task == "measure":
        warnings.simplefilter("ignore", explain.ExplainWarning)  # maps of zeros are wanted here
        networks, x = torch.load(options.file, weights_only=False)
        for method in options.methods:
            manipulated = cases(networks, x, method, options.moves)
            for row in measured(manipulated, method, options.certified):
                print(json.dumps(row, ensure_ascii=False), flush=True)
    else:
        lines = options.file.read_text().splitlines()
        for line in table([json.loads(text) for text in lines]):
            print(line)


if __name__ == "__main__":
    main()
