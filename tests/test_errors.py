"""Common mistakes of users give one line that names the argument; errors of their own code stay as
they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import explain
from explain import (
    Explainer,
    ExplainError,
    ImageError,
    LayerError,
    MethodError,
    ModelError,
    OutputError,
    TargetError,
)
from explain.methods import GradCAM, Smooth
from tests.conftest import ROOT, Made, TinyNet, layer_for, settled, snapshot

CAT = str(ROOT / "assets" / "chelsea.png")


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(1))


def net(change: Callable[[Any], Any] | None = None) -> nn.Module:
    """A network, and what something makes of its output."""
    model = settled(TinyNet()).eval()
    return Made(lambda made, x: change(made.net(x)), net=model) if change else model


def frozen(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return made.net(x)


def of_inference() -> nn.Module:
    with torch.inference_mode():
        return TinyNet()


def quantised() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    model = settled(nn.Sequential(*layers)).eval()
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def nested(x: torch.Tensor) -> Any:
    model = net()
    return explain.attribute(model, x, target=lambda output: explain.attribute(model, x).score)


def wrong(x: Any, method: Any = "gradcam", model: Any = None, **options: Any) -> Any:
    return explain.attribute(model or net(), x, method, **options)


ON_TENSORS: dict[str, tuple[Callable[[torch.Tensor], Any], type[ExplainError], str]] = {
    "no batch dimension": (lambda x: wrong(x[0]), ImageError, "x"),
    "an array": (lambda x: wrong(x.numpy()), ImageError, "x"),
    "NaN in the input": (lambda x: wrong(x / 0), ImageError, "x"),
    "NaN in the output": (lambda x: wrong(x, model=net(lambda y: y / 0)), ModelError, "model"),
    "a name for a model": (lambda x: wrong(x, model="resnet50"), ModelError, "model"),
    "a misspelt layer": (lambda x: wrong(x, layer="layr1"), LayerError, "layer"),
    "a layer without a map": (lambda x: wrong(x, layer="fc"), LayerError, "layer"),
    "more top classes than classes": (
        lambda x: wrong(x, top_k=99),
        TargetError,
        "at most 5, .* got 99",
    ),
    "no_grad inside the model, for a layer": (
        lambda x: wrong(x, model=Made(frozen, net=net()), layer="net.layer2"),
        LayerError,
        "layer",
    ),
    "detach() inside the model, for pixels": (
        lambda x: wrong(x, "saliency", net(torch.Tensor.detach)),
        TargetError,
        "target",
    ),
    "weights made in inference mode": (
        lambda x: wrong(x, model=of_inference()),
        ModelError,
        "model",
    ),
    "two methods of one name": (
        lambda x: wrong(x, [Smooth(GradCAM()), Smooth(GradCAM(relu=False))]),
        MethodError,
        "methods",
    ),
    "batches of nothing": (lambda x: wrong(x, "scorecam", batch_size=0), MethodError, "batch_size"),
    "a method for other networks": (lambda x: wrong(x, "rollout"), MethodError, "rollout"),
    "an explanation within another": (nested, ExplainError, "explanation"),
    "a layer that a traced model lacks": (
        lambda x: wrong(x, model=torch.jit.trace(net(), x), layer="conv"),
        LayerError,
        "layer",
    ),
    "gradients of quantised layers": (
        lambda x: wrong(x, "saliency", quantised(), target=1),
        TargetError,
        "target",
    ),
}


@pytest.mark.parametrize("mistake", ON_TENSORS)
@pytest.mark.filterwarnings("ignore:.*(jit|quantiz):DeprecationWarning", "ignore:.*(jit|quantiz)")
def test_a_mistake_with_tensors_is_one_line_that_names_the_argument(
    mistake: str, x: torch.Tensor
) -> None:
    call, kind, argument = ON_TENSORS[mistake]
    assert_one_line_error(lambda: call(x), kind, argument)


def assert_one_line_error(call: Callable[[], Any], kind: type[ExplainError], words: str) -> None:
    with pytest.raises(kind, match=rf"\b{words}\b") as caught:
        call()
    assert re.fullmatch(".{30,400}", str(caught.value))


def photo(path: Any = CAT, **options: Any) -> explain.Explanation:
    return Explainer("tiny")(path, **options)


ON_FILES: dict[str, tuple[Callable[[], Any], type[ExplainError], str]] = {
    "a volume": (lambda: photo(np.zeros((5, 20, 20), np.uint8)), ImageError, "image"),
    "a preprocessing that adds the batch": (
        lambda: Explainer("tiny", preprocess=lambda image: torch.zeros(1, 3, 64, 64))(CAT),
        ImageError,
        "preprocess",
    ),
    "weights of another network": (
        lambda: Explainer("tiny", weights="other.pt"),
        ModelError,
        "weights",
    ),
    "a folder that cannot be written": (
        lambda: photo().save("other.pt/out"),
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
    torch.save({"a": torch.ones(1)}, "other.pt")
    assert_one_line_error(*ON_FILES[mistake])


class CallersError(RuntimeError):
    """An error of the user's own, of a kind that is also caught here and there."""


