"""Signals at any moment: nothing is left changed, no signal is lost, and the handlers stay the caller's own."""

from __future__ import annotations

import gc
import signal
import threading
import time
import warnings
import weakref
from _thread import interrupt_main
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import explain
from explain import hooks
from explain._utils.errors import muted, quiet
from explain._utils.signals import SignalSafe, came_by_signal, unsplit
from explain.engine import validation as entry
from explain.hooks import preserve
from tests import interruptions
from tests.conftest import TinyNet, settled, snapshot


class TimeLimit(Exception):
    pass


def raise_time_limit(number: int, frame: Any) -> None:
    raise TimeLimit


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Give SIGALRM a handler that raises, and see that all handlers are the same ones afterwards."""
    before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGALRM, raise_time_limit)
    yield
    left = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGALRM, before[1])
    assert left == (before[0], raise_time_limit)


def sending(number: int = signal.SIGINT) -> dict[str, None]:
    """Return a dictionary that sends a signal when its one item is looked up.

    Python does not look at such a signal before the next function begins or returns. At the end of a block, this is
    the function that ends it.
    """
    return defaultdict(partial(interrupt_main, number))


@pytest.mark.filterwarnings("ignore:.* is zero everywhere")  # random networks may have nothing to say
def test_two_hundred_signals_at_random_times_damage_nothing() -> None:
    torch.manual_seed(0)
    calls = [
        *interruptions.calls_of("small", interruptions.small(), torch.rand(2, 3, 10, 10)),
        *interruptions.calls_of("chain", interruptions.deep(40), torch.rand(1, 3, 6, 6), ["gradcam", "saliency"]),
        *interruptions.calls_of_explainer(),
    ]
    callbacks = gc.callbacks[:]  # Hypothesis has one, in which an interrupt is not raised but printed
    gc.callbacks.clear()
    try:
        tally = interruptions.interrupt_often(calls, 200, seed=0)
    finally:
        gc.callbacks[:] = callbacks
    assert (tally.damaged, tally.lost, tally.twice) == ([], [], [])
    assert tally.sent == 200
    assert tally.in_time > 120


BLOCKS: dict[str, Callable[[nn.Module], Any]] = {
    "untouched": hooks.untouched,
    "evaluating": hooks.evaluating,
    "calculating": lambda model: preserve.calculating("cpu"),
    "recording": lambda model: preserve.recording(False),
    "capture": lambda model: hooks.capture(model, "*"),
    "HookGroup": hooks.HookGroup,
    "alone": lambda model: entry.alone(),
    "muted": lambda model: muted(),
    "quiet": lambda model: quiet(),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, TimeLimit)])
def test_a_signal_between_a_block_and_its_end_comes_when_the_block_has_ended(
    name: str, number: int, raised: type[BaseException]
) -> None:
    net, sent = settled(TinyNet()).train(), sending(number)
    before = interruptions.state(net)
    with pytest.raises(raised), BLOCKS[name](net) as given:
        if isinstance(given, hooks.HookGroup):
            given.forward("conv1", lambda module, args, output: None)
        torch.set_grad_enabled(name not in ("untouched", "calculating", "recording", "capture"))
        sent["now"]
    assert interruptions.state(net) == before


class Sending(SignalSafe[str]):
    """Sends a signal from its beginning or its end."""

    def __init__(self, *where: str) -> None:
        self.where, self.log = where, []

    def begin(self) -> str:
        self.log.append("begins")
        self._send("begin")
        self.log.append("has begun")
        return "bound"

    def end(self, error: BaseException | None) -> None:
        self.log.append(f"ends with {type(error).__name__}")
        self._send("end")
        self.log.append("has ended")

    def _send(self, place: str) -> None:
        if place in self.where:
            signal.raise_signal(signal.SIGINT)


def test_a_signal_amid_a_beginning_ends_the_block_before_its_first_line() -> None:
    block = Sending("begin")
    with pytest.raises(KeyboardInterrupt), block:
        block.log.append("inside")
    assert block.log == ["begins", "has begun", "ends with KeyboardInterrupt", "has ended"]


def test_a_signal_amid_an_end_comes_after_it() -> None:
    block = Sending("end")
    with pytest.raises(KeyboardInterrupt), block as bound:
        block.log.append(bound)
    assert block.log == ["begins", "has begun", "bound", "ends with NoneType", "has ended"]


def test_a_signal_inside_comes_at_once_and_one_amid_the_end_too() -> None:
    block = Sending("end")
    with pytest.raises(KeyboardInterrupt) as caught, block:
        signal.raise_signal(signal.SIGALRM)
        block.log.append("not reached")
    assert block.log == ["begins", "has begun", "ends with TimeLimit", "has ended"]
    assert isinstance(caught.value.__context__, TimeLimit)


def test_each_signal_reaches_the_handler_once_and_in_order() -> None:
    came: list[str] = []
    mine = {n: lambda number, frame: came.append(signal.Signals(number).name) for n in (signal.SIGINT, signal.SIGALRM)}
    theirs = {number: signal.signal(number, handler) for number, handler in mine.items()}
    outer, inner = Sending("begin", "end"), Sending("begin", "end")

    @unsplit
    def work() -> None:
        signal.raise_signal(signal.SIGALRM)
        with inner:
            came.append("inner")
        came.append("whole")

    with outer:
        came.append("outer")
        work()
    for number, handler in theirs.items():
        assert signal.signal(number, handler) is mine[number]
    assert came == ["SIGINT", "outer", "inner", "whole", "SIGALRM", "SIGINT", "SIGINT", "SIGINT"]


def test_a_handler_may_be_interrupted_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a handler that asks whether to stop, and takes a second Ctrl-C for a yes."""

    def ask(number: int, frame: Any) -> None:
        signal.raise_signal(signal.SIGALRM)
        raise AssertionError("the second signal must come at once")

    theirs = signal.signal(signal.SIGINT, ask)
    try:
        with pytest.raises(TimeLimit), Sending("end"):
            pass
    finally:
        signal.signal(signal.SIGINT, theirs)


