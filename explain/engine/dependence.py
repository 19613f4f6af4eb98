"""Which tensors of a forward pass depend on what is explained: those from which its graph leads back there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import Node

from explain.hooks import behind_proxy


class Dependence:
    """Tells what depends on the explained inputs from what is made of parameters, numbers and other inputs.

    A gradient leads from the one to the inputs. From the other it leads to parameters at most, whether they are trained
    or not, and whether or not the model has registered them: what is computed from a detached tensor, or looked up by
    an index, depends on the input in no way that a gradient could follow.

    >>> layer, x = torch.nn.Linear(3, 3), torch.ones(1, 3, requires_grad=True)
    >>> dependence = Dependence([x])
    >>> [dependence.of(made) for made in (layer(x), layer.weight.T * 2, layer(x.detach()))]
    [True, False, False]
    """

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self._sources = {id(tensor): tensor for tensor in sources}
        self._known: dict[Node, bool] = {}
        self._begun = sequence_number()

    def of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on the explained inputs."""
        tensor = behind_proxy(tensor)
        if not tensor.requires_grad:
            return False
        node = tensor.grad_fn
        return id(tensor) in self._sources if node is None else self._leads_back(node)

    def beside(self, view: torch.Tensor) -> torch.Tensor | None:
        """What lies beside a view, which has just been overwritten, in the constant that it is a view of.

        The constant has become something that depends on the input in this part of it. None where it did so before, or
        where all beside is zero.
        """
        base = view._base
        if base is None or base.grad_fn is None or not base.grad_fn.name().endswith("CopySlices"):
            return None
        before = base.grad_fn.next_functions[0][0]
        if before is not None and self._leads_back(before):
            return None
        found = base.detach().clone()
        if found.stride() != base.stride():
            return None
        found.as_strided(view.shape, view.stride(), view.storage_offset() - base.storage_offset()).zero_()
        return found if bool(found.any()) else None

    def _leads_back(self, node: Node) -> bool:
        """Whether a gradient leads from a Node to the explained inputs; each Node is looked at once."""
        known, waiting = self._known, [node]
        while waiting:
            last = waiting[-1]
            if last in known:
                waiting.pop()
                continue
            before = self._before(last)
            unknown = [each for each in before if each not in known]
            if unknown:
                waiting += unknown
                continue
            known[waiting.pop()] = any(known[each] for each in before) if before else self._is_explained(last)
        return known[node]

    def _before(self, node: Node) -> list[Node]:
        """The Nodes that a gradient reaches next; none where it comes to what the model has kept of an earlier pass."""
        if node._sequence_nr() < self._begun:
            return []
        return [each for each, _ in node.next_functions if each is not None]

    def _is_explained(self, node: Node) -> bool:
        """Whether a gradient that ends at a Node ends at an explained input."""
        return isinstance(node, torch._C._functions.AccumulateGrad) and id(node.variable) in self._sources


def sequence_number() -> int:
    """The number of the Node that autograd makes next, of this thread."""
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.ones(1, requires_grad=True).clone().grad_fn
    assert node is not None
    return int(node._sequence_nr())
