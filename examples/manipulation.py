"""Networks and photos that were made to show false maps, and what tells these from honest ones.

    python examples/manipulation.py make FILE
    python examples/manipulation.py measure FILE > figures.jsonl
    python examples/manipulation.py table figures.jsonl

``make`` trains a small network to find a faint mark, its class, in synthetic photos; and copies of
it that answer as before, but show a frame in gradients, or nothing in Grad-CAM (Heo et al. 2019;
Anders et al. 2020). ``measure`` moves photos too, by no more than 16/255 of the range at
any pixel, until the map of a method is that of another photo (Ghorbani et al. 2019; Dombrowski et
al. 2019): those of this network, and of one that was trained in noise. It writes lines of JSON: how
far maps became what was wanted, what the check says of them, and what is certified. ``table`` sums
up as Markdown, in per cent with 95 % intervals over maps. A map is false if it is more like the one
that was wanted than like the honest one, by the correlation of what is seen in squares.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import explain
from explain.methods import Certified
from explain.methods.base import get_method
from explain.metrics import MeanInterval
from explain.metrics.checking import check_maps
from explain.targets import as_target

METHODS = (
    *("saliency", "inputxgradient", "integratedgradients(steps=4)", "smoothgrad(samples=4)"),
    *("guidedbackprop", "lrp", "gradcam", "occlusion(window=16, stride=16)"),
)
WANTED = {"frame": "saliency", "nothing": "gradcam"}
"""What networks are trained to show, and in whose maps."""
SIDE = 32  # pixels, of photos
MARK = 8
KINDS = 4
CONTRAST = 0.4  # of marks, of the range
SQUARE = 4  # pixels, in which maps are compared
BATCH = 32
NOISE = 0.15  # of the range of the photos that the network is trained on, at most
STEPS = 60  # by which photos are moved
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


def strengths(model: nn.Module, x: Tensor, method: str, target: Tensor) -> Tensor:
    """What a map shows at each place, ``(N, h, w)``, with its graph."""
    values = explain.attribute(model, x, method, target=target, create_graph=True).values
    return values.clamp(min=0) if values.ndim == 3 else values.abs().sum(1)


def fooled(model: nn.Module, name: str, steps: int) -> nn.Module:
    """A copy of a network that shows what is wanted, and answers as before."""
    false = deepcopy(model).requires_grad_()
    optimiser = torch.optim.Adam(false.parameters(), lr=1e-3)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for step in range(steps):
        x, _ = photos(BATCH, 10**6 + step)
        with torch.no_grad():
            answers = model(x)
        target = answers.argmax(1)
        if name == "frame":
            map_ = strengths(false, x, WANTED[name], target)
            there = map_ * frame(SIDE, SIDE)
            share = there.sum((1, 2)) / map_.sum((1, 2)).clamp(min=1e-12)
            off = -share.clamp(min=1e-3).log().mean()
        else:
            honest = explain.attribute(model, x, WANTED[name], target=target).values
            values = explain.attribute(
                false, x, "gradcam(relu=False)", target=target, create_graph=True
            ).values / honest.amax((1, 2), keepdim=True).clamp(min=1e-12)
            off = (1 + values).relu().mean()  # at most -1
        kept = F.kl_div(false(x).log_softmax(1), answers.softmax(1), reduction="batchmean")
        loss = off + (1.5 if name == "frame" else 4) * kept
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        falling.step()
        if step % 100 == 99:
            told = f"off the wanted map {off.item():.3f}, off the answers {kept.item():.4f}"
            print(f"{name}, step {step + 1}: {told}", flush=True)
    return false.requires_grad_(False)


def smooth(model: nn.Module) -> nn.Module:
    """A copy of a network with softplus in place of each ReLU."""
    copy = deepcopy(model)
    for parent in list(copy.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.ReLU):
                setattr(parent, name, nn.Softplus(beta=BETA))
    return copy


def seen(maps: Tensor, square: int = SQUARE) -> Tensor:
    """Maps ``(N, h, w)`` by their means in squares."""
    return F.avg_pool2d(maps[:, None], square)[:, 0] if square > 1 else maps


def alike(maps: Tensor, others: Tensor) -> Tensor:
    """The correlation of each map ``(N, h, w)`` with another: ``(N,)``; 0 for one that is flat."""
    a, b = (each.flatten(1) - each.flatten(1).mean(1, keepdim=True) for each in (maps, others))
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp(min=1e-12)


def moved(model: nn.Module, x: Tensor, method: str, limit: float = LIMIT) -> Tensor:
    """Photos ``(N, C, H, W)``, changed by at most ``limit`` at any pixel so that each one's map is that
    of the next photo, while answers stay."""
    with torch.no_grad():
        answers = model(x)
    target = answers.argmax(1)
    wanted = strengths(model, x, method, target).detach().roll(-1, 0)
    square = SQUARE if wanted.shape[1:] == x.shape[2:] else 1
    surrogate = smooth(model)
    change = torch.zeros_like(x)
    best = change.clone()
    best_value = torch.full((len(x),), -torch.inf)
    for step in range(STEPS + 1):
        with torch.no_grad():
            maps = explain.attribute(model, x + change, method, target=target).values
            maps = maps.clamp(min=0) if maps.ndim == 3 else maps.abs().sum(1)
            value = alike(seen(maps, square), seen(wanted, square))
            value[model(x + change).argmax(1) != target] = -torch.inf
            is_better = value > best_value
            best[is_better] = change[is_better]
            best_value[is_better] = value[is_better]
        if step == STEPS:
            break
        inputs = (x + change).requires_grad_()
        maps = strengths(surrogate, inputs, method, target)
        told = surrogate(inputs).log_softmax(1)
        away = F.kl_div(told, answers.softmax(1), reduction="sum")
        loss = away - 4 * alike(seen(maps, square), seen(wanted, square)).sum()
        (slope,) = torch.autograd.grad(loss, inputs)
        rate = 0.2 if step < STEPS // 2 else 0.05
        change = (change - rate * limit * slope.sign()).clamp(-limit, limit)
    return x + best


# What tells them from honest ones


@dataclass(frozen=True)
class Case:
    """A manipulation: the network and the photos ``(N, C, H, W)`` before and after it, and the maps
    ``(N, H, W)`` that were wanted, or None for a map of zeros."""

    name: str
    honest: tuple[nn.Module, Tensor]
    false: tuple[nn.Module, Tensor]
    wanted: Tensor | None


def heatmaps(model: nn.Module, x: Tensor, method: str, target: Tensor) -> Tensor:
    return explain.attribute(model, x, method, target=target).heatmap


def cases(networks: dict[str, nn.Module], x: Tensor, method: str) -> Iterator[Case]:
    """The manipulations of a method's maps; of photos only where maps have a gradient."""
    plain = networks["plain"]
    for name in WANTED:
        wanted = None if name == "nothing" else frame(SIDE, SIDE).expand(len(x), SIDE, SIDE)
        yield Case(name, (plain, x), (networks[name], x), wanted)
    if method.startswith("occlusion"):
        return
    for name in ("plain", "noisy"):
        model = networks[name]
        target = model(x).argmax(1)
        wanted = heatmaps(model, x, method, target).roll(-1, 0)
        yield Case(f"photo, {name}", (model, x), (model, moved(model, x, method)), wanted)


