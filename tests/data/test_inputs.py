"""Models that take more than one image: tuples, keywords, containers; one of them is explained, the
others stay."""

from __future__ import annotations

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
from tests.conftest import ATTENDING, COVERING, Made, settled, snapshot

Two: TypeAlias = tuple[Tensor, Tensor]
METHODS = sorted(set(explain.list_methods()) - COVERING - ATTENDING - {"cam"})


class Siamese(nn.Module):
    """One encoder looks at two images; a third input, for each pair, scales the scores; an option
    may switch it off."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3, stride=2)
        )
        self.fc = nn.Linear(8, 4)

    def forward(
        self, left: Tensor, right: Tensor, *, gain: Tensor | None = None, halve: bool = False
    ) -> Tensor:
        scores = self.fc(
            torch.cat([F.relu(self.encoder(side)).mean((2, 3)) for side in (left, right)], 1)
        )
        scores = scores if gain is None else scores * gain[:, None]
        return scores / 2 if halve else scores


class OneSide(nn.Module):
    """The same network written for one image, with the rest of one pair built in and no module
    called twice."""

    def __init__(self, model: Siamese, pair: Two, gain: Tensor, side: int) -> None:
        super().__init__()
        self.conv1, _, self.conv2 = model.encoder
        self.fc = model.fc
        self.gain = gain
        self.side = side
        with torch.no_grad():
            self.other = F.relu(self.conv2(F.relu(self.conv1(pair[1 - side])))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        mine = F.relu(self.conv2(F.relu(self.conv1(x)))).mean((2, 3))
        other = self.other.expand(len(x), -1)
        return self.fc(torch.cat([mine, other] if self.side == 0 else [other, mine], 1)) * self.gain


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
    before = snapshot(siamese)
    found = explain.attribute(siamese, inputs, METHODS, target=1, layer="encoder.2")
    assert snapshot(siamese) == before
    for i in (0, 2):
        image = slice(i, i + 1)
        alone = OneSide(siamese, (pair[0][image], pair[1][image]), gain[i], side).eval()
        expected = explain.attribute(alone, pair[side][image], METHODS, target=1, layer="conv2")
        for method in METHODS:
            assert_close(found[method].values[i], expected[method].values[0], rtol=1e-9, atol=1e-12)
    assert found["gradcam"].input == str(side)
    assert found["gradcam"].layer == ("encoder.2@0" if side == 0 else "encoder.2")


def test_a_layer_that_sees_both_images_stands_for_the_call_of_the_explained_one(
    siamese: Siamese, pair: Two
) -> None:
    left = Inputs(pair)
    right = Inputs(pair, explained=1)
    assert [(c.label, c.depends) for c in list_layers(siamese, left)] == [
        *[(f"{name}@0", True) for name in ("encoder.0", "encoder.1", "encoder.2", "encoder")],
        *[(name, False) for name in ("encoder.0", "encoder.1", "encoder.2", "encoder")],
        ("fc", True),
    ]
    assert (default_layer(siamese, left), default_layer(siamese, right)) == ("encoder@0", "encoder")
    assert stage_layers(siamese, left) == ["encoder.1@0", "encoder@0"]
    assert stage_layers(siamese, right) == ["encoder.1", "encoder"]
    assert explain.find_concepts(siamese, left, 2, layer="encoder.1").layer == "encoder.1@0"


def test_each_call_of_a_layer_has_its_own_map(x: Tensor) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = F.relu_(self.conv(x))
            return self.fc(x.mean((2, 3)))

    class Unrolled(nn.Module):
        def __init__(self, model: Again) -> None:
            super().__init__()
            twins = [nn.Conv2d(3, 3, 3, padding=1).double() for _ in range(3)]
            for twin in twins:
                twin.weight = model.conv.weight
                twin.bias = model.conv.bias
            self.convs = nn.ModuleList(twins)
            self.fc = model.fc

        def forward(self, x: Tensor) -> Tensor:
            for conv in self.convs:
                x = F.relu(conv(x))
            return self.fc(x.mean((2, 3)))

    again = settled(Again()).double().eval()
    unrolled = Unrolled(again).eval()
    methods = ["gradcam", "ablationcam", "eigencam", "smoothgradcam++"]
    calls = ["conv@0", "conv@1", "conv"]
    for call, twin in zip(calls, ["convs.0", "convs.1", "convs.2"], strict=True):
        found = explain.attribute(again, x, methods, target=2, layer=call)
        expected = explain.attribute(unrolled, x, methods, target=2, layer=twin)
        for method in methods:
            assert_close(found[method].values, expected[method].values, rtol=1e-9, atol=1e-12)
    last = explain.attribute(again, x, target=2, layer="conv@2").values
    assert torch.equal(last, explain.attribute(again, x, target=2, layer="conv").values)
    both = explain.attribute(again, x, target=2, layer=["conv@0", "conv@2"])
    assert list(both.maps) == ["conv@0", "conv@2"]
    with pytest.raises(LayerError, match="calls"):
        explain.attribute(again, x, target=2, layer="conv@3")


class Unpacking(nn.Module):
    """Takes one container of inputs, as training loops often pass them on."""

    def __init__(self, model: Siamese, unpack: Any) -> None:
        super().__init__()
        self.model = model
        self.unpack = unpack

    def forward(self, batch: Any) -> Tensor:
        left, right = self.unpack(batch)
        return self.model(left, right, halve=True)


class Batch(UserDict):
    @property
    def images(self) -> tuple[Tensor, Tensor]:
        return self["left"], self["right"]


@dataclass(frozen=True)
class Pair:
    left: Tensor
    right: Tensor
    name: str = "a pair"


@pytest.mark.parametrize(
    ("make", "unpack", "path"),
    [
        (lambda left, right: {"of": [left, right]}, lambda batch: batch["of"], (0, "of", 1)),
        (
            lambda left, right: Batch(left=left, right=right),
            lambda batch: batch.images,
            (0, "right"),
        ),
        (Pair, lambda batch: (batch.left, batch.right), (0, "right")),
    ],
    ids=["dictionary", "mapping of its own kind", "dataclass"],
)
def test_inputs_may_lie_in_containers(
    make: Any, unpack: Any, path: Any, siamese: Siamese, pair: Two
) -> None:
    model = Unpacking(siamese, unpack).eval()
    batch = make(*pair)
    for method, layer in (
        ("saliency", None),
        ("scorecam", "encoder.1"),
        ("integratedgradients", None),
    ):
        inputs = Inputs((batch,), explained=path)
        inside = None if layer is None else f"model.{layer}"
        found = explain.attribute(model, inputs, method, target=0, layer=inside)
        plain = Inputs(pair, {"halve": True}, explained=1)
        expected = explain.attribute(siamese, plain, method, target=0, layer=layer)
        assert_close(found.values, expected.values)
        assert found.input == ".".join(map(str, path))
    assert unpack(batch)[0] is pair[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((3, None), "x must"),
        ((), "x must"),
        ({"ids": torch.tensor([1, 2])}, "input ids must"),
        ((torch.rand(3, 8, 8), 1), "input 0 must"),
        ((torch.rand(1, 3, 4, 4), torch.zeros(1, 3, 4, 4, device="meta")), "input 1 must"),
    ],
)
def test_inputs_that_cannot_be_explained_are_refused(
    given: Any, message: str, siamese: Siamese
) -> None:
    with pytest.raises(ImageError, match=message):
        explain.attribute(siamese, given, "saliency", target=0)


def test_what_is_explained_must_be_among_the_inputs() -> None:
    x = torch.rand(1, 3, 4, 4)
    with pytest.raises(ImageError, match="explained must"):
        Inputs((x,), {"size": torch.ones(1)}, explained="mask")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.rand(1, 3, 8, 8), "float64"),
        (torch.rand(1, 1, 8, 8).double(), "channels"),
        (torch.rand(1, 3, 2, 8, 8).double(), "dimensions"),
    ],
)
@pytest.mark.parametrize("method", ["gradcam", "saliency"])
def test_what_torch_refuses_in_an_input_is_one_line_with_its_own_words_as_the_cause(
    method: str, x: Tensor, message: str, net: nn.Module
) -> None:
    with pytest.raises(RuntimeError) as plain:
        net(x)
    with pytest.raises(ImageError, match=message) as caught:
        explain.attribute(net, x, method, target=0)
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


def matching() -> nn.Module:
    """Compares images with texts, each of which is one class, as CLIP does."""
    parts = {"conv": nn.Conv2d(3, 4, 3, stride=2), "words": nn.Embedding(7, 4)}
    net = Made(
        lambda net, x, texts: F.relu(net.conv(x)).mean((2, 3)) @ net.words(texts).mean(1).T, **parts
    )
    return settled(net).double().eval()


SHARED = ["gradcam", "ablationcam", "integratedgradients"]


@pytest.mark.parametrize("images", [2, 3])
def test_inputs_that_belong_to_no_single_image_are_shared(images: int, x: Tensor) -> None:
    model = matching()
    texts = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 1]])
    found = explain.attribute(model, Inputs((x[:images], texts), shared=[1]), SHARED, target=1)
    # and not the words, which might be places by their number
    assert found["gradcam"].layer == "conv"
    for i in range(images):
        alone = explain.attribute(
            model, Inputs((x[i : i + 1], texts), shared=[1]), SHARED, target=1
        )
        for method in SHARED:
            assert_close(found[method].values[i], alone[method].values[0], rtol=1e-9, atol=1e-12)


class ReadsText(nn.Module):
    """Image tokens, then text tokens, through one transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.words = nn.Embedding(9, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True, norm_first=True)
        self.fc = nn.Linear(8, 5)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        tokens = torch.cat([self.patches(image).flatten(2).mT, self.words(ids)], 1)
        return self.fc(self.block(tokens).mean(1))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("words", [4, 9])
