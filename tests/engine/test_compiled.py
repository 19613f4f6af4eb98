"""Networks in other forms: compiled, exported, scripted, traced, under transforms: explained
exactly, or refused in one line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import explain
from explain import ExplainError, LayerError
from tests.conftest import Made, TinyNet, settled

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit", "ignore::torch.jit.TracerWarning"),
    pytest.mark.xdist_group("compiler"),  # which takes seconds to load
]
LOOKING = ["guidedbackprop", "deconvnet", "fullgrad"]
OTHERS = ["gradcam", "saliency", "ablationcam", "integratedgradients"]
X = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PART = torch.zeros(2, 6, 12, 10, dtype=torch.float64)


def plain() -> Any:
    return settled(TinyNet()).double().eval()


def with_part(change: Callable[[Any], Any]) -> nn.Module:
    net = plain()
    net.layer1 = change(net.layer1)
    return net


def assert_exact(net: nn.Module, methods: list[str]) -> None:
    expected = explain.attribute(plain(), X, methods, target=1, layer="layer2.1")
    for name, a in explain.attribute(net, X, methods, target=1, layer="layer2.1").items():
        assert_close(a.values, expected[name].values, rtol=1e-9, atol=1e-14, msg=name)


def counting(calls: list[int]) -> Callable[..., Any]:
    """A compiler that leaves everything as it is, and counts how often its code runs."""
    return lambda graph, example: lambda *args: calls.append(1) or graph(*args)


def compiled_part(calls: list[int]) -> nn.Module:
    return with_part(lambda part: torch.compile(part, backend=counting(calls)))


def compiled_in_place(calls: list[int]) -> nn.Module:
    net = plain()
    net.compile(backend=counting(calls))
    return net


def compiled_function(calls: list[int]) -> nn.Module:
    relu = torch.compile(lambda x: F.relu(x), backend=counting(calls))

    class Net(TinyNet):
        def forward(self, x: Tensor) -> Tensor:
            x = relu(self.bn1(self.conv1(x)))
            x = relu(self.layer2(relu(self.layer1(x) + x)))
            return self.fc(self.avgpool(x).flatten(1))

    return settled(Net()).double().eval()


@pytest.mark.parametrize("build", [compiled_part, compiled_in_place, compiled_function])
def test_compiled_code_is_explained_as_it_was_written(
    build: Callable[[list[int]], nn.Module],
) -> None:
    calls: list[int] = []
    net = build(calls)
    for _ in range(2):
        calls.clear()
        assert_exact(net, [*LOOKING, *OTHERS])
        assert not calls, "compiled code ran"
        with torch.no_grad():
            net(X)
        assert calls, "compiled code does not run any more"
    torch.compiler.reset()


def calling(call: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    return with_part(lambda part: Made(lambda outer, x: call(outer.part, x), part=part))


def with_other_parameters(part: nn.Module, x: Tensor) -> Tensor:
    doubled = {name: p * 2 / 2 for name, p in part.named_parameters()}
    return torch.func.functional_call(part, doubled, (x,))


EXACT: dict[str, Callable[[], nn.Module]] = {
    "exported": lambda: with_part(lambda part: torch.export.export(part, (PART,)).module()),
    "symbolic": lambda: torch.fx.symbolic_trace(plain()),
    "other parameters": lambda: calling(with_other_parameters),
    "checkpoint": lambda: calling(lambda part, x: checkpoint(part, x, use_reentrant=False)),
}


@pytest.mark.parametrize("build", EXACT.values(), ids=EXACT)
def test_other_forms_of_a_network_are_exact(build: Callable[[], nn.Module]) -> None:
    assert_exact(build(), [*LOOKING, *OTHERS])


OPAQUE: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: with_part(torch.jit.script),
    "traced": lambda: with_part(lambda part: torch.jit.trace(part, PART + 1)),
}


@pytest.mark.parametrize("build", OPAQUE.values(), ids=OPAQUE)
def test_with_scripted_parts_methods_are_exact(build: Callable[[], nn.Module]) -> None:
    net = build()
    for _ in range(3):  # scripted code runs in another way once it has run
        assert_exact(net, [*OTHERS, *LOOKING, "guidedgradcam", "lrp", "deeplift"])


@pytest.mark.long
@pytest.mark.parametrize("close", [torch.jit.script, lambda net: torch.jit.trace(net, X)])
def test_a_closed_network_is_explained_by_what_reads_its_operations(
    close: Callable[[nn.Module], nn.Module],
) -> None:
    net = close(plain())
    methods = ["saliency", "integratedgradients", "occlusion", "attnlrp", "lrp", "deeplift"]
    methods += LOOKING
    expected = explain.attribute(plain(), X, methods, target=1)
    for _ in range(3):  # scripted code runs in another way once it has run
        for name, a in explain.attribute(net, X, methods, target=1).items():
            assert_close(a.values, expected[name].values, rtol=1e-9, atol=1e-14, msg=name)
    for name in methods:
        a = explain.attribute(net, X, name, target=1)
        assert_close(a.values, expected[name].values, rtol=1e-9, atol=1e-14, msg=name)


def test_a_scripted_network_that_its_owner_has_run_is_explained_exactly() -> None:
    net = torch.jit.script(plain())
    for _ in range(4):  # with gradients, so that its code is run in another way from now on
        (gradient,) = torch.autograd.grad(net(X).sum(), [next(net.parameters())])
    assert gradient.any()
    expected = explain.attribute(plain(), X, "lrp", target=1).values
    assert_close(explain.attribute(net, X, "lrp", target=1).values, expected, rtol=1e-9, atol=1e-14)


class Scaled(nn.Module):
    """A number leaves the pass, and comes back as another one for each photo."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)) * float(x.mean())


