"""Calls that are interrupted by real signals at random times, and a comparison of all that must be
as before."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_modules

import explain
from explain import hooks
from explain._utils import errors, signals
from explain._utils.modules import module_names
from explain.hooks import preserve
from explain.hooks.intervening import active_interventions
from tests.conftest import Made, TinyNet, snapshot

METHODS = [
    "gradcam",
    "saliency",
    "guidedbackprop",
    "integratedgradients",
    "scorecam",
    "smooth(gradcam)",
]
DICTS = ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"]


def small() -> nn.Module:
    model = TinyNet().train()
    model.bn1.eval()
    model.conv1.requires_grad_(False)
    return model


def deep(length: int = 300) -> nn.Module:
    """A chain of many small modules, half of them frozen in evaluation mode."""
    layers = [nn.Dropout(0.1) if number % 3 else nn.ReLU() for number in range(length)]
    for layer in layers[1::2]:
        layer.eval()
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )


@dataclass
class Call:
    """Something that is called, on one network, over and over."""

    name: str
    model: nn.Module
    run: Callable[[], Any]
    expected: torch.Tensor
    seconds: float
    by_user: bool
    """Whether the user runs the network, in training mode: random numbers and running statistics
    then change."""


def calls_of(
    name: str, model: nn.Module, x: torch.Tensor, methods: list[str] = METHODS
) -> list[Call]:
    """Everything that is done with a network: explanations, and hooks of the user's own."""

    def attribute(method: str) -> torch.Tensor:
        return explain.attribute(model, x, method, target=1, batch_size=16).values

    def capture() -> int:
        with hooks.capture(model, "*") as seen:
            model(x).sum()
        return len(seen.records)

    def group() -> int:
        count = []
        with hooks.HookGroup(model) as group:
            group.forward("*", lambda module, args, output: count.append(1))
            group.backward("*", lambda module, grad_input, grad_output: None)
            source = x.clone().requires_grad_()
            torch.autograd.grad(model(source).sum(), source)
        return len(count)

    def extract() -> torch.Tensor:
        first, _ = next(model.named_children())
        (output,) = hooks.FeatureExtractor(model, first)(x).values()
        return output

    works: dict[str, Callable[[], Any]] = {m: partial(attribute, m) for m in methods}
    works["inspect"] = lambda: len(hooks.inspect(model, x).rows)
    by_users = {"capture": capture, "HookGroup": group, "FeatureExtractor": extract}
    calls = [_timed(f"{work} of {name}", model, run) for work, run in works.items()]
    return calls + [
        _timed(f"{work} of {name}", model, run, by_user=True) for work, run in by_users.items()
    ]


def calls_of_explainer() -> list[Call]:
    explainer = explain.Explainer(
        small(), preprocess=lambda photo: torch.from_numpy(np.array(photo)).movedim(2, 0) / 255
    )
    photo = torch.randint(0, 255, (24, 24, 3), dtype=torch.uint8).numpy()
    run = lambda: explainer(photo, ["gradcam", "saliency"]).values  # noqa: E731
    return [_timed("Explainer", explainer.model, run)]