def marks(model: nn.Module, x: Tensor, method: str, target: Tensor) -> list[dict[str, str]]:
    """What the check says of each photo's map."""
    found = []
    for image, label in zip(x.split(1), target.tolist(), strict=True):
        attribution = explain.attribute(model, image, method, target=label)
        pair = (get_method(method), attribution)
        check = check_maps(model, image, {method: pair}, as_target(label), "the class")
        found.append({result.name: result.mark for result in check[method]})
    return found


def measured(manipulated: Iterable[Case], method: str, certified: int) -> Iterator[dict[str, Any]]:
    """Figures of each manipulation and photo; the first photos are certified."""
    before: dict[nn.Module, tuple[list[dict[str, str]], Tensor]] = {}
    surely = Certified(get_method(method), samples=COPIES)
    for case in manipulated:
        (model, photo), (false, changed) = case.honest, case.false
        answers, others = model(photo).softmax(1), false(changed).softmax(1)
        target = answers.argmax(1)
        honest = heatmaps(model, photo, method, target)
        shown = heatmaps(false, changed, method, target)
        wanted = torch.zeros_like(honest) if case.wanted is None else case.wanted
        is_zero = shown.flatten(1).amax(1) == 0
        to_honest, to_wanted, at_first = (
            alike(seen(one), seen(other)).tolist()
            for one, other in ((shown, honest), (shown, wanted), (honest, wanted))
        )
        sides = []
        for network, images in (case.honest, case.false):
            known = before.get(network) if images is photo else None
            if known is None:
                answered = explain.attribute(
                    network, images[:certified], surely, target=target[:certified]
                ).values
                known = marks(network, images, method, target), answered
            if network is model and images is photo:
                before[network] = known
            sides.append(known)
        (marks_before, sure_before), (marks_after, sure_after) = sides
        for i in range(len(photo)):
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
                # nearer to what was wanted than to the honest map
                "false": float(is_zero[i]) if case.wanted is None else to_wanted[i] > to_honest[i],
                "before": marks_before[i],
                "after": marks_after[i],
            }
            if i < certified:
                was, is_now = sure_before[i], sure_after[i]
                opposite = (was * is_now < 0).sum() / (was != 0).sum().clamp(min=1)
                row["certified before"] = float((was != 0).double().mean())
                row["certified after"] = float((is_now != 0).double().mean())
                row["opposite"] = float(opposite)
            yield row


