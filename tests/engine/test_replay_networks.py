"""Networks of many kinds before a layer: replayed wherever that is exact, and run again or refused
elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import explain
from explain.methods import AblationCAM
from tests.conftest import settled

X = torch.randn(1, 3, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIGNED = AblationCAM(relu=False)
EXACT = {"rtol": 1e-9, "atol": 1e-12}
Between = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """A stem, the layer, and a head; ``between`` says what happens in between, the layer
    included."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.between = between
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layer = nn.Conv2d(6, 6, 3, padding=1)
        self.fc = nn.Linear(6, 5)
        self.turn = 0
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        maps = self.between(self, self.stem(x))
        return self.fc(F.softplus(maps).square().mean((2, 3)))


def counts_rows(net: Any, h: Tensor) -> Tensor:
    """Works behind the layer on as many rows as there were before it."""
    y = net.layer(h)
    for i in range(len(h)):
        y[i] = y[i] * 2 - y[i].mean()
    return y


def in_place_before(net: Any, h: Tensor) -> Tensor:
    size = h.sum((2, 3), keepdim=True)
    h.relu_().add_(1).mul_(size)
    return net.layer(h) + 0.1 * h


def in_place_behind(net: Any, h: Tensor) -> Tensor:
    """Overwrites behind the layer what was made before it."""
    h = h.tanh()
    y = net.layer(h)
    h.mul_(2)
    return y + h


def in_place_by_numpy(net: Any, h: Tensor) -> Tensor:
    h = h.detach().tanh()
    values = h.numpy()
    y = net.layer(h)
    values *= 2
    return y + h


def decides(net: Any, h: Tensor) -> Tensor:
    h = h.tanh() if h.mean() > 0 else h.sigmoid()
    for _ in range(1 + int(h.amax().item() > 0.5)):
        h = h * 1.5
    return net.layer(h) + h


def views(net: Any, h: Tensor) -> Tensor:
    flat = h.view(len(h), 6, -1)
    flat[:, :2] += 1
    rows = torch.stack([row * 2 for row in flat.mT.mT.reshape(h.shape)])
    most, where = h.max(1, keepdim=True)
    return net.layer(rows) + most * (where + 1)


def writes_a_buffer(net: Any, h: Tensor) -> Tensor:
    net.count.fill_(h.square().mean())
    return net.layer(h) * net.count


def counts_calls(net: Any, h: Tensor) -> Tensor:
    net.count += 1
    return net.layer(h) * net.count


def counts_calls_behind(net: Any, h: Tensor) -> Tensor:
    y = net.layer(h)
    net.count += 1
    return y * net.count


def random_behind(net: Any, h: Tensor) -> Tensor:
    h = h * torch.rand(1, dtype=h.dtype)
    return net.layer(h) * torch.rand(1, dtype=h.dtype)


def takes_turns(net: Any, h: Tensor) -> Tensor:
    """Does the same by another function every time."""
    net.turn += 1
    h = h.relu() if net.turn % 2 else h.clamp(min=0)
    return net.layer(h) + h


def shortcut(net: Any, h: Tensor) -> Tensor:
    h = h.tanh()
    return net.layer(h) + h


def parts(net: Any, h: Tensor) -> Tensor:
    """A dictionary of views, one of which is overwritten before it is read as a whole again."""
    of = dict(zip("ab", h.chunk(2, 1), strict=True))
    of["a"].mul_(2)
    of["b"] = of["b"].tanh()
    return net.layer(torch.cat(list(of.values()), 1)) + h


def loop(h: Tensor) -> Tensor:
    for _ in range(2):
        h = h.tanh() if bool(h.mean() > 0) else h.sigmoid()
    return h


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    script: Any = torch.jit.script(loop)


def scripted(net: Any, h: Tensor) -> Tensor:
    return net.layer(script(h)) + h


def foreach(net: Any, h: Tensor) -> Tensor:
    maps = list(h.split(3, 1))
    torch._foreach_mul_(maps, 2)
    out = torch.empty_like(h)
    torch.tanh(h, out=out)
    return net.layer(out) + maps[0].mean()


def into_a_weight(net: Any, h: Tensor) -> Tensor:
    """Writes before the layer into what is there before the pass."""
    net.fc.weight.data[0] = h.mean((2, 3))[0]
    return net.layer(h)