def test_tokens_of_a_text_are_not_taken_for_places(words: int) -> None:
    """Behind the 16 tokens of the photo, as many stand for words as would make a square of 20, or
    25, tokens."""
    model = settled(ReadsText()).eval()
    image = torch.rand(1, 3, 16, 16)
    ids = torch.arange(words)[None] % 9
    found = explain.attribute(model, (image, ids), "hirescam(relu=False)", target=0, layer="block")
    tokens = model.block(torch.cat([model.patches(image).flatten(2).mT, model.words(ids)], 1))
    (gradients,) = torch.autograd.grad(model.fc(tokens.mean(1))[0, 0], tokens)
    of_patches = (tokens * gradients).sum(2)[0, :16].reshape(4, 4)
    assert_close(found.values[0], of_patches)


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
    parts = {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(3, 4, 5), "which": "a"}
    model = Made(lambda net, x: getattr(net, net.which)(x).mean((2, 3)), **parts).double()
    assert explain.attribute(model, x, "gradcam", target=0).layer == "a"
    model.which = "b"
    assert explain.attribute(model, x, "gradcam", target=0).layer == "b"


def test_an_input_that_is_missing_is_named_for_tensors_and_photos(x: Tensor) -> None:
    class WithAge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor, age: Tensor, scale: float = 1.0) -> Tensor:
            return scale * self.conv(x).mean((2, 3)) + age

    model = WithAge()
    with pytest.raises(ImageError, match=r"WithAge \(age\)"):
        explain.attribute(model.double(), x, "saliency", target=1)
    with pytest.raises(ImageError, match=r"WithAge \(age\)"):
        explain.Explainer(model, size=8, mean=0.5, std=0.5)(
            torch.zeros(9, 9, 3).numpy(), "occlusion"
        )
    assert (
        explain.attribute(model, (x, torch.ones(1, 1)), "saliency", target=1).values.shape
        == x.shape
    )


