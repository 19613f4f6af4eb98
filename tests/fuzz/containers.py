"""Random networks whose modules pass containers to each other, explained at every module against
plain autograd.

Modules append to the caller's container, take out of it, write over what is in it, and return it.
`made` draws such a network; `check` compares its explanations with plain gradients of the same
steps without anything in place.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import GradCAM, HiResCAM


@dataclass
class Held:
    """A container of the caller's own."""

    skips: list[Any] = field(default_factory=list)
    note: str = "skips"


KINDS = ("list", "dict", "ordered", "in a list", "in a dict", "in a tuple", "dataclass", "twice")
STEPS = ("append", "append double", "append double", "add", "take out", "write over", "halve")
WAYS = ("alone", "tuple", "dict", "last")


def empty(kind: str) -> Any:
    inner: list[Any] = []
    inside = {"in a list": [inner], "in a dict": {"skips": inner}, "in a tuple": (inner, "text")}
    twice = (inner, {"again": inner})
    alone = {
        "list": inner,
        "dict": {},
        "ordered": OrderedDict(),
        "dataclass": Held(inner),
        "twice": twice,
    }
    return {**inside, **alone}[kind]


def opened(state: Any) -> Any:
    """The list or dictionary that the skips are in."""
    if isinstance(state, Held):
        return state.skips
    if isinstance(state, tuple) or (
        isinstance(state, list) and state and isinstance(state[0], list)
    ):
        return state[0]
    return state["skips"] if isinstance(state, dict) and "skips" in state else state


class Part(nn.Module):
    """A convolution and what is done to the container before and after it, in place where ``pure``
    does not forbid."""

    def __init__(self, before: list[Any], after: list[Any], way: str, overwrites: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.before = before
        self.after = after
        self.way = way
        self.overwrites = overwrites
        self.pure = False

    def act(self, steps: list[Any], x: Tensor, skips: Any) -> Tensor:
        for step, number in steps:
            keys = list(skips) if isinstance(skips, dict) else range(len(skips))
            if step == "append":
                self.append(skips, x)
            elif step == "append double":
                self.append(skips, x * 2)
            elif step == "add":
                x = x + skips[keys[number]]
            elif step == "take out":
                x = x - skips.pop(keys[number])
            elif step == "write over":
                skips[keys[number]] = x * 3
            elif self.pure:
                skips[keys[number]] = skips[keys[number]] * 0.5
            else:
                skips[keys[number]].mul_(0.5)
        return x

    @staticmethod
    def append(skips: Any, x: Tensor) -> None:
        if isinstance(skips, dict):
            skips[f"skip {len(skips)} {id(x)}"] = x
        else:
            skips.append(x)

    def forward(self, x: Tensor, state: Any) -> Any:
        x = self.conv(self.act(self.before, x, opened(state)))
        x = x.relu_() if self.overwrites and not self.pure else x.relu()
        x = self.act(self.after, x, opened(state))
        return {
            "alone": x,
            "tuple": (x, state),
            "dict": {"out": x, "state": state},
            "last": (state, x),
        }[self.way]


class Net(nn.Module):
    """Parts that pass one container on; ``seen`` has what each returned, for a plain
    computation."""

    def __init__(self, kind: str, parts: list[Part], by_keyword: bool) -> None:
        super().__init__()
        self.kind = kind
        self.by_keyword = by_keyword
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(3, 4)
        self.seen: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = empty(self.kind)
        for part in self.parts:
            out = part(x, state=state) if self.by_keyword else part(x, state)
            if isinstance(out, tuple):
                out, back = reversed(out) if part.way == "last" else out  # type: ignore[union-attr]
                assert isinstance(back, tuple) or back is state
            elif isinstance(out, dict):
                out, back = out["out"], out["state"]
                assert isinstance(back, tuple) or back is state
            x = out
            if self.seen is not None:
                self.seen.append(x)
        scores: Tensor = self.head(x.mean((2, 3)))
        skips = opened(state)
        for skip in skips.values() if isinstance(skips, dict) else skips:
            scores = scores + self.head(skip.square().mean((2, 3)))
        return scores


def made(seed: int) -> Net:
    """Draw a network; what is in the container is followed, so that autograd can follow what is
    done in place."""
    draw = random.Random(seed)
    mine: list[bool] = []  # of what is in the container: whether it may be overwritten

    def steps(count: int) -> list[Any]:
        found: list[Any] = []
        for _ in range(draw.randrange(count)):
            step = draw.choice(STEPS)
            number = draw.randrange(len(mine)) if mine else 0
            if step in ("append", "append double"):
                mine.append(step != "append")
            elif not mine or (step == "halve" and not mine[number]):
                continue
            elif step == "take out":
                mine.pop(number)
            elif step == "write over":
                mine[number] = True
            found.append((step, number))
        return found

    torch.manual_seed(seed)
    parts = [
        Part(steps(3), steps(4), draw.choice(WAYS), draw.random() < 0.5)
        for _ in range(draw.randrange(2, 5))
    ]
    return Net(draw.choice(KINDS), parts, draw.random() < 0.3).double().eval()


def plain(net: Net, x: Tensor, target: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the scores; the photos and the maps of every part; and their gradients, with nothing
    in place."""
    for part in net.parts:
        part.pure = True  # type: ignore[assignment]
    try:
        with torch.enable_grad():
            net.seen = [x.clone().requires_grad_()]
            scores = net(net.seen[0])
            grads = torch.autograd.grad(scores[:, target].sum(), net.seen, allow_unused=True)
        maps = [each.detach() for each in net.seen]
    finally:
        net.seen = None
        for part in net.parts:
            part.pure = False  # type: ignore[assignment]
    return (
        scores.detach(),
        maps,
        [torch.zeros_like(m) if g is None else g for g, m in zip(grads, maps, strict=True)],
    )


def check(seed: int) -> int:
    """Compare a network's explanations at every part with the plain computation; return how many
    maps were compared."""
    net = made(seed)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if seed % 3 == 0:
        net.requires_grad_(False)
    scores, maps, grads = plain(net, x, 1)
    methods = [GradCAM(relu=False), HiResCAM(relu=False), "inputxgradient"]
    compared = 0
    for number, (each, gradient) in enumerate(zip(maps[1:], grads[1:], strict=True)):
        wanted = {
            "gradcam": (gradient.mean((2, 3), keepdim=True) * each).sum(1),
            "hirescam": (gradient * each).sum(1),
            "inputxgradient": maps[0] * grads[0],
        }
        if not all(value.flatten(1).abs().amax(1).all() for value in wanted.values()):
            continue  # a map of zeros, of which it is warned
        # with a graph from the photo on, and one that begins at the layer
        for asked in (methods, methods[:2]):
            found = explain.attribute(net, x, asked, target=1, layer=f"parts.{number}")
            for name in found:
                told = f"seed {seed}, parts.{number}, {name}"
                assert_close(found[name].score, scores[:, 1], rtol=1e-9, atol=1e-12, msg=told)
                assert_close(
                    found[name].values.double(), wanted[name], rtol=1e-9, atol=1e-12, msg=told
                )
                compared += 1
    return compared
