"""Interventions equal plain hooks, plain attention with the same edit, and models that are truly
altered."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torchvision.ops import Permute

import explain
from explain.baselines import Mean
from explain.hooks import Ablate, HookGroup, Patch, Project, Replace, Steer, capture, intervene
from explain.hooks.interventions import Intervention
from explain.layers import cell_centres
from tests.conftest import Made, TinyNet, in_threads, settled


def net() -> nn.Module:
    return settled(TinyNet()).double().eval()


def photos(count: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.rand(
        count, 3, 12, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def plain_hook(model: nn.Module, layer: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A plain hook of PyTorch, which replaces what a layer gives until the block ends."""
    part = model.get_submodule(layer)
    return part.register_forward_hook(lambda module, args, output: change(output))


def only(channels: Any, new: Callable[[torch.Tensor], Any], *positions: Any) -> Any:
    """Make something new of some channels and positions alone."""

    def change(output: torch.Tensor) -> torch.Tensor:
        chosen = torch.zeros(output.shape, dtype=torch.bool)
        chosen[:, channels, *positions] = True
        return torch.where(chosen, new(output), output)

    return change


def mean(maps: torch.Tensor) -> torch.Tensor:
    return maps.mean((2, 3), keepdim=True)


EVERY = slice(None)
DIRECTION = torch.linspace(-1, 1, 6, dtype=torch.float64)
QUARTER = torch.full((6, 12, 10), 0.25, dtype=torch.float64)
CASES: dict[str, tuple[Intervention, Callable[[torch.Tensor], torch.Tensor]]] = {
    "channels": (Ablate("layer1", channels=[1, 4]), only([1, 4], lambda maps: 0.0)),
    "mean": (Ablate("layer1", by="mean", channels=[2]), only(2, mean)),
    "baseline": (Ablate("layer1", by=Mean(), channels=[2]), only(2, mean)),
    "steer": (Steer("layer1", DIRECTION, 2.5), lambda maps: maps + 2.5 * DIRECTION[:, None, None]),
    "patch": (Patch("layer1", QUARTER, channels=[0]), only(0, lambda maps: 0.25)),
    "replace": (Replace("layer1", torch.tanh), torch.tanh),
    "positions": (
        Ablate("layer1", positions=[(0, 3), (11, 9)]),
        only(EVERY, lambda maps: 0.0, [0, 11], [3, 9]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_intervention_is_bit_equal_to_a_plain_hook(name: str) -> None:
    model = net()
    x = photos()
    intervention, change = CASES[name]
    with intervene(model, [intervention]):
        found = model(x)
    with plain_hook(model, "layer1", change):
        assert torch.equal(found, model(x))
    assert not torch.equal(found, model(x))


def test_a_region_of_the_photo_is_the_positions_whose_centres_are_in_it() -> None:
    model = net()
    x = photos()
    rows, columns = cell_centres(model, x, "layer2").unbind(-1)
    inside = (rows >= 3) & (rows < 8) & (columns >= 2) & (columns < 7)
    assert 4 <= int(inside.sum()) <= 9  # layer2 has half the photo's size
    with intervene(model, [Ablate("layer2", region=(2, 3, 7, 8))]):
        found = model(x)
    with plain_hook(model, "layer2", lambda maps: torch.where(inside, 0.0, maps)):
        assert torch.equal(found, model(x))


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def plain_attention(
    layer: nn.MultiheadAttention, x: torch.Tensor, **edits: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Attention by hand, whose parts are edited: an independent reference."""
    projected = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    parts = {
        name: part.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for name, part in zip("qkv", projected, strict=True)
    }
    q, k, v = (edits.get(name, unchanged)(part) for name, part in parts.items())
    pattern = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    heads = edits.get("heads", unchanged)(edits.get("pattern", unchanged)(pattern) @ v)
    return layer.out_proj(heads.transpose(1, 2).flatten(2))


def by_einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    weights = torch.einsum("bihd, bjhd -> bhij", q, k).softmax(-1)
    return torch.einsum("bjhd,bhij->bihd", v, weights).transpose(1, 2)


MIXED: dict[str, Callable[..., torch.Tensor]] = {
    "fused": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1),
    "eager": lambda q, k, v: torch.matmul((q @ k.transpose(-2, -1)).softmax(dim=-1), v),
    "reversed": lambda q, k, v: (
        (v.mT @ F.dropout(nn.Softmax(-1)(q @ k.mT), 0.5, False).permute(0, 1, 3, 2)).mT
    ),
    "einsum": by_einsum,
}


class Eager(nn.Module):
    """The same attention as code, mixed in one of the ways above."""

    def __init__(self, of: nn.MultiheadAttention, kind: str) -> None:
        super().__init__()
        self.of = of
        self.mix = MIXED[kind]
        self.num_heads = of.num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = F.linear(x, self.of.in_proj_weight, self.of.in_proj_bias)
        q, k, v = parts.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = self.mix(q * q.shape[-1] ** -0.5, k, v)
        return self.of.out_proj(mixed.transpose(1, 2).flatten(2))


def multihead(of: nn.MultiheadAttention, *, weights: bool) -> nn.Module:
    return Made(lambda model, x: model.of(x, x, x, need_weights=weights)[0], of=of)


@pytest.mark.parametrize("part", ["q", "k", "v", "pattern", "heads"])
@pytest.mark.parametrize(
    "kind",
    [
        "fused",
        "eager",
        "reversed",
        "einsum",
        "module",
        "module with weights",
        "module on the fast path",
    ],
)
@pytest.mark.parametrize("units", [{"tokens": [0, 2]}, {"heads": [0], "tokens": [3]}])
def test_every_part_of_an_attention_is_replaced(
    part: str, kind: str, units: dict[str, list[int]]
) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    x = torch.rand(3, 5, 8, dtype=torch.float64)
    model = nn.Sequential(
        multihead(layer, weights=kind == "module with weights")
        if "module" in kind
        else Eager(layer, kind)
    ).eval()

    heads = units.get("heads", [0, 1])

    def zeroed(tensor: torch.Tensor) -> torch.Tensor:
        edited = tensor.clone()
        for head in heads:
            edited[:, head, units["tokens"]] = 0
        return edited

    ablate = Ablate(f"0:{part}", **units)
    with torch.set_grad_enabled(kind != "module on the fast path"), intervene(model, [ablate]):
        output = model(x)
    expected = plain_attention(layer, x, **{part: zeroed})
    assert_close(output, expected, rtol=0, atol=1e-14)
    assert not torch.allclose(output, model(x))


def test_a_hook_group_and_a_capture_see_the_parts_of_an_attention() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    model = nn.Sequential(multihead(layer, weights=False))
    x = torch.rand(1, 5, 8, dtype=torch.float64)
    kept: list[torch.Tensor] = []
    output = plain_attention(layer, x, pattern=lambda weights: kept.append(weights) or weights)
    (gradient,) = torch.autograd.grad(output[0, 2, 3], kept[0])
    seen: list[torch.Tensor] = []
    with HookGroup(model) as group:
        group.forward("0:pattern", lambda module, args, weights: seen.append(weights))
        model(x)
    assert_close(seen, kept)
    with capture(model, ["0:pattern", "0:heads"]) as captured:
        model(x)[0, 2, 3].backward()
    assert_close(captured.activations["0:pattern"], kept[0].detach())
    assert_close(captured.gradients["0:pattern"], gradient)
    with torch.inference_mode(), capture(model, "0:pattern", gradients=False) as captured:
        model(x)
    assert_close(captured.activations["0:pattern"], kept[0].detach())


def altered(model: nn.Module, channel: int) -> nn.Module:
    """A model whose layer1 truly gives zero in a channel."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        made.layer1[2].weight[channel] = 0
        made.layer1[2].bias[channel] = 0
    return made


METHODS = [
    "gradcam",
    "saliency",
    "guidedbackprop",
    "integratedgradients",
    "deeplift",
    "lrp",
    "fullgrad",
    "scorecam",
    "occlusion(window=4, stride=4)",
    "eigencam",
]


@pytest.mark.parametrize("method", METHODS)
def test_explanations_of_an_ablated_model_are_those_of_a_truly_altered_one(method: str) -> None:
    model = net()
    x = photos(1)
    with intervene(model, [Ablate("layer1", channels=[3])]):
        found = explain.attribute(model, x, method, target=1, placement="even")
    expected = explain.attribute(altered(model, 3), x, method, target=1, placement="even")
    # its stabiliser grows with the layer's largest value
    tolerance = 1e-6 if method == "lrp" else 1e-9
    assert_close(found.values, expected.values, rtol=tolerance, atol=tolerance / 10)
    assert_close(found.score, expected.score)


def test_layers_of_an_inserted_module_have_names_and_are_explained_and_ablated() -> None:
    model = net()
    x = photos(1)
    encoder = nn.Sequential(nn.Conv2d(6, 9, 1), nn.ReLU())
    sae = Made(lambda model, x: model.decoder(model.encoder(x)), encoder=encoder)
    sae.decoder = nn.Conv2d(9, 6, 1)
    settled(sae, seed=5).double()
    with intervene(model, [Replace("layer1", sae, name="sae")]):
        with capture(model, "layer1/sae.encoder") as seen:
            model(x)[0, 2].backward()
        found = explain.attribute(
            model, x, "gradcam(relu=False)", target=2, layer="layer1/sae.encoder"
        )
        with intervene(model, [Ablate("layer1/sae.encoder", channels=[4])]):
            ablated = model(x)
    latents = seen.activations["layer1/sae.encoder"]
    gradients = seen.gradients["layer1/sae.encoder"]
    expected = (latents * gradients.mean((2, 3), keepdim=True)).sum(1)
    assert_close(found.values, expected)

    def without(output: torch.Tensor) -> torch.Tensor:
        code = sae.encoder(output).clone()
        code[:, 4] = 0
        return sae.decoder(code)

    with plain_hook(model, "layer1", without):
        assert_close(ablated, model(x))
    with pytest.raises(explain.LayerError, match="sae"):
        explain.attribute(model, x, "gradcam", layer="layer1/sae.encoder")


def test_inserted_modules_keep_their_names_while_another_threads_block_ends() -> None:
    """Blocks of two threads that overlap, with neither inside of the other."""
    models = [net(), net()]
    x = photos(1)
    entered, ended = threading.Event(), threading.Event()
    found: list[torch.Tensor] = []

    def inserted(number: int) -> Any:
        return intervene(models[number], [Replace("layer1", nn.Tanh(), name="tanh")])

    def other() -> None:
        with inserted(1):
            entered.set()
            ended.wait(60)
            found.append(explain.attribute(models[1], x, "gradcam", layer="layer1/tanh").values)

    thread = threading.Thread(target=other)
    with inserted(0):
        thread.start()
        entered.wait(60)
    ended.set()
    thread.join()
    with inserted(1):
        expected = explain.attribute(models[1], x, "gradcam", layer="layer1/tanh").values
    assert_close(found[0], expected)


WRONG: dict[str, tuple[Callable[[], Intervention], str]] = {
    "channel": (lambda: Ablate("layer1", channels=[6]), "0 to 5"),
    "position": (lambda: Ablate("layer1", positions=[(12, 0)]), "12 × 10"),
    "region": (lambda: Ablate("layer2", region=(0, 0, 0.5, 0.5)), "larger"),
    "tokens": (lambda: Ablate("layer1", tokens=[0]), "positions"),
    "directions": (lambda: Project("layer1", torch.ones(5)), "6"),
    "by": (lambda: Ablate("layer1", by="nothing"), "zero"),
    "values": (lambda: Patch("layer1", torch.ones(2, 6, 5, 5), from_input=False), "broadcast"),
    "images": (lambda: Patch("layer1", torch.ones(3, 6, 12, 10), from_input=False), "images"),
    "one vector": (lambda: Ablate("fc", by="mean"), "reference"),
    "not a value": (lambda: "layer1", "Ablate"),  # type: ignore[return-value, arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_line(name: str) -> None:
    make, word = WRONG[name]
    model = net()
    with pytest.raises(explain.ExplainError, match=word) as raised, intervene(model, [make()]):
        model(photos())
    assert "\n" not in str(raised.value)


def test_resampled_values_are_of_other_positions_or_of_a_reference() -> None:
    model = net()
    x = photos()
    other = photos(4, seed=2)
    seen = []
    watch = Replace("layer1", lambda t: seen.append(t) or t)
    for reference in (None, other):
        ablate = Ablate("layer1", by="resample", seed=3, reference=reference)
        with intervene(model, [ablate, watch]):
            model(x)
    own, theirs = (model.layer1(model.relu(model.bn1(model.conv1(y)))) for y in (x, other))
    for values, image in zip(seen[0].flatten(2), own.flatten(2), strict=True):
        assert all(any(torch.equal(column, each) for each in image.T) for column in values.T)
    assert any(torch.allclose(seen[1], each.expand_as(seen[1]), atol=1e-14) for each in theirs)


PERTURBING = [
    "rise(samples=20)",
    "scorecam",
    "ablationcam",
    "smoothgrad",
    "kernelshap(samples=40)",
    "integratedgradients",
]


@pytest.mark.parametrize("method", PERTURBING)
def test_values_of_each_image_go_with_its_perturbed_rows(method: str) -> None:
    model = net()
    x = photos(2)
    others = photos(2, seed=4)
    interventions = [Patch("layer1", others, channels=[0, 2])]
    run = partial(explain.attribute, method=method, target=1, placement="even")
    found = run(model, x, interventions=interventions, batch_size=3)
    for i in range(2):
        patch = Patch("layer1", others[i : i + 1], channels=[0, 2])
        alone = run(model, x[i : i + 1], interventions=[patch])
        assert_close(found.values[i], alone.values[0], rtol=1e-8, atol=1e-10)


def test_values_of_each_image_cost_no_more_passes_than_one_for_all() -> None:
    """Perturbed rows of several images still run together."""
    x = photos(6)
    costs = []
    for count in (1, 6):
        model = net()
        rows: list[int] = []
        patch = Patch("layer1", photos(count, seed=4), channels=[0, 2])
        with model.register_forward_pre_hook(lambda module, args: rows.append(len(args[0]))):  # noqa: B023
            explain.attribute(model, x, "rise(samples=20)", target=1, interventions=[patch])
        costs.append((len(rows), sum(rows) - count))  # values are taken from so many images
    assert costs[0] == costs[1]


def test_perturbed_rows_of_one_thread_are_none_of_anothers() -> None:
    """While a batch of four perturbed photos of two images runs, another thread patches as many."""
    model, other = net(), net()
    x, four = photos(2), photos(4, seed=3)
    patch = Patch("layer1", photos(4, seed=4))

    def patched() -> torch.Tensor:
        with intervene(other, [patch]):
            return other(four)

    expected = patched()
    found: list[torch.Tensor] = []

    def run_other(module: nn.Module, args: Any) -> None:
        if len(args[0]) == 4:
            in_threads(1, lambda number: found.append(patched()))

    with model.register_forward_pre_hook(run_other):
        explain.attribute(model, x, "rise(samples=4)", target=1, batch_size=4)
    assert found
    assert all(torch.equal(output, expected) for output in found)


def test_channels_of_maps_with_channels_last_are_found() -> None:
    patches = nn.Sequential(nn.Conv2d(3, 6, 2, 2), Permute([0, 2, 3, 1]), nn.LayerNorm(6))
    block = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
    model = nn.Sequential(patches, block, nn.Flatten(), nn.Linear(6 * 30, 5)).double().eval()
    for layer in ("1.2", "1", "0", "1.1:input"):
        ablate = Ablate(layer, channels=[3])
        with intervene(model, [ablate]), capture(model, layer, gradients=False) as seen:
            model(photos())
        values = seen.activations[layer]
        assert not values[..., 3].any()
        assert values[:, 3].any()


def test_directions_are_not_rounded_to_half_precision() -> None:
    direction = torch.tensor([1.0, 1.0 / 3, 1e-5, 0.2, 0.7, 0.4], dtype=torch.float64)
    model = nn.Sequential(nn.Identity()).half()
    x = torch.rand(2, 6).half()
    unit = direction / direction.norm()
    expected = x.double() - (x.double() @ unit)[:, None] * unit
    for directions in (direction, torch.stack([direction, 3 * direction]), 1e-9 * direction):
        with intervene(model, [Project("0", directions)]):
            assert_close(model(x).double(), expected, rtol=0, atol=3e-3)


def test_every_attention_takes_its_values_from_an_input() -> None:
    layers = [nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)]
    shared = nn.Linear(8, 8)
    blocks = nn.ModuleList(multihead(layer, weights=False) for layer in layers)

    def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            x = torch.tanh(model.shared(x + block(x)))
        return x

    model = Made(twice, blocks=blocks, shared=shared).double()
    x = torch.rand(2, 5, 8, dtype=torch.float64)
    other = x[1:]
    with capture(model, ["blocks.0:heads", "blocks.1:heads"], gradients=False) as seen:
        model(other)
    expected = x[:1]
    for i, layer in enumerate(layers):
        second = seen.activations[f"blocks.{i}:heads"][:, 1]
        plain = plain_attention(
            layer, expected, heads=lambda h, second=second: torch.stack([h[:, 0], second], 1)
        )
        expected = torch.tanh(shared(expected + plain))
    with intervene(model, [Patch("blocks.?", other, from_input=True, heads=[1])]):
        assert_close(model(x[:1]), expected)
    with intervene(model, [Patch("shared@1", other, from_input=True)]):
        assert_close(model(x[:1]), model(other))


def test_a_tensor_that_is_there_twice_is_replaced_twice() -> None:
    model = nn.Sequential(Made(lambda model, x: (x, {"same": x})))
    with intervene(model, [Ablate("0")]):
        first, rest = model(torch.ones(1, 2))
    assert not first.any()
    assert not rest["same"].any()


def test_copies_with_random_weights_are_altered_too() -> None:
    model = net()

    evaluate = partial(explain.evaluate, model, photos(1), "saliency", "mprt", target=1)
    unaltered = evaluate()["saliency"]["mprt"]
    with intervene(model, [Ablate("layer1", channels=[1, 4])]):
        values = evaluate()["saliency"]["mprt"]
    # copies have it, too
    with plain_hook(model, "layer1", only([1, 4], lambda maps: 0.0)):
        assert_close(values, evaluate()["saliency"]["mprt"])
    assert not torch.allclose(values, unaltered)


def test_interventions_of_one_thread_are_none_of_anothers() -> None:
    model = net()
    x = photos()
    plain = explain.attribute(model, x, "saliency", target=1)
    found: list[explain.Attribution] = []
    with intervene(model, [Ablate("layer2", channels=[0])]):
        in_threads(
            1, lambda number: found.append(explain.attribute(model, x, "saliency", target=1))
        )
        altered = explain.attribute(model, x, "saliency", target=1)
    assert found[0].interventions == ()
    assert_close(found[0].values, plain.values)
    assert len(altered.interventions) == 1
    assert (altered.values - plain.values).abs().max() > 0
