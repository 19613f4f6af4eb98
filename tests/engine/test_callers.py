"""What callers wrap around models, and what is left of a finished explanation."""

from __future__ import annotations

import copy
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils.checkpoint import checkpoint

import explain
from explain import ExplainError, ExplainWarning, LayerError, ModelError
from explain.distributed.communication import communicate
from explain.hooks import HookGroup
from explain.methods import GradCAM
from tests import interruptions
from tests.conftest import ATTENDING, COVERING, TinyNet, in_threads, settled, snapshot

METHODS = [name for name in explain.list_methods() if name not in ATTENDING | COVERING]


def test_data_parallel_is_looked_into(net: TinyNet, x: torch.Tensor) -> None:
    expected = explain.attribute(net, x, "gradcam", target=1)
    found = explain.attribute(nn.DataParallel(net), x, "gradcam", target=1)
    assert found.layer == expected.layer
    assert torch.equal(found.values, expected.values)
    assert explain.find_concepts(nn.DataParallel(net), x, 2).layer == "dropout"


@pytest.fixture
def distributed(net: TinyNet, tmp_path: Path) -> Iterator[DistributedDataParallel]:
    """A network in a process group of one."""
    del net.unused  # each parameter must have a part in what is trained
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        yield DistributedDataParallel(net)
    finally:
        dist.destroy_process_group()


def test_a_distributed_model_is_looked_into_and_trains_on(
    distributed: DistributedDataParallel, x: torch.Tensor
) -> None:
    net = distributed.module
    alone = copy.deepcopy(net)
    sent = communicate(distributed)
    reducer = distributed.reducer
    before = snapshot(distributed)
    methods = ["gradcam", "guidedbackprop", "fullgrad", "scorecam"]
    for name, found in explain.attribute(distributed, x, methods, target=1).items():
        expected = explain.attribute(alone, x, name, target=1)
        assert torch.equal(found.values, expected.values), name
        assert found.layer == expected.layer
    assert (distributed.reducer is reducer, snapshot(distributed), sent.buckets) == (
        True,
        before,
        [],
    )
    for model in (distributed, alone):
        loss = model(x).square().sum()
        explain.attribute(model, x, "saliency", target=1)  # amid a step
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    assert len(sent.buckets) > 0
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is not None
    found, expected = (
        explain.attribute(model, x, target=1).values for model in (distributed, alone)
    )
    assert torch.equal(found, expected)


def test_a_compiled_model_is_explained_through_the_original_and_says_so(
    net: TinyNet, x: torch.Tensor
) -> None:
    expected = explain.attribute(net, x, "guidedbackprop", target=1).values
    compiled = torch.compile(net, backend="eager")
    with pytest.warns(ExplainWarning, match="model is compiled"):
        found = explain.attribute(compiled, x, "guidedbackprop", target=1).values
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning"
)
def test_a_scripted_model_is_refused(x: torch.Tensor) -> None:
    scripted = torch.jit.trace(nn.Sequential(nn.Conv2d(3, 2, 1)).double(), x)
    with pytest.raises(ModelError, match="Sequential"):
        explain.attribute(scripted, x, target=0)


@pytest.mark.usefixtures("new_objects_alone")
@pytest.mark.parametrize("method", ["gradcam", "refinecam"])
def test_nothing_stays_alive_of_several_layers_and_targets(
    method: str, net: TinyNet, x: torch.Tensor
) -> None:
    def run() -> None:
        explain.attribute(
            net, x, [method, "saliency"], targets=[0, 1], layer=["conv1", "layer1", "layer2"]
        )
        with pytest.raises(ZeroDivisionError):
            explain.attribute(
                net, x, method, target=lambda output: 1 / 0, layer=["conv1", "layer2"]
            )

    assert_leaves_no_tensors(run)


@pytest.mark.usefixtures("new_objects_alone")
def test_nothing_stays_alive_of_hooks_that_saw_gradients(net: TinyNet, x: torch.Tensor) -> None:
    def run() -> None:
        with (
            explain.hooks.capture(net, ["conv1", "layer1", "layer2"]),
            explain.hooks.HookGroup(net) as group,
        ):
            group.backward("*", lambda module, grad_input, grad_output: None)
            group.backward_pre("layer*", lambda module, grad_output: None)
            net(x).sum().backward()
        net.zero_grad(set_to_none=True)

    assert_leaves_no_tensors(run)