def test_a_handler_that_is_put_there_inside_a_block_stays() -> None:
    theirs, came = signal.getsignal(signal.SIGINT), []
    mine = lambda number, frame: came.append(number)  # noqa: E731
    with preserve.recording(False):
        assert signal.signal(signal.SIGINT, mine) is not mine
        with Sending("end"):
            pass
        assert signal.getsignal(signal.SIGINT) is mine
    assert signal.signal(signal.SIGINT, theirs) is mine
    assert came == [signal.SIGINT]


def test_a_time_limit_comes_through_hooks_and_probes_as_it_is(net: TinyNet, x: torch.Tensor) -> None:
    """A hook that is interrupted is not a wrong hook, and a network that is interrupted does take two images."""
    for where in ("conv1", "layer2"):
        limit = net.get_submodule(where).register_forward_hook(lambda *_: signal.raise_signal(signal.SIGALRM))
        before = snapshot(net)
        for run in (explain.attribute, explain.list_layers, hooks.inspect):
            with pytest.raises(TimeLimit) as caught:
                run(net, x)
            assert came_by_signal(caught.value)
            assert snapshot(net) == before
        limit.remove()
    with pytest.raises(TimeLimit), hooks.HookGroup(net) as group:
        group.forward("fc", lambda module, args, output: signal.raise_signal(signal.SIGALRM))
        net(x)


