from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

import explain
from explain import MethodError
from explain.engine import Evidence
from explain.methods import (
    KPCACAM,
    AblationCAM,
    Augmented,
    FinerCAM,
    GradCAM,
    GuidedGradCAM,
    IntegratedGradients,
    LeGrad,
    Method,
    RandomCAM,
    RefineCAM,
    Saliency,
    Smooth,
    list_methods,
    register,
)
from explain.methods.base import options
from explain.methods.registry import family, get_method
from tests.conftest import TinyNet


def test_names_find_methods_and_patterns_list_them() -> None:
    assert list_methods() == sorted(set(list_methods()))
    assert explain.list_methods("g*cam*") == ["gradcam", "gradcam++", "guidedgradcam"]
    assert get_method("GradCAM") == GradCAM()
    custom = GradCAM(relu=False)
    assert get_method(custom) is custom


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gradcan", "did you mean 'gradcam'"),
        ("gradcam, lrp", "method must"),
        (GradCAM, "GradCAM"),
        (3, "method"),
    ],
)
def test_what_is_no_method_is_refused(given: object, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        get_method(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list_methods())
def test_every_method_is_a_frozen_value_that_describes_itself(name: str) -> None:
    method = get_method(name)
    assert isinstance(method, Method)
    assert method == get_method(name)
    assert hash(method) == hash(get_method(name))
    assert method.name == name
    assert method.about
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


def test_wrappers_take_any_method_in_brackets() -> None:
    assert get_method("smooth(layercam)") == Smooth(get_method("layercam"))
    for statistic in ("mean", "square", "variance"):
        wrapped = Smooth(get_method("gradcam"), statistic=statistic)  # type: ignore[arg-type]
        assert get_method(wrapped.name) == wrapped
    nested = get_method(" Augmented( smooth(gradcam++) ) ")
    assert nested.name == "augmented(smooth(gradcam++))"
    for name, suggestion in {"smooth(gradcan)": "did you mean 'gradcam'", "smoth(gradcam)": "smooth.gradcam."}.items():
        with pytest.raises(MethodError, match=suggestion):
            get_method(name)


@dataclass(frozen=True)
class Named(GradCAM):
    name: str = ""  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Smooth(samples=0), "samples of smooth must"),
        (lambda: Smooth(sigma=-1.0), "sigma of smooth must"),
        (lambda: Smooth(statistic="median"), "statistic of smooth must"),
        (lambda: IntegratedGradients(rule="simpson"), "rule of integratedgradients must"),
        (
            lambda: IntegratedGradients(1, rule="trapezoid"),
            "steps of integratedgradients must",
        ),
        (lambda: IntegratedGradients(baseline="purple"), "baseline of integratedgradients must"),
        (lambda: KPCACAM("gauss"), "kernel of kpcacam must"),
        (lambda: FinerCAM(references=0), "references of finercam must"),
        (lambda: LeGrad(blocks=0), "blocks of legrad must"),
        (lambda: IntegratedGradients(steps=2.5), "steps of integratedgradients must"),
        (lambda: Smooth(sigma=float("inf")), "sigma of smooth must"),
        (lambda: Smooth(GradCAM), "method of smooth must"),
        (lambda: get_method("smooth(refinecam)"), "method of smooth must"),
        (
            lambda: FinerCAM(cam=get_method("eigencam")),
            "cam of finercam must",
        ),
        (lambda: register(Named(name="MyCAM")), "lower-case"),
        (lambda: Augmented(GradCAM(), scales=()), "number of scales of augmented must"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        make()


def test_two_options_of_one_method_need_two_calls(net: object, x: object) -> None:
    with pytest.raises(MethodError, match="two of 'gradcam'"):
        explain.attribute(net, x, ["gradcam", GradCAM(relu=False)])  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="got none"):
        explain.attribute(net, x, [])  # type: ignore[arg-type]


