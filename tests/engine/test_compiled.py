"""Parts of a network that are compiled, exported, scripted or traced: explained exactly, or refused in one line."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain import ArgumentError, LayerError, MethodError
from explain.hooks.preserve import eager
from explain.methods import RISE, KernelSHAP
from tests.conftest import TinyNet, settled, snapshot

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


def with_part_compiled_in_place(calls: list[int]) -> nn.Module:
    return with_part(lambda part: part.compile(backend=counting(calls)))


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


COMPILED = [with_compiled_part, with_part_compiled_in_place, compiled_in_place, with_compiled_function]


@pytest.mark.parametrize("build", COMPILED)
def test_compiled_code_is_explained_as_it_was_written(build: Callable[[list[int]], nn.Module]) -> None:
    x = torch.randn(2, 3, 12, 10, dtype=torch.float64)
    calls: list[int] = []
    net, methods = build(calls), [*LOOKING, *OTHERS]
    expected = explain.attribute(plain(), x, methods, target=1, layer="layer2")
    for _ in range(2):
        before = len(calls)
        found = explain.attribute(net, x, methods, target=1, layer="layer2")
        assert len(calls) == before, "compiled code ran"
        for method in methods:
            torch.testing.assert_close(found[method].values, expected[method].values, rtol=1e-9, atol=1e-14)
        with torch.no_grad():
            net(x)
        assert len(calls) > before, "compiled code does not run any more"
    torch.compiler.reset()


def test_a_layer_in_a_compiled_part_has_its_name_there() -> None:
    net, x = with_compiled_part([]), torch.randn(2, 3, 12, 10, dtype=torch.float64)
    found = explain.attribute(net, x, target=1, layer="layer1._orig_mod.2")
    torch.testing.assert_close(found.values, explain.attribute(plain(), x, target=1, layer="layer1.2").values)


def test_the_setting_of_the_compiler_comes_back_after_errors_and_from_threads() -> None:
    from torch._dynamo import eval_frame

    net, x = plain(), torch.randn(1, 3, 12, 10, dtype=torch.float64)
    inside, leave = threading.Event(), threading.Event()

    def wait(output: torch.Tensor) -> torch.Tensor:
        inside.set()
        leave.wait(10)
        return output[:, 1]

    before = eval_frame._stance
    thread = threading.Thread(target=explain.attribute, args=(net, x, "saliency"), kwargs={"target": wait})
    thread.start()
    assert inside.wait(10)
    assert eval_frame._stance.stance == "force_eager"
    with pytest.raises(LayerError):
        explain.attribute(net, x, target=1, layer="unused")
    assert eval_frame._stance.stance == "force_eager"  # the other one goes on
    leave.set()
    thread.join()
    assert eval_frame._stance is before
    with pytest.raises(ZeroDivisionError):
        explain.attribute(net, x, "saliency", target=lambda output: 1 // 0)
    assert eval_frame._stance is before


def exported_part() -> nn.Module:
    return with_part(lambda part: torch.export.export(part, (PART,)).module())


def exported() -> nn.Module:
    return torch.export.export(plain(), (torch.zeros(2, 3, 12, 10, dtype=torch.float64),)).module()


@pytest.mark.parametrize("build", [exported, exported_part, lambda: torch.fx.symbolic_trace(plain())])
def test_exported_and_traced_graphs_are_exact(build: Callable[[], nn.Module]) -> None:
    x = torch.randn(2, 3, 12, 10, dtype=torch.float64)
    methods = [*LOOKING, "saliency", "integratedgradients"]
    found, expected = (explain.attribute(net, x, methods, target=1) for net in (build(), plain()))
    for method in methods:
        torch.testing.assert_close(found[method].values, expected[method].values, rtol=1e-9, atol=1e-14)
    assert found["fullgrad"].delta.abs().max() < 1e-9


def scripted_part() -> nn.Module:
    return with_part(torch.jit.script)


def traced_part() -> nn.Module:
    return with_part(lambda part: torch.jit.trace(part, PART + 1))


@pytest.mark.parametrize("build", [scripted_part, traced_part])
def test_methods_that_do_not_look_inside_are_exact_with_scripted_parts(build: Callable[[], nn.Module]) -> None:
    x, net = torch.randn(2, 3, 12, 10, dtype=torch.float64), build()
    for _ in range(3):  # scripted code runs in another way once it has run
        found, expected = (explain.attribute(each, x, OTHERS, target=1, layer="layer2") for each in (net, plain()))
        for method in OTHERS:
            torch.testing.assert_close(found[method].values, expected[method].values, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("method", [*LOOKING, "guidedgradcam", "rollout", "legrad"])
@pytest.mark.parametrize("build", [scripted_part, traced_part])
def test_methods_that_look_inside_are_refused_with_scripted_parts(build: Callable[[], nn.Module], method: str) -> None:
    with pytest.raises(MethodError, match=f"{method} must see every operation of the model, but layer 'layer1'"):
        explain.attribute(build(), torch.randn(2, 3, 12, 10, dtype=torch.float64), method, target=1)


def test_a_scripted_layer_is_refused_in_one_line() -> None:
    with pytest.raises(LayerError, match="layer 'layer1' must"):
        explain.attribute(scripted_part(), PART[:, :3] + 1, target=1, layer="layer1")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_rows_of_a_compiled_model_have_the_same_scores() -> None:
    net, x = plain().float().train(), torch.randn(2, 3, 12, 10)
    before = snapshot(net)
    expected = explain.attribute(net, x, RISE(samples=130), target=1)
    for _ in range(2):
        found = explain.attribute(net, x, RISE(samples=130), target=1, compile=True)
        torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-6 * expected.values.abs().max())
    assert snapshot(net) == before
    torch.compiler.reset()


def test_only_long_runs_for_scores_alone_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting(calls)))
    net, x = plain(), torch.randn(1, 3, 12, 10, dtype=torch.float64)

    def run(method: Any, **options: Any) -> int:
        expected = explain.attribute(net, x, method, target=1, **options)
        calls.clear()
        found = explain.attribute(net, x, method, target=1, compile=True, **options)
        torch.testing.assert_close(found.values, expected.values, rtol=1e-9, atol=1e-13)
        return len(calls)

    assert run(RISE(samples=300)) == 17  # of 16 rows each; the first has one more, and 12 are left over
    assert run(RISE(samples=300), batch_size=64) == 3
    assert run(RISE(samples=300), batch_size=4) > 70  # fewer than the rows that are compared with the model
    assert run(KernelSHAP(samples=300)) > 10
    assert run("saliency") == run("integratedgradients(steps=300)") == run(RISE(samples=200)) == 0
    assert run("ablationcam", layer="layer2") == 0
    handle = net.layer1.register_forward_hook(lambda module, args, output: 2 * output)
    assert run(RISE(samples=300)) == 0, "hooks are not looked for in compiled code"
    handle.remove()
    inside, leave = threading.Event(), threading.Event()

    def explain_meanwhile() -> None:
        with eager():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=explain_meanwhile)
    thread.start()
    assert inside.wait(10)
    assert run(RISE(samples=300)) == 0, "another explanation needs compiled code not to run"
    leave.set()
    thread.join()
    assert run(RISE(samples=300)) == 17
    torch.compiler.reset()


def test_a_compiler_that_fails_or_gives_other_scores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, compile = plain(), torch.randn(1, 3, 12, 10, dtype=torch.float64), torch.compile

    def failing(graph: Any, example: Any) -> Any:
        raise RuntimeError("no C++ compiler found")

    def wrong(graph: Any, example: Any) -> Any:
        return lambda *args: [output + 1 for output in graph(*args)]

    for backend, told in {failing: "compile must be False here.*C..", wrong: "gives other scores"}.items():
        monkeypatch.setattr(torch, "compile", partial(compile, backend=backend))
        with pytest.raises(ArgumentError, match=told) as error:
            explain.attribute(net, x, RISE(samples=300), target=1, compile=True)
        assert "\n" not in str(error.value)
        torch.compiler.reset()
