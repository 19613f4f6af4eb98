"""Common mistakes of users give one line that names the argument; errors of their own code stay as
they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import (
    ExplainError,
    ImageError,
    LayerError,
    MethodError,
    ModelError,
    OutputError,
    TargetError,
)
from explain.methods import GradCAM, IntegratedGradients
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
        self.net = inner or settled(TinyNet())
        self.change = change

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


def net(**options: Any) -> nn.Module:
    return settled(TinyNet(**options)).eval()


def with_nan() -> nn.Module:
    broken = net()
    broken.layer1[2].weight.data[0] = float("nan")
    return broken


def of_inference() -> nn.Module:
    with torch.inference_mode():
        return TinyNet()


def quantised() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    ).eval()
    return torch.ao.quantization.quantize_dynamic(settled(model), {nn.Linear}, dtype=torch.qint8)


def nested(x: torch.Tensor) -> Any:
    model = net()
    return explain.attribute(model, x, target=lambda output: explain.attribute(model, x).score)


def wrong(x: Any, method: Any = "gradcam", **options: Any) -> Any:
    return explain.attribute(net(), x, method, **options)


Mistake = tuple[Callable[[torch.Tensor], Any], type[ExplainError], str]
ON_TENSORS: dict[str, Mistake] = {
    "no batch dimension": (lambda x: wrong(x[0]), ImageError, "x"),
    "an array": (lambda x: wrong(x.numpy()), ImageError, "x"),
    "another device": (lambda x: wrong(x.to("meta")), ImageError, "x"),
    "NaN in the input": (lambda x: wrong(x / 0), ImageError, "x"),
    "NaN in the weights": (lambda x: explain.attribute(with_nan(), x), ModelError, "model"),
    "a name for a model": (lambda x: explain.attribute("resnet50", x), ModelError, "model"),
    "a misspelt layer": (lambda x: wrong(x, layer="layr1"), LayerError, "layer"),
    "a layer that is not called": (lambda x: wrong(x, layer="unused"), LayerError, "layer"),
    "a layer without a map": (lambda x: wrong(x, layer="fc"), LayerError, "layer"),
    "a model without maps": (
        lambda x: explain.attribute(nn.Sequential(nn.Flatten(), nn.Linear(360, 5)), x),
        LayerError,
        "layer",
    ),
    "a misspelt label": (
        lambda x: wrong(x, target="dgo", categories=LABELS),
        TargetError,
        "target",
    ),
    "more top classes than classes": (
        lambda x: wrong(x, "gradcam", top_k=99),
        TargetError,
        "at most 5, .* got 99",
    ),
    "no top class": (lambda x: wrong(x, "gradcam", top_k=0), TargetError, "top_k"),
    "no_grad inside the model, for a layer": (
        lambda x: explain.attribute(Frozen(), x, layer="net.layer2"),
        LayerError,
        "layer",
    ),
    "detach() inside the model, for pixels": (
        lambda x: explain.attribute(Wrapped(torch.Tensor.detach), x, "saliency"),
        TargetError,
        "target",
    ),
    "weights made in inference mode": (
        lambda x: explain.attribute(of_inference(), x),
        ModelError,
        "model",
    ),
    "a misspelt method": (lambda x: wrong(x, "gradcamm"), MethodError, "method"),
    "two methods of one name": (
        lambda x: wrong(x, [GradCAM(), GradCAM(relu=False)]),
        MethodError,
        "methods",
    ),
    "a baseline that is none": (
        lambda x: IntegratedGradients(baseline="blakc"),
        MethodError,
        "baseline",
    ),
    "batches of nothing": (lambda x: wrong(x, "scorecam", batch_size=0), MethodError, "batch_size"),
    "a method for other networks": (lambda x: wrong(x, "rollout"), MethodError, "rollout"),
    "cam without its head": (lambda x: wrong(x, "cam", layer="conv1"), LayerError, "layer"),
    "an explanation within another": (nested, ExplainError, "explanation"),
    "a scripted model": (
        lambda x: explain.attribute(torch.jit.trace(net(), x), x),
        ModelError,
        "model",
    ),
    "gradients of quantised layers": (
        lambda x: explain.attribute(quantised(), x, "saliency", target=1),
        TargetError,
        "target",
    ),
}


@pytest.mark.parametrize("mistake", ON_TENSORS)
@pytest.mark.filterwarnings("ignore:.*(jit|quantiz):DeprecationWarning", "ignore:.*(jit|quantiz)")
def test_a_mistake_with_tensors_is_one_line_that_names_the_argument(
    mistake: str, x: torch.Tensor
) -> None:
    make, kind, argument = ON_TENSORS[mistake]
    assert_one_line_error(lambda: make(x), kind, argument)


def assert_one_line_error(make: Callable[[], Any], kind: type[ExplainError], argument: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    text = str(caught.value)
    assert re.search(rf"\b{argument}\b", text), text
    assert "\n" not in text
    assert 30 < len(text) < 400, text
    assert isinstance(caught.value, ExplainError)


def photo(path: Any = CAT, **options: Any) -> explain.Explanation:
    return explain.Explainer("tiny")(path, **options)


ON_FILES: dict[str, tuple[Callable[[], Any], type[ExplainError], str]] = {
    "a volume": (lambda: photo(np.zeros((5, 20, 20), np.uint8)), ImageError, "image"),
    "an array of text": (lambda: photo(np.full((20, 20, 3), "255")), ImageError, "image"),
    "a misspelt label": (lambda: photo(target="expresso"), TargetError, "target"),
    "target and top_k": (lambda: photo(target=1, top_k=2), TargetError, "target"),
    "too few labels": (
        lambda: explain.Explainer("tiny", categories=["cat"])(CAT),
        ModelError,
        "categories",
    ),
    "a preprocessing that adds the batch": (
        lambda: explain.Explainer("tiny", preprocess=lambda image: torch.zeros(1, 3, 64, 64))(CAT),
        ImageError,
        "preprocess",
    ),
    "missing weights": (
        lambda: explain.Explainer("tiny", weights="none.pt"),
        ModelError,
        "weights",
    ),
    "weights of another network": (
        lambda: explain.Explainer("tiny", weights="other.pt"),
        ModelError,
        "weights",
    ),
    "an unknown model": (lambda: explain.Explainer("resnet5"), ModelError, "model"),
    "a folder that cannot be written": (
        lambda: photo().save("text.jpg/out"),
        OutputError,
        "output",
    ),
    "a method that was not asked for": (lambda: photo().overlay("saliency"), MethodError, "method"),
    "a misspelt colour map": (lambda: photo().overlay(colormap="jett"), ExplainError, "colormap"),
}


@pytest.mark.parametrize("mistake", ON_FILES)
def test_a_mistake_with_files_is_one_line_that_names_the_argument(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cut.png").write_bytes(Path(CAT).read_bytes()[:5000])
    Path("text.jpg").write_text("hello")
    torch.save({"a": torch.ones(1)}, "other.pt")
    assert_one_line_error(*ON_FILES[mistake])


class CallersError(RuntimeError):
    """An error of the user's own, of a kind that is also caught here and there."""