def test_baselines_that_print_alike_are_told_apart(net: TinyNet, x: torch.Tensor) -> None:
    plain = torch.zeros(3, 40, 40)
    other = plain.clone()
    other[:, 20, 20] = 1
    assert repr(plain) == repr(other)
    with pytest.raises(MethodError, match="two of 'integratedgradients'"):
        explain.attribute(net, x, [IntegratedGradients(baseline=each) for each in (plain, other)])
    same = [Smooth(IntegratedGradients(2, baseline=torch.zeros(x.shape[1:])), samples=1) for _ in range(2)]
    assert list(explain.attribute(net, x, same, target=1)) == ["smooth(integratedgradients)"]


@pytest.mark.parametrize("outer", [GuidedGradCAM, RefineCAM])
@pytest.mark.parametrize("inner", ["saliency", "integratedgradients", "guidedgradcam", "smooth(inputxgradient)"])
def test_what_is_made_of_maps_refuses_pixels(outer: Any, inner: str, net: Any, x: Any) -> None:
    message = (
        rf"cam of {outer.name} must give a map \(N, h, w\), got {re.escape(inner)} with values of shape \(3, 3, 12"
    )
    with pytest.raises(MethodError, match=message):
        explain.attribute(net, x, outer(get_method(inner)), target=1, layer="layer2")
    assert explain.attribute(net, x, outer("fullgrad"), target=1, layer="layer2").values.any()


# --- options of the wrong type

NOTHING_LIKE_IT: list[Any] = [object(), {}, b"1", 1j, torch.zeros(2, 2), np.zeros(3), float("nan"), GradCAM, ["", None]]
WRONG: dict[type, list[Any]] = {
    bool: ["yes", "True", 0, 1, 1.0, [True], torch.tensor(True), *NOTHING_LIKE_IT],
    int: ["3", 1.5, 2.0, True, np.True_, float("inf"), [3], *NOTHING_LIKE_IT],
    float: ["0.6", True, np.True_, float("inf"), -np.inf, 10**400, [0.5], *NOTHING_LIKE_IT],
    str: ["nonsense", "", 3, True, ["mean"], *NOTHING_LIKE_IT],
    Method: ["gradcan", "", 3, True, ["gradcam"], "refinecam", "smooth()", *NOTHING_LIKE_IT],
    tuple: ["1", True, [True], ["1"], [0.05], [], (1, None), [[1]], -1, *NOTHING_LIKE_IT[:5], *NOTHING_LIKE_IT[6:]],
    torch.Tensor: ["black", None, True, [0.0, 1.0], (1,), float("inf"), np.nan, torch.tensor([1.0, torch.inf]),
                   torch.zeros(2, dtype=torch.complex64), np.array(["a"]), object(), {}, b"1", 1j, GradCAM],
}  # fmt: skip
# Options whose default does not tell their kind
KINDS = {"blocks": int, "gamma": float, "baseline": torch.Tensor, "composite": str}
KINDS |= {"keeps": float, "step": int, "sigma": float}
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
}  # those of masks: see test_masking
OPTIONS = [
    (method, option)
    for method in METHODS
    for option in options(method)
    if option not in OBJECTS and (method.name, option) != ("kpcacam", "gamma")  # a number, a word, or None
]


@pytest.mark.parametrize("wrong", ["auto", -1.0, float("nan"), [1.0], True])
def test_kpcacams_gamma_is_a_number_or_scale(wrong: Any) -> None:
    with pytest.raises(MethodError, match="gamma"):
        KPCACAM(gamma=wrong)
    assert KPCACAM(gamma=np.float32(0.5)).gamma == 0.5


def kind_of(option: str, default: Any) -> type:
    kinds = [bool, int, float, str, tuple, Method]
    return KINDS.get(option) or next(kind for kind in kinds if isinstance(default, kind))


@pytest.mark.parametrize(("method", "option"), OPTIONS, ids=lambda each: getattr(each, "name", each))
def test_options_of_another_type_are_refused_in_one_line(method: Any, option: str) -> None:
    default = getattr(method, option)
    for wrong in [*WRONG[kind_of(option, default)], *([] if default is None else [None])]:
        with pytest.raises(MethodError) as caught:
            replace(method, **{option: wrong})
        message = str(caught.value)
        assert "\n" not in message
        assert len(message) < 300
        refusals = [
            f"{option} of ",
            f"method {wrong!r} is unknown",
            "scales of",
            "must have one method in its brackets",
        ]
        assert any(refusal in message for refusal in refusals), message
    assert replace(method, **{option: default}) == method


