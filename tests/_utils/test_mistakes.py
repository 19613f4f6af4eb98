"""Mistakes that users make are told in one line that names the argument."""

import pytest
import torch
from torch import nn

import explain
from explain.data.images import load_image
from explain.data.inputs import as_inputs
from explain.metrics.randomised import Randomised
from explain.store.manifest import changes_in_words

X = torch.rand(2, 3, 8, 8)
NETWORK = nn.Sequential(nn.Conv2d(3, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
MAPS = torch.rand(2, 8, 8)


class NoCopy(nn.Sequential):
    def __deepcopy__(self, memo):
        raise TypeError("no copies")


@pytest.mark.parametrize(("image", "said"), [("https://a.org/cat.jpg", "download"), (None, "file")])
def test_of_photos(image, said):
    with pytest.raises(explain.ImageError, match=f"^image .*{said}"):
        load_image(image)


@pytest.mark.parametrize("weights", [{}, True, "none.pth"])
def test_weights_that_are_no_file(weights):
    with pytest.raises(explain.ModelError, match=r"^weights .*file"):
        explain.Explainer("tiny", weights=weights)


def test_weights_of_text(tmp_path):
    path = tmp_path / "text.pth"
    path.write_text("hello")
    with pytest.raises(explain.ModelError, match=r"^weights .*PyTorch"):
        explain.Explainer("tiny", weights=path)


@pytest.mark.parametrize("ending", ["pt", "pt2", "onnx"])
def test_models_that_are_no_file(ending):
    with pytest.raises(explain.ModelError, match=r"^model .*file"):
        explain.Explainer(f"none.{ending}")


def test_timm_with_a_broken_torchvision(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text("raise RuntimeError('no operator torchvision::nms')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "timm", raising=False)
    with pytest.raises(explain.ModelError, match=r"^torchvision"):
        explain.Explainer("timm:resnet18")


@pytest.mark.parametrize(("channels", "said"), [(1, "expand"), (4, ":3")])
def test_grey_and_transparent_photos(channels, said):
    with pytest.raises(explain.ImageError, match=f"^x .*{said}"):
        explain.attribute(NETWORK, torch.rand(2, channels, 8, 8), "saliency", target=0)


def test_signals_without_channels():
    with pytest.raises(explain.ImageError, match=r"^x .*signals"):
        explain.attribute(nn.Linear(4, 2), torch.rand(2, 4), "saliency", target=0)


@pytest.mark.parametrize(
    ("methods", "boxes", "argument"),
    [({"a": None}, None, "map 'a'"), ([MAPS], None, "methods"), ({"a": MAPS}, 5, "boxes")],
)
def test_of_evaluations(methods, boxes, argument):
    with pytest.raises(explain.MetricError, match=f"^{argument}"):
        explain.evaluate(NETWORK, X, methods, "deletion", target=0, boxes=boxes)


def test_models_that_cannot_be_copied():
    with pytest.raises(explain.MetricError, match=r"^model"):
        Randomised(NoCopy(*NETWORK).eval(), as_inputs(X))


def test_metrics_are_added_to_a_run_without_any():
    stored = {"methods": {}, "metrics": None}
    assert changes_in_words(stored, {"methods": {}, "metrics": {"deletion": {}}}, more=True) == []