BATCH = ({0: torch.export.Dim("batch")},)
PROGRAMS: dict[str, Callable[[nn.Module], Any]] = {
    "scripted": torch.jit.script,
    "traced": lambda net: torch.jit.trace(net, X),
    "exported": lambda net: torch.export.export(net, (X,), dynamic_shapes=BATCH).module(),
    "one by one": lambda net: torch.export.export(net, (X[:1],)).run_decompositions().module(),
}
CAMS = ["gradcam", "hirescam", "layercam", "eigencam", "gradcam++", "scorecam", "ablationcam"]


@pytest.mark.long
@pytest.mark.parametrize("kind", PROGRAMS)
def test_maps_of_the_layers_of_a_program_are_those_of_the_network(kind: str) -> None:
    net = plain()
    program = PROGRAMS[kind](net)
    by_path = kind in ("exported", "one by one")
    for layer, name in [(None, None), ("layer1", "layer1" if by_path else "convolution_2")]:
        expected = explain.attribute(net, X, CAMS, target=1, layer=layer)
        maps = explain.attribute(program, X, CAMS, target=1, layer=name)
        for method, a in maps.items():
            assert_close(a.values, expected[method].values, rtol=1e-9, atol=1e-12, msg=method)
        assert maps["gradcam"].layer == name or name is None
        once = explain.attribute(program, X[1:], "gradcam", target=1, layer=name)
        assert_close(once.values, expected["gradcam"].values[1:], rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_the_tokens_of_an_exported_transformer_are_those_of_the_network() -> None:
    net = settled(torchvision.models.VisionTransformer(32, 8, 2, 2, 8, 16, num_classes=4))
    net = net.double().eval()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    program = torch.export.export(net, (x,), dynamic_shapes=BATCH).module()
    expected = explain.attribute(net, x, ["gradcam", "ablationcam"], target=1)
    for method, a in explain.attribute(program, x, [*expected], target=1).items():
        assert a.layer == expected[method].layer
        assert_close(a.values, expected[method].values, rtol=1e-9, atol=1e-12, msg=method)


def test_the_default_layer_of_a_program_is_none_of_its_heads() -> None:
    net = settled(torchvision.models.VisionTransformer(32, 8, 2, 2, 8, 16, num_classes=4))
    net = net.double().eval()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    program = torch.jit.trace(net, x, check_trace=False)
    expected = explain.attribute(net, x, "gradcam", target=1)
    a = explain.attribute(program, x, "gradcam", target=1)
    assert_close(a.values, expected.values, rtol=1e-9, atol=1e-12)


def test_a_program_for_a_fixed_number_of_images_is_explained_for_any() -> None:
    net = plain()
    program = torch.export.export(net, (X,)).module()
    expected = explain.attribute(net, X, "gradcam", target=1).values
    assert_close(explain.attribute(program, X, "gradcam", target=1).values, expected)
    assert_close(explain.attribute(program, X[:1], "gradcam", target=1).values, expected[:1])


def test_the_layers_of_a_program_are_listed_and_refused_where_it_cannot_be_recorded() -> None:
    layers = explain.list_layers(torch.jit.script(plain()), X)
    assert [layer.name for layer in layers if layer.kind == "convolution"] == [
        f"convolution_{number}" for number in range(4)
    ]
    with pytest.raises(LayerError, match="item"):
        explain.attribute(torch.jit.script(Scaled()), X, "gradcam", target=1)


@pytest.mark.filterwarnings("ignore:cells of layer")  # of what runs under vmap, nothing is known
def test_a_part_under_vmap_is_explained_exactly() -> None:
    assert_exact(calling(lambda part, x: torch.vmap(part)(x)), OTHERS)
    rectified = calling(lambda part, x: torch.vmap(lambda row: part(row).clamp(min=0))(x))
    plainly = calling(lambda part, x: part(x).clamp(min=0))
    for method in ("fullgrad", "guidedbackprop", "lrp", "deeplift"):
        a, expected = (explain.attribute(net, X, method, target=1) for net in (rectified, plainly))
        assert_close(a.values, expected.values, rtol=1e-9, atol=1e-12, msg=method)


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "vmap": lambda function: torch.vmap(function)(X),
    "grad": lambda function: torch.func.grad(function)(X),
    "jvp": lambda function: torch.func.jvp(function, (X,), (X,)),
    "compile": lambda function: torch.compile(function, backend="eager")(X),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_an_explanation_inside_a_transform_is_refused_in_one_line(
    transform: Callable[[Any], Any],
) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(320, 2)).double()

    def explained(x: Tensor) -> Tensor:
        x = x if x.ndim == 4 else x[None]
        return explain.attribute(net, x, "saliency", target=1).values.sum()

    with pytest.raises(ExplainError, match="an explanation must"):
        transform(explained)


def test_the_setting_of_the_compiler_comes_back_after_errors_and_from_threads() -> None:
    from torch._dynamo import eval_frame

    net = plain()
    at_target = threading.Barrier(2, timeout=10)

    def wait(output: Tensor) -> Tensor:
        at_target.wait()
        at_target.wait()
        return output[:, 1]

    stance = eval_frame._stance
    options = {"target": wait}
    thread = threading.Thread(target=explain.attribute, args=(net, X, "saliency"), kwargs=options)
    thread.start()
    at_target.wait()
    with pytest.raises(LayerError):
        explain.attribute(net, X, target=1, layer="unused")
    assert eval_frame._stance.stance == "force_eager"  # the other one goes on
    at_target.wait()
    thread.join()
    assert eval_frame._stance is stance