def failing(where: str, after: int) -> tuple[nn.Module, Exception]:
    """A network that raises an error from its forward or backward pass, from a call on."""
    model = settled(TinyNet()).train()
    error = CallersError("first line\nsecond line")
    calls = count()

    def forward(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = made.net(x)
        if where == "backward" and out.requires_grad:
            out.register_hook(fail(error))
        if where == "forward" and next(calls) >= after:
            raise error
        return out

    return Made(forward, net=model), error


@pytest.mark.parametrize(
    ("method", "where", "after"),
    [
        ("gradcam", "forward", 0),
        ("gradcam", "backward", 0),
        ("saliency", "backward", 0),
        ("integratedgradients", "forward", 1),
        ("scorecam", "forward", 1),
    ],
)
def test_what_the_users_model_raises_comes_through_as_it_is(
    method: str, where: str, after: int, x: torch.Tensor
) -> None:
    model, error = failing(where, after)
    before = snapshot(model)
    with pytest.raises(CallersError) as caught:
        explain.attribute(model, x, method, target=1, layer=layer_for(method, "net.layer2"))
    assert caught.value is error
    assert snapshot(model) == before


def fail(error: BaseException) -> Callable[..., Any]:
    def raising(*_: Any) -> Any:
        raise error

    return raising


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_what_the_users_hooks_raise_comes_through_as_it_is(kind: str, x: torch.Tensor) -> None:
    model = net()
    error = CallersError("from a hook")
    getattr(model.avgpool, f"register_{kind}_hook")(fail(error))
    before = snapshot(model)
    for method in ("gradcam", "saliency"):
        with pytest.raises(CallersError) as caught:
            explain.attribute(model, x, method, target=1)
        assert caught.value is error
    assert snapshot(model) == before


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
@pytest.mark.parametrize("method", ["guidedbackprop", "deconvnet", "fullgrad", "lrp", "deeplift"])
def test_what_runs_no_backward_pass_of_autograd_calls_no_hooks_of_it(
    method: str, kind: str, x: torch.Tensor
) -> None:
    model = net()
    expected = explain.attribute(model, x, method, target=1).values
    getattr(model.avgpool, f"register_{kind}_hook")(fail(CallersError("from a hook")))
    model.register_forward_hook(lambda module, args, output: hooked(output))
    values = explain.attribute(model, x, method, target=1).values
    assert torch.equal(values, expected)


def hooked(output: torch.Tensor) -> torch.Tensor:
    if output.requires_grad:
        output.register_hook(fail(CallersError("from a hook")))
    return output


@pytest.mark.parametrize("kind", [ValueError, KeyError, MemoryError])
def test_what_targets_callbacks_and_preprocessings_raise_comes_through_as_it_is(
    kind: type[Exception], x: torch.Tensor
) -> None:
    model = net()
    error = kind("from the caller's code")
    before = snapshot(model)
    calls: list[Callable[[], Any]] = [
        lambda: wrong(x, "ablationcam", model, target=fail(error)),
        lambda: wrong(x, "scorecam", model, target=1, progress=fail(error)),
        lambda: Explainer(model, preprocess=fail(error))(CAT),
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert caught.value is error
    assert snapshot(model) == before


def test_errors_are_the_built_in_kind_as_well(x: torch.Tensor) -> None:
    explanation = photo(np.zeros((8, 8, 3), np.uint8), methods="saliency")
    table = explain.evaluate(net(), x, "saliency", "sparseness")
    calls: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ValueError, lambda: wrong(x, "lpr")),
        (TypeError, lambda: wrong(x, batchsize=3)),
        (KeyError, lambda: explanation["lrp"]),
        (KeyError, lambda: table["lrp"]),
    ]
    for kind, call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, ExplainError)
        assert str(caught.value) == caught.value.args[0]
