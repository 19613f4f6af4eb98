"""`timeline`: which hook fires when, as a list that prints itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from explain._utils.nested import as_sources, first_tensor
from explain.hooks.group import HookGroup
from explain.hooks.preserve import untouched
from explain.hooks.unwrap import hookable


@dataclass(frozen=True)
class Event:
    """One hook that fired: the kind of it, and the layer that it sat on."""

    kind: str
    layer: str
    type: str


class Timeline(list[Event]):
    """Events in the order in which they happened; printing it shows them by depth."""

    def __str__(self) -> str:
        lines = []
        for number, event in enumerate(self, start=1):
            depth = 0 if event.layer == "" else event.layer.count(".") + 1
            lines.append(f"{number:>4}  {'  ' * depth}{event.kind:<13} {event.layer or 'model'} ({event.type})")
        return "\n".join(lines)

    __repr__ = __str__


def timeline(model: nn.Module, *inputs: Any) -> Timeline:
    """Run a model forward, and its output's sum backward, and note every module hook as it fires.

    The model is left as it was; no gradient is accumulated.

    >>> print(timeline(nn.Sequential(nn.Linear(2, 1)), torch.ones(1, 2)))
       1  forward-pre   model (Sequential)
       2    forward-pre   0 (Linear)
       3    forward       0 (Linear)
       4  forward       model (Sequential)
       5  backward-pre  model (Sequential)
       6    backward-pre  0 (Linear)
       7    backward      0 (Linear)
       8  backward      model (Sequential)
    """
    events = Timeline()
    sources = as_sources(inputs)
    with untouched(model, grad=True), HookGroup(model) as group:
        for name, module in hookable(model).items():

            def note(kind: str, name: str = name, module: nn.Module = module) -> None:
                events.append(Event(kind, name, type(module).__name__))

            group.forward_pre(name, lambda m, args, note=note: note("forward-pre"))
            group.forward(name, lambda m, args, output, note=note: note("forward"))
            group.backward_pre(name, lambda m, grad_output, note=note: note("backward-pre"))
            group.backward(name, lambda m, grad_input, grad_output, note=note: note("backward"))
        output = first_tensor(model(*sources))
        wanted = [x for x in sources if isinstance(x, torch.Tensor) and x.requires_grad]
        if output is not None and output.requires_grad and wanted:
            torch.autograd.grad(output.sum(), wanted, allow_unused=True)
    return events
