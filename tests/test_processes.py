"""Explanations in other processes: the workers of a DataLoader, and children forked at the worst of
times."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

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


def explained(model: nn.Module, x: torch.Tensor, number: int = 0) -> dict[str, bytes]:
    """The bits of the maps of an image."""
    maps = explain.attribute(model, x[number : number + 1], METHODS, target=1)
    return {name: attribution.values[0].numpy().tobytes() for name, attribution in maps.items()}


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


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_a_data_loaders_workers_find_what_their_parent_finds(
    start: str, net: TinyNet, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))  # where a spawned worker finds this module
    expected = [explained(net, x, number) for number in range(len(x))]
    before = snapshot(net)
    numbers: Any = range(len(x))
    loader = DataLoader(
        numbers,
        batch_size=None,
        collate_fn=partial(explained, net, x),
        num_workers=1,
        multiprocessing_context=start,
        timeout=2 * LONG,
        generator=torch.Generator(),  # seeds are drawn from there, not from what all share
    )
    assert list(loader) == expected
    assert snapshot(net) == before


@contextmanager
def held_up(model: nn.Module, x: torch.Tensor) -> Iterator[None]:
    """Have another thread in the middle of an explanation while the block lasts, and see that it
    ends well."""
    inside = threading.Event()
    go_on = threading.Event()
    maps: list[torch.Tensor] = []

    def work() -> None:
        maps.append(explain.attribute(model, x, "guidedgradcam", target=1).values)

    def wait(*_: Any) -> None:
        if threading.current_thread() is thread:
            inside.set()
            assert go_on.wait(LONG)

    work()
    thread = threading.Thread(target=work)
    handle = model.get_submodule("layer2").register_forward_hook(wait)
    thread.start()
    try:
        assert inside.wait(LONG)
        yield
    finally:
        go_on.set()
        thread.join(LONG)
        handle.remove()
    assert torch.equal(maps[0], maps[1])


def test_a_child_forked_amid_another_threads_explanation_begins_with_a_clean_model(
    net: TinyNet, x: torch.Tensor
) -> None:
    net.train()
    net.bn1.eval()
    before = snapshot(net)
    wanted = explained(net, x)

    def hooks_and_modes() -> tuple[int, list[bool]]:
        modules = list(net.modules())
        return sum(map(hook_count, modules)), [module.training for module in modules]

    modes = hooks_and_modes()[1]
    with held_up(net, x):
        # those of the other thread, and the test's own
        hooks, modes_there = hooks_and_modes()
        assert hooks > 1
        assert not any(modes_there)
        at_first, maps, at_last = in_child(
            lambda: (hooks_and_modes(), explained(net, x), hooks_and_modes())
        )
    assert at_first == at_last == (1, modes)
    assert maps == wanted
    assert snapshot(net) == before


def test_a_child_forked_inside_an_explanation_may_explain_and_its_parent_goes_on(
    net: TinyNet, x: torch.Tensor
) -> None:
    net.train()
    before = snapshot(net)
    wanted = explained(net, x)
    seen: list[Any] = []

    def fork(*_: Any) -> None:
        handle.remove()
        with pytest.raises(ExplainError, match="from inside another one"):
            explained(net, x)
        seen.append(in_child(lambda: (net.training, explained(net, x), net.training)))

    handle = net.layer2.register_forward_hook(fork)
    assert explained(net, x) == wanted
    assert seen == [(True, wanted, True)]
    assert snapshot(net) == before
