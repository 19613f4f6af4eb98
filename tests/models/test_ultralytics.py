"""Networks of ultralytics as they are, with random weights."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import explain
from explain import ModelError
from explain.targets import Detections

os.environ.setdefault("YOLO_OFFLINE", "true")
os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.gettempdir())
# its import sets how arrays are printed, and replaces the function that opens images
_printing = np.get_printoptions()
_opening = Image.open
ultralytics = pytest.importorskip("ultralytics")
np.set_printoptions(**_printing)
torch.set_printoptions(profile="default")
Image.open = _opening

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))


def model_of(name: str) -> Any:
    torch.manual_seed(1)
    return ultralytics.YOLO(f"{name}.yaml")


def test_a_photo_lies_on_the_grey_square_of_ultralytics() -> None:
    from ultralytics.data.augment import LetterBox

    explainer = explain.Explainer(model_of("yolov8n"), size=50)  # made a multiple of the stride
    for photo in (PHOTO, PHOTO.rotate(90, expand=True)):
        expected = LetterBox((64, 64), auto=False)(image=np.asarray(photo))
        x = explainer.preprocess(photo)
        torch.testing.assert_close(255 * x, torch.from_numpy(expected).permute(2, 0, 1).float())


@pytest.mark.parametrize("side", [64, 128])  # at 64 pixels, some have fewer cells than columns
@pytest.mark.parametrize(
    "name",
    [
        "yolov8n",
        "yolov8n-seg",
        "yolov8n-pose",
        "yolov8n-obb",
        "yolo11n",
        "yolo26n",
        "yolo26n-pose",
        "yolov3-tiny",
    ],
)
def test_a_box_is_explained_as_its_number_in_the_output(name: str, side: int) -> None:
    model = model_of(name)
    explainer = explain.Explainer(model)
    network = explainer.model.double().eval()
    assert network is model.model
    x = torch.rand(1, 3, side, side, dtype=torch.double, requires_grad=True)
    output = network(x)
    table = output[0] if isinstance(output, tuple) else output
    table = table[0] if isinstance(table, (list, tuple)) else table  # of a segmenter, also masks
    best = int(table[0, 4].detach().argmax())
    middle, sides = table[0, :2, best].detach(), table[0, 2:4, best].detach()
    target = Detections(0, box=torch.cat([middle - sides / 2, middle + sides / 2]))
    (gradient,) = torch.autograd.grad(table[0, 4, best], x)
    if name.endswith("obb"):  # the upright box around a turned one
        target = Detections(0, threshold=0)
    found = explain.attribute(network, x.detach(), "saliency", target=target)
    torch.testing.assert_close(found.score, table[:, 4, best].detach())
    torch.testing.assert_close(found.values, gradient.abs())


def test_classes_have_their_names_and_classifiers_a_crop() -> None:
    model = model_of("yolov8n-cls")
    model.model.names = {index: f"kind {index}" for index in range(1000)}
    explainer = explain.Explainer(model, size=64)
    with torch.no_grad():
        probabilities = model.model.eval()(explainer.preprocess(PHOTO)[None])[0]
    explanation = explainer(PHOTO, "saliency")
    top = int(probabilities.argmax())
    label, probability = explanation.predictions[0][:2]
    assert label == f"kind {top}"
    assert probability == pytest.approx(float(probabilities.max()))
    assert explainer.preprocess(PHOTO).shape == (3, 64, 64)


def test_boxes_of_rtdetr_are_shares_of_the_input() -> None:
    logits = torch.randn(3, 2, 5, 4)  # of three layers of the decoder
    shares = torch.rand(3, 2, 5, 4)
    output = (torch.rand(2, 5, 6), [shares, logits, shares[0], logits[0], None])
    target = Detections(2, threshold=0, size=(40, 80)).resolved(output, 2)
    scores, _ = target.pick(output, 2)
    torch.testing.assert_close(scores, logits[-1, :, :, 2].sigmoid().amax(1))
    best = logits[-1, 0, :, 2].argmax()
    x, y, width, height = shares[-1, 0, best] * torch.tensor([80, 40, 80, 40])
    left = Detections(2, threshold=0, size=(40, 80), of="left").resolved(output, 2)
    torch.testing.assert_close(left.pick(output, 2)[0][0], x - width / 2)
    assert height > 0
    assert y > 0


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_checkpoint_is_read_and_none_of_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("yolov8n")
    model.save(tmp_path / "yolo.pt")
    explainer = explain.Explainer(str(tmp_path / "yolo.pt"), size=64)
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        expected = ultralytics.YOLO(tmp_path / "yolo.pt").model.eval()(x)[0]
        torch.testing.assert_close(explainer.model(x)[0], expected)
    program = (
        "import numpy, explain\nfrom PIL import Image\nbefore = Image.open, numpy.get_printoptions()\n"
        "explain.Explainer('yolo.pt', size=64)\n"
        "assert before == (Image.open, numpy.get_printoptions())"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    trace = tmp_path / "trace"
    torch.save({"model": model.model, "more": Touch(trace)}, tmp_path / "bad.pt")
    with pytest.raises(ModelError, match="YOLO"):
        explain.Explainer(str(tmp_path / "bad.pt"))
    assert not trace.exists()
    monkeypatch.setitem(sys.modules, "ultralytics.nn.tasks", None)
    with pytest.raises(ModelError, match="installed"):
        explain.Explainer(str(tmp_path / "yolo.pt"))


def test_a_model_of_another_format_is_refused() -> None:
    model = model_of("yolov8n")
    del model.model
    model.model = "yolo.engine"
    with pytest.raises(ModelError, match=r"yolo\.engine"):
        explain.Explainer(model)
