"""What users get wrong most often, word for word; and that nothing but our own errors, or theirs untouched, comes out.

Each message is one line that a stranger can act on: the argument, what it must be, what it was, and what to do. Where
the requirement lists all that may be given ("must be one of ..."), it is the remedy as well.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import ExplainError, ImageError, LayerError, MethodError, ModelError, OutputError, TargetError
from explain._utils import removed
from explain.methods import GradCAM, IntegratedGradients, ScoreCAM
from explain.targets import BinaryLogit, Detection, Segmentation
from tests.conftest import ROOT, TinyNet, settled, snapshot

CAT = str(ROOT / "assets" / "chelsea.png")
LABELS = ["tabby cat", "tiger cat", "crane", "crane", "dog"]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(1))


class Wrapped(nn.Module):
    """Does something to what a network returns."""

    def __init__(self, change: Callable[[Any], Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.net, self.change = inner or settled(TinyNet()), change

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(self.net(x))


class Frozen(nn.Module):
    """Turns gradients off inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = settled(TinyNet())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.net(x)


def boxes(maps: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": torch.ones(1, 4), "labels": torch.ones(1), "scores": each.mean()[None]} for each in maps]


def net(**options: Any) -> nn.Module:
    return settled(TinyNet(**options)).eval()


def maps() -> nn.Module:
    return settled(nn.Conv2d(3, 4, 3, padding=1))


def with_nan() -> nn.Module:
    broken = net()
    broken.layer1[2].weight.data[0] = float("nan")
    return broken


def of_inference() -> nn.Module:
    with torch.inference_mode():
        return TinyNet()


def quantised() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    return torch.ao.quantization.quantize_dynamic(settled(model), {nn.Linear}, dtype=torch.qint8)


def explained(model: nn.Module, x: Any, method: Any = "gradcam", **options: Any) -> Callable[[], Any]:
    return lambda: explain.attribute(model, x, method, **options)


def nested(x: torch.Tensor) -> Any:
    model = net()
    return explain.attribute(model, x, target=lambda output: explain.attribute(model, x).score)


Mistake = tuple[Callable[[torch.Tensor], Any], type[ExplainError], str]
ON_TENSORS: dict[str, Mistake] = {
    "no batch dimension": (
        lambda x: explain.attribute(net(), x[0]),
        ImageError,
        "x must have the shape (N, C, H, W), got (3, 12, 10); add the batch dimension with x[None]",
    ),
    "neither batch nor channels": (
        lambda x: explain.attribute(net(), x[0, 0]),
        ImageError,
        "x must have the shape (N, C, H, W), got (12, 10); use explainer.preprocess(image)[None]",
    ),
    "an array": (
        lambda x: explain.attribute(net(), x.numpy()),
        ImageError,
        "x must be a tensor (N, C, H, W), got ndarray; use explainer.preprocess(image)[None]",
    ),
    "bytes of an image": (
        lambda x: explain.attribute(net(), (x * 9).byte()),
        ImageError,
        "x must be floating point, got torch.uint8; use x.float() / 255 or the model's preprocessing",
    ),
    "another device": (
        lambda x: explain.attribute(net(), x.to("meta")),
        ImageError,
        "x must be on the model's device cpu, got meta; use .to('cpu')",
    ),
    "an empty batch": (
        lambda x: explain.attribute(net(), x[:0]),
        ImageError,
        "x must hold at least one image, got shape (0, 3, 12, 10); leave empty batches out",
    ),
    "NaN in the input": (
        lambda x: explain.attribute(net(), x / 0),
        ImageError,
        "x must hold finite values, got NaN or infinity; check the preprocessing",
    ),
    "NaN in the weights": (
        lambda x: explain.attribute(with_nan(), x),
        ModelError,
        "model must give finite scores, got nan, first in layer 'layer1.2' (Conv2d); check its weights and the input's "
        "values",
    ),
    "a name for a model": (
        lambda x: explain.attribute("resnet50", x),  # type: ignore[arg-type]
        ModelError,
        "model must be a torch.nn.Module, got the name 'resnet50'; explain.Explainer('resnet50') takes names",
    ),
    "a class for a model": (
        lambda x: explain.attribute(TinyNet, x),  # type: ignore[arg-type]
        ModelError,
        "model must be a torch.nn.Module, got the class TinyNet; make an instance of it",
    ),
    "no model": (
        lambda x: explain.attribute(None, x),  # type: ignore[arg-type]
        ModelError,
        "model must be a torch.nn.Module, got NoneType; give the network itself",
    ),
    "a misspelt layer": (
        lambda x: explain.attribute(net(), x, layer="layr1"),
        LayerError,
        "layer 'layr1' is not in the model; did you mean 'layer1' or 'layer2.1' or 'layer1.2'?",
    ),
    "a layer by its number": (
        lambda x: explain.attribute(net(), x, layer=-1),  # type: ignore[arg-type]
        LayerError,
        "layer must be a name, a pattern, a module, a module class or several of them, got -1; "
        "explain.list_layers(model, x) shows the names",
    ),
    "a layer of another model": (
        lambda x: explain.attribute(net(), x, layer=net().conv1),
        LayerError,
        "layer must be a part of the model, got a Conv2d that is not in it; give its name instead",
    ),
    "a kind of layer that is not there": (
        lambda x: explain.attribute(net(), x, layer=nn.LSTM),
        LayerError,
        "layer must select at least one module, but the model has no LSTM; explain.list_layers(model, x) shows what it "
        "has",
    ),
    "no layers": (
        lambda x: explain.attribute(net(), x, layer=[]),
        LayerError,
        "layer must name at least one layer, got an empty list; leave it out for the last feature map",
    ),
    "a layer that is not called": (
        lambda x: explain.attribute(net(), x, layer="unused"),
        LayerError,
        "layer 'unused' was not called in the forward pass; choose one that the model uses for this input "
        "(--list-layers shows them)",
    ),
    "a layer without a map": (
        lambda x: explain.attribute(net(), x, layer="fc"),
        LayerError,
        "layer 'fc' must give a spatial map, got shape (2, 5); choose a convolutional layer (--list-layers or "
        "explain.list_layers shows which have a map)",
    ),
    "a layer after pooling": (
        lambda x: explain.attribute(net(), x, layer="avgpool"),
        LayerError,
        "layer 'avgpool' must give a map of several positions, got shape (2, 8, 1, 1), one position for the whole "
        "input, which cannot tell one part of it from another; choose an earlier layer, or use a larger input",
    ),
    "a model without maps": (
        lambda x: explain.attribute(nn.Sequential(nn.Flatten(), nn.Linear(360, 5)), x),
        LayerError,
        "layer must be given for this model: none of its layers gives a spatial map (2 calls looked at); name one, or "
        "use a method for pixels such as saliency",
    ),
    "a class beyond the last": (
        lambda x: explain.attribute(net(), x, target=5),
        TargetError,
        "target must be a class from 0 to 4 for this model, got 5; leave it out to explain the top prediction",
    ),
    "a fraction for a class": (
        lambda x: explain.attribute(net(), x, target=1.5),  # type: ignore[arg-type]
        TargetError,
        "target must be a class index, a label, N class indices or a callable, got 1.5; give the index of a class as a "
        "whole number",
    ),
    "a truth value for a class": (
        lambda x: explain.attribute(net(), x, target=True),
        TargetError,
        "target must be a class index, a label or a callable, got True; for a yes or no take "
        "explain.targets.BinaryLogit()",
    ),
    "a label where none is known": (
        lambda x: explain.attribute(net(), x, target="dog"),
        TargetError,
        "target 'dog' is a label, but the labels are not known; pass categories=, or give the class index",
    ),
    "a misspelt label": (
        lambda x: explain.attribute(net(), x, target="dgo", categories=LABELS),
        TargetError,
        "target 'dgo' is not a label of this model; did you mean 'dog'?",
    ),
    "half a label": (
        lambda x: explain.attribute(net(), x, target="cat", categories=LABELS),
        TargetError,
        "target 'cat' fits 2 labels: 'tabby cat', 'tiger cat'; name one of them",
    ),
    "a label of two classes": (
        lambda x: explain.attribute(net(), x, target="crane", categories=LABELS),
        TargetError,
        "target 'crane' is the label of classes 2, 3; give the class index",
    ),
    "as many targets as there are no images": (
        lambda x: explain.attribute(net(), x, target=torch.tensor([1, 2, 3])),
        TargetError,
        "target must hold one class for each of the 2 images, got 3; targets= takes several classes for every image",
    ),
    "a callable that picks no class": (
        lambda x: explain.attribute(net(), x, target=lambda output: output),
        TargetError,
        "target <lambda> must return one score per image, shape (2,), got (2, 5); pick a class as in output[:, 0], and "
        "sum over no images",
    ),
    "a callable that gives no tensor": (
        lambda x: explain.attribute(net(), x, target=lambda output: output.sum().item()),  # type: ignore[arg-type]
        TargetError,
        "target <lambda> must return a tensor of 2 scores, got float; pick a class as in output[:, 0]",
    ),
    "more top classes than classes": (
        lambda x: explain.attribute(net(), x, "gradcam", top_k=6),
        TargetError,
        "target must be among the 5 best classes, since the model has no more, got number 6; ask for at most 5",
    ),
    "no top class": (
        lambda x: explain.attribute(net(), x, "gradcam", top_k=0),
        TargetError,
        "top_k must be a whole number from 1, got 0; None is the top class",
    ),
    "a dictionary without scores": (
        lambda x: explain.attribute(Wrapped(lambda scores: {"loss": scores.sum()}), x),
        ModelError,
        "model must return class scores (2, K), got dict with 'loss' (); pass a callable as target",
    ),
    "a detector asked for a class": (
        lambda x: explain.attribute(Wrapped(boxes, maps()), x, target=1),
        ModelError,
        "model must return class scores (2, K), got list of dict, dict; for a detector take "
        "explain.targets.Detection(category), or pass a callable as target",
    ),
    "a segmenter asked for a class": (
        lambda x: explain.attribute(Wrapped(lambda found: {"out": found}, maps()), x, target=1),
        ModelError,
        "model must return class scores (2, K), got dict with 'out' (2, 4, 12, 10); for a map of classes take "
        "explain.targets.Segmentation(category), or pass a callable as target",
    ),
    "a classifier asked for a region": (
        lambda x: explain.attribute(net(), x, target=Segmentation(1)),
        TargetError,
        "target 1 where predicted must be asked of a model that returns class maps (2, K, H, W), got shape (2, 5); "
        "give a class index, or pass a callable as target",
    ),
    "a classifier asked for a box": (
        lambda x: explain.attribute(net(), x, target=Detection(1)),
        TargetError,
        "target best 1 detection must be asked of a detector that returns boxes, labels and scores for each of the 2 "
        "images, got shape (2, 5); give a class index, or pass a callable as target",
    ),
    "a classifier asked for yes or no": (
        lambda x: explain.attribute(net(), x, target=BinaryLogit()),
        TargetError,
        "target positive must be asked of a model with one logit per image, got 5; give the class index",
    ),
    "no_grad inside the model, for a layer": (
        lambda x: explain.attribute(Frozen(), x, layer="net.layer2"),
        LayerError,
        "layer 'net.layer2' must influence the score of target top-1, but the score does not use it, or not "
        "through differentiable operations; choose a layer or target that depend on each other, without no_grad(), "
        "detach() or checkpoints between",
    ),
    "detach() inside the model, for pixels": (
        lambda x: explain.attribute(Wrapped(torch.Tensor.detach), x, "saliency"),
        TargetError,
        "target top-1 must depend on the input through differentiable operations, but it does not; look for .detach(), "
        ".data, no_grad() or rounding in the model or the target",
    ),
    "weights made in inference mode": (
        lambda x: explain.attribute(of_inference(), x),
        ModelError,
        "model must have weights made outside torch.inference_mode() for gradients to exist, got some made inside it; "
        "build or load it outside",
    ),
    "a misspelt method": (
        lambda x: explain.attribute(net(), x, "gradcamm"),
        MethodError,
        "method 'gradcamm' is unknown; did you mean 'gradcam' or 'xgradcam' or 'gradcam++'?",
    ),
    "a method's class": (
        lambda x: explain.attribute(net(), x, ScoreCAM),  # type: ignore[arg-type]
        MethodError,
        "method must be a name or an object, got the class ScoreCAM; use ScoreCAM()",
    ),
    "no method": (
        lambda x: explain.attribute(net(), x, []),
        MethodError,
        "methods must name at least one method, got none; see explain.list_methods()",
    ),
    "two methods of one name": (
        lambda x: explain.attribute(net(), x, [GradCAM(), GradCAM(relu=False)]),
        MethodError,
        "methods must have different names, got two of 'gradcam'; ask for them in two calls",
    ),
    "no steps": (
        lambda x: IntegratedGradients(steps=0),
        MethodError,
        "steps of integratedgradients must be a whole number from 1, got 0",
    ),
    "a baseline that is none": (
        lambda x: IntegratedGradients(baseline="black"),  # type: ignore[arg-type]
        MethodError,
        "baseline of integratedgradients must be a number, a tensor (C, H, W) or one of mean, blur, "
        "least, most, got 'black'; 0 is "
        "usual",
    ),
    "a baseline of another size": (
        lambda x: explain.attribute(net(), x, IntegratedGradients(baseline=torch.zeros(3, 4, 4))),
        MethodError,
        "baseline of integratedgradients must have the shape (3, 12, 10) of an image, got (3, 4, 4); give it one that "
        "the model would take",
    ),
    "batches of nothing": (
        lambda x: explain.attribute(net(), x, "scorecam", batch_size=0),
        MethodError,
        "batch_size must be a whole number from 1, got 0",
    ),
    "a method for other networks": (
        lambda x: explain.attribute(net(), x, "rollout"),
        MethodError,
        "rollout must have attention among all tokens of the photo in every block, got none; use it for vision "
        "transformers (ViT, DeiT), and gradcam or layercam otherwise",
    ),
    "cam without its head": (
        lambda x: explain.attribute(net(), x, "cam", layer="conv1"),
        LayerError,
        "layer 'conv1' must be followed by an average over its maps and one linear layer for cam, but it is not; use "
        "gradcam or hirescam, which need no such head, or name the layer that is pooled",
    ),
    "an explanation within another": (
        nested,
        ExplainError,
        "an explanation was started from inside another one (in a hook or a target); run them in turn",
    ),
    "a scripted model": (
        lambda x: explain.attribute(torch.jit.trace(net(), x), x),
        ModelError,
        "model must be a module of Python code, got a scripted one (TinyNet); pass the module that it was made from",
    ),
    "gradients of quantised layers": (
        lambda x: explain.attribute(quantised(), x, "saliency", target=1),
        TargetError,
        "target 1 must depend on the input through differentiable operations, but it does not; look for .detach(), "
        ".data, no_grad() or rounding in the model or the target (quantised layers have no gradients: use scorecam, "
        "ablationcam or eigencam, or the model before quantisation)",
    ),
}


@pytest.mark.parametrize("mistake", ON_TENSORS)
@pytest.mark.filterwarnings("ignore:.*(jit|quantiz):DeprecationWarning", "ignore:.*(jit|quantiz)")
def test_a_mistake_with_tensors_is_told_in_these_words(mistake: str, x: torch.Tensor) -> None:
    make, kind, message = ON_TENSORS[mistake]
    check(lambda: make(x), kind, message)


def check(make: Callable[[], Any], kind: type[ExplainError], message: str) -> None:
    with pytest.raises(ExplainError) as caught:
        make()
    expected = re.escape(message).replace(re.escape("..."), ".+")  # what others say, and what may change with a file
    assert re.fullmatch(expected, str(caught.value)), str(caught.value)
    assert isinstance(caught.value, kind)
    assert isinstance(caught.value, ExplainError)
    assert "\n" not in message


def photo(path: Any = CAT, **options: Any) -> explain.Explanation:
    return explain.Explainer("tiny")(path, **options)


ON_FILES: dict[str, tuple[Callable[[], Any], type[ExplainError], str]] = {
    "a missing photo": (
        lambda: photo("nothing.jpg"),
        ImageError,
        "image 'nothing.jpg' does not exist; check the path",
    ),
    "a damaged photo": (
        lambda: photo("cut.png"),
        ImageError,
        "image 'cut.png' is damaged or truncated (...); get the file again",
    ),
    "a text for a photo": (
        lambda: photo("text.jpg"),
        ImageError,
        "image 'text.jpg' is not an image that Pillow can read; convert it to PNG or JPEG",
    ),
    "channels first": (
        lambda: photo(np.zeros((3, 20, 20), np.uint8)),
        ImageError,
        "image must be an array (H, W), (H, W, 3) or (H, W, 4), got shape (3, 20, 20); use array.transpose(1, 2, 0)",
    ),
    "floats up to 255": (
        lambda: photo(np.full((20, 20, 3), 255.0)),
        ImageError,
        "image must have floats in [0, 1], got values outside or not finite; use uint8 for 0-255",
    ),
    "a misspelt label": (
        lambda: photo(target="expresso"),
        TargetError,
        "target 'expresso' is not a label of this model; did you mean 'espresso'?",
    ),
    "target and top_k": (
        lambda: photo(target=1, top_k=2),
        TargetError,
        "target and top_k cannot both be given; leave one out",
    ),
    "too few labels": (
        lambda: explain.Explainer("tiny", categories=["cat"])(CAT),
        ModelError,
        "categories must hold a label for each of the model's 200 classes, got 1; give them all, in the order of the "
        "classes",
    ),
    "a preprocessing that adds the batch": (
        lambda: explain.Explainer("tiny", preprocess=lambda image: torch.zeros(1, 3, 64, 64))(CAT),
        ImageError,
        "preprocess must return a tensor (C, H, W), got shape (1, 3, 64, 64); leave the batch dimension out",
    ),
    "a preprocessing that gives an array": (
        lambda: explain.Explainer("tiny", preprocess=lambda image: np.zeros((3, 64, 64)))(CAT),  # type: ignore[arg-type, return-value]
        ImageError,
        "preprocess must return a tensor (C, H, W), got ndarray; use torch.from_numpy or the like",
    ),
    "missing weights": (
        lambda: explain.Explainer("tiny", weights="none.pt"),
        ModelError,
        "weights 'none.pt' must be a file, but there is none; check the path",
    ),
    "a text for weights": (
        lambda: explain.Explainer("tiny", weights="text.jpg"),
        ModelError,
        "weights 'text.jpg' cannot be read (it is not a file of PyTorch); save them again with torch.save",
    ),
    "weights of another network": (
        lambda: explain.Explainer("tiny", weights="other.pt"),
        ModelError,
        "weights 'other.pt' must fit the model, but ... tensors are missing and 1 tensor is unknown "
        "(conv1.weight is missing); take those of this very network",
    ),
    "weights for a module": (
        lambda: explain.Explainer(net(), weights="other.pt"),
        ModelError,
        "weights can be given for a model by name only; load them into your module yourself",
    ),
    "an unknown model": (
        lambda: explain.Explainer("resnet5"),
        ModelError,
        "model 'resnet5' is unknown (your own is given as package.module:factory); did you mean 'resnet50' or "
        "'resnet152' or 'resnet34'?",
    ),
    "a module that is not there": (
        lambda: explain.Explainer("nowhere:Net"),
        ModelError,
        "model 'nowhere:Net': no module named 'nowhere'; run from its folder, or install it",
    ),
    "an unknown device": (
        lambda: explain.Explainer("tiny", device="gpu"),
        ModelError,
        "device 'gpu' cannot be used (torch knows no such device); use 'cpu', or 'cuda' with a GPU",
    ),
    "a folder that cannot be written": (
        lambda: photo().save("text.jpg/out"),
        OutputError,
        "output folder 'text.jpg/out' cannot be written: Not a directory; choose another",
    ),
    "a file that is there": (
        lambda: (photo().save("out"), photo().save("out")),
        OutputError,
        "output 'out/chelsea-gradcam.png' exists already (and 2 more); choose another folder, or pass overwrite=True",
    ),
    "a method that was not asked for": (
        lambda: photo().overlay("saliency"),
        MethodError,
        "method 'saliency' was not asked for here; known: gradcam",
    ),
    "a target that was not asked for": (
        lambda: photo().overlay(target=3),
        TargetError,
        "target must be a label or a position from 0 to 0 here, got 3; explanation.targets lists them",
    ),
    "a misspelt colour map": (
        lambda: photo().overlay(colormap="jett"),
        ExplainError,
        "colormap 'jett' is unknown; did you mean 'jet' or 'jet_r'?",
    ),
}


@pytest.mark.parametrize("mistake", ON_FILES)
def test_a_mistake_with_files_is_told_in_these_words(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cut.png").write_bytes(Path(CAT).read_bytes()[:5000])
    Path("text.jpg").write_text("hello")
    torch.save({"a": torch.ones(1)}, "other.pt")
    check(*ON_FILES[mistake])


# What may be raised that is no ExplainError, and why
JUSTIFIED = {
    ("explain", "__getattr__", "AttributeError"): "what Python asks of a module that looks its names up",
    ("explain.hooks", "__getattr__", "AttributeError"): "what Python asks of a module that looks its names up",
    ("explain.cli.arguments", "_above_zero", "argparse.ArgumentTypeError"): "what argparse asks of a type",
    ("explain.cli.arguments", "_check_value", "argparse.ArgumentError"): "what argparse asks of its own checks",
    ("explain.cli.arguments", "_count", "argparse.ArgumentTypeError"): "what argparse asks of a type",
    ("explain.cli.arguments", "_crop", "argparse.ArgumentTypeError"): "what argparse asks of a type",
    ("explain.cli.arguments", "_numbers", "argparse.ArgumentTypeError"): "what argparse asks of a type",
    ("explain.cli.arguments", "_opacity", "argparse.ArgumentTypeError"): "what argparse asks of a type",
    (
        "explain.attribution.request",
        "_must_follow",
        "_OtherWayError",
    ): "caught by answered, which then chooses other layers",
    ("explain.engine.replay", "__torch_function__", "ReplayError"): "caught by the run, which then runs all of it",
    (
        "explain.engine.layer_reruns",
        "_check",
        "DependentRowsError",
    ): "caught where the rows are run, one at a time then",
    ("explain.engine.layer_reruns", "_must_fit", "DependentRowsError"): "caught where the maps are run, whole then",
    ("explain.engine.reruns", "_check", "DependentRowsError"): "caught where the rows are run, one at a time then",
    ("explain.engine.reruns", "_run_piece", "DependentRowsError"): "caught where the rows are run, one at a time then",
    (
        "explain.engine.token_subsets",
        "_must_be_alone",
        "DependentRowsError",
    ): "caught where the rows are run, one at a time",
    ("explain.engine.replay", "_reach", "ReachedError"): "ends a forward pass, and is caught around it",
    ("explain.distributed.communication", "_average", "ValueError"): "told to all ranks as a HookError by _together",
    ("explain.distributed.communication", "_tensor", "TypeError"): "told to all ranks as a HookError by _together",
    ("explain.methods.options", "_finite", "TypeError"): "caught by its caller, which says what was given",
    ("explain.methods.options", "_whole", "TypeError"): "caught by its caller, which says what was given",
    (
        "explain.hooks.registration",
        "__call__",
        "NotImplementedError",
    ): "what a protocol of PyTorch's leaves to its kinds",
    (
        "explain.hooks.saved_tensors",
        "_unchanged",
        "RuntimeError",
    ): "what autograd says of a tensor that was overwritten",
    ("explain.layers.calls", "take_look", "error if came_by_signal(error) else failed"): "what the model raised",
    ("explain.hooks.extractor", "keep", "_SeenEnough"): "ends a forward pass, and is caught around it",
    ("explain.distributed.exporting", "check", "self._error"): "an OSError that export_package catches and tells",
    ("explain.explanation.photos", "_check", "general[0]"): "what the work on photos raised, which came from there",
    (
        "explain.attribution.records",
        "_decode_tensor",
        "ValueError",
    ): "caught in the same function, and told as a RecordError",
    (
        "explain.explanation.loading",
        "_read_values",
        "ValueError",
    ): "caught in the same function, and told as a RecordError",
    ("explain.render.placement", "_resampled", "MemoryError"): "what running out of memory is called, also by OpenCV",
    ("explain.targets.resolve", "_index", "TypeError"): "caught by its caller, which says what was given",
    ("explain.engine.reruns", "_answer", "self.asked.interrupted[0]"): "the interrupt itself, which came before",
    ("explain.attribution.request", "_answered", "KeyboardInterrupt"): "the interrupt, where nothing can be shown",
    ("explain.engine.reruns", "end", "error"): "the interrupt, where nothing is to be shown",
    (
        "explain.app.scheduler",
        "__call__",
        "KeyboardInterrupt",
    ): "ends a method with what it has; caught by whoever asked it",
    ("explain.app.scheduler", "still_wanted", "DroppedError"): "caught where the answer would have been told",
    ("explain.relevance.linear_rules", "back", "NotImplementedError"): "what a kind of rules leaves to each of them",
    ("explain.relevance.linear_rules", "shares", "NotImplementedError"): "what a kind of rules leaves to each of them",
    ("explain.relevance.input_prefix", "_operations", "_Unknown"): "caught in Prefix.to, which answers None",
    ("explain.relevance.input_prefix", "_through", "_Unknown"): "caught in Prefix.to, which answers None",
    ("explain.relevance.input_prefix", "forward", "_Unknown"): "caught in Prefix.to, which answers None",
    ("explain.methods.coalitions", "design", "NotImplementedError"): "what a kind of methods leaves to each of them",
    ("explain.methods.coalitions", "solver", "NotImplementedError"): "what a kind of methods leaves to each of them",
    ("explain.runs.runner", "_enter", "general[0]"): "what the work on photos raised, which came from there",
    ("explain.runs.cluster", "_enter", "general[0]"): "what the work on photos raised, which came from there",
    ("explain.runs.cluster", "_enter", "report.error"): "what ended the work of another process",
    ("explain.runs.files", "_must_end", "tarfile.ReadError"): "caught by entries, which tells it as trouble",
    ("explain.runs.workers", "__iter__", "self._error"): "what the source raised in another thread",
    ("explain.runs.workers", "_begin", "CannotBeginError"): "caught by the run, which then goes without workers",
    ("explain.runs.writing", "_check", "self._error"): "a RunError of another thread",
    ("explain.methods.estimates", "found", "NotImplementedError"): "what a kind of methods leaves to each of them",
}


def raises(path: Path) -> Iterator[tuple[str, ast.Raise]]:
    """Every ``raise`` of a file with the name of the innermost function around it."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Raise]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Raise):
                yield function, child
            inside = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
            yield from walk(child, inside)

    return walk(ast.parse(path.read_text("utf-8")), "")


def is_ours(module: Any, source: str) -> bool:
    """Whether what is raised is a class of ours, or comes from a function that says it returns one."""
    name = source.removeprefix("self.")
    if "." in name:
        return False
    found = getattr(module, name, None)
    if found is None:  # a method: of whichever class of the module has it
        found = next((vars(c)[name] for _, c in inspect.getmembers(module, inspect.isclass) if name in vars(c)), None)
    if not inspect.isclass(found):
        returned = str(getattr(found, "__annotations__", {}).get("return", ""))
        found = getattr(module, returned, None)
    return inspect.isclass(found) and issubclass(found, ExplainError)


def test_whatever_the_package_raises_is_its_own_error() -> None:
    strange = set()
    for path in sorted((ROOT / "explain").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for function, statement in raises(path):
            if statement.exc is None:
                continue  # what was caught goes on
            called = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
            source = ast.unparse(called)
            if not is_ours(importlib.import_module(name), source):
                strange.add((name, function, source))
    assert strange == set(JUSTIFIED)


class Told(RuntimeError):
    """An error of the user's own, of a kind that is also caught here and there."""


class Failing(TinyNet):
    """Raises one error from its forward or backward pass, from the given call on."""

    def __init__(self, where: str, after: int = 0) -> None:
        super().__init__()
        self.error, self.where, self.left = Told("first line\nsecond line"), where, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        out = super().forward(x)
        if self.where == "forward" and self.left < 0:
            raise self.error
        if self.where == "backward" and out.requires_grad:
            out.register_hook(self.stop)
        return out

    def stop(self, gradient: torch.Tensor) -> None:
        raise self.error


@pytest.mark.parametrize("method", ["gradcam", "guidedbackprop", "fullgrad", "integratedgradients", "shapleycam"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_the_users_model_raises_comes_through_as_it_is(where: str, method: str, x: torch.Tensor) -> None:
    model = settled(Failing(where)).train()
    before = snapshot(model)
    with pytest.raises(Told) as caught:
        explain.attribute(model, x, method, target=1, layer="layer2")
    assert caught.value is model.error
    assert caught.value.args == ("first line\nsecond line",)
    assert snapshot(model) == before


@pytest.mark.parametrize("method", ["scorecam", "ablationcam", "smoothgrad", "sscam", "smooth(gradcam)"])
@pytest.mark.parametrize("after", [0, 1])
def test_so_does_what_it_raises_in_a_later_run(after: int, method: str, x: torch.Tensor) -> None:
    model = settled(Failing("forward", after)).train()
    before = snapshot(model)
    with pytest.raises(Told) as caught:
        explain.attribute(model, x, method, target=1, layer="layer2")
    assert caught.value is model.error
    assert snapshot(model) == before


def fail(error: BaseException) -> Callable[..., Any]:
    def raising(*_: Any) -> Any:
        raise error

    return raising


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_what_the_users_hooks_raise_comes_through_as_it_is(kind: str, x: torch.Tensor) -> None:
    model, error = net(), Told("from a hook")
    handle = getattr(model.avgpool, f"register_{kind}_hook")(fail(error))
    before = snapshot(model)
    for method in ("gradcam", "guidedbackprop"):
        with pytest.raises(Told) as caught:
            explain.attribute(model, x, method, target=1)
        assert caught.value is error
    assert snapshot(model) == before
    handle.remove()
    assert torch.equal(explain.attribute(model, x, target=1).values, explain.attribute(net(), x, target=1).values)


@pytest.mark.parametrize("kind", [Told, ValueError, KeyError, OSError, MemoryError])
def test_what_targets_callbacks_and_preprocessings_raise_comes_through_as_it_is(
    kind: type[Exception], x: torch.Tensor
) -> None:
    model, error = net(), kind("from the caller's code")
    before = snapshot(model)
    calls: list[Callable[[], Any]] = [
        explained(model, x, target=fail(error)),
        explained(model, x, "ablationcam", target=fail(error)),
        explained(model, x, "scorecam", target=1, progress=fail(error)),
        explained(model, x, "ablationcam", target=1, progress=fail(error)),
        lambda: explain.Explainer(model, preprocess=fail(error))(CAT),
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert caught.value is error
    assert snapshot(model) == before


def test_errors_are_the_built_in_kind_as_well(x: torch.Tensor) -> None:
    explanation = explain.Explainer("tiny")(np.zeros((8, 8, 3), np.uint8), "saliency")
    table = explain.evaluate(net(), x, "saliency", "sparseness")
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ValueError, lambda: explain.attribute(net(), x, "lpr")),
        (TypeError, lambda: explain.attribute(net(), x, batchsize=3)),  # type: ignore[call-overload]
        (KeyError, lambda: explanation["lrp"]),
        (KeyError, lambda: table["lrp"]),
        (AttributeError, lambda: explain.attribute_all),
        (AttributeError, lambda: explain.fills),
    ]
    for kind, call in wrong:
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, explain.ExplainError)
        assert str(caught.value) == caught.value.args[0]


def test_a_name_that_is_gone_says_the_new_one(x: torch.Tensor) -> None:
    assert not hasattr(explain, "attribute_targets")
    for name, new in removed.NAMES.items():
        with pytest.raises(explain.ExplainError) as caught:
            getattr(explain, name)
        assert new in str(caught.value)
    with pytest.raises(explain.ArgumentError, match="'max_seconds'"):
        explain.attribute(net(), x, "rise", seconds=3)  # type: ignore[call-overload]