def turned_in_place(net: Any, h: Tensor) -> Tensor:
    """Reads the shape of a tensor that changes in place."""
    count = len(h)
    h.transpose_(0, 1)
    h = h.tanh()
    return net.layer(h.transpose(0, 1) if len(h) != count else h)


def reads_lists(net: Any, h: Tensor) -> Tensor:
    """Chooses by values that were overwritten later."""
    most = max(h.flatten().tolist())
    h.clamp_(max=0.5)
    return net.layer(h.tanh() if most > 1 else h.sigmoid())


REPLAYED: dict[str, Between] = {
    "one behind the other": lambda net, h: net.layer(h.relu()),
    "a shortcut": shortcut,
    "in place before": in_place_before,
    "decides": decides,
    "views": views,
    "takes turns": takes_turns,
    "counts calls behind": counts_calls_behind,
    "parts": parts,
    "scripted": scripted,
    "foreach": foreach,
}
RUN_AGAIN: dict[str, Between] = {
    "in place behind": in_place_behind,
    "in place by NumPy": in_place_by_numpy,
    # rows that are put beside others have to be as many
    "beside": lambda net, h: torch.cat([net.layer(h), h], 2),
    "counts rows": counts_rows,
    "random behind": random_behind,
    # what was written is put back after each pass
    "writes a buffer": writes_a_buffer,
    "counts calls": counts_calls,
    "into a weight": into_a_weight,
    "turned in place": turned_in_place,
    "reads lists": reads_lists,
}
NETWORKS = REPLAYED | RUN_AGAIN


class Stems(TorchDispatchMode):
    """Counts how often the stem's convolution is computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.convolution.default and args[0].shape[1] == 3
        return func(*args, **(kwargs or {}))


def network(between: Between) -> Net:
    model = settled(Net(between)).double().eval()
    explain.attribute(
        model, X, "eigencam", target=1, layer="layer", placement="even"
    )  # looks at the layers
    model.turn = 0
    torch.manual_seed(0)
    return model


def score(model: Net, without: int | None = None) -> tuple[Tensor, Tensor]:
    """The score, with a map of the layer set to zero by a hook; and the maps as they were."""
    maps: list[Tensor] = []

    def zeroed(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        maps.append(output.clone())
        numbers = torch.arange(output.shape[1])[:, None, None]
        return output if without is None else output * (numbers != without)

    count = model.count.clone()
    state = torch.get_rng_state()
    with torch.no_grad(), model.layer.register_forward_hook(zeroed):
        output = model(X)[0, 1]
        model.count.copy_(count)
    torch.set_rng_state(state)
    return output, maps[0]


def ablated(model: Net) -> Tensor:
    """Ablation-CAM, signed, with a whole pass for each of the maps."""
    full, maps = score(model)
    drops = [(full - score(model, channel)[0]) / full for channel in range(maps.shape[1])]
    return (torch.stack(drops)[:, None, None] * maps).sum(1)


@pytest.mark.parametrize(
    ("name", "batch_size"), [*product(NETWORKS, [None, 4]), ("a shortcut", 1), ("counts rows", 1)]
)
@pytest.mark.filterwarnings("ignore:model draws random numbers")
def test_ablations_equal_the_plain_computation(name: str, batch_size: int | None) -> None:
    expected = ablated(network(NETWORKS[name]))
    model = network(NETWORKS[name])
    with Stems() as stems:
        how = {"layer": "layer", "batch_size": batch_size}
        values = explain.attribute(model, X, SIGNED, target=1, **how, placement="even").values
    assert_close(values, expected, **EXACT)
    # the photo's own pass is kept
    assert (stems.count == 1) == (name in REPLAYED)


def test_what_counts_before_the_layer_is_as_it_was_in_the_pass_of_the_photo() -> None:
    model = network(counts_calls)
    expected = ablated(model)
    count = model.count.clone()
    values = explain.attribute(model, X, SIGNED, target=1, layer="layer", placement="even").values
    assert_close(values, expected, **EXACT)
    assert model.count == count


def test_nothing_is_replayed_past_hooks_of_others() -> None:
    model = network(shortcut)
    expected = ablated(model)
    calls: list[int] = []
    with model.stem.register_forward_hook(lambda module, args, output: calls.append(len(output))):
        values = explain.attribute(
            model, X, SIGNED, target=1, layer="layer", batch_size=2, placement="even"
        ).values
    assert_close(values, expected, **EXACT)
    # the photo, the probe, three pieces, and the probe again
    assert calls == [1] * (1 + 1 + 3 + 1)
