from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass

import pytest

import explain
from explain.errors import MethodError
from explain.methods import (
    KPCACAM,
    Augmented,
    FinerCAM,
    GradCAM,
    IntegratedGradients,
    LeGrad,
    Method,
    Smooth,
    get_method,
    list_methods,
    options,
    register,
)  # fmt: skip


def test_names_find_methods_and_patterns_list_them() -> None:
    assert list_methods() == sorted(set(list_methods()))
    assert len(list_methods()) == 32
    assert explain.list_methods("g*cam*") == ["gradcam", "gradcam++", "guidedgradcam"]
    assert get_method("GradCAM") == GradCAM()
    custom = GradCAM(relu=False)
    assert get_method(custom) is custom


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gradcan", "method 'gradcan' is unknown; did you mean 'gradcam'"),
        (GradCAM, r"got the class GradCAM; use GradCAM\(\)"),
        (3, "must be a name or a method object, got 3"),
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
        with pytest.raises(MethodError, match="'gradcam' is already registered by GradCAM"):
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
        (lambda: Smooth(samples=0), "samples of smooth must be a whole number from 1, got 0"),
        (lambda: Smooth(sigma=-1.0), "sigma of smooth must be a number from 0, got -1.0"),
        (lambda: Smooth(statistic="median"), "statistic of smooth must be one of mean, square, variance, got 'median'"),
        (lambda: IntegratedGradients(rule="simpson"), "rule of integratedgradients must be one of gausslegendre, left"),
        (
            lambda: IntegratedGradients(1, rule="trapezoid"),
            "steps of integratedgradients must be a whole number from 2",
        ),
        (lambda: IntegratedGradients(baseline="black"), "baseline of integratedgradients must be a number"),
        (lambda: KPCACAM("gauss"), "kernel of kpcacam must be one of sigmoid, rbf"),
        (lambda: FinerCAM(references=0), "references of finercam must be a whole number from 1"),
        (lambda: LeGrad(blocks=0), "blocks of legrad must be a whole number from 1"),
        (lambda: IntegratedGradients(steps=2.5), "steps of integratedgradients must be a whole number from 1, got 2.5"),
        (lambda: Smooth(sigma=float("inf")), "sigma of smooth must be a number from 0, got inf"),
        (lambda: Smooth(GradCAM), "method of smooth must be a method object, got <class"),
        (lambda: get_method("smooth(refinecam)"), "method of smooth must look at one layer, got refinecam"),
        (
            lambda: FinerCAM(cam=get_method("eigencam")),
            "cam of finercam must be one of gradients, such as gradcam, got eig",
        ),
        (lambda: register(Named("MyCAM")), "must be of lower-case letters, digits"),
        (lambda: Augmented(GradCAM(), scales=()), "number of scales of augmented must be a number from 1"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        make()


def test_two_options_of_one_method_need_two_calls(net: object, x: object) -> None:
    with pytest.raises(MethodError, match="two of 'gradcam'"):
        explain.attribute_all(net, x, ["gradcam", GradCAM(relu=False)])  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="got none"):
        explain.attribute_all(net, x, [])  # type: ignore[arg-type]
