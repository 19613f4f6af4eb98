"""What is recorded of a layer's call, and the parts that `Capture` and others are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from explain._utils.errors import NotRecordedError, note
from explain.hooks.group import HookGroup
from explain.hooks.layer_names import place_of

T = TypeVar("T")
Source: TypeAlias = Any
"""The graph's side of a tensor, to differentiate with respect to: a tensor or a `GradientEdge`.

The type hints of `torch.autograd.grad` know lists of the one or of the other, but not of both, which it takes.
"""


@dataclass(eq=False)
class TensorRecord:
    """A copy of one tensor, and the gradient that came back to it.

    It holds nothing of the graph: a hook in the graph holds it, and the two would keep each other alive forever, since
    the garbage collector does not see through autograd.
    """

    activation: torch.Tensor
    gradient: torch.Tensor | None = None
    _task: int = field(default=-1, repr=False)

    def take_gradient(self, gradient: torch.Tensor) -> None:
        """Take what a backward pass brings; what it brings by several ways adds up."""
        # A copy: the tensor that autograd passes may be shared with another branch, and may be reused by it.
        copy, task = gradient.detach().clone(), torch._C._current_graph_task_id()
        self.gradient = copy if self.gradient is None or task != self._task else self.gradient + copy
        self._task = task


@dataclass(eq=False)
class Record(TensorRecord):
    """One call of one layer: its first tensor and the gradient of that, and which call of the pass it was.

    Where all tensors were requested, ``tensors`` has them by position, key or field; by the whole way to them where
    they are in containers in containers.
    """

    layer: str = ""
    call: int = 0
    tensors: dict[Any, TensorRecord] = field(default_factory=dict)


class Recorded(Mapping[str, torch.Tensor]):
    """What was recorded of layers, by name. What is read is a copy: a hook may return it, and the model overwrite it.

    ``missing`` says of another name why nothing is recorded under it.
    """

    def __init__(self, kept: dict[str, torch.Tensor], missing: Callable[[str], str]) -> None:
        self._kept, self._missing = kept, missing

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._kept:
            raise NotRecordedError(self._missing(name))
        return self._kept[name].clone()

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return repr(self._kept)


class Overwriting:
    """Tells whether a module overwrote its input, so that its output is also known by an older name."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[torch.Tensor, int]] = {}

    def watch(self, group: HookGroup, name: str) -> None:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
            if first is not None and not first.is_inference():
                self._given[name] = first, first._version

        if group._model is None or not place_of(name, group._model).of_input:  # which nothing has overwritten yet
            group.forward_pre(name, note, with_kwargs=True)

    def is_by(self, name: str, output: torch.Tensor) -> bool:
        """Whether this output of a module is its input, overwritten; asked once, when it has returned."""
        given, version = self._given.pop(name, (None, 0))
        return given is output and output._version != version


def cut_where_allowed(run: Callable[[bool], T]) -> T:
    """Run a forward pass with ``cut=True``, and where autograd forbids that, again without."""
    try:
        return run(True)
    except RuntimeError as error:
        # Autograd refuses to overwrite, with gradients on, a view that was made while they were off.
        if "view was created in no_grad mode" not in str(error):
            raise
    note("the pass is recorded from the input on: the model overwrites a view that was made without gradients")
    return run(False)
