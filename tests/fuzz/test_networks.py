"""Every method on random networks, and the networks that showed a mistake; `examples/fuzz.py` draws
many more."""

from __future__ import annotations

import hypothesis
import pytest

import explain
from explain.methods.base import MAPS, PATTERNS, get_method
from tests.conftest import COVERING
from tests.fuzz.expected import CHEAP, METHODS, RERUNS
from tests.fuzz.networks import Case, cases, check
from tests.fuzz.programs import Program, Step

ALWAYS = hypothesis.settings(
    phases=[hypothesis.Phase.generate],
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def check_some(case: Case) -> None:
    long = sorted(RERUNS)
    check(case, [*CHEAP, long[case.seed % len(long)], long[case.program.seed % len(long)]])


@hypothesis.settings(ALWAYS, max_examples=4)
@hypothesis.given(cases())
def test_every_method_is_exact_on_random_networks_and_leaves_no_trace(case: Case) -> None:
    check_some(case)


@pytest.mark.long
@hypothesis.settings(ALWAYS, max_examples=100)
@hypothesis.given(cases())
def test_every_method_is_exact_on_many_random_networks(case: Case) -> None:
    check_some(case)


# What random networks found, each shrunk to the least that shows it.


def chain(
    *steps: Step, size: tuple[int, int, int] = (1, 6, 6), classes: int = 2, seed: int = 0
) -> Program:
    """Steps one behind the other, an average and a linear layer."""
    head = [
        Step("mean", (len(steps),), ("mean",)),
        Step("linear", (len(steps) + 1,), (classes, True)),
    ]
    return Program((size,), (*steps, *head), seed=seed)


def conv(of: int, channels: int, stride: int = 1) -> Step:
    return Step("conv", (of,), (channels, (3, 3), stride, 1, 1, 1, True))


def act(of: int, kind: str = "relu", style: str = "module_") -> Step:
    return Step("act", (of,), (kind,), style)


def norm(of: int, kind: str) -> Step:
    return Step("norm", (of,), (kind, 1))


def linear(of: int) -> Step:
    return Step("linear", (of,), (2, True))


def mean(of: int) -> Step:
    return Step("mean", (of,), ("mean",))


THREE = chain(conv(0, 4), conv(1, 4, 2), conv(2, 4, 2), size=(1, 8, 5))
CALLED_TWICE = chain(
    conv(0, 2),
    Step("pool", (1,), ("max", 2)),
    Step("conv", (2,), (2, (3, 3), 1, 0, 1, 1, True)),
    Step("pool", (3,), ("max", 2), again=1),
    size=(1, 12, 12),
)
TWO_INPUTS = Program(
    ((1, 4, 4), (1, 4, 4)),
    (conv(0, 2), conv(1, 2), Step("mul", (2, 3), (), "function_"), mean(4), linear(5)),
)
FLAT = Program(((1, 4, 4),), (conv(0, 2), Step("flatten", (1,)), act(2), linear(3)))
REFUSES_LAYOUT = Program(
    ((3, 6, 6),),
    (
        conv(0, 4),
        act(1, "tanh", "module"),
        Step("mul", (1, 2), (), "function_"),
        Step("flatten", (3,), (), "view"),
        linear(4),
    ),
)
INSTANCE = chain(
    conv(0, 4),
    conv(1, 4),
    norm(2, "instance"),
    Step("add", (1, 3)),
    act(4, "gelu", "function"),
    conv(5, 4),
    size=(3, 5, 10),
)


def branch(second: Step, size: tuple[int, int, int]) -> Program:
    """A second branch leads to another output than the scores."""
    return Program((size,), (conv(0, 2), second, mean(1), linear(3)), output="dict", extra=2)


OVERWRITTEN = chain(conv(0, 2), act(1), conv(2, 2), Step("same", (2, 1)), Step("add", (3, 4)))
SOME_CHANNELS = chain(conv(0, 2), Step("half", (1,), ("relu", 0, 1, 1), "function_"), conv(2, 2))
AVERAGED_NORM = chain(conv(0, 2), conv(1, 2), norm(2, "batch"), size=(3, 7, 3))
FOUND: dict[str, tuple[str, Case]] = {
    "relevance of a product with what trained weights made of another image": (
        "lrp",
        Case(TWO_INPUTS),
    ),
    "ablation for a caller in inference mode, of a map that is changed in place": (
        "ablationcam",
        Case(chain(conv(0, 2), act(1)), layer="m0", mode="inference"),
    ),
    "a rectifier that overwrites a flattened view": ("guidedbackprop", Case(FLAT)),
    "a rectifier that overwrites some channels": ("deconvnet", Case(SOME_CHANNELS)),
    "a layer before a norm that is averaged, of one image that lies channels last": (
        "hirescam",
        Case(AVERAGED_NORM, layer="m1", layout="channels_last"),
    ),
    "ablation of a module that is called twice": ("ablationcam", Case(CALLED_TWICE, layer="m1")),
    "a map of few channels taken for one with the channels last": (
        "gradcam",
        Case(THREE, layer="m2"),
    ),
    "a bias of few channels taken for one with the channels last": ("fullgrad", Case(THREE)),
    "a shortcut from what an in-place module overwrote": ("gradcam", Case(OVERWRITTEN, layer="m1")),
    "a map that leads to another output than the scores": (
        "gradcam",
        Case(branch(conv(1, 1), (1, 6, 6))),
    ),
    "ablation of a network that refuses the fastest layout, and so runs twice": (
        "ablationcam",
        Case(REFUSES_LAYOUT, images=3, layer="m1"),
    ),
    "instance normalisation of one image that lies channels last, beside a shortcut": (
        "saliency",
        Case(INSTANCE, layout="channels_last"),
    ),
    "a resolution that only a branch has which the scores do not use": (
        "refinecam",
        Case(branch(conv(1, 2, 2), (1, 8, 8))),
    ),
    "an in-place module that is called for its effect alone": (
        "ablationcam",
        Case(chain(conv(0, 2), act(1, "relu", "effect_")), layer="m1"),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_right(name: str) -> None:
    method, case = FOUND[name]
    assert check(case, [method]).failures == []


def test_every_class_activation_map_is_compared() -> None:
    cams = {name for name in explain.list_methods() if get_method(name).family in (MAPS, PATTERNS)}
    assert cams - COVERING <= {get_method(method).name for method, _ in METHODS.values()}