@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning", "ignore:.*quantiz:UserWarning")
def test_quantised_layers_are_explained_without_gradients_and_refused_with_them(
    x: torch.Tensor,
) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    ).eval()
    light = torch.ao.quantization.quantize_dynamic(settled(model), {nn.Linear}, dtype=torch.qint8)
    for method in ("eigencam", "fem", "scorecam", "ablationcam"):
        full, found = (
            explain.attribute(m, x.float(), method, target=1).heatmap for m in (model, light)
        )
        assert (full - found).abs().mean() < 0.05
    for method in ("gradcam", "saliency", "guidedbackprop", "integratedgradients"):
        with pytest.raises(ExplainError, match="quantised layers have no"):
            explain.attribute(light, x.float(), method, target=1)
    with pytest.raises(LayerError, match="followed"):
        explain.attribute(light, x.float(), "cam", target=1)


class LowRank(nn.Module):
    """What LoRA adds to a weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = (len(weight), 2), (2, weight[0].numel())
        self.a, self.b = (
            nn.Parameter(torch.randn(s, generator=generator).to(weight)) for s in shapes
        )

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (self.a @ self.b).reshape(weight.shape)


def test_parametrised_weights_are_explained_as_what_they_come_to(
    net: TinyNet, x: torch.Tensor
) -> None:
    for layer in (net.conv1, net.fc):
        register_parametrization(layer, "weight", LowRank(layer.weight))
    methods = ["gradcam", "cam", "guidedbackprop", "fullgrad"]
    before = snapshot(net)
    found = explain.attribute(net, x, methods, target=1)
    assert snapshot(net) == before
    for layer in (net.conv1, net.fc):
        remove_parametrizations(layer, "weight")
    for name, expected in explain.attribute(net, x, methods, target=1).items():
        torch.testing.assert_close(found[name].values, expected.values, rtol=1e-9, atol=1e-12)


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


def assert_leaves_no_tensors(run: Callable[[], object]) -> None:
    """Run once for what is kept for good, and once more, after which there are as many tensors as
    before."""
    run()
    gc.collect()
    before = count_tensors()
    run()
    gc.collect()
    assert count_tensors() <= before  # what others left may go meanwhile


def count_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.usefixtures("new_objects_alone")
@pytest.mark.parametrize("method", METHODS)
def test_nothing_of_a_finished_explanation_stays_alive(
    method: str, net: TinyNet, x: torch.Tensor
) -> None:
    """Without help from the garbage collector: there are no cycles for it to find."""
    explain.attribute(net, x, method, target=1)
    gc.collect()
    gc.disable()
    try:
        before = count_tensors()
        found = explain.attribute(net, x, method, target=1)
        values = weakref.ref(found.values)
        del found
        assert values() is None
        assert count_tensors() <= before  # what others left may go meanwhile
    finally:
        gc.enable()


def test_eight_threads_get_what_one_gets_with_shared_and_with_own_models(
    net: TinyNet, x: torch.Tensor
) -> None:
    methods = ["gradcam", "layercam", "guidedbackprop", "fullgrad", "ablationcam", "smoothgrad"]
    models = [net, *(settled(TinyNet(), seed).double().train() for seed in (1, 2))]
    net.avgpool.register_forward_pre_hook(lambda module, args: time.sleep(0.003))
    expected = [explain.attribute(model, x, methods, target=2) for model in models]
    before = [snapshot(model) for model in models]
    wrong: list[str] = []

    def work(number: int) -> None:
        for step in range(3):
            which = (number + step) % 3
            for name, found in explain.attribute(models[which], x, methods, target=2).items():
                if not torch.allclose(
                    found.values, expected[which][name].values, rtol=1e-10, atol=1e-13
                ):
                    wrong.append(f"{name} in thread {number}")

    in_threads(8, work)
    assert wrong == []
    assert [snapshot(model) for model in models] == before


class Draws(nn.Module):
    """Draws random numbers, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x + 0.1 * torch.randn_like(x)).mean((2, 3))


