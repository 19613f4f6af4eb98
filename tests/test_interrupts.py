"""Signals at any moment: nothing is left changed, no signal is lost, and the handlers stay the
caller's own."""

from __future__ import annotations

import gc
import signal
from _thread import interrupt_main
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode

from explain import hooks
from explain._utils.errors import muted, quiet
from explain._utils.signals import SignalSafe, deferring_signals
from explain.hooks import Ablate, Replace, preserve
from tests import interruptions
from tests.conftest import TinyNet, settled
from tests.interruptions import TimeLimit


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Give SIGALRM a handler that raises, and see that all handlers are the same ones
    afterwards."""

    def raise_time_limit(number: int, frame: Any) -> None:
        raise TimeLimit

    of_interrupts = signal.getsignal(signal.SIGINT)
    theirs = signal.signal(signal.SIGALRM, raise_time_limit)
    yield
    assert signal.signal(signal.SIGALRM, theirs) is raise_time_limit
    assert signal.getsignal(signal.SIGINT) is of_interrupts


# random networks may have nothing to say
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.long)])
def test_signals_at_random_times_damage_nothing(count: int) -> None:
    torch.manual_seed(0)
    calls = [
        *interruptions.calls_of("small", interruptions.small(), torch.rand(2, 3, 10, 10)),
        *interruptions.calls_of(
            "chain", interruptions.deep(40), torch.rand(1, 3, 6, 6), ["gradcam", "saliency"]
        ),
        *interruptions.calls_of_explainer(),
        *interruptions.calls_of_interventions(),
    ]
    # Hypothesis has one, in which an interrupt is not raised but printed
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        tally = interruptions.interrupt_often(calls, count, seed=0)
    finally:
        gc.callbacks[:] = callbacks
    assert (tally.damaged, tally.lost, tally.twice) == ([], [], [])
    assert tally.sent == count
    assert tally.in_time > count // 2


BLOCKS: dict[str, Callable[[nn.Module], Any]] = {
    "untouched": hooks.preserve.untouched,
    "calculating": lambda model: preserve.calculating("cpu"),
    "recording": lambda model: preserve.recording(False),
    "capture": lambda model: hooks.capture(model, "*"),
    "HookGroup": hooks.HookGroup,
    "intervene": lambda model: hooks.intervene(
        model, [Ablate("conv1"), Replace("layer1", nn.Tanh(), name="sae"), Ablate("layer1/sae")]
    ),
    "alone": lambda model: preserve.untouched(model, alone=True),
    "muted": lambda model: muted(),
    "quiet": lambda model: quiet(),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, TimeLimit)]
)
def test_a_signal_between_a_block_and_its_end_comes_when_the_block_has_ended(
    name: str, number: int, raised: type[BaseException]
) -> None:
    """Python does not look at a signal that is sent when a dictionary is looked up before the next
    function begins or returns. At the end of a block, this is the function that ends it."""
    net = settled(TinyNet()).train()
    sent: dict[str, None] = defaultdict(partial(interrupt_main, number))
    before = interruptions.state(net)
    with pytest.raises(raised), BLOCKS[name](net) as entered:
        if isinstance(entered, hooks.HookGroup):
            entered.forward("conv1", lambda module, args, output: None)
        if name in ("untouched", "alone", "calculating", "recording", "capture"):
            torch.set_grad_enabled(False)
        sent["now"]
    assert interruptions.state(net) == before


class Sending(SignalSafe[str]):
    """Sends a signal from its beginning or its end."""

    def __init__(self, *where: str) -> None:
        self.where = where

    def on_enter(self) -> str:
        self._send("begin")
        return "bound"

    def on_exit(self, error: BaseException | None) -> None:
        self._send("end")

    def _send(self, place: str) -> None:
        if place in self.where:
            signal.raise_signal(signal.SIGINT)


def test_each_signal_reaches_the_handler_once_and_in_order() -> None:
    came: list[str] = []

    def handler(number: int, frame: Any) -> None:
        came.append(signal.Signals(number).name)

    numbers = (signal.SIGINT, signal.SIGALRM)
    theirs = [signal.signal(number, handler) for number in numbers]
    inner = Sending("begin", "end")

    @deferring_signals
    def work() -> None:
        signal.raise_signal(signal.SIGALRM)
        with inner:
            came.append("inner")
        came.append("whole")

    with Sending("begin", "end"):
        came.append("outer")
        work()
    for number, of_others in zip(numbers, theirs, strict=True):
        assert signal.signal(number, of_others) is handler
    assert came == ["SIGINT", "outer", "inner", "whole", "SIGALRM", "SIGINT", "SIGINT", "SIGINT"]


@pytest.mark.parametrize("name", ["untouched", "calculating"])
def test_settings_of_torch_come_back_from_contexts_that_were_never_left(name: str) -> None:
    net = settled(TinyNet()).train()
    with torch.autocast("cpu", torch.bfloat16), BaseTorchFunctionMode():
        before = interruptions.state(net), torch.get_autocast_dtype("cpu")
        with pytest.raises(KeyboardInterrupt), BLOCKS[name](net):
            BaseTorchFunctionMode().__enter__()
            torch.autocast("cpu", torch.float16, enabled=False, cache_enabled=False).__enter__()
            torch.set_grad_enabled(not torch.is_grad_enabled())
            raise KeyboardInterrupt
        assert (interruptions.state(net), torch.get_autocast_dtype("cpu")) == before
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0
