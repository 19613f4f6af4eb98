"""What callers wrap around models, and what is left of a finished explanation."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import remove_parametrizations
from torch.utils.checkpoint import checkpoint

import explain
from explain import ExplainError, ExplainWarning
from explain.distributed.communication import communicate
from tests.conftest import TinyNet, in_threads, settled, snapshot


def test_data_parallel_is_looked_into(net: TinyNet, x: torch.Tensor) -> None:
    expected = explain.attribute(net, x, "gradcam", target=1)
    found = explain.attribute(nn.DataParallel(net), x, "gradcam", target=1)
    assert found.layer == expected.layer
    assert torch.equal(found.values, expected.values)
    assert explain.find_concepts(nn.DataParallel(net), x, 2).layer == "dropout"


def test_a_compiled_model_is_explained_through_the_original_and_says_so(
    net: TinyNet, x: torch.Tensor
) -> None:
    expected = explain.attribute(net, x, "guidedbackprop", target=1).values
    compiled = torch.compile(net, backend="eager")
    with pytest.warns(ExplainWarning, match="model is compiled"):
        found = explain.attribute(compiled, x, "guidedbackprop", target=1).values
    assert torch.equal(found, expected)


class Checkpointed(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


def test_checkpoints_and_autocast_of_the_caller_make_no_difference(
    net: TinyNet, x: torch.Tensor
) -> None:
    for method in ("gradcam", "guidedbackprop", "fullgrad", "scorecam"):
        expected = explain.attribute(net, x, method, target=1, layer="dropout").values
        found = explain.attribute(
            Checkpointed(net), x, method, target=1, layer="net.dropout"
        ).values
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    expected = explain.attribute(net, x, "gradcam", target=1)
    with torch.autocast("cpu", torch.bfloat16):
        found = explain.attribute(net.float(), x.float(), "gradcam", target=1)
    assert found.values.dtype == torch.float32
    assert (found.heatmap - expected.heatmap).abs().max() < 0.05


def test_eight_threads_get_what_one_gets_with_shared_and_with_own_models(
    net: TinyNet, x: torch.Tensor
) -> None:
    methods = ["gradcam", "guidedbackprop", "fullgrad", "ablationcam", "smoothgrad(samples=4)"]
    models = [net, *(settled(TinyNet(), seed).double().train() for seed in (1, 2))]
    net.avgpool.register_forward_pre_hook(lambda module, args: time.sleep(0.002))
    expected = [explain.attribute(model, x, methods, target=2) for model in models]
    before = [snapshot(model) for model in models]
    wrong: list[str] = []

    def work(number: int) -> None:
        for step in range(2):
            which = (number + step) % 3
            for name, found in explain.attribute(models[which], x, methods, target=2).items():
                if not torch.allclose(
                    found.values, expected[which][name].values, rtol=1e-10, atol=1e-13
                ):
                    wrong.append(f"{name} in thread {number}")

    in_threads(8, work)
    assert wrong == []
    assert [snapshot(model) for model in models] == before


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
    errors = []
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
    words = (
        "model must stay in evaluation mode, but another thread called its train(); explain a "
        "copy of it"
    )
    refused = f"{words}: explain.hooks.copied(model)"
    assert errors == [refused] * 2
    assert snapshot(net)["hooks"] == hooks
    assert nn.Module.train is train


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


def test_parametrised_weights_are_explained_as_what_they_come_to(
    net: TinyNet, x: torch.Tensor
) -> None:
    methods = ["gradcam", "cam", "guidedbackprop", "fullgrad"]
    for layer in (net.conv1, net.fc):
        nn.utils.parametrizations.weight_norm(layer)
        layer.parametrizations.weight.original0.data.mul_(3)  # norms other than the weight had
    values = explain.attribute(net, x, methods, target=1)
    for layer in (net.conv1, net.fc):
        remove_parametrizations(layer, "weight")
    for name, expected in explain.attribute(net, x, methods, target=1).items():
        torch.testing.assert_close(values[name].values, expected.values, rtol=1e-9, atol=1e-12)


class OnDefaultDevice(nn.Module):
    """A network that asks for the default device in each pass, and may fail."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.devices: set[str] = set()
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.devices.add(torch.get_default_device().type)
        if self.fails:
            raise RuntimeError("cannot")
        return self.net(x)


def test_a_default_device_of_the_caller_is_that_of_the_model_alone(
    net: TinyNet, x: torch.Tensor
) -> None:
    """A tensor that followed the default device here would hold no values."""
    model = OnDefaultDevice(net)
    names = ["gradcam", "occlusion(window=6)", "featurepermutation"]
    metrics = ["deletion", "sparseness", "mprt"]
    expected = explain.attribute(model, x, names, target=1)
    scores = explain.evaluate(model, x, ["gradcam"], metrics, target=1)
    model.devices.clear()
    with torch.device("meta"):
        found = explain.attribute(model, x, names, target=1)
        again = explain.evaluate(model, x, ["gradcam"], metrics, target=1)
        model.fails = True
        with pytest.raises(RuntimeError, match="cannot"):
            explain.attribute(model, x, "gradcam", target=1)
        assert torch.get_default_device().type == "meta"
    assert torch.get_default_device().type == "cpu"
    assert model.devices == {"meta"}
    for name, attribution in expected.items():
        torch.testing.assert_close(found[name].values, attribution.values)
    for metric in metrics:
        assert torch.equal(again["gradcam"][metric], scores["gradcam"][metric])
