"""Names with options, as people type them: for methods, from Python and on the command line
alike."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explain import BaselineError, MethodError
from explain.baselines import Blur
from explain.baselines.base import Baseline
from explain.baselines.replacements import get_baseline
from explain.methods import (
    KPCACAM,
    Augmented,
    FinerCAM,
    GradCAM,
    GradCAMPlusPlus,
    GuidedGradCAM,
    IntegratedGradients,
    LayerCAM,
    Method,
    Smooth,
    list_methods,
)
from explain.methods.base import get_method, options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gradcam(relu=False)", GradCAM(relu=False)),
        (" GradCAM ( relu = false , ) ", GradCAM(relu=False)),
        ("integratedgradients(steps=20, baseline=blur)", IntegratedGradients(20, "blur")),
        (
            "integratedgradients(baseline=-1.5, rule='left')",
            IntegratedGradients(baseline=-1.5, rule="left"),
        ),
        ("kpcacam(kernel=rbf, gamma=none)", KPCACAM("rbf", None)),
        ("smooth(gradcam, samples=5)", Smooth(GradCAM(), 5)),
        ("smooth(gradcam(relu=False), seed=3)", Smooth(GradCAM(relu=False), seed=3)),
        ("var(layercam, sigma=.2)", Smooth(LayerCAM(), sigma=0.2, statistic="variance")),
        ("smoothgrad2(samples=3)", Smooth(samples=3, statistic="square")),
        (
            "augmented(gradcam, scales=(1.0, 0.8), flip=False)",
            Augmented(GradCAM(), False, (1.0, 0.8)),
        ),
        (
            "augmented(smooth(gradcam++(), samples=2), scales=[1])",
            Augmented(Smooth(GradCAMPlusPlus(), 2), True, (1,)),
        ),
        ("finercam(cam=gradcam++, references=2)", FinerCAM(GradCAMPlusPlus(), references=2)),
        ("guidedgradcam(cam='smooth(gradcam, samples=2)')", GuidedGradCAM(Smooth(GradCAM(), 2))),
    ],
)
def test_a_method_is_written_with_its_options(text: str, expected: Method) -> None:
    assert get_method(text) == expected


@pytest.mark.parametrize("name", list_methods())
def test_what_a_method_shows_of_its_options_can_be_written(name: str) -> None:
    method = get_method(name)
    kinds = (bool, int, float, str, tuple, type(None), Baseline)
    plain = {key: value for key, value in options(method).items() if isinstance(value, kinds)}
    assert (
        get_method(f"{name}({', '.join(f'{key}={value!r}' for key, value in plain.items())})")
        == method
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("integratedgradients(step=20)", "did you mean 'steps'"),
        ("integratedgradients(20)", "options"),
        ("integratedgradients(steps=2.5)", "steps of integratedgradients must"),
        ("integratedgradients(steps=1e999)", "steps of integratedgradients must"),
        ("eigencam(relu=False)", "method EigenCAM has no"),
        ("gradcam(relu=False, relu=True)", "'relu'"),
        ("gradcam(relu=False", "brackets"),
        ("gradcam(relu=False])", "closing"),
        ("gradcam(relu='False)", "brackets"),
        ("gradcam(relu={1})", "numbers"),
        ("gradcam(relu=[1, 2j])", "numbers"),
        ("smooth(samples=3, gradcam)", "options"),
        ("smooth()", "brackets"),
        ("smooth(gradcam, layercam)", "one method"),
        ("smooth(gradcam, cam=3)", "method Smooth has no"),
        ("gradcam(relu=" + "9" * 5000 + ")", "method must"),
        ("()", "brackets"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(MethodError, match=re.escape(message)) as caught:
        get_method(text)
    assert "\n" not in str(caught.value)


def test_nothing_that_is_written_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    for value in (
        "print('run')",
        "__import__('os').system('echo run')",
        "(lambda: print('run'))()",
        "f'{print(1)}'",
    ):
        with pytest.raises(MethodError):
            get_method(f"gradcam(relu={value})")
    assert capsys.readouterr() == ("", "")


PIECES = [*"()[],='\"\\ .-+x9", "gradcam", "smooth", "relu", "samples", "None", "\n", "\x00", "猫"]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_text_is_a_method_or_refused(text: str) -> None:
    try:
        assert isinstance(get_method(f"smooth({text}"), Method)
    except MethodError as error:
        message = str(error)
        assert "\n" not in message


def test_fills_are_written_with_options_too() -> None:
    assert get_baseline("Blur(sigma=3)") == Blur(sigma=3)
    assert get_baseline("blur()") == Blur()
    method: Any = get_method("occlusion(baseline=blur(sigma=3))")
    assert method.baseline == Blur(sigma=3)
    for text, message in {
        "blur(sgma=3)": "'sigma'",
        "blur(3)": "by name",
        "zero(3)": "by name",
        "blur(": "brackets",
    }.items():
        with pytest.raises(BaselineError, match=message):
            get_baseline(text)