def test_no_input_is_altered_by_a_model_that_works_in_place() -> None:
    greedy = Made(lambda net, image, mask: image.mul_(mask.add_(1)).mean((2, 3)))
    inputs = torch.rand(2, 3, 4, 4), torch.rand(2, 1, 4, 4)
    copies = [tensor.clone() for tensor in inputs]
    methods = ["saliency", "integratedgradients", "smoothgrad"]
    explain.attribute(greedy, inputs, methods, target=0)
    for tensor, expected in zip(inputs, copies, strict=True):
        assert torch.equal(tensor, expected)


def test_statistics_that_happen_to_be_as_many_as_the_images_are_told_from_theirs(x: Tensor) -> None:
    normalised = Made(
        lambda net, x, mean: F.relu(net.conv(x - mean)).mean((2, 3)), conv=nn.Conv2d(3, 4, 3)
    )
    model = settled(normalised).double().eval()
    mean = torch.tensor([0.1, 0.5, 0.9]).double()[:, None, None]
    alone = Inputs((x[:1], mean), shared=[1])
    values, expected = (
        explain.attribute(model, inputs, "integratedgradients", target=1).values
        for inputs in ((x, mean), alone)
    )
    assert_close(values[:1], expected)


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
    values = explain.attribute(model, inputs, method, target=1, layer="conv").values
    model.sizes = range(100)
    expected = explain.attribute(model, inputs, method, target=1, layer="conv").values
    assert_close(values, expected, rtol=1e-9, atol=1e-12)


def test_a_module_under_two_names_goes_by_either(x: Tensor) -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), conv, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = settled(model).double().eval()
    layers: list[Any] = ["0", "2", conv, "0@0"]
    last, *same, first = (
        explain.attribute(model, x, "gradcam", target=0, layer=layer).values for layer in layers
    )
    assert not torch.equal(first, last)
    assert all(torch.equal(values, last) for values in same)
