"""What callers wrap around models, and what is left of a finished explanation."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import explain
from explain import ExplainError, ExplainWarning, ModelError
from explain.distributed.communication import communicate
from tests.conftest import Made, TinyNet, in_threads, settled, snapshot


def test_wrapped_and_compiled_models_are_looked_into(net: TinyNet, x: torch.Tensor) -> None:
    expected = explain.attribute(net, x, "guidedgradcam", target=1)
    a = explain.attribute(nn.DataParallel(net), x, "guidedgradcam", target=1)
    assert a.layer == expected.layer
    assert torch.equal(a.values, expected.values)
    assert explain.find_concepts(nn.DataParallel(net), x, 2).layer == "dropout"
    with pytest.warns(ExplainWarning, match="model is compiled"):
        a = explain.attribute(torch.compile(net, backend="eager"), x, "guidedgradcam", target=1)
    assert torch.equal(a.values, expected.values)


def test_autocast_of_the_caller_makes_no_difference(net: TinyNet, x: torch.Tensor) -> None:
    expected = explain.attribute(net, x, "gradcam", target=1)
    with torch.autocast("cpu", torch.bfloat16):
        a = explain.attribute(net.float(), x.float(), "gradcam", target=1)
    assert a.values.dtype == torch.float32
    assert (a.heatmap - expected.heatmap).abs().max() < 0.05


@pytest.mark.long
def test_eight_threads_get_what_one_gets_with_shared_and_with_own_models(
    net: TinyNet, x: torch.Tensor
) -> None:
    methods = ["gradcam", "guidedbackprop", "fullgrad", "ablationcam", "smoothgrad(samples=4)"]
    models = [net, *(settled(TinyNet(), seed).double().train() for seed in (1, 2))]
    net.avgpool.register_forward_pre_hook(lambda module, args: time.sleep(0.002))
    expected = [explain.attribute(model, x, methods, target=2) for model in models]
    states = [snapshot(model) for model in models]
    results: list[tuple[int, dict[str, explain.Attribution]]] = []

    def work(number: int) -> None:
        for step in range(2):
            which = (number + step) % 3
            results.append((which, explain.attribute(models[which], x, methods, target=2)))

    in_threads(8, work)
    assert len(results) == 16
    for which, maps in results:
        for name, a in maps.items():
            values = expected[which][name].values
            torch.testing.assert_close(a.values, values, rtol=1e-10, atol=1e-13)
    assert [snapshot(model) for model in models] == states


@contextmanager
def explained_elsewhere(model: nn.Module, x: torch.Tensor, errors: list[str]) -> Iterator[None]:
    """Have another thread explain a model, and hold it in the middle of that while the block
    lasts."""
    inside = threading.Event()
    go_on = threading.Event()

    def wait(output: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(30)
        return output[:, 1]

    def work() -> None:
        try:
            explain.attribute(model, x, "saliency", target=wait)
        except ExplainError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(30)
        yield
    finally:
        go_on.set()
        thread.join()


def test_eval_and_train_that_another_thread_calls_meanwhile_hold_afterwards(
    net: TinyNet, x: torch.Tensor
) -> None:
    hooks = snapshot(net)["hooks"]
    train = nn.Module.train
    errors: list[str] = []
    net.train()
    with explained_elsewhere(net, x, errors), explained_elsewhere(net, x, errors):
        assert not net.training
        net.eval()
        net.layer2.eval()
    assert not any(module.training for module in net.modules())
    assert errors == []
    with explained_elsewhere(net, x, errors):
        net.layer1.train()
        net.dropout.train()
        net.dropout.eval()
    training = {name for name, module in net.named_modules() if module.training}
    assert training == {"layer1", "layer1.0", "layer1.1", "layer1.2"}
    net.eval()
    with explained_elsewhere(net, x, errors):
        net.train()
        assert all(module.training for module in net.modules())
    assert all(module.training for module in net.modules())
    assert len(errors) == 2
    assert all("must stay in evaluation mode" in error for error in errors)
    assert snapshot(net)["hooks"] == hooks
    assert nn.Module.train is train


class Switched(nn.BatchNorm2d):
    """A normalisation that has begun to run when another thread calls a function."""

    during: Callable[[], object] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.during is not None:
            in_thread(self.during)
        return super().forward(x)


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        Switched(4),
        nn.InstanceNorm2d(4, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, 5),
    ]
    net = nn.Sequential(*layers).double()
    net(torch.rand(4, 3, 8, 8, dtype=torch.float64))  # which sets the statistics
    return net.eval()


@pytest.mark.parametrize("method", ["saliency", "scorecam", "lrp"])
@pytest.mark.parametrize("place", [0, 2])
def test_statistics_stay_where_another_thread_calls_train_amid_a_pass(
    method: str, place: int
) -> None:
    net = normalised()
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    expected = net(x)
    before = copy.deepcopy(net.state_dict())
    if place == 2:
        net[2].during = lambda: net.train()  # just before it looks whether it is in training mode
        restore: Callable[[], object] = partial(setattr, net[2], "during", None)
    else:
        handle = net[0].register_forward_hook(lambda *arguments: in_thread(lambda: net.train()))
        restore = handle.remove
    with pytest.raises(ModelError, match="train"):
        explain.attribute(net, x, method, target=1, layer="0" if method == "scorecam" else None)
    restore()
    assert all(module.training for module in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(net.eval()(x), expected)
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_what_another_thread_trains_meanwhile_is_kept() -> None:
    net = normalised()
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    other = copy.deepcopy(net).train()
    other(x)

    def train(*arguments: object) -> None:
        if not net.training:
            in_thread(lambda: net.train()(x))

    with net[0].register_forward_hook(train), pytest.raises(ModelError, match="train"):
        explain.attribute(net, x, "saliency", target=1)
    for name, value in other.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name


def test_a_distributed_model_is_looked_into_and_trains_on(
    net: TinyNet, x: torch.Tensor, tmp_path: Path
) -> None:
    del net.unused  # each parameter must have a part in what is trained
    alone = copy.deepcopy(net)
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        distributed = DistributedDataParallel(net)
        sent = communicate(distributed)
        state = snapshot(distributed)
        methods = ["gradcam", "guidedbackprop", "fullgrad", "scorecam"]
        expected = explain.attribute(alone, x, methods, target=1)
        for name, attribution in explain.attribute(distributed, x, methods, target=1).items():
            assert torch.equal(attribution.values, expected[name].values), name
        assert snapshot(distributed) == state
        assert sent.buckets == []
        for model in (distributed, alone):
            loss = model(x).square().sum()
            explain.attribute(model, x, "saliency", target=1)  # amid a step
            loss.backward()
        assert sent.buckets
    finally:
        dist.destroy_process_group()
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_default_device_of_the_caller_is_that_of_the_model_alone(
    net: TinyNet, x: torch.Tensor
) -> None:
    """A tensor that followed the default device here would hold no values."""
    devices: set[str] = set()

    def forward(outer: Any, x: torch.Tensor) -> torch.Tensor:
        devices.add(torch.get_default_device().type)
        return outer.net(x / 2)

    model = Made(forward, net=net)
    names = ["gradcam", "occlusion(window=6)", "featurepermutation", "deeplift"]
    metrics = ["deletion", "sparseness", "mprt"]
    expected = explain.attribute(model, x, names, target=1)
    scores = explain.evaluate(model, x, ["gradcam"], metrics, target=1)
    devices.clear()
    with torch.device("meta"):
        maps = explain.attribute(model, x, names, target=1)
        again = explain.evaluate(model, x, ["gradcam"], metrics, target=1)
        with pytest.raises(ZeroDivisionError):
            explain.attribute(model, x, target=lambda output: 1 // 0)
        assert torch.get_default_device().type == "meta"
    assert torch.get_default_device().type == "cpu"
    assert devices == {"meta"}
    for name, a in expected.items():
        torch.testing.assert_close(maps[name].values, a.values)
    for metric in metrics:
        assert torch.equal(again["gradcam"][metric], scores["gradcam"][metric])