def calls_of_interventions() -> list[Call]:
    """Interventions of every kind: in attention, from another input, and with a module that is
    inserted."""

    def forward(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
        tokens = made.embed(x.flatten(2).transpose(1, 2))
        return made.fc(made.act(made.attn(tokens, tokens, tokens)[0]).mean(1))

    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    layers = {"embed": nn.Linear(3, 8), "attn": attention, "act": nn.ReLU(), "fc": nn.Linear(8, 5)}
    model = Made(forward, **layers).eval()
    x = torch.rand(1, 3, 6, 6)
    other = torch.rand(1, 3, 6, 6)
    several = [
        hooks.Ablate("attn:pattern", heads=[0]),
        hooks.Patch("embed", other, from_input=True, tokens=[1, 2]),
        hooks.Replace("act", nn.Sequential(nn.Linear(8, 8), nn.ReLU()), name="sae"),
        hooks.Ablate("act/sae.1", channels=[3]),
    ]

    def intervene() -> torch.Tensor:
        with hooks.intervene(model, several):
            return model(x).detach()

    def explained() -> torch.Tensor:
        return explain.attribute(model, x, "saliency", target=1, interventions=several).values

    def trace() -> torch.Tensor:
        traced = explain.trace(model, x, other, "heads", target=1, batch_size=1)
        return traced.by_layer["attn:heads"]

    works = {"intervene": intervene, "attribute under interventions": explained, "trace": trace}
    return [_timed(name, model, run) for name, run in works.items()]


def _timed(name: str, model: nn.Module, run: Callable[[], Any], *, by_user: bool = False) -> Call:
    with kept_buffers(model):
        run()
        start = time.perf_counter()
        expected = torch.as_tensor(run())
        seconds = time.perf_counter() - start
    return Call(name, model, run, expected, seconds, by_user)


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """The user's own passes in training mode change the running statistics, as they always do."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, kept in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(kept)


def state(model: nn.Module) -> dict[str, Any]:
    """All that must be the same after a call as before it."""
    return snapshot(model) | {
        "versions": [(id(p), p._version, id(p.grad)) for p in model.parameters()],
        "train": nn.Module.train,
        "hooks of every module": [len(getattr(torch_modules, f"_global{name}")) for name in DICTS],
        "mixed precision": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "function modes": torch._C._len_torch_function_stack(),
        "interventions": active_interventions(model),
        "inserted modules": sorted(module_names.inserted.get(model, {})),
        "walked": dict(module_names.walked),
        "warning filters": list(warnings.filters),
        "handlers": (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGALRM)),
        "signals that wait": len(signals._shared),
        "held modes": (len(preserve._held_modes), preserve.is_in_untouched_block()),
        "warnings": getattr(errors._here, "collect_warnings", None) is None,
    }


class TimeLimit(Exception):
    """What handlers of a user's own raise here."""


KINDS: dict[str, tuple[int, type[BaseException]]] = {
    "SIGINT": (signal.SIGINT, KeyboardInterrupt),
    "SIGINT, own handler": (signal.SIGINT, TimeLimit),
    "SIGALRM": (signal.SIGALRM, TimeLimit),
}


@dataclass
class Tally:
    """How many signals were sent, how many of them ended a call, and what went wrong."""

    sent: int = 0
    in_time: int = 0
    lost: list[str] = field(default_factory=list)
    """Signals that no handler was called for, and interrupts (KeyboardInterrupt) that did not end
    the call."""
    twice: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


class _Sender(threading.Thread):
    """Sends one real signal to the main thread after some time, unless that is called off
    before."""

    def __init__(self, number: int, after: float) -> None:
        super().__init__()
        self.sent = 0
        self._number = number
        self._after = after
        self._called_off = threading.Event()

    def call_off(self) -> None:
        """End it; a signal that has been sent has arrived afterwards."""
        self._called_off.set()
        self.join()
        time.sleep(0)

    def run(self) -> None:
        if not self._called_off.wait(self._after):
            self.sent = 1
            os.kill(os.getpid(), self._number)


def interrupt(call: Call, kind: str, after: float, tally: Tally) -> None:
    """Make a call, interrupt it by one signal after some time, and note what is not as it was
    before."""
    number, raised = KINDS[kind]
    came: list[bool] = []
    inside = False

    def handler(number: int, frame: Any) -> None:
        came.append(inside)
        if inside:
            raise raised

    theirs = signal.signal(number, handler)
    sender = _Sender(number, after)
    ended = False
    before = state(call.model)
    with kept_buffers(call.model) if call.by_user else nullcontext():
        try:
            inside = True
            sender.start()
            call.run()
            inside = False
        except BaseException as error:
            inside = False
            ended = _led_to(error, raised)
            if not ended:
                raise
        sender.call_off()
    now = state(call.model)
    signal.signal(number, theirs)
    changing = {"rng"} if call.by_user else set()
    wrong = [name for name in before.keys() - changing if before[name] != now[name]]
    what = f"{call.name}, {kind}"
    tally.sent += sender.sent
    tally.in_time += ended
    if wrong:
        tally.damaged.append(f"{what}: {', '.join(wrong)}")
    if len(came) < sender.sent or (any(came) and not ended and raised is KeyboardInterrupt):
        tally.lost.append(what)
    if len(came) > sender.sent:
        tally.twice.append(what)


def _led_to(error: BaseException | None, raised: type[BaseException]) -> bool:
    """Whether an error is one of a kind, or what a library made of one."""
    return error is not None and (
        isinstance(error, raised) or _led_to(error.__cause__ or error.__context__, raised)
    )


def changed(call: Call) -> bool:
    """Whether a call no longer gives what it gave at first."""
    with kept_buffers(call.model):
        values = torch.as_tensor(call.run())
    return not torch.allclose(values, call.expected, rtol=1e-5, atol=1e-8)


def interrupt_often(
    calls: Sequence[Call], count: int, seed: int, show: Callable[[Tally], None] | None = None
) -> Tally:
    """Send so many signals, each at a random time to one of the calls, and then make every call
    once more."""
    draw = random.Random(seed)
    tally = Tally()
    while tally.sent < count:
        call = draw.choice(calls)
        kind = draw.choice(list(KINDS))
        interrupt(call, kind, draw.uniform(0, call.seconds), tally)
        if show is not None:
            show(tally)
    tally.damaged += [f"{call.name}: other values than at first" for call in calls if changed(call)]
    return tally
