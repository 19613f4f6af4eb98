"""Models that take more than one image: tuples, keywords, containers; one of them is explained, the
others stay."""

from __future__ import annotations

import copy
import warnings
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ExplainWarning, ImageError, LayerError
from explain.data.inputs import Inputs
from explain.layers import default_layer, list_layers
from explain.layers.default_layer import stage_layers
from tests.conftest import ATTENDING, COVERING, Made, layer_for, settled, snapshot
from tests.runs.networks import as_it_is, picture

Two: TypeAlias = tuple[Tensor, Tensor]
METHODS = sorted(set(explain.list_methods()) - COVERING - ATTENDING - {"cam"})


class Siamese(nn.Module):
    """One encoder looks at two images; a third input, for each pair, scales the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3, stride=2)
        )
        self.fc = nn.Linear(8, 4)

    def forward(self, left: Tensor, right: Tensor, *, gain: Tensor | float = 1.0) -> Tensor:
        features = [F.relu(self.encoder(side)).mean((2, 3)) for side in (left, right)]
        scores: Tensor = self.fc(torch.cat(features, 1)).T * gain
        return scores.T


def one_side(model: Siamese, pair: Two, gain: Tensor, side: int) -> nn.Module:
    """The same network written for one image, with the rest of one pair built in and no module
    called twice."""
    conv1, _, conv2 = model.encoder
    with torch.no_grad():
        other = F.relu(model.encoder(pair[1 - side])).mean((2, 3))

    def forward(net: Any, x: Tensor) -> Tensor:
        features = F.relu(net.conv2(F.relu(net.conv1(x)))).mean((2, 3))
        both = [features, other.expand(len(x), -1)]
        return net.fc(torch.cat(both if side == 0 else both[::-1], 1)) * gain

    return Made(forward, conv1=conv1, conv2=conv2, fc=model.fc).eval()


@pytest.fixture
def siamese() -> Siamese:
    return settled(Siamese()).double().eval()


@pytest.fixture
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.flip(0, 3) + 0.3


@pytest.fixture(autouse=True)
def _maps_may_be_empty() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is zero everywhere", ExplainWarning)
        yield


@pytest.mark.parametrize("side", [0, 1])
def test_one_of_two_images_is_explained_as_if_the_other_were_built_in(
    side: int, siamese: Siamese, pair: Two
) -> None:
    gain = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)
    inputs = Inputs(pair, {"gain": gain}, explained=side)
    state = snapshot(siamese)
    results = explain.attribute(siamese, inputs, METHODS, target=1, layer="encoder.2")
    assert snapshot(siamese) == state
    one_pair = (pair[0][2:], pair[1][2:])
    alone = one_side(siamese, one_pair, gain[2], side)
    expected = explain.attribute(alone, one_pair[side], METHODS, target=1, layer="conv2")
    for method in METHODS:
        assert_close(results[method].values[2], expected[method].values[0], rtol=1e-9, atol=1e-12)
    assert results["gradcam"].input == str(side)
    assert results["gradcam"].layer == ("encoder.2@0" if side == 0 else "encoder.2")


def test_a_layer_that_sees_both_images_stands_for_the_call_of_the_explained_one(
    siamese: Siamese, pair: Two
) -> None:
    left = Inputs(pair)
    right = Inputs(pair, explained=1)
    layers = {layer.label: layer.depends for layer in list_layers(siamese, left)}
    assert (layers["encoder.0@0"], layers["encoder.0"], layers["fc"]) == (True, False, True)
    assert (default_layer(siamese, left), default_layer(siamese, right)) == ("encoder@0", "encoder")
    assert stage_layers(siamese, left) == ["encoder.1@0", "encoder@0"]
    assert stage_layers(siamese, right) == ["encoder.1", "encoder"]
    assert explain.find_concepts(siamese, left, 2, layer="encoder.1").layer == "encoder.1@0"


def test_each_call_of_a_layer_has_its_own_map(x: Tensor) -> None:
    def scores(net: Any, x: Tensor) -> Tensor:
        for conv in net.convs:
            x = F.relu_(conv(x))
        return net.fc(x.mean((2, 3)))

    conv = nn.Conv2d(3, 3, 3, padding=1)
    again = Made(scores, conv=conv, fc=nn.Linear(3, 4))
    again.convs = [conv] * 3  # a plain list, which registers none
    settled(again).double().eval()
    twins = nn.ModuleList(copy.deepcopy(conv) for _ in range(3))
    unrolled = Made(scores, convs=twins, fc=again.fc).eval()
    methods = ["gradcam", "ablationcam", "eigencam", "smoothgradcam++"]
    for call, twin in {"conv@0": "convs.0", "conv@1": "convs.1", "conv": "convs.2"}.items():
        results = explain.attribute(again, x, methods, target=2, layer=call)
        expected = explain.attribute(unrolled, x, methods, target=2, layer=twin)
        for method in methods:
            assert_close(results[method].values, expected[method].values, rtol=1e-9, atol=1e-12)
    last = explain.attribute(again, x, target=2, layer="conv@2").values
    assert torch.equal(last, explain.attribute(again, x, target=2, layer="conv").values)
    both = explain.attribute(again, x, target=2, layer=["conv@0", "conv@2"])
    assert list(both.maps) == ["conv@0", "conv@2"]
    with pytest.raises(LayerError, match="calls"):
        explain.attribute(again, x, target=2, layer="conv@3")


class Batch(UserDict):
    @property
    def images(self) -> tuple[Tensor, Tensor]:
        return self["left"], self["of"][0]


@dataclass(frozen=True)
class Pair:
    left: Tensor
    right: Tensor
    name: str = "a pair"

    @property
    def images(self) -> tuple[Tensor, Tensor]:
        return self.left, self.right


@pytest.mark.parametrize(
    ("pack", "path"),
    [
        (lambda left, right: Batch(left=left, of=[right]), (0, "of", 0)),
        (Pair, (0, "right")),
    ],
    ids=["mapping of its own kind", "dataclass"],
)
def test_inputs_may_lie_in_containers(pack: Any, path: Any, siamese: Siamese, pair: Two) -> None:
    model = Made(lambda net, batch: net.model(*batch.images, gain=2.0), model=siamese).eval()
    batch = pack(*pair)
    inputs = Inputs((batch,), explained=path)
    plain = Inputs(pair, {"gain": 2.0}, explained=1)
    for method, layer in (("scorecam", "encoder.1"), ("integratedgradients", None)):
        within = layer and f"model.{layer}"
        a = explain.attribute(model, inputs, method, target=0, layer=within)
        expected = explain.attribute(siamese, plain, method, target=0, layer=layer)
        assert_close(a.values, expected.values)
        assert a.input == ".".join(map(str, path))
    assert batch.images[0] is pair[0]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((3, None), "x must"),
        ({"ids": torch.tensor([1, 2])}, "input ids must"),
        ((torch.rand(3, 8, 8), 1), "input 0 must"),
        ((torch.rand(1, 3, 4, 4), torch.zeros(1, 3, 4, 4, device="meta")), "input 1 must"),
    ],
)
def test_inputs_that_cannot_be_explained_are_refused(
    inputs: Any, message: str, siamese: Siamese
) -> None:
    with pytest.raises(ImageError, match=message):
        explain.attribute(siamese, inputs, "saliency", target=0)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.rand(1, 3, 8, 8), "float64"),
        (torch.rand(1, 1, 8, 8).double(), "channels"),
        (torch.rand(1, 3, 2, 8, 8).double(), "dimensions"),
    ],
)
def test_what_torch_refuses_in_an_input_is_one_line_with_its_own_words_as_the_cause(
    x: Tensor, message: str, net: nn.Module
) -> None:
    with pytest.raises(RuntimeError) as plain:
        net(x)
    with pytest.raises(ImageError, match=message) as caught:
        explain.attribute(net, x, target=0)
    assert "\n" not in str(caught.value)
    assert str(caught.value.__cause__) == str(plain.value)


def test_what_the_model_itself_raises_comes_through_with_a_note_where_the_input_may_explain_it(
    net: nn.Module,
) -> None:
    """It is not known to be the input's fault, even though the input has another precision."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no such size")

    net.register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="no such size") as caught:
        explain.attribute(net, torch.rand(1, 3, 8, 8), target=0)
    assert not isinstance(caught.value, ImageError)
    (note,) = caught.value.__notes__
    assert "x.to(torch.float64)" in note


