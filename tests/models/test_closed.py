"""Models in files: a factory by its path, TorchScript, exported programs and ONNX; and models of
photos in grey."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain import ExplainError, ExplainWarning, LayerError, ModelError
from explain.methods import LIME, RISE, HiResCAM, Occlusion, Smooth
from explain.models import CenterCrop

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*torch.jit.*:{kind}")
    for kind in ("FutureWarning", "DeprecationWarning")
]

SIDE = 16
VIEW: Any = {"size": SIDE, "mean": 0.5, "std": 0.5}
SOURCE = """
import torch
from torch import nn

def make(channels=3):
    torch.manual_seed(0)
    parts = nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(*parts).eval()

def grey():
    return make(1)
"""
PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3)).astype(np.uint8))
OUTSIDE = [Occlusion(4, 4), RISE(20), LIME(samples=20)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def net(file: Path) -> nn.Module:
    space: dict[str, Any] = {}
    exec(SOURCE, space)
    model: nn.Module = space["make"]()
    return model


# By the path of a file


def test_a_factory_is_found_by_the_path_of_its_file(file: Path, net: nn.Module) -> None:
    explainer = explain.Explainer(f"{file}:make", **VIEW)
    assert torch.equal(explainer(PHOTO).values, explain.Explainer(net, **VIEW)(PHOTO).values)


def test_a_path_without_a_file_or_factory_is_refused(file: Path) -> None:
    with pytest.raises(ModelError, match=r"nothing\.py"):
        explain.Explainer(f"{file.parent / 'nothing.py'}:make")
    with pytest.raises(ModelError, match="'grey'"):
        explain.Explainer(f"{file}:gray")


# Closed models


def scripted_file(net: nn.Module, path: Path) -> Any:
    torch.jit.trace(net, torch.rand(1, 3, SIDE, SIDE)).save(path / "net.pt")
    return str(path / "net.pt")


def exported_file(net: nn.Module, path: Path) -> Any:
    exported = torch.export.export(net, (torch.rand(1, 3, SIDE, SIDE),))
    torch.export.save(exported, path / "net.pt2")
    return str(path / "net.pt2")


@pytest.mark.parametrize("close", [scripted_file, exported_file])
def test_a_closed_model_is_explained_as_its_original(
    close: Callable[[nn.Module, Path], Any], net: nn.Module, tmp_path: Path
) -> None:
    explainer = explain.Explainer(close(net, tmp_path), **VIEW)
    original = explain.Explainer(net, **VIEW)
    explanation = explainer(PHOTO, OUTSIDE)
    expected = original(PHOTO, OUTSIDE)
    assert not explanation.origin.hooks  # those that torch puts on an exported program
    for name in expected.methods:
        assert_close(explanation[name].values, expected[name].values, atol=1e-5, rtol=1e-4)
    for name in ("lrp", "deeplift", "guidedbackprop", "gradcam", "ablationcam"):
        values = explainer(PHOTO, name).values
        assert_close(values, original(PHOTO, name).values, atol=1e-5, rtol=1e-4)


class Branching(nn.Module):
    """Other operations for bright photos than for dark ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y.relu() if bool(x.mean() > 0.5) else torch.tanh(y) * 2
        return self.head(self.second(y).relu().mean((2, 3)))


def test_the_layers_of_a_program_are_listed_with_their_types() -> None:
    first = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU())
    net = nn.Sequential(first, nn.Sequential(nn.Flatten(), nn.Linear(8, 3)))
    x = torch.ones(1, 3, 4, 4)
    listed = explain.list_layers(torch.export.export(net.eval(), (x,)).module(), x)
    types = {call.name: call.kind for call in listed}
    assert types["0"] == types["1"] == "Layers"  # also where a layer in it has the same name
    assert (types["0.0"], types["0.1"], types["1.1"]) == ("convolution", "relu", "addmm")


