"""Explanations in other processes: the workers of a DataLoader, and children forked at the worst of
times."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import explain
from explain import ExplainError
from tests.conftest import ROOT, TinyNet, hook_count, snapshot

METHODS = ["gradcam", "guidedbackprop", "scorecam", "ablationcam", "smoothgrad"]
LONG = 30  # seconds after which a process that ought to take one is said to hang

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system"),
    # which is the point here
    pytest.mark.filterwarnings("ignore:This process .*is multi-threaded:DeprecationWarning"),
]


class Explained(Dataset[dict[str, torch.Tensor]]):
    """Images with their explanations, made where they are loaded."""

    def __init__(self, model: nn.Module, images: torch.Tensor) -> None:
        self.model = model
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return explained(self.model, self.images[index : index + 1])


def explained(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = explain.attribute(model, x, METHODS, target=1)
    return {name: attribution.values[0] for name, attribution in found.items()}


def in_child(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in a process forked now; fail if it raises there, or hangs."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def report() -> None:
        try:
            sender.send(("done", work()))
        except BaseException as error:
            sender.send(("failed", repr(error)))

    process = context.Process(target=report)
    process.start()
    try:
        assert receiver.poll(LONG), "the child hangs"
        how, what = receiver.recv()
        process.join(LONG)
    finally:
        process.kill()
        process.join()
    assert how == "done", what
    return what


def bits(found: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: values.numpy().tobytes() for name, values in found.items()}


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_data_loaders_workers_find_what_their_parent_finds(
    start: str, net: TinyNet, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))  # where a spawned worker finds this module
    images = Explained(net, x)
    expected = [images[i] for i in range(len(images))]
    before = snapshot(net)
    # seeds are drawn from there, not from what all share
    calm = {"timeout": 2 * LONG, "generator": torch.Generator()}
    loader = DataLoader(
        images, batch_size=None, num_workers=1, multiprocessing_context=start, **calm
    )
    for found, wanted in zip(loader, expected, strict=True):
        assert found.keys() == wanted.keys()
        for name, values in found.items():
            assert torch.equal(values, wanted[name]), name
    assert snapshot(net) == before


@contextmanager
def held_up(model: nn.Module, x: torch.Tensor, **options: Any) -> Iterator[None]:
    """Have another thread in the middle of an explanation while the block lasts, and see that it
    ends well."""
    inside = threading.Event()
    go_on = threading.Event()
    found = []

    def wait(*_: Any) -> None:
        inside.set()
        assert go_on.wait(LONG)

    def work() -> None:
        explained_here.append(threading.get_ident())
        found.append(explain.attribute(model, x, "guidedgradcam", target=1, **options).values)

    explained_here: list[int] = []
    wanted = explain.attribute(model, x, "guidedgradcam", target=1).values

    def only_there(*_: Any) -> None:
        if threading.get_ident() in explained_here:
            wait()

    handle = model.get_submodule("layer2").register_forward_hook(only_there)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert inside.wait(LONG)
        yield
    finally:
        go_on.set()
        thread.join(LONG)
        handle.remove()
    assert torch.equal(found[0], wanted)


def test_a_child_forked_amid_another_threads_explanation_begins_with_a_clean_model(
    net: TinyNet, x: torch.Tensor
) -> None:
    net.train()
    net.bn1.eval()
    before = snapshot(net)
    wanted = bits(explained(net, x[:1]))

    def work() -> Any:
        left = (
            [hook_count(module) for module in net.modules()],
            [module.training for module in net.modules()],
        )
        return left, bits(explained(net, x[:1])), [module.training for module in net.modules()]

    with held_up(net, x):
        # those of the other thread, and the test's own
        assert sum(hook_count(module) for module in net.modules()) > 1
        assert not any(module.training for module in net.modules())
        (hooks, modes), found, modes_after = in_child(work)
    assert sum(hooks) == 1
    assert modes == modes_after == list(before["training"].values())
    assert found == wanted
    assert snapshot(net) == before


def test_a_child_forked_inside_an_explanation_may_explain_and_its_parent_goes_on(
    net: TinyNet, x: torch.Tensor
) -> None:
    net.train()
    before = snapshot(net)
    wanted = explained(net, x[:1])
    seen: list[Any] = []

    def forking(*_: Any) -> None:
        if not seen:
            seen.append(None)
            with pytest.raises(ExplainError, match="from inside another one"):
                explained(net, x[:1])
            seen[0] = in_child(lambda: (net.training, bits(explained(net, x[:1])), net.training))

    handle = net.layer2.register_forward_hook(forking)
    found = explain.attribute(net, x[:1], "gradcam", target=1).values[0]
    handle.remove()
    assert seen == [(True, bits(wanted), True)]
    assert torch.equal(found, wanted["gradcam"])
    assert snapshot(net) == before
