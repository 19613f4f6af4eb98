"""Which tensors depend on what is explained, and what a network adds that does not: biases, shifts, constants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from explain._utils.errors import MethodError
from explain.hooks.preserve import is_transforming, without_proxy
from explain.tracing.calls import Call, TensorMap, storage_of
from explain.tracing.table import SCORE_NODES
from explain.tracing.tracer import ModuleTracker


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
        self._begun = torch._C._autograd._get_sequence_nr()

    def of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on the explained inputs."""
        tensor = without_proxy(tensor)
        if not tensor.requires_grad:
            return False
        node = tensor.grad_fn
        return id(tensor) in self._sources if node is None else self._leads_back(node)

    def rest_of_base(self, view: torch.Tensor) -> torch.Tensor | None:
        """The rest of the constant that a view belongs to, after the view was overwritten.

        The constant has become something that depends on the input in this part of it. None where it did so before, or
        where all the rest is zero.
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
        """Whether a gradient leads from a Node to the explained inputs; each Node is visited once."""
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
            ends_at = getattr(last, "variable", None)  # of the Node that accumulates a leaf's gradient
            known[waiting.pop()] = any(known[each] for each in before) or id(ends_at) in self._sources
        return known[node]

    def _before(self, node: Node) -> list[Node]:
        """The Nodes that a gradient reaches next; none where it comes to what the model has kept of an earlier pass."""
        if node._sequence_nr() < self._begun:
            return []
        return [each for each, _ in node.next_functions if each is not None]


_NAMED = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
"""Modules that do one thing: what their output is laid out as, the bias is too."""
_STEPS = 12


@dataclass(frozen=True, eq=False)
class AddedConstant:
    """A constant, and where it is added: the Node, by its output; the module, by name and call if it does no more.

    ``lies_on_input`` is False for numbers, and for what is added to scores of attention: they are no maps. The channels
    of linear functions come last.
    """

    value: torch.Tensor | float
    edge: GradientEdge
    module: str | None = None
    call: int = 0
    lies_on_input: bool = True
    channels_last: bool = False


@dataclass(eq=False)
class ConstantRecorder:
    """Notes what is added in a forward pass, all of which it has to see."""

    model: nn.Module
    found: list[AddedConstant] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = [*self.model.parameters(), *self.model.buffers()]
        self._themselves = {id(tensor): tensor for tensor in own}
        self._own = {storage for tensor in own if (storage := storage_of(tensor))}
        self._made = TensorMap[bool]()
        self._calls: Counter[str] = Counter()
        self._of_attention: set[Any] = set()
        self._begun, self._running = torch._C._autograd._get_sequence_nr(), ModuleTracker(self.model)

    def settled(self) -> list[AddedConstant]:
        """What has been found, when the forward pass is over."""
        return [replace(c, lies_on_input=False) if c.edge.node in self._of_attention else c for c in self.found]

    def seen(self, call: Call, result: Any) -> Any:
        """Note what a call adds; return its result, in the graph."""
        info, args = call.info, call.args
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return self.derive(call, result)
        if info.has("biased"):
            given = _arguments(call)
            if not self.is_constant(given["input"]):
                return self._note_bias(info.channels, given, result)
        elif info.has("adds") and len(args) == 2:
            self._note_sum(call, result)
        elif info.has("adds to first") and args and self.is_constant(args[0]):
            if not all(map(self.is_constant, args[1:])):
                self._note(call.kwargs.get("beta", 1) * args[0], result)
        elif call.name == "softmax":
            self._mark_attention(args[0] if args else call.kwargs["input"])
        return self.derive(call, result)

    def is_constant(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            made = id(value) in self._themselves or value in self._made or storage_of(value) in self._own
            # One made before the pass began, of weights, is kept by the model, with its graph.
            return made or (value.grad_fn is not None and value.grad_fn._sequence_nr() < self._begun)
        return isinstance(value, (int, float))

    def derive(self, call: Call, result: Any) -> Any:
        """Note whether a result, or what was written into, is made of constants alone."""
        tensors = call.tensors
        read = tensors[1:] if call.info.has("fills") else tensors[:1] if call.info.has("fits second") else tensors
        constant = all(map(self.is_constant, read))
        made = call.args[0] if call.name == "setitem" else result
        for each in made if isinstance(made, (list, tuple)) else (made,):
            if isinstance(each, torch.Tensor):
                if constant:
                    self._made[each] = True
                else:
                    for changed in (each, each._base):  # what is written into a view is in its base
                        if changed is not None:
                            self._made.discard(changed)
        return result

    def _note_bias(self, channels: int | None, given: Mapping[str, Any], result: torch.Tensor) -> torch.Tensor:
        name, module = self._running()
        named = name if isinstance(module, _NAMED) else None
        call = self._calls[named] if named else 0
        if named:
            self._calls[named] += 1
        bias = _bias(given)
        if bias is None:
            return result
        if is_transforming():
            raise MethodError(
                f"fullgrad must see what is added outside torch.vmap and the other transforms of torch.func, but the "
                f"bias in layer {name or 'model'!r} is added inside one; write the model without it, or use "
                "integratedgradients"
            )
        if not result.requires_grad and torch.is_grad_enabled():
            result = result.detach().requires_grad_().clone()  # of another image: its graph begins here
        elif result._is_view():
            result = result.clone()  # what overwrites a view hides its Node (instance normalisation gives one)
        if channels is not None:
            bias = bias.reshape(-1, *[1] * (result.ndim - 1 - channels % result.ndim))
        if result.requires_grad:  # the bias of a single channel is one number, but lies where the channel does
            last = channels is None and bias.ndim == 1
            self.found.append(AddedConstant(bias, get_gradient_edge(result), named, call, channels_last=last))
        return result

    def _note_sum(self, call: Call, result: torch.Tensor) -> None:
        """``a + alpha b``, ``a - alpha b`` or ``b - alpha a``, one of which is constant."""
        args = call.args
        which = [place for place, value in enumerate(args) if self.is_constant(value)]
        if len(which) != 1:
            return
        second = which[0] == (0 if call.name == "rsub" else 1)
        sign = -1 if second and "sub" in call.name else 1
        self._note(sign * (call.kwargs.get("alpha", 1) if second else 1) * args[which[0]], result)

    def _note(self, value: torch.Tensor | float, result: torch.Tensor) -> None:
        if result.requires_grad:
            lies = isinstance(value, torch.Tensor) and value.numel() > 1
            value = value.detach() if isinstance(value, torch.Tensor) else value
            self.found.append(AddedConstant(value, get_gradient_edge(result), lies_on_input=lies))

    def _mark_attention(self, scores: torch.Tensor) -> None:
        """Remember the last steps before a softmax: what is added there is added to scores."""
        node = scores.grad_fn
        for _ in range(_STEPS):
            if node is None or not node.name().startswith(SCORE_NODES):
                return
            self._of_attention.add(node)
            node = next((before for before, _ in node.next_functions if before is not None), None)


def _arguments(call: Call) -> dict[str, Any]:
    """The arguments by name: functions that are written in Python have an order of their own."""
    code = getattr(call.function, "__code__", None)
    names = call.info.arguments if code is None else code.co_varnames[: code.co_argcount]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def _bias(given: Mapping[str, Any]) -> torch.Tensor | None:
    """The constant ``(C,)`` that a call adds to what is otherwise linear in its input.

    For a normalisation by running statistics it is ``beta - gamma mean / sqrt(var + eps)``: the shift by the running
    mean counts, which the bias alone leaves out.
    """
    bias, mean, variance = given.get("bias"), given.get("running_mean"), given.get("running_var")
    bias = None if bias is None else bias.detach()
    batch = given.get("training", False) or given.get("use_input_stats", "training" not in given)
    if mean is None or variance is None or batch:
        return bias
    shift = mean.detach() * (variance.detach() + given.get("eps", 1e-5)).rsqrt()
    weight = given.get("weight")
    shift = shift if weight is None else shift * weight.detach()
    found: torch.Tensor = -shift if bias is None else bias - shift
    return found
