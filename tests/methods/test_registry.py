from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import explain
from explain import ExplainError, MethodError
from explain.engine import Evidence
from explain.methods import (
    Augmented,
    FinerCAM,
    GradCAM,
    GuidedGradCAM,
    Method,
    RefineCAM,
    Smooth,
    list_methods,
    register,
)
from explain.methods.base import get_method, options


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
    extremalperturbation(steps=0)
"""


@pytest.mark.parametrize("text", BAD_OPTIONS.split())
def test_options_that_cannot_be_meant_are_refused_by_name(text: str) -> None:
    method, option = re.match(r"(\w+)\(.*?(\w+)=", text).groups()  # type: ignore[union-attr]
    with pytest.raises(ExplainError, match=rf"{option} of {method} ") as caught:
        explain.attribute(
            nn.Conv2d(3, 4, 2),
            torch.rand(1, 3, 8, 8),
            text,
            target=lambda output: output.sum((1, 2, 3)),
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("outer", [GuidedGradCAM, RefineCAM])
@pytest.mark.parametrize(
    "inner", ["saliency", "integratedgradients", "guidedgradcam", "smooth(inputxgradient)"]
)
def test_what_is_made_of_maps_refuses_pixels(outer: Any, inner: str, net: Any, x: Any) -> None:
    message = rf"cam of {outer.name} must give a map \(N, h, w\), got {re.escape(inner)}"
    with pytest.raises(MethodError, match=message):
        explain.attribute(net, x, outer(get_method(inner)), target=1, layer="layer2")
    assert explain.attribute(net, x, outer("fullgrad"), target=1, layer="layer2").values.any()


# --- options of the wrong type

NOTHING_LIKE_IT: list[Any] = [object(), b"1", 1j, torch.zeros(2, 2), float("nan"), ["", None]]
WRONG: dict[type, list[Any]] = {
    bool: ["yes", 1, [True], torch.tensor(True), *NOTHING_LIKE_IT],
    int: ["3", 1.5, True, np.True_, float("inf"), [3], *NOTHING_LIKE_IT],
    float: ["0.6", True, np.True_, -np.inf, 10**400, [0.5], *NOTHING_LIKE_IT],
    str: ["nonsense", "", 3, ["mean"], *NOTHING_LIKE_IT],
    Method: ["gradcan", 3, ["gradcam"], "refinecam", "smooth()", *NOTHING_LIKE_IT],
    tuple: ["1", [True], ["1"], [0.05], [], (1, None), [[1]], -1, object(), b"1"],
    Tensor: ["black", None, [0.0, 1.0], np.nan, torch.tensor([1.0, torch.inf]), object()],
}
# Options whose default does not tell their kind
KINDS = {"blocks": int, "gamma": float, "baseline": Tensor, "composite": str, "token": int}
KINDS |= {"becomes": int, "keeps": float, "step": int, "sigma": float}
METHODS = [*map(get_method, list_methods()), Augmented(GradCAM())]
OBJECTS = {
    "low",
    "high",
    "area",
    "concept",
    "baseline",
    "regions",
    "window",
    "stride",
    "tolerance",
    "max_seconds",
    "keep",
    "guide",
}  # those of masks: see test_masking and test_evidence
OPTIONS = [
    (method, option)
    for method in METHODS
    for option in options(method)
    # a number, a word, or None
    if option not in OBJECTS and (method.name, option) != ("kpcacam", "gamma")
]


def kind_of(option: str, default: Any) -> type:
    kinds = [bool, int, float, str, tuple, Method]
    return KINDS.get(option) or next(kind for kind in kinds if isinstance(default, kind))


@pytest.mark.parametrize(
    ("method", "option"), OPTIONS, ids=lambda each: getattr(each, "name", each)
)
def test_options_of_another_type_are_refused_in_one_line(method: Any, option: str) -> None:
    default = getattr(method, option)
    for wrong in [*WRONG[kind_of(option, default)], *([] if default is None else [None])]:
        with pytest.raises(MethodError) as caught:
            replace(method, **{option: wrong})
        message = str(caught.value)
        assert "\n" not in message
        assert len(message) < 300
        refusals = (
            f"{option} of ",
            f"method {wrong!r} is unknown",
            "scales of",
            "must have one method in its brackets",
        )
        assert any(refusal in message for refusal in refusals), message
    assert replace(method, **{option: default}) == method


def test_a_text_is_read_again_once_another_method_has_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for sign in (1, -1):
        monkeypatch.setattr("explain.methods.base._known", {})

        class Scaled(Method):
            scale: int = 1
            name = "scaled-of-test"
            sign = 0

            def __call__(self, evidence: Evidence) -> Tensor:
                return self.sign * self.scale * evidence.inputs[:, 0]

        Scaled.sign = sign
        register(Scaled)
        x = torch.rand(1, 3, 4, 4)
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
        values = explain.attribute(model, x, "scaled-of-test(scale=3)", target=1).values
        assert torch.equal(values, sign * 3 * x[:, 0])


@pytest.mark.parametrize(
    ("outer", "depth"), [(GradCAM, 500), (FinerCAM, 4), (GuidedGradCAM, 4), (str, 100)]
)
def test_methods_deep_within_each_other_are_refused(outer: Any, depth: int) -> None:
    with pytest.raises(MethodError, match="methods") as caught:
        if outer is str:
            get_method("smooth(" * depth + "gradcam" + ")" * depth)
        GuidedGradCAM(nested(outer(), depth))
    assert "\n" not in str(caught.value)


def nested(method: Method, depth: int) -> Method:
    for _ in range(depth):
        method = Smooth(method)
    return method
