"""Random networks whose modules pass containers to each other, explained at every module against
plain autograd.

Modules append to the caller's container, take out of it, write over what is in it, and return it.
`made` draws such a network; `check` compares its explanations with plain gradients of the same
steps without anything in place.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
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


KINDS: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "ordered": OrderedDict,
    "in a list": lambda: [[]],
    "in a dict": lambda: {"skips": []},
    "in a tuple": lambda: ([], "text"),
    "dataclass": Held,
}
STEPS = ("append", "append double", "append double", "add", "take out", "write over", "halve")
WAYS: dict[str, Callable[[Tensor, Any], Any]] = {
    "alone": lambda x, state: x,
    "tuple": lambda x, state: (x, state),
    "dict": lambda x, state: {"out": x, "state": state},
    "last": lambda x, state: (state, x),
}


def opened(state: Any) -> Any:
    """The list or dictionary that the skips are in."""
    if isinstance(state, dict):
        return state.get("skips", state)
    if isinstance(state, Held):
        return state.skips
    return state[0] if state and isinstance(state[0], list) else state


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
        return WAYS[self.way](x, state)


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
        state = KINDS[self.kind]()
        for part in self.parts:
            out = part(x, state=state) if self.by_keyword else part(x, state)
            if part.way != "alone":
                out = tuple(out.values()) if isinstance(out, dict) else out
                out, back = reversed(out) if part.way == "last" else out
                assert isinstance(back, tuple) or back is state
            x = out
            if self.seen is not None:
                self.seen.append(x)
        skips = opened(state)
        skips = skips.values() if isinstance(skips, dict) else skips
        maps = [x, *(skip.square() for skip in skips)]
        return sum(self.head(values.mean((2, 3))) for values in maps)


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
        Part(steps(3), steps(4), draw.choice([*WAYS]), draw.random() < 0.5)
        for _ in range(draw.randrange(2, 5))
    ]
    return Net(draw.choice([*KINDS]), parts, draw.random() < 0.3).double().eval()


def plain(net: Net, x: Tensor, target: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return the scores; the photos and the maps of every part; and their gradients, with nothing
    in place."""
    twin = copy.deepcopy(net)
    for part in twin.parts:
        part.pure = True  # type: ignore[assignment]
    twin.seen = [x.clone().requires_grad_()]
    scores = twin(twin.seen[0])[:, target]
    gradients = torch.autograd.grad(
        scores.sum(), twin.seen, allow_unused=True, materialize_grads=True
    )
    return scores.detach(), [maps.detach() for maps in twin.seen], [*gradients]


def check(seed: int) -> int:
    """Compare a network's explanations at every part with the plain computation; return how many
    maps were compared."""
    net = made(seed)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if seed % 3 == 0:
        net.requires_grad_(False)
    scores, maps, gradients = plain(net, x, 1)
    methods = [GradCAM(relu=False), HiResCAM(relu=False), "inputxgradient"]
    compared = 0
    for number, (values, gradient) in enumerate(zip(maps[1:], gradients[1:], strict=True)):
        expected = {
            "gradcam": (gradient.mean((2, 3), keepdim=True) * values).sum(1),
            "hirescam": (gradient * values).sum(1),
            "inputxgradient": maps[0] * gradients[0],
        }
        if not all(values.flatten(1).any(1).all() for values in expected.values()):
            continue  # a map of zeros, of which it is warned
        # with a graph from the photo on, and one that begins at the layer
        for asked in (methods, methods[:2]):
            attributions = explain.attribute(net, x, asked, target=1, layer=f"parts.{number}")
            for name, a in attributions.items():
                what = f"seed {seed}, parts.{number}, {name}"
                assert_close(a.score, scores, rtol=1e-9, atol=1e-12, msg=what)
                assert_close(a.values.double(), expected[name], rtol=1e-9, atol=1e-12, msg=what)
                compared += 1
    return compared
