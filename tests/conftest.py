"""Small networks with the traits that make explaining hard, and a snapshot of all that must not
change."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# of processes that tests start, too, since several run at a time
os.environ.setdefault("OMP_NUM_THREADS", "1")
# nor do threads spin where others want the processor
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import explain
from explain.methods import Method
from explain.methods.base import get_method, uses_layer

ROOT = Path(__file__).resolve().parents[1]
ALONG_PATHS = {
    "blurintegratedgradients",
    "guidedintegratedgradients",
    "idgi",
    "expectedgradients",
    "xrai",
}
COVERING = {
    name for name in explain.list_methods() if type(get_method(name)).outcome is not Method.outcome
} | ALONG_PATHS
"""Methods that run hundreds of covered photos, or follow paths of their own: they have their own
tests."""
ATTENDING = {name for name in explain.list_methods() if "transformers" in get_method(name).only_for}
"""Methods for networks with attention."""
HOOK_DICTS = [
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
]

# as shells have it for what they run in the background
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


CASES = 5
"""As many cases of one test are run without ``-m``; `.ci/run` runs the others too."""


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test with more than `CASES` cases, mark others than as many, spread evenly, as long;
    where tests are chosen by their names, all are run."""
    if config.option.keyword or any("::" in argument for argument in config.args):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        chosen = [len(cases) * number // CASES for number in range(CASES)]
        for number, case in enumerate(cases):
            if len(cases) > CASES and number not in chosen:
                case.add_marker(pytest.mark.long)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let each test draw the same numbers in every run, whichever tests run before it.

    ``EXPLAIN_TEST_SEED=1`` and so on let them draw others, to look for tests that hold by chance.
    """
    seed = int(os.environ.get("EXPLAIN_TEST_SEED", "0"))
    torch.default_generator.manual_seed(seed)  # torch.manual_seed notes the stack for other devices
    np.random.seed(seed)
    random.seed(seed)


@pytest.fixture
def new_objects_alone() -> Iterator[None]:
    """Let the collector look at what a test makes alone: all objects of a long run take it half a
    second each time."""
    gc.freeze()
    yield
    gc.unfreeze()


class TinyNet(nn.Module):
    """Convolutions, batch normalisation, in-place and functional ReLUs, an in-place shortcut and
    dropout."""

    def __init__(self, classes: int = 5, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, padding=1)
        )
        self.layer2 = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8))
        self.dropout = nn.Dropout(0.5)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, classes)
        self.unused = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        out = self.layer1(x)
        out += x
        x = F.relu(self.layer2(F.relu_(out)))
        return self.fc(self.avgpool(self.dropout(x)).flatten(1))


class Made(nn.Module):
    """A network of the parts given, by their names, that does with its input what a function of it
    says."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def layer_for(methods: Any, layer: str | None) -> str | None:
    """The layer, where one of the methods looks at a layer; it is refused where none does."""
    several = methods if isinstance(methods, (list, tuple)) else [methods]
    return layer if any(uses_layer(get_method(method).in_layer()) for method in several) else None


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call ``work`` with a number in each of several threads, and wait for all of them."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def settled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a model reproducible random weights and running statistics that are not the initial
    ones."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.copy_(
                    torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.4
                )
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_var.abs_().add_(0.5)
            module.weight.data.abs_().add_(0.5)
    return model


def registered_backwards(model: nn.Module) -> nn.Module:
    """Register all parts and parameters in reverse, which changes nothing of what a network
    computes."""
    for module in model.modules():
        if not isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList)):
            module._modules = dict(reversed(module._modules.items()))
            module._parameters = dict(reversed(module._parameters.items()))
            module._buffers = dict(reversed(module._buffers.items()))
    return model


@pytest.fixture
def net() -> nn.Module:
    return settled(TinyNet()).double().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(
        3, 3, 12, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return all that an explanation must leave as it is, in a form that compares bit by bit."""

    def digest(tensor: torch.Tensor | None) -> str | None:
        return (
            None
            if tensor is None
            else hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
        )

    return {
        "state": {name: digest(tensor) for name, tensor in model.state_dict().items()},
        "grad": {name: digest(p.grad) for name, p in model.named_parameters()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "training": {name: module.training for name, module in model.named_modules()},
        "inplace": {
            name: getattr(module, "inplace", None) for name, module in model.named_modules()
        },
        "hooks": {name: hook_count(module) for name, module in model.named_modules()},
        "forward": {name: "forward" in vars(module) for name, module in model.named_modules()},
        "rng": digest(torch.get_rng_state()),
        "grad_mode": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
    }


def hook_count(module: nn.Module) -> int:
    return sum(len(getattr(module, name)) for name in HOOK_DICTS)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """On pictures this small, threads wait for each other longer than they work."""
    torch.set_num_threads(1)


class GuidedFunction(torch.autograd.Function):
    """A ReLU whose backward is the guided rule, to put in the place of every ReLU of a network."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient.clamp(min=0) * (x > 0)