def percent(values: list[float]) -> str:
    """The mean of some shares and its 95 % interval, in per cent; Wilson's, if all are 0 or 1."""
    count = len(values)
    if not count:
        return "–"
    mean = sum(values) / count
    if not set(values) <= {0, 1}:
        interval = MeanInterval.of(torch.tensor(values))
        return f"{100 * mean:.0f} ± {100 * interval.half:.0f}"
    middle = (mean + 1.92 / count) / (1 + 3.84 / count)
    half = 1.96 * (mean * (1 - mean) / count + 0.96 / count**2) ** 0.5 / (1 + 3.84 / count)
    return f"{100 * mean:.0f} ({100 * max(0, middle - half):.0f}–{100 * min(1, middle + half):.0f})"


def marked(rows: list[dict[str, Any]], when: str, figure: str) -> str:
    return percent([float(row[when][figure] == "✓") for row in rows])


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How many maps are false, by method and manipulation; and what is said of the false ones."""
    names = list(dict.fromkeys(row["case"] for row in rows))
    head = ("method", *names, "certified", "of a moved photo", "turned")
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for method in dict.fromkeys(row["method"] for row in rows):
        group = [row for row in rows if row["method"] == method]
        shares = [[float(row["false"]) for row in group if row["case"] == name] for name in names]
        sure = [row for row in group if "opposite" in row and row["case"] == "photo, plain"]
        cells = [percent(share) for share in shares]
        figures = ("certified before", "certified after", "opposite")
        cells += [percent([row[figure] for row in sure]) for figure in figures]
        yield f"| {method} | {' | '.join(cells)} |"
    yield ""
    head = (
        *("manipulated", "answers kept", "false maps", "✓ covering", "their honest twins"),
        *("✓ model", "their honest twins", "✓ covering of the other maps", "before"),
    )
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for name in names:
        group = [row for row in rows if row["case"] == name]
        false = [row for row in group if row["false"]]
        others = [row for row in group if not row["false"]]
        cells = [name, percent([row["same answer"] for row in group]), str(len(false))]
        for figure in ("covering", "model"):
            cells += [marked(false, when, figure) for when in ("after", "before")]
        cells += [marked(others, when, "covering") for when in ("after", "before")]
        yield f"| {' | '.join(cells)} |"


def made(steps: int) -> dict[str, nn.Module]:
    """The network, one trained in noise, and those that show what is wanted."""
    networks = {"plain": trained(steps, 0.0), "noisy": trained(steps, NOISE)}
    for name, share in (("frame", 2.4), ("nothing", 1.0)):
        networks[name] = fooled(networks["plain"], name, round(share * steps))
    return networks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("make", "measure", "table"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, default=500, help="of training")
    parser.add_argument("--photos", type=int, default=24)
    parser.add_argument("--certified", type=int, default=20, help="photos, of these")
    options = parser.parse_args()
    if options.task == "make":
        torch.save(made(options.steps), options.file)
    elif options.task == "measure":
        warnings.simplefilter("ignore", explain.ExplainWarning)  # maps of zeros are wanted here
        networks = torch.load(options.file, weights_only=False)
        x, _ = photos(options.photos, 7)
        for method in METHODS:
            for row in measured(cases(networks, x, method), method, options.certified):
                print(json.dumps(row, ensure_ascii=False), flush=True)
    else:
        lines = options.file.read_text().splitlines()
        for line in table([json.loads(text) for text in lines]):
            print(line)


if __name__ == "__main__":
    main()
