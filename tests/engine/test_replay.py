"""What lies before a layer runs once, however many altered maps go through what lies behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import explain
from tests.conftest import TinyNet


class _Convolutions(TorchDispatchMode):
    """Notes the rows of every convolution that is computed, by the number of its output
    channels."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func) and "backward" not in str(func):
            self.rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[int]]:
    with _Convolutions() as mode:
        yield mode.rows


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_convolutions_before_the_layer_run_once_more_for_each_image(
    images: int, batch_size: int | None, net: TinyNet, x: torch.Tensor
) -> None:
    # looks at the layer's layout
    explain.attribute(net, x[:images], "ablationcam", target=1, layer="layer2")
    with counted() as rows:
        explain.attribute(
            net, x[:images], "ablationcam", target=1, layer="layer2", batch_size=batch_size
        )
    once = 4  # the convolutions up to and within the layer
    assert rows == [images] * once + [1] * (len(rows) - once)
    assert len(rows) <= once + images * once


@pytest.mark.parametrize("layer", ["layer1", "bn1"])
def test_a_network_that_overwrites_altered_maps_is_replayed_too(
    layer: str, net: TinyNet, x: torch.Tensor
) -> None:
    """TinyNet adds in place to what ``layer1`` gives, and rectifies in place what ``bn1`` gives."""
    # looks at the layer's layout
    expected = explain.attribute(net, x[:1], "ablationcam", target=1, layer=layer)
    with counted() as rows:
        found = explain.attribute(net, x[:1], "ablationcam", target=1, layer=layer, batch_size=2)
    torch.testing.assert_close(found.values, expected.values)
    before = 1 if layer != "layer1" else 3
    behind = len(rows) - (4 + before)
    pieces = 1 + 6 // 2  # the probe, and six maps by two
    assert behind == pieces * (4 - before), rows
