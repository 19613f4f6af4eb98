"""Where the graph begins in a pass that autograd does not record: at the input of what computes the layer's output.

Beginning at the output would be too late: what the layer itself makes from its output (a pooled second output, a tensor
that it keeps as an attribute) would have no history. So the last module that runs in a layer is given aliases of its
inputs that start a graph; in a container other than `nn.Sequential`, that module is unknown, and the container takes
its place. Backward never gets there: it ends at the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules import module as global_hooks

from explain._utils import nested
from explain._utils.nested import Lent
from explain.hooks.graph import alias, go_on_from, is_alias
from explain.hooks.group import HookGroup
from explain.hooks.unwrap import modules_of

_PASSING_ON = (nn.Identity, nn.modules.dropout._DropoutNd)


class GraphStart:
    """Begins a graph at layers when they run, unless autograd records them already.

    With ``cut``, that may be while gradients are off, which are on from then; it happens once.
    """

    def __init__(self, *, cut: bool) -> None:
        self.cut = cut
        self.was_cut = False
        self._missing: list[str] = []
        self._older: list[tuple[str, torch.Tensor, int]] = []
        self.starts: list[GradientEdge] = []
        """Where backward continues beyond the layers, so that the user's backward hooks on these fire."""

    @property
    def missing(self) -> list[str]:
        """The layers with a tensor that was overwritten, and that has an older name than the one with a history."""
        overwritten = [layer for layer, tensor, version in self._older if tensor._version != version]
        return self._missing + overwritten

    def watch(self, group: HookGroup, layer: str, module: nn.Module, is_wanted: Callable[[], bool]) -> None:
        """Let the graph begin at a call of a layer, which is a module, when ``is_wanted`` says so."""

        def begin(module: nn.Module, args: Any, kwargs: Any) -> Lent | None:
            if not is_wanted() or not self.begin(module, args, kwargs):
                return None
            lent = lend((args, kwargs))
            if _has_backward_hooks(module):
                self.starts += [get_gradient_edge(other) for _, other in lent.pairs]
            return lent

        group.lending(_last_in(module), begin, lambda lent, output: self.settled(layer, lent, output))

    def begin(self, module: nn.Module, *inputs: Any) -> bool:
        """Turn gradients on where they are off and this is allowed; say whether a graph begins here."""
        if torch.is_grad_enabled():
            given = (tensor for _, tensor in nested.paths(inputs))
            return not any(tensor.requires_grad for tensor in (*given, *module.parameters()))
        if not self.cut:
            return False  # the network itself has turned gradients off here
        self.cut, self.was_cut = False, True  # a graph begins only once
        torch.set_grad_enabled(True)  # the caller's mode comes back when `untouched` ends
        return True

    def settled(self, layer: str, lent: Lent | None, output: Any) -> Any:
        """Let tensors that were overwritten through an alias go on from it, by their own names; return the output."""
        names = {}
        for tensor, other in () if lent is None else lent.pairs:
            if any(
                each._base is other for _, each in nested.paths(output)
            ):  # it may still be overwritten through these
                self._older.append((layer, tensor, tensor._version))
            if is_alias(other):
                continue  # nothing has overwritten it
            if go_on_from(tensor, other):
                names[id(other)] = tensor
            else:
                self._missing.append(layer)
        return nested.edit(output, lambda path, t: names.get(id(t), t)) if names else None


def lend(inputs: Any) -> Lent:
    """Lend aliases of floating-point tensors instead of these."""
    return Lent(inputs, lambda t: alias(t) if t.is_floating_point() and not t.is_inference() else t)


def _last_in(module: nn.Module) -> nn.Module:
    """The module that computes the output of this one, as far as that is certain."""
    while getattr(type(module), "forward", None) is nn.Sequential.forward and "forward" not in vars(module):
        children = [
            child
            for child in module._modules.values()
            if child is not None and (child.training or not isinstance(child, _PASSING_ON))
        ]
        if not children:
            return module
        module = children[-1]
    return module


def _has_backward_hooks(module: nn.Module) -> bool:
    everywhere = global_hooks._global_backward_hooks or global_hooks._global_backward_pre_hooks
    return bool(everywhere) or any(m._backward_hooks or m._backward_pre_hooks for m in modules_of(module))
