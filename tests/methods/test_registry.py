from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass

import pytest

import explain
from explain.errors import MethodError
from explain.methods import GradCAM, Method, get_method, list_methods, options, register


def test_names_find_methods_and_patterns_list_them() -> None:
    assert list_methods() == ["gradcam", "guidedbackprop", "guidedgradcam", "inputxgradient", "saliency"]
    assert explain.list_methods("*cam*") == ["gradcam", "guidedgradcam"]
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
    class Other:
        name = "gradcam"

    assert register(GradCAM) is GradCAM
    with pytest.raises(MethodError, match="'gradcam' is already registered by GradCAM"):
        register(Other)


def test_two_options_of_one_method_need_two_calls(net: object, x: object) -> None:
    with pytest.raises(MethodError, match="two of 'gradcam'"):
        explain.attribute_all(net, x, ["gradcam", GradCAM(relu=False)])  # type: ignore[arg-type]
    with pytest.raises(MethodError, match="got none"):
        explain.attribute_all(net, x, [])  # type: ignore[arg-type]
