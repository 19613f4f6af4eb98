"""Parts of a network that are compiled, exported, scripted or traced: explained exactly, or refused
in one line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain import LayerError, MethodError
from tests.conftest import TinyNet, settled

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit", "ignore::torch.jit.TracerWarning")
LOOKING = ["guidedbackprop", "deconvnet", "fullgrad"]
OTHERS = ["gradcam", "saliency", "ablationcam", "integratedgradients"]
PART = torch.zeros(2, 6, 12, 10, dtype=torch.float64)


def plain() -> Any:
    return settled(TinyNet()).double().eval()


def counting(calls: list[int]) -> Callable[..., Any]:
    """A compiler that leaves everything as it is, and counts how often its code runs."""

    def compiled(graph: Any, example: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph(*args)

        return run

    return compiled


def with_part(change: Callable[[Any], Any]) -> nn.Module:
    net = plain()
    net.layer1 = change(net.layer1) or net.layer1
    return net


def with_compiled_part(calls: list[int]) -> nn.Module:
    return with_part(lambda part: torch.compile(part, backend=counting(calls)))


def compiled_in_place(calls: list[int]) -> nn.Module:
    net = plain()
    net.compile(backend=counting(calls))
    return net


def with_compiled_function(calls: list[int]) -> nn.Module:
    relu = torch.compile(lambda x: F.relu(x), backend=counting(calls))

    class Net(TinyNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = relu(self.bn1(self.conv1(x)))
            x = relu(self.layer2(relu(self.layer1(x) + x)))
            return self.fc(self.avgpool(x).flatten(1))

    return settled(Net()).double().eval()


@pytest.mark.parametrize("build", [with_compiled_part, compiled_in_place, with_compiled_function])
def test_compiled_code_is_explained_as_it_was_written(
    build: Callable[[list[int]], nn.Module],
) -> None:
    x = torch.randn(2, 3, 12, 10, dtype=torch.float64)
    calls: list[int] = []
    net = build(calls)
    methods = [*LOOKING, *OTHERS]
    expected = explain.attribute(plain(), x, methods, target=1, layer="layer2")
    for _ in range(2):
        before = len(calls)
        found = explain.attribute(net, x, methods, target=1, layer="layer2")
        assert len(calls) == before, "compiled code ran"
        for method in methods:
            torch.testing.assert_close(
                found[method].values, expected[method].values, rtol=1e-9, atol=1e-14
            )
        with torch.no_grad():
            net(x)
        assert len(calls) > before, "compiled code does not run any more"
    torch.compiler.reset()


def exported_part() -> nn.Module:
    return with_part(lambda part: torch.export.export(part, (PART,)).module())


@pytest.mark.parametrize("build", [exported_part, lambda: torch.fx.symbolic_trace(plain())])
def test_exported_and_traced_graphs_are_exact(build: Callable[[], nn.Module]) -> None:
    x = torch.randn(2, 3, 12, 10, dtype=torch.float64)
    methods = [*LOOKING, "saliency", "integratedgradients"]
    found, expected = (explain.attribute(net, x, methods, target=1) for net in (build(), plain()))
    for method in methods:
        torch.testing.assert_close(
            found[method].values, expected[method].values, rtol=1e-9, atol=1e-14
        )
    assert found["fullgrad"].delta.abs().max() < 1e-9


def scripted_part() -> nn.Module:
    return with_part(torch.jit.script)


def traced_part() -> nn.Module:
    return with_part(lambda part: torch.jit.trace(part, PART + 1))


@pytest.mark.parametrize("build", [scripted_part, traced_part])
def test_with_scripted_parts_methods_are_exact_or_refused_where_they_look_inside(
    build: Callable[[], nn.Module],
) -> None:
    x = torch.randn(2, 3, 12, 10, dtype=torch.float64)
    net = build()
    expected = explain.attribute(plain(), x, OTHERS, target=1, layer="layer2")
    for _ in range(3):  # scripted code runs in another way once it has run
        values = explain.attribute(net, x, OTHERS, target=1, layer="layer2")
        for method in OTHERS:
            torch.testing.assert_close(
                values[method].values, expected[method].values, rtol=1e-9, atol=1e-14
            )
    for method in (*LOOKING, "guidedgradcam", "rollout", "legrad"):
        with pytest.raises(MethodError, match=f"{method} must see .* but layer 'layer1'"):
            explain.attribute(net, x, method, target=1)


def test_the_setting_of_the_compiler_comes_back_after_errors_and_from_threads() -> None:
    from torch._dynamo import eval_frame

    net = plain()
    x = torch.randn(1, 3, 12, 10, dtype=torch.float64)
    at_target = threading.Barrier(2, timeout=10)

    def wait(output: torch.Tensor) -> torch.Tensor:
        at_target.wait()
        at_target.wait()
        return output[:, 1]

    stance = eval_frame._stance
    options = {"target": wait}
    thread = threading.Thread(target=explain.attribute, args=(net, x, "saliency"), kwargs=options)
    thread.start()
    at_target.wait()
    with pytest.raises(LayerError):
        explain.attribute(net, x, target=1, layer="unused")
    assert eval_frame._stance.stance == "force_eager"  # the other one goes on
    at_target.wait()
    thread.join()
    assert eval_frame._stance is stance
    with pytest.raises(ZeroDivisionError):
        explain.attribute(net, x, "saliency", target=lambda output: 1 // 0)
    assert eval_frame._stance is stance