@pytest.mark.parametrize("shared", [[1], []])
def test_inputs_that_belong_to_no_single_image_are_shared(shared: list[int], x: Tensor) -> None:
    """Images are compared with texts, each of which is one class, as CLIP does; that there are as
    many of them is found out."""
    parts = {"conv": nn.Conv2d(3, 4, 3, stride=2), "words": nn.Embedding(7, 4)}
    model = Made(
        lambda net, x, texts: F.relu(net.conv(x)).mean((2, 3)) @ net.words(texts).mean(1).T, **parts
    )
    settled(model).double().eval()
    texts = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 1], [2, 2, 2, 2]])
    methods = ["gradcam", "ablationcam", "integratedgradients(steps=5)"]
    results = explain.attribute(model, Inputs((x, texts), shared=shared), methods, target=1)
    alone = explain.attribute(model, Inputs((x[2:], texts), shared=[1]), methods, target=1)
    # and not the words, which might be places by their number
    assert results["gradcam"].layer == "conv"
    for method, expected in alone.items():
        assert_close(results[method].values[2:], expected.values, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("words", [4, 9])
def test_tokens_of_a_text_are_not_taken_for_places(words: int) -> None:
    """Behind the 16 tokens of the photo, as many stand for words as would make a square of 20, or
    25, tokens."""
    block = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True, norm_first=True)
    parts = {"patches": nn.Conv2d(3, 8, 4, 4), "words": nn.Embedding(9, 8), "fc": nn.Linear(8, 5)}

    def tokens_of(net: Any, image: Tensor, ids: Tensor) -> Tensor:
        return net.block(torch.cat([net.patches(image).flatten(2).mT, net.words(ids)], 1))

    model = Made(lambda net, *inputs: net.fc(tokens_of(net, *inputs).mean(1)), block=block, **parts)
    settled(model).eval()
    inputs = torch.rand(1, 3, 16, 16), torch.arange(words)[None]
    a = explain.attribute(model, inputs, "hirescam(relu=False)", target=0, layer="block")
    tokens = tokens_of(model, *inputs)
    (gradients,) = torch.autograd.grad(model.fc(tokens.mean(1))[0, 0], tokens)
    assert_close(a.values[0], (tokens * gradients).sum(2)[0, :16].reshape(4, 4))


