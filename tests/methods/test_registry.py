from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import explain
from explain import ExplainError, MethodError
from explain.engine import Evidence
from explain.methods import (
    Augmented,
    GradCAM,
    GuidedGradCAM,
    Method,
    RefineCAM,
    Smooth,
    list_methods,
    register,
)
from explain.methods.base import get_method, options, uses_layer


def test_names_find_methods_and_patterns_list_them() -> None:
    assert list_methods() == sorted(set(list_methods()))
    assert explain.list_methods("g*cam*") == ["gradcam", "gradcam++", "guidedgradcam"]
    assert get_method("GradCAM") == GradCAM()
    custom = GradCAM(relu=False)
    assert get_method(custom) is custom


@pytest.mark.parametrize("name", list_methods())
def test_every_method_is_a_frozen_value_that_describes_itself(name: str) -> None:
    method = get_method(name)
    assert isinstance(method, Method)
    assert method == get_method(name)
    assert hash(method) == hash(get_method(name))
    assert method.name == name
    assert method.summary
    assert method.paper
    assert method.needs
    assert "Returns:" in (type(method).__doc__ or "")
    for option in options(method):
        with pytest.raises(FrozenInstanceError):
            setattr(method, option, None)


def test_a_name_belongs_to_one_class() -> None:
    @dataclass(frozen=True)
    class Other(GradCAM):
        pass

    known = get_method("gradcam")
    assert register(known) is known
    assert register(GradCAM()) == known
    for other in (GradCAM(relu=False), Other()):
        with pytest.raises(MethodError, match="'gradcam' is already"):
            register(other)
    assert get_method("gradcam") is known


BAD_OPTIONS = """
    smooth(gradcam,samples=0) smooth(gradcam,sigma=-1.0) smooth(gradcam,sigma=inf) smooth(gradcam,statistic=median)
    integratedgradients(rule=simpson) integratedgradients(steps=1,rule=trapezoid) integratedgradients(steps=2.5)
    integratedgradients(baseline=purple) idgi(path=saliency) guidedintegratedgradients(distance=2)
    kpcacam(kernel=gauss) finercam(references=0) finercam(cam=eigencam) legrad(blocks=0) augmented(gradcam,scales=())
    occlusion(window=0) occlusion(window=(1,2,3)) occlusion(window=9,stride=1) occlusion(stride=3,window=2)
    lime(regions=0) lime(max_seconds=0) rise(samples=-5) rise(tolerance=-0.1) rise(probability=1.0) rise(baseline=grey)
    shapleysampling(samples=10,regions=3) extremalperturbation(area=0.0) extremalperturbation(area=())
    extremalperturbation(steps=0) gradcam(relu=1) rise(samples=True) finercam(alpha=True) finercam(alpha=nan)
    augmented(gradcam,scales=(1,None)) smooth(gradcam,statistic=3)
"""


@pytest.mark.parametrize("text", BAD_OPTIONS.split())
def test_options_that_cannot_be_meant_are_refused_by_name(text: str) -> None:
    method, option = re.match(r"(\w+)\(.*?(\w+)=", text).groups()  # type: ignore[union-attr]
    model = nn.Conv2d(3, 4, 2)
    with pytest.raises(ExplainError, match=rf"{option} of {method} ") as caught:
        explain.attribute(model, torch.rand(1, 3, 8, 8), text, target=lambda y: y.sum((1, 2, 3)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [("Grad CAM", "did you mean 'gradcam'"), ("", "known: "), ("gradcam, lrp", "list of names")],
)
def test_a_text_that_is_no_name_is_met_with_what_may_be_meant(text: str, remedy: str) -> None:
    with pytest.raises(MethodError, match=f"method .*{remedy}"):
        get_method(text)


@pytest.mark.parametrize("outer", [GuidedGradCAM, RefineCAM])
@pytest.mark.parametrize("inner", ["integratedgradients", "smooth(inputxgradient)"])
def test_what_is_made_of_maps_refuses_pixels(outer: Any, inner: str, net: Any, x: Any) -> None:
    with pytest.raises(MethodError, match=rf"cam of {outer.name} must give a map"):
        explain.attribute(net, x, outer(inner), target=1)
    assert explain.attribute(net, x, outer("fullgrad"), target=1).values.any()


def test_methods_of_one_name_are_told_apart_by_their_options(net: Any, x: Any) -> None:
    methods = ["occlusion(window=8)", "saliency", "occlusion(window=4, stride=4)", "occlusion"]
    methods += [Smooth("saliency", samples=2), Smooth("saliency", samples=3)]
    found = explain.attribute(net, x, [*methods, "occlusion(window=8)"], target=1)
    names = ["occlusion(window=8)", "saliency", "occlusion(window=4, stride=4)", "occlusion"]
    names += ["smooth(saliency, samples=2)", "smooth(saliency, samples=3)"]
    assert list(found) == names
    for name, method in zip(names, methods, strict=True):
        alone = explain.attribute(net, x, method, target=1)
        assert get_method(name) == get_method(method) == found[name].applied()
        assert found[name].method == name
        torch.testing.assert_close(found[name].values, alone.values)


def test_methods_that_no_typed_option_tells_apart_are_refused(net: Any, x: Any) -> None:
    methods = [Smooth(GradCAM()), Smooth(GradCAM(relu=False))]
    with pytest.raises(MethodError, match="different names"):
        explain.attribute(net, x, methods, target=1)


def test_a_layer_that_no_method_looks_at_is_refused(net: Any, x: Any) -> None:
    for method in list_methods():
        if uses_layer(get_method(method).in_layer()):
            continue
        with pytest.raises(MethodError, match=method.replace("+", r"\+")):
            explain.attribute(net, x, method, target=1, layer="layer2")
    both = explain.attribute(net, x, ["saliency", "gradcam"], target=1, layer="conv1")
    assert both["gradcam"].layer == "conv1"


# --- options of the wrong type

OPTIONS = [
    (method, option)
    for method in [*map(get_method, list_methods()), Augmented(GradCAM())]
    for option in options(method)
]


@pytest.mark.parametrize(
    ("method", "option"), OPTIONS, ids=lambda each: getattr(each, "name", each)
)
def test_options_of_another_type_are_refused_in_one_line(method: Any, option: str) -> None:
    for wrong in (object(), b"1", 1j, "nonsense", ["", None]):
        with pytest.raises(ExplainError) as caught:
            replace(method, **{option: wrong})
        assert "\n" not in str(caught.value)
        assert option in str(caught.value) or "nonsense" in str(caught.value)


def test_a_text_is_read_again_once_another_method_has_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(2):
        monkeypatch.setattr("explain.methods.base._known", {})

        class Scaled(Method):
            scale: int = 1
            name = "scaled-of-test"

            def __call__(self, evidence: Evidence) -> Tensor:
                raise NotImplementedError

        register(Scaled)
        method = get_method("scaled-of-test(scale=3)")
        assert (type(method), options(method)) == (Scaled, {"scale": 3})


def test_methods_deep_within_each_other_are_refused() -> None:
    nested: Method = GradCAM()
    with pytest.raises(MethodError, match="methods"):
        for _ in range(500):
            nested = Smooth(nested)
    assert nested == get_method("smooth(" * 4 + "gradcam" + ")" * 4)
    with pytest.raises(MethodError, match="methods"):
        get_method("smooth(" * 100 + "gradcam" + ")" * 100)