def test_threads_leave_random_numbers_and_the_filters_of_warnings_as_they_were(
    x: torch.Tensor,
) -> None:
    content = BytesIO()
    Image.new("RGB", (9, 9)).save(content, "PNG")
    model = Draws().double()
    together = threading.Barrier(8)
    filters = list(warnings.filters)
    state = torch.get_rng_state()

    def work(number: int) -> None:
        together.wait()
        for _ in range(2):
            explain.data.images.load_image(content.getvalue())
            explain.attribute(model, x, GradCAM(relu=False), target=0)
            explain.applicable_methods(model, x[:1])

    in_threads(8, work)
    assert warnings.filters == filters
    assert torch.equal(torch.get_rng_state(), state)


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
    assert not any("train" in vars(module) for module in net.modules())


def test_a_train_of_ones_own_is_called_and_heard(x: torch.Tensor) -> None:
    class Frozen(TinyNet):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            self.bn1.eval()
            return self

    net = settled(Frozen()).double().eval()
    errors = []
    net.layer2.train = lambda mode=True: net.layer2  # as in networks that must never be trained
    own = net.layer2.train
    with explained_elsewhere(net, x, errors):
        assert net.train() is net
    assert (net.training, net.bn1.training, net.layer2.training, net.dropout.training) == (
        True,
        False,
        False,
        True,
    )
    assert net.layer2.train is own
    assert len(errors) == 1


def test_what_a_network_does_to_its_modes_in_its_own_forward_is_undone(x: torch.Tensor) -> None:
    class Toggling(TinyNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.train(not self.training).train(not self.training)
            self.dropout.train(False)
            return super().forward(x)

    net = settled(Toggling()).double().train()
    net.bn1.eval()
    before = snapshot(net)
    explain.attribute(net, x, "saliency", target=1)
    assert snapshot(net) == before


def test_a_copy_has_modes_hooks_and_weights_of_its_own_and_the_same_values(
    net: TinyNet, x: torch.Tensor
) -> None:
    net.train()
    # part of what the network computes
    net.layer1.register_forward_hook(lambda module, args, output: 2 * output)
    torch.nn.utils.parametrizations.weight_norm(net.layer1[0])
    net.unused.shared = net.fc.weight
    wanted = explain.attribute(net, x, target=1).values
    before = snapshot(net)
    state = interruptions.state(net)
    with HookGroup(net) as group, explained_elsewhere(net, x, []):
        group.forward("conv1", lambda module, args, output: output * 0)
        own = explain.hooks.copied(net)
        sharing = explain.hooks.copied(net, share=True)
    assert (snapshot(net), interruptions.state(net)) == (before, state)
    for copy_, same in ((own, False), (sharing, True)):
        assert snapshot(copy_) == before
        assert interruptions.state(copy_)["own methods"] == state["own methods"]
        assert torch.equal(explain.attribute(copy_, x, target=1).values, wanted)
        tensors, of_net = (
            list(model.state_dict(keep_vars=True).values()) for model in (copy_, net)
        )
        assert [a is b for a, b in zip(tensors, of_net, strict=True)] == [same] * len(of_net)
        assert copy_.unused.shared is copy_.fc.weight
        copy_.eval()
    assert snapshot(net) == before


def test_a_thread_trains_as_if_alone_while_another_explains_copies(x: torch.Tensor) -> None:
    """Batch normalisation and dropout of a network in training must not notice; what is explained
    is one state."""

    def train(model: nn.Module, handed: list[nn.Module]) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        losses = []
        for step in range(40):
            if step % 8 == 0:
                handed.append(explain.hooks.copied(model))
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def trained(explaining: bool) -> tuple[list[float], dict[str, object], int]:
        model = settled(TinyNet()).double().train()
        handed = []
        found = []
        model.dropout.p = 0.0  # random numbers belong to the process
        thread = threading.Thread(target=lambda: found.append(train(model, handed)))
        thread.start()
        count = 0
        while explaining and (thread.is_alive() or count < 3):
            if handed:
                latest = handed[-1]
                first, again = (
                    explain.attribute(latest, x, "guidedbackprop", target=1).values
                    for _ in range(2)
                )
                assert torch.equal(first, again)
                count += 1
        thread.join()
        return found[0], {key: tensor.tolist() for key, tensor in model.state_dict().items()}, count

    alone = trained(False)
    watched = trained(True)
    assert watched[2] >= 3
    assert alone[:2] == watched[:2]
