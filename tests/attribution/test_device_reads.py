"""How often a call waits for the device: each number that Python reads from a GPU stops until the
GPU has computed everything before it."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import explain
from explain import ModelError
from explain.engine import recorded_pass
from explain.recording.images import image_numbers, images_elsewhere
from tests.conftest import Made

_READS = (
    "_local_scalar_dense",
    "_unique2",
    "allclose",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "repeat_interleave.Tensor",
    "unique_consecutive",
    "unique_dim",
)
_MASKED = ("index", "index_put", "index_put_")


class Waits(TorchDispatchMode):
    """Counts what waits for a GPU: operations whose results have to be read, and copies from and to
    the host.

    On a CPU, ``tolist``, ``numpy`` and ``cpu`` are no operations, and no copy of a list tells that
    it is meant for a device; so these are counted where Python calls them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts = Counter[str]()
        # the numbers of images are in the memory of the host, whatever device the photos are on
        self.on_host = False
        for function in (image_numbers, images_elsewhere):
            monkeypatch.setattr(recorded_pass, function.__name__, self._on_host(function))
        for name in ("tolist", "numpy", "cpu", "__array__"):
            self._count(monkeypatch, Tensor, name)
        for name in ("tensor", "as_tensor", "from_numpy"):
            self._count(monkeypatch, torch, name)

    def _on_host(self, function: Any) -> Any:
        def uncounted(*args: Any) -> Any:
            self.on_host = True
            found = function(*args)
            self.on_host = False
            return found

        return uncounted

    def _count(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            copies = owner is Tensor or not isinstance(args[0], Tensor)
            self.counts[name] += copies and not self.on_host
            return plain(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        overload = func._schema.overload_name
        by_mask = name.split(".")[0] in _MASKED and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if self.on_host:
            return func(*args, **(kwargs or {}))
        if by_mask or name.split(".")[0] in _READS or f"{name}.{overload}" in _READS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def network(blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(blocks):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)).eval()


def waits(method: str, images: int, blocks: int = 1, **options: Any) -> Counter[str]:
    """What a call waits for, of a model that is known."""
    model = network(blocks)
    x = torch.rand(images, 3, 12, 12)
    explain.attribute(model, x, method, **options)
    with pytest.MonkeyPatch.context() as monkeypatch, Waits(monkeypatch) as count:
        explain.attribute(model, x, method, **options)
    return count.counts


@pytest.mark.parametrize(
    "method", ["gradcam", "saliency", "guidedbackprop", "integratedgradients", "lrp"]
)
def test_a_call_waits_for_the_device_three_times_at_most(method: str) -> None:
    one = waits(method, 1)
    assert 1 <= one.total() <= 3, one
    # neither more images nor more layers nor more batches of rows add to that
    assert waits(method, 5).total() <= 3
    assert waits(method, 2, blocks=6).total() <= 3
    assert waits(method, 2, batch_size=7, target=3).total() <= 3


@pytest.mark.parametrize("method", ["gradcam", "lrp", "occlusion"])
def test_scores_that_are_not_finite_are_refused_with_the_layer_although_read_later(
    method: str,
) -> None:
    model = network(1)
    model[2].weight.data[0, 0] = torch.nan
    with pytest.raises(ModelError, match=r"finite scores.* in layer '2'"):
        explain.attribute(model, torch.rand(2, 3, 12, 12), method)


@pytest.mark.parametrize("method", ["integratedgradients", "occlusion"])
def test_altered_photos_whose_scores_are_not_finite_are_refused_with_the_layer(method: str) -> None:
    of_bright = Made(lambda model, x: x / (x.amax((1, 2, 3), keepdim=True) > 0.7).float())
    x = torch.full((2, 3, 12, 12), 0.5)
    x[..., 0, 0] = 1
    with pytest.raises(ModelError, match=r"finite scores.* in layer '0'"):
        explain.attribute(nn.Sequential(of_bright, *network(1)), x, method)