def test_what_was_seen_of_a_network_is_forgotten_when_it_is_another_one(x: Tensor) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).double()
    for _ in range(20):  # modules come and go, and with them their addresses
        assert default_layer(model, x) == "1"
        model[1] = nn.MaxPool2d(2)
        assert default_layer(model, x) == "0"
        model[1] = nn.ReLU()


def test_a_network_that_was_switched_over_is_looked_at_again(x: Tensor) -> None:
    parts = {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(3, 4, 5)}
    model = Made(lambda net, x: getattr(net, net.which)(x).mean((2, 3)), **parts).double()
    for which in ("a", "b"):
        model.which = which
        assert explain.attribute(model, x, target=0).layer == which


def test_an_input_that_is_missing_is_named_for_tensors_and_photos(x: Tensor) -> None:
    class WithAge(nn.Conv2d):
        def forward(self, x: Tensor, age: Tensor, scale: float = 1.0) -> Tensor:
            return scale * super().forward(x).mean((2, 3)) + age

    model = WithAge(3, 4, 3).double()
    with pytest.raises(ImageError, match=r"WithAge \(age\)"):
        explain.attribute(model, x, "saliency", target=1)
    with pytest.raises(ImageError, match=r"WithAge \(age\)"):
        explain.Explainer(model, preprocess=as_it_is)(picture(0), "occlusion")


def test_no_input_is_altered_by_a_model_that_works_in_place() -> None:
    greedy = Made(lambda net, image, mask: image.mul_(mask.add_(1)).mean((2, 3)))
    inputs = torch.rand(2, 3, 4, 4), torch.rand(2, 1, 4, 4)
    copies = copy.deepcopy(inputs)
    explain.attribute(greedy, inputs, ["saliency", "smoothgrad"], target=0)
    assert_close(inputs, copies, rtol=0, atol=0)


@pytest.mark.parametrize("method", ["ablationcam", "smoothgrad"])
def test_rows_beside_the_images_go_with_them_in_a_network_of_a_fixed_batch_size(
    method: str, x: Tensor
) -> None:
    def scores(net: Any, x: Tensor, gain: Tensor) -> Tensor:
        if len(x) not in net.sizes:
            raise RuntimeError(f"expected 2 images, got {len(x)}")
        return F.relu(net.conv(x)).mean((2, 3)) * gain[:, None]

    model = settled(Made(scores, conv=nn.Conv2d(3, 5, 3))).double().eval()
    inputs = x[:2], torch.tensor([1.0, 2.0]).double()
    model.sizes = [2]
    layer = layer_for(method, "conv")
    values = explain.attribute(model, inputs, method, target=1, layer=layer).values
    model.sizes = range(100)
    expected = explain.attribute(model, inputs, method, target=1, layer=layer).values
    assert_close(values, expected, rtol=1e-9, atol=1e-12)


def test_a_module_under_two_names_goes_by_either(x: Tensor) -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), conv, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    settled(model).double().eval()
    layers: list[Any] = ["0", "2", conv, "0@0"]
    last, *same, first = (
        explain.attribute(model, x, "gradcam", target=0, layer=layer).values for layer in layers
    )
    assert not torch.equal(first, last)
    assert all(torch.equal(values, last) for values in same)