class Tokens(nn.Module):
    """Feature maps as tokens, first in a batch of their own, and as places, last in order: the layout takes probing."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.tokens, self.places, self.fc = (
            nn.Conv2d(3, 6, 3),
            nn.Linear(6, 6),
            nn.Linear(6, 8),
            nn.Linear(8, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        tokens = self.tokens(x.flatten(2).permute(2, 0, 1))
        return self.fc(self.places(tokens.permute(1, 0, 2).reshape(*x.shape[:1], *x.shape[2:], 6)).mean((1, 2)))


def test_a_time_limit_in_any_pass_over_the_network_ends_the_explanation() -> None:
    """Also in those that only find out what the network takes, and go on when it raises."""
    for number in range(1, 40):
        net, calls = settled(Tokens()), []

        def count(*_: Any, number: int = number, calls: list[int] = calls) -> None:
            calls.append(number)
            if len(calls) == number:
                signal.raise_signal(signal.SIGALRM)

        net.conv.register_forward_hook(count)
        try:
            explain.attribute(net, torch.rand(2, 3, 8, 8), "scorecam", target=1, layer=["tokens", "places"])
        except TimeLimit:
            continue
        assert len(calls) < number
        break
    assert 5 < number < 39


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["untouched", "calculating"])
def test_settings_of_torch_come_back_from_contexts_that_were_never_left(name: str) -> None:
    net = settled(TinyNet()).train()
    with torch.autocast("cpu", torch.bfloat16), Passing():
        before = interruptions.state(net), torch.get_autocast_dtype("cpu")
        with pytest.raises(KeyboardInterrupt), BLOCKS[name](net):
            Passing().__enter__()
            torch.autocast("cpu", torch.float16, enabled=False, cache_enabled=False).__enter__()
            torch.set_grad_enabled(not torch.is_grad_enabled())
            raise KeyboardInterrupt
        assert (interruptions.state(net), torch.get_autocast_dtype("cpu")) == before
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def test_hooks_on_parameters_go_with_an_interrupt_at_either_end() -> None:
    net, sent = settled(TinyNet()), sending()
    with pytest.raises(KeyboardInterrupt), explain.training.GradientClipper(net, value=1e-9):
        sent["now"]

    other = settled(TinyNet())
    every = list(other.named_parameters())

    def interrupted() -> Iterator[tuple[str, nn.Parameter]]:
        yield from every[:5]
        signal.raise_signal(signal.SIGINT)

    other.named_parameters = interrupted
    with pytest.raises(KeyboardInterrupt):
        explain.training.GradientClipper(other, value=1e-9)
    del other.named_parameters
    for model in (net, other):
        model(torch.ones(2, 3, 8, 8)).sum().backward()
        assert model.fc.bias.grad is not None
        assert float(model.conv1.weight.grad.abs().max()) > 1e-3
        assert float(model.fc.bias.grad.min()) == 2


def test_an_interrupt_while_two_models_are_held_gives_both_back() -> None:
    one, other = settled(TinyNet()).train(), settled(TinyNet(), 1).train()
    other.bn1.eval()
    before, sent = (interruptions.state(one), interruptions.state(other)), sending()
    with pytest.raises(KeyboardInterrupt), hooks.untouched(one), hooks.HookGroup(one) as group:
        group.forward("*", lambda *_: None)
        with hooks.untouched(other, grad=True), hooks.capture(other, "*"), quiet():
            sent["now"]
    assert (interruptions.state(one), interruptions.state(other)) == before


def test_other_threads_receive_no_signals_and_keep_the_handlers_alone(x: torch.Tensor) -> None:
    net, found = settled(TinyNet()).double().train(), []
    before, wanted = interruptions.state(net), explain.attribute(net, x, target=1).values
    thread = threading.Thread(target=lambda: found.append(explain.attribute(net, x, "smoothgrad", target=1)))
    thread.start()
    came = 0
    for _ in range(20):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            came += 1
        time.sleep(0.001)
    thread.join()
    assert (came, len(found)) == (20, 1)
    assert interruptions.state(net) == before
    assert torch.equal(explain.attribute(net, x, target=1).values, wanted)


WITH_CONTEXTLIB = """
@contextmanager
def generator(net):
    with HookGroup(net) as group:
        group.forward("conv1", print)
        yield

@contextmanager
def stack(net):
    with ExitStack() as stack:
        stack.enter_context(HookGroup(net)).forward("conv1", print)
        yield

def work(context, net, sent):
    with context(net):
        sent["now"]
"""


@pytest.mark.parametrize("context", ["generator", "stack"])
def test_contexts_that_the_package_makes_with_contextlib_are_whole_too(context: str) -> None:
    net, sent = settled(TinyNet()).train(), sending()
    before = interruptions.state(net)
    names: dict[str, Any] = {
        "__name__": "explain.pretended",
        "contextmanager": contextmanager,
        "ExitStack": ExitStack,
        "HookGroup": hooks.HookGroup,
    }
    exec(WITH_CONTEXTLIB, names)
    with pytest.raises(KeyboardInterrupt) as caught:
        names["work"](names[context], net, sent)
    assert interruptions.state(net) == before  # while the traceback still holds what was not left
    assert caught.tb is not None


def test_a_signal_is_not_lost_where_a_member_of_a_weak_collection_dies() -> None:
    """Python would print what a handler raises there, and go on."""

    class Member:
        pass

    members, keys = weakref.WeakSet[Member](), weakref.WeakKeyDictionary[Member, int]()
    for note in (members.add, lambda member: keys.update({member: 1})):
        member, sent, reached = Member(), sending(), False
        note(member)
        with pytest.raises(KeyboardInterrupt), preserve.recording(False):
            sent["now"]
            del member  # no function begins before the one that forgets it
            reached = True
        assert reached
    assert (len(members), len(keys)) == (0, 0)


def test_quiet_blocks_of_threads_and_interrupts_leave_the_filters() -> None:
    filters = list(warnings.filters)
    for _ in range(3):
        sent = sending()
        with pytest.raises(KeyboardInterrupt), quiet(), quiet():
            sent["now"]
    assert warnings.filters == filters