class Failing(TinyNet):
    """Raises one error from its forward or backward pass, from the given call on."""

    def __init__(self, where: str, after: int = 0) -> None:
        super().__init__()
        self.error = CallersError("first line\nsecond line")
        self.where = where
        self.left = after

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


@pytest.mark.parametrize("method", ["gradcam", "guidedbackprop", "integratedgradients"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_the_users_model_raises_comes_through_as_it_is(
    where: str, method: str, x: torch.Tensor
) -> None:
    model = settled(Failing(where)).train()
    before = snapshot(model)
    with pytest.raises(CallersError) as caught:
        explain.attribute(model, x, method, target=1, layer="layer2")
    assert caught.value is model.error
    assert caught.value.args == ("first line\nsecond line",)
    assert snapshot(model) == before


@pytest.mark.parametrize("method", ["scorecam", "smoothgrad"])
@pytest.mark.parametrize("after", [0, 1])
def test_so_does_what_it_raises_in_a_later_run(after: int, method: str, x: torch.Tensor) -> None:
    model = settled(Failing("forward", after)).train()
    before = snapshot(model)
    with pytest.raises(CallersError) as caught:
        explain.attribute(model, x, method, target=1, layer="layer2")
    assert caught.value is model.error
    assert snapshot(model) == before


def fail(error: BaseException) -> Callable[..., Any]:
    def raising(*_: Any) -> Any:
        raise error

    return raising


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_what_the_users_hooks_raise_comes_through_as_it_is(kind: str, x: torch.Tensor) -> None:
    model = net()
    error = CallersError("from a hook")
    handle = getattr(model.avgpool, f"register_{kind}_hook")(fail(error))
    before = snapshot(model)
    for method in ("gradcam", "guidedbackprop"):
        with pytest.raises(CallersError) as caught:
            explain.attribute(model, x, method, target=1)
        assert caught.value is error
    assert snapshot(model) == before
    handle.remove()
    assert torch.equal(
        explain.attribute(model, x, target=1).values, explain.attribute(net(), x, target=1).values
    )


@pytest.mark.parametrize("kind", [ValueError, KeyError, MemoryError])
def test_what_targets_callbacks_and_preprocessings_raise_comes_through_as_it_is(
    kind: type[Exception], x: torch.Tensor
) -> None:
    model = net()
    error = kind("from the caller's code")
    before = snapshot(model)
    attribute = partial(explain.attribute, model, x)
    calls: list[Callable[[], Any]] = [
        partial(attribute, "ablationcam", target=fail(error)),
        partial(attribute, "scorecam", target=1, progress=fail(error)),
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
    ]
    for kind, call in wrong:
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, explain.ExplainError)
        assert str(caught.value) == caught.value.args[0]
