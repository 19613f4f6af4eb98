from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from explain import hooks
from explain.distributed import communication, packaging
from explain.hooks import HookGroup
from explain.hooks.handles import Handle
from tests.conftest import ROOT


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"examples.{name}", ROOT / "examples" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@contextmanager
def scripts_of(*folders: str) -> Iterator[None]:
    """Let scripts of these folders find each other, and forget them afterwards: other folders have
    such names, too."""
    names = {path.stem for folder in folders for path in (ROOT / "examples" / folder).glob("*.py")}
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            patch.syspath_prepend(str(ROOT / "examples" / folder))
        yield
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


tour = example("hooks_tour")

FIGURES = {
    "tensor": [
        "the hook only looks: gradients of x, y, w 4, 4, 5",
        "the hook returns 2 * gradient: gradients of x, y, w 8, 8, 5",
        "the hook only rebinds its argument: gradients of x, y, w 4, 4, 5",
        "z's gradient, seen by a hook without retain_grad 4",
    ],
    "retain_grad": [
        "before and after one that doubles 4, 8",
        "z.grad, although retain_grad came first 8",
        "after a second pass; what the hooks saw in it 16, 4, 8",
    ],
    "order": [
        "d, c, a, b when c's hook stays 112, 10, 30, 20",
        "d, c, a, b when c's hook is removed before backward 112, 8, 24, 16",
        "d, c, a, b when c's hook is removed after backward 112, 10, 30, 20",
        "e.grad 2",
    ],
    "leaf": ["its hook doubles it (2, 4, 6)", "p.grad 2.4, None"],
    "inplace": [
        "d's hook doubles in place: c's gradient 2",
        "gradients of a and w, when a's hook only looks 2, 5",
        (
            "HookError: hook 'doubles_in_place' on a tensor of shape () (gradient) edited its "
            "gradient in place"
        ),
    ],
    "edited": [
        "the tensor that backward was given (6, 6), (2, 2)",
        (
            "HookError: hook 'edits_and_returns' on a tensor of shape (2,) (gradient) edited its "
            "gradient in place"
        ),
        "instead: the same two (6, 6), (1, 1)",
    ],
    "tensors": ["all gradients 5, 7", "the first of them to arrive 7"],
    "module": [
        "(7, -13, 27, -29)",
        "after ReLU(inplace=True) (7, 0, 27, 0)",
        "(89)",
        "hooks left on the model 0",
    ],
    "two_inputs": [
        "before: inputs 3, 4 a hook made them (2 * a, b + 1): inputs, output 6, 5, 30",
        "gradients of both inputs, as the module got them 5, 6 gradients of a and b 10, 6",
        "missing 1 required positional argument: 'b'",
    ],
    "shapes": [
        "Conv2d: input, output (1, 1, 6, 6), (1, 2, 4, 4) MaxPool2d: input, output (1, 2, 4, 4), "
        "(1, 2, 2, 2) "
        "Flatten: input, output (1, 2, 2, 2), (1, 8) Linear: input, output (1, 8), (1, 3)",
        "model Sequential 1 x 3 47",
        "0 Conv2d 1 x 2 x 4 x 4 20",
        "3 Linear 1 x 3 27",
    ],
    "always": ["input of shape, output (1, 5), None"],
    "backward": [
        "Linear: grad_output -> grad_input (1), (1, 2, 3, 4) "
        "ReLU: grad_output -> grad_input (1, 2, 3, 4), (1, 0, 3, 0) "
        "Linear: grad_output -> grad_input (1, 0, 3, 0), (22, 26, 30)",
        "no input needs a gradient: grad_output, grad_input (1, 0, 3, 0), None",
        "is a view and is being modified inplace",
    ],
    "backward_pre": ["grad_output (1)", "doubled it (2)", "(44, 52, 60)"],
    "deprecated": [
        "deprecated hook (5) full-backward hook (120)",
        "deprecated hook (1), (1, 2, 3, 4), ((7), (0), (27), (0)) full-backward hook (1, 2, 3, 4)",
        "for a batch of two deprecated hook (2, 2), ((4, 6), (4, 6)), ((2, 2), (2, 2)) "
        "full-backward hook ((4, 6), (4, 6))",
        "without a batch deprecated hook (1, 1) full-backward hook (4, 6)",
        "This hook will be missing some grad_input",
    ],
    "convolution": [
        "feature maps ((9, 9), (9, 9)), ((18, 18), (18, 18))",
        "feature maps (9), (18)",
    ],
    "triple": [
        "module: grad_input ((1, 3, 2), (4, 10, 6), (3, 7, 4))",
        "input, weight, bias ((1, 3, 2), (4, 10, 6), (3, 7, 4)), ((4, 4), (4, 4)), (4)",
    ],
    "every": [
        "before Sequential, before Linear, after Linear, after Sequential, before ReLU, after ReLU, "
        "towards ReLU, back through ReLU, towards Sequential, back through Sequential, "
        "towards Linear, back through Linear",
    ],
    "parts": [
        "its second call gives (4)",
        "added after the second (10)",
        "is given (7, 0, 27, 0)",
        "two equal tokens ((0.5, 0.5), (0.5, 0.5))",
    ],
    "graph": ["AddmmBackward0, AccumulateGrad, ReluBackward0, TBackward0, AddmmBackward0"],
    "node": ["10 times that (10, 10)", "added 1 (22, 2)"],
    "guided": [
        "gradient of y (-2, 2)",
        "the second relu is a function: hooks on modules, on Nodes (0, 2), (1, 1)",
        "both are modules: hooks on modules, on Nodes (1, 1), (1, 1)",
        "a small DenseNet: ReLU modules, ReLU Nodes 6, 7 modules and Nodes agree False "
        "modules and the first Node behind the output agree True explain.attribute and Nodes "
        "agree True",
    ],
    "accumulator": ["torch::autograd::AccumulateGrad, True", "before accumulation 7", "p.grad 7"],
    "after_backward": ["y, x, end of the pass"],
    "capture": [
        "call 0: activation, gradient (2), (4)",
        "call 1: activation, gradient (4), (2)",
        "(8), (1)",
    ],
    "extractor": [
        "features of layer 1 (7, 0, 27, 0)",
        "Linear(in_features=3, out_features=4, bias=True), ReLU(inp",
    ],
    "timeline": [
        "1 forward-pre model (Sequential)",
        "12 backward-pre 1 (ReLU)",
        "16 backward model (Sequential)",
    ],
    "intervention": [
        "score (89)",
        "set to 0 (82)",
        "(1, 0, 0, 0) (90)",
        "halved (45)",
        "afterwards (89)",
    ],
    "recording": ["t, addmm, relu, t, addmm"],
    "communication": ["weight and bias (1, 2, 3), (1)", "sent as float16 16, 8"],
    "packaging": ["in: explain.models.small_networks, out: torch", "labels (cat, dog)"],
    "errors": [
        "must take (module, args, output)",
        "[(1, 4)], got [(1, 2)]",
        "raised ZeroDivisionError: division by zero",
    ],
}


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_every_section_has_its_figures() -> None:
    assert list(FIGURES) == list(tour.SECTIONS)


def test_the_tour_and_the_page_show_every_kind_of_hook() -> None:
    """All that registers hooks: the methods of a group, and what the rooms of hooks offer."""
    kinds = [f"group.{name}" for name, method in vars(HookGroup).items() if is_kind(name, method)]
    assert len(kinds) >= 14
    tools = {"inspect", "capture", "FeatureExtractor", "timeline", "intervene", "record", "graph"}
    assert tools < set(hooks.__all__)
    between = [communication.communicate.__name__, packaging.export_package.__name__]
    for page in ("examples/hooks_tour.py", "docs/hooks.md"):
        text = (ROOT / page).read_text("utf-8")
        wanted = [*kinds, *(f"hooks.{name}" for name in tools), *between]
        assert [name for name in wanted if not re.search(rf"\b{name}\b", text)] == [], page


def is_kind(name: str, method: object) -> bool:
    returns_handle = getattr(method, "__annotations__", {}).get("return") is Handle
    return returns_handle and not name.startswith("_")


@pytest.mark.parametrize("name", FIGURES)
def test_a_section_prints_its_figures(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    tour.main([name])
    printed = words(capsys.readouterr().out)
    for figure in FIGURES[name]:
        assert figure in printed
