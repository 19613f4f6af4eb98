"""Padded sequences in PyTorch's encoder, of which its fast path makes nested tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import LayerError
from explain.hooks import Ablate, HookGroup, capture, intervene
from tests.conftest import Made, settled

PADDED = 4
BLOCKS = ["encoder.layers.0", "encoder.layers.1"]
LAYERS = [*BLOCKS, "encoder.layers.0.self_attn", "encoder.layers.1.linear1", "encoder"]


def read(model: nn.Module, x: Tensor) -> Tensor:
    """The mean of the tokens that no padding mask hides, after two blocks."""
    tokens = model.patches(x).flatten(2).mT
    hidden = torch.arange(tokens.shape[1]) >= tokens.shape[1] - PADDED
    tokens = model.encoder(tokens, src_key_padding_mask=hidden.expand(len(x), -1))
    return model.head(tokens[:, :-PADDED].mean(1))


@pytest.fixture(params=[False, True], ids=["trainable", "frozen"])
def padded(request: pytest.FixtureRequest) -> nn.Module:
    block = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    parts = {
        "patches": nn.Conv2d(3, 8, 4, 4),
        "encoder": nn.TransformerEncoder(block, 2),
        "head": nn.Linear(8, 5),
    }
    return settled(Made(read, **parts)).double().eval().requires_grad_(not request.param)


def photos() -> Tensor:
    return torch.rand(2, 3, 16, 16, dtype=torch.float64)


def outputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What the layers give, in plain tensors: the fast path is not for tensors with gradients."""
    found = {}

    def keep(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            assert isinstance(tensor, Tensor)
            found[name] = tensor

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in LAYERS]
    torch.backends.mha.set_fastpath_enabled(False)
    found["score"] = model(x)
    torch.backends.mha.set_fastpath_enabled(True)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_captured_without_gradients(padded: nn.Module, layer: str) -> None:
    x = photos()
    with torch.no_grad(), capture(padded, layer) as seen:
        padded(x)
    assert_close(seen.activations[layer], outputs(padded, x)[layer].detach())
    assert torch.backends.mha.get_fastpath_enabled()


def test_hooks_and_interventions_meet_plain_tensors(padded: nn.Module) -> None:
    x = photos()
    shapes = []
    with torch.no_grad(), HookGroup(padded) as group:
        group.forward("encoder.layers.0", lambda module, args, output: shapes.append(output.shape))
        padded(x)
    assert shapes == [(2, 16, 8)]
    with torch.no_grad(), intervene(padded, Ablate("encoder.layers.1")):
        ablated = padded(x)
    assert_close(ablated, padded.head.bias.detach().expand(2, -1))


@pytest.mark.parametrize("layer", BLOCKS)
def test_maps_of_layers_are_those_of_plain_gradients(padded: nn.Module, layer: str) -> None:
    x = photos()
    maps = explain.attribute(padded, x, ["hirescam", "eigencam"], target=3, layer=layer)
    found = outputs(padded, x.clone().requires_grad_())
    (gradient,) = torch.autograd.grad(found["score"][:, 3].sum(), found[layer])
    expected = (found[layer] * gradient).sum(2).reshape(2, 4, 4)
    assert_close(maps["hirescam"].values, expected.detach())
    assert maps["eigencam"].values.shape == (2, 4, 4)
    chosen = explain.attribute(padded, x, "hirescam", target=3)
    assert chosen.layer == "encoder.layers.0"


def test_a_layer_that_gives_a_nested_tensor_is_left_out_or_refused() -> None:
    def unequal(layer: nn.Module, maps: Tensor) -> Tensor:
        return torch.nested.nested_tensor([*maps.flatten(2).mT])

    def classes(model: nn.Module, x: Tensor) -> Tensor:
        tokens = model.nested(model.maps(x)).to_padded_tensor(0.0)
        return model.head(tokens.mean(1))

    parts = {"maps": nn.Conv2d(3, 8, 4, 4), "nested": Made(unequal), "head": nn.Linear(8, 5)}
    model = settled(Made(classes, **parts)).double().eval()
    assert explain.attribute(model, photos(), "eigencam", target=3).layer == "maps"
    with pytest.raises(LayerError, match="nested"):
        explain.attribute(model, photos(), "eigencam", target=3, layer="nested")