@pytest.mark.parametrize(("method", "option"), OPTIONS, ids=lambda each: getattr(each, "name", each))
def test_options_may_be_numpys_or_come_from_a_record(method: Any, option: str) -> None:
    default = getattr(method, option)
    kind = kind_of(option, default)
    given: Any = {
        bool: lambda: np.bool_(default),
        int: lambda: np.int64(default or 2),
        float: lambda: np.float32(default or 0.5),
        str: lambda: np.str_(default),
        tuple: lambda: list(default),
        torch.Tensor: lambda: np.float64(default),
        Method: lambda: default.name,
    }[kind]()
    if default == Saliency(absolute=False):
        given = "saliency"
    made = getattr(replace(method, **{option: given}), option)
    expected = {int: default or 2, float: default or 0.5}.get(kind, default)
    assert made == (pytest.approx(expected) if kind is float else Saliency() if given == "saliency" else expected)
    assert type(made) in (type(expected), float, Saliency)


def test_arrays_become_tensors_and_single_scales_lists() -> None:
    baseline = IntegratedGradients(baseline=np.ones((3, 2, 2), np.float32)).baseline
    assert isinstance(baseline, torch.Tensor)
    assert baseline.dtype is torch.float32
    assert Augmented("gradcam", scales=np.array([1.0, 2.0])) == Augmented(GradCAM(), scales=[1.0, 2.0])  # type: ignore[arg-type]
    assert Augmented(GradCAM(), scales=2).scales == (2,)  # type: ignore[arg-type]


def test_every_method_with_options_checks_them() -> None:
    for method in METHODS:
        for option, least in method.minimums.items():
            with pytest.raises(MethodError, match=option):
                replace(method, **{option: least - 1})
        for field in fields(method):
            with pytest.raises(MethodError, match=field.name):
                replace(method, **{field.name: object()})


def test_register_above_a_class_registers_its_default_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("explain.methods.registry._known", {})

    @register
    class Blank(Method):
        name = "blank-of-test"

        def __call__(self, evidence: Evidence) -> torch.Tensor:
            return torch.zeros_like(evidence.inputs[:, 0])

    assert get_method("blank-of-test") == Blank()
    assert family("blank-of-test") == "other methods"


@dataclass(frozen=True)
class Somebodys(AblationCAM):
    own: UnknownHere = None  # type: ignore[name-defined]  # noqa: F821


def test_types_that_are_not_known_are_left_alone() -> None:
    assert Somebodys(own=object()).relu is True
    with pytest.raises(MethodError, match="relu of ablationcam must"):
        Somebodys(relu="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: get_method("smooth(" * 500 + "gradcam" + ")" * 500),
        lambda: get_method("augmented(smooth(" * 3 + "gradcam" + "))" * 3),
        lambda: explain.attribute(torch.nn.Identity(), torch.zeros(1, 3, 2, 2), "smooth(" * 5 + "gradcam" + ")" * 5),
        lambda: nested(GradCAM(), 500),
        lambda: nested(FinerCAM(), 4),
        lambda: GuidedGradCAM(nested(GradCAM(), 4)),
    ],
)
def test_methods_deep_within_each_other_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(MethodError, match="methods") as e:
        make()
    assert "\n" not in str(e.value)


def nested(method: Method, depth: int) -> Method:
    for _ in range(depth):
        method = Smooth(method)
    return method


def test_methods_may_be_within_each_other_up_to_a_depth() -> None:
    assert get_method(nested(GradCAM(), 4).name) == nested(GradCAM(), 4)


@pytest.mark.parametrize("seed", [-1, 2**64, 2**80, np.int64(7)])
def test_any_whole_number_is_a_seed(seed: int, net: Any, x: Any) -> None:
    for method in (RandomCAM(seed=seed), Smooth(samples=2, seed=seed)):
        values = explain.attribute(net, x, method, layer="layer2").values
        assert torch.equal(values, explain.attribute(net, x, method, layer="layer2").values)