def test_a_program_may_compute_something_else_for_the_next_photo_but_not_within_one_explanation() -> (
    None
):
    torch.manual_seed(0)
    net = Branching().double().eval()
    program = explain.Explainer(torch.jit.script(net), **VIEW).model
    bright = torch.rand(1, 3, 12, 12).double() * 0.2 + 0.6
    for x in (bright, bright - 0.5, bright):
        expected = explain.attribute(
            net, x, HiResCAM(relu=False), target=0, layer="second", placement="even"
        )
        found = explain.attribute(
            program, x, HiResCAM(relu=False), target=0, layer="convolution_1", placement="even"
        )
        assert_close(found.values, expected.values, rtol=1e-12, atol=1e-14)
        names = [call.kind for call in explain.list_layers(program, x)]
        assert ("tanh" in names) == bool(x.mean() < 0.5)
    noisy = Smooth("hirescam", samples=3)
    on_the_border = bright - bright.mean() + 0.5
    with pytest.raises(
        LayerError, match="same layers"
    ):  # noise leads one of them to the other side
        for offset in (1e-9, -1e-9):
            x = on_the_border + offset
            explain.attribute(program, x, noisy, target=0, layer="convolution_1", placement="even")


@pytest.mark.parametrize(("taken", "count"), [(1, 1), (2, 2), (2, 3), (2, 1)])
def test_a_program_of_a_fixed_batch_gives_the_maps_of_the_network_for_any_number_of_images(
    taken: int, count: int
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 5, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3)),
    )
    net = net.double().eval()
    program = torch.export.export(net, (torch.rand(taken, 3, 9, 9).double(),)).module()
    x = torch.randn(count, 3, 9, 9).double()
    for method in (HiResCAM(relu=False), "scorecam", "ablationcam", "smoothgradcam++"):
        expected = explain.attribute(net, x, method, target=1, layer="3").values
        found = explain.attribute(program, x, method, target=1, layer="3").values
        assert_close(found, expected, rtol=1e-10, atol=1e-12)


def onnx_file(path: Path, weight: np.ndarray, kind: str, shape: list[Any]) -> str:
    """A linear ONNX model with the given weight and one input ``x``."""
    onnx = pytest.importorskip("onnx", reason="onnx comes with the extra 'peers'")
    pytest.importorskip("onnxruntime", reason="onnxruntime comes with the extra 'onnx'")
    helper = onnx.helper
    floats = onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Cast", ["x"], ["floats"], to=floats),
        helper.make_node("Flatten", ["floats"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", getattr(onnx.TensorProto, kind), shape)
    y = helper.make_tensor_value_info("y", floats, [shape[0], weight.shape[1]])
    graph = helper.make_graph(
        nodes, "net", [x], [y], [onnx.numpy_helper.from_array(weight.astype(np.float32), "w")]
    )
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), path / "net.onnx")
    return str(path / "net.onnx")


def test_onnx_gives_scores_alone_and_says_its_size_and_channels(tmp_path: Path) -> None:
    weight = np.random.default_rng(1).normal(size=(SIDE * SIDE, 3))
    file = onnx_file(tmp_path, weight, "FLOAT", [1, 1, SIDE, SIDE])
    explainer = explain.Explainer(file, mean=0.5, std=0.5)
    assert explainer.preprocess == CenterCrop(SIDE, mean=(0.5,), std=(0.5,))
    # of a linear model: weight times value
    values = explainer(PHOTO, Occlusion(1, 1), target=2).values
    expected = weight[:, 2].reshape(SIDE, SIDE) * explainer.as_input(PHOTO)[0, 0].numpy()
    np.testing.assert_allclose(values.numpy(), expected, atol=1e-5)
    with pytest.raises(ExplainError, match="occlusion"):
        explainer(PHOTO, "saliency")


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16", "DOUBLE", "UINT8"])
def test_onnx_takes_other_numbers_and_channels_last(kind: str, last: bool, tmp_path: Path) -> None:
    weight = np.random.default_rng(1).normal(size=(SIDE + 2, SIDE, 3, 2))
    shape: list[Any] = ["n", SIDE + 2, SIDE, 3] if last else ["n", 3, SIDE + 2, SIDE]
    laid_out = weight if last else weight.transpose(2, 0, 1, 3)
    file = onnx_file(tmp_path, laid_out.reshape(-1, 2), kind, shape)
    model = explain.models.load(file).model
    x = torch.randint(256, (2, 3, SIDE + 2, SIDE)) / 255
    # levels are counted whole, and half precision is exact in 256 steps of 1 / 128
    x = x if kind == "UINT8" else (128 * x).round() / 128
    values = explain.attribute(model, x, Occlusion(1, 1), target=1).values
    unit = 255 if kind == "UINT8" else 1
    expected = unit * np.einsum("nchw,hwc->nhw", x.numpy(), weight[..., 1])
    np.testing.assert_allclose(values.numpy(), expected, atol=2e-3 * unit)
    if kind == "UINT8":
        with pytest.raises(ExplainError, match="from 0 to 1"):
            model(255 * x)


def test_onnx_of_whole_levels_assumes_photos_as_they_are(tmp_path: Path) -> None:
    file = onnx_file(tmp_path, np.ones((SIDE * SIDE * 3, 2)), "UINT8", [1, SIDE, SIDE, 3])
    with pytest.warns(ExplainWarning, match="assumed"):
        explainer = explain.Explainer(file)
    assert explainer.preprocess == CenterCrop(SIDE, mean=(0.0,) * 3, std=(1.0,) * 3)


def test_onnx_that_takes_no_image_is_refused(tmp_path: Path) -> None:
    weight = np.ones((SIDE * SIDE, 2))
    for kind, shape in (("INT64", [1, 1, SIDE, SIDE]), ("FLOAT", [1, SIDE * SIDE])):
        with pytest.raises(ModelError, match="images"):
            explain.models.load(onnx_file(tmp_path, weight, kind, shape))


class Traced:
    """Leaves a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_a_pickled_model_is_told_what_it_is_and_never_unpickled(
    net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    for content in (net, {"model": net, "epoch": 3}, {"model": net, "extra": Traced(trace)}):
        torch.save(content, tmp_path / "whole.pt")
        with pytest.raises(ModelError, match=r"torch\.load") as refused:
            explain.Explainer(str(tmp_path / "whole.pt"))
        assert "\n" not in str(refused.value)
    assert not trace.exists()
    monkeypatch.setattr(Traced, "__module__", "ultralytics.nn.tasks")
    module = ModuleType("ultralytics.nn.tasks")
    module.Traced = Traced  # type: ignore[attr-defined]
    monkeypatch.setattr(Traced, "__reduce__", object.__reduce__)
    for name in ("ultralytics", "ultralytics.nn", "ultralytics.nn.tasks"):
        monkeypatch.setitem(sys.modules, name, module)
    torch.save({"model": Traced(trace)}, tmp_path / "yolo.pt")
    with pytest.raises(ModelError, match=r"YOLO\(.*\)\.model"):
        explain.Explainer(str(tmp_path / "yolo.pt"))


def test_a_missing_runtime_a_state_dict_and_weights_are_refused(
    net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(net.state_dict(), tmp_path / "state.pt")
    (tmp_path / "net.onnx").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for name, word in {
        "state.pt": "TorchScript",
        "net.onnx": "onnxruntime",
        "no.pt2": r"a file that is there.*no\.pt2",
    }.items():
        with pytest.raises(ModelError, match=word):
            explain.Explainer(str(tmp_path / name))
    with pytest.raises(ModelError, match="weights"):
        explain.Explainer(str(tmp_path / "state.pt"), weights=tmp_path / "state.pt")


# Photos in grey


def test_a_model_of_one_channel_gets_photos_in_grey(file: Path) -> None:
    explainer = explain.Explainer(f"{file}:grey", **VIEW)
    assert explainer.preprocess == CenterCrop(SIDE, mean=(0.5,), std=(0.5,))
    flat = Image.new("RGB", (20, 20), (200, 40, 90))
    grey = round(0.299 * 200 + 0.587 * 40 + 0.114 * 90)  # ITU-R 601
    expected = torch.full((1, 1, SIDE, SIDE), (grey / 255 - 0.5) / 0.5)
    assert_close(explainer.as_input(flat), expected)
    assert explainer(PHOTO, ["saliency", "lrp"]).values.shape == (1, SIDE, SIDE)
    with pytest.warns(ExplainWarning, match=r"mean=\(0.449"):
        assert explain.Explainer(f"{file}:grey").preprocess == CenterCrop(
            224, mean=(0.449,), std=(0.226,)
        )
