"""Full-backward hooks that survive in-place operations, and the gates that they rest on."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.module import register_module_forward_hook

from explain._utils import nested
from explain._utils.errors import HookError
from explain.hooks.graph import Gradients, continue_from
from explain.hooks.guard import Hook
from explain.hooks.handles import BeforeEvery, Registered, unless_in_hook


class _Gate(torch.autograd.Function):
    """Passes on its first ``count`` tensors themselves, with a new history, and aliases of the
    others (copies of leaves). Backward passes the gradients to ``act``, and on what it returns."""

    @staticmethod
    def forward(
        ctx: Any, act: Callable[[Gradients], Gradients], count: int, *tensors: torch.Tensor
    ) -> Gradients:
        """Return the first ``count`` tensors themselves with a new history, and aliases of the
        others."""
        ctx.act = act
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors[:count])
        # a module may overwrite what it gets, which autograd allows of no leaf
        aliases = [
            tensor.clone() if tensor.is_leaf else tensor.detach() for tensor in tensors[count:]
        ]
        return (*tensors[:count], *aliases)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Pass the gradients of the tensors to ``act``, and on what it returns."""
        return (None, None, *ctx.act(gradients))


class Gates:
    """The full-backward hooks and pre-hooks of one module, or of every module that runs. Each call
    has a record of its own: a module that runs three times meets its hook three times."""

    def __init__(self, thread: int | None, module: nn.Module | None) -> None:
        """Prepare the backward hooks (on gradients) of one module (None: of every module), for
        calls of ``thread`` (None for all)."""
        # Nothing of the group is kept: the graph holds the gates, and the two would keep each other
        # alive.

        # by direction, in the order in which they fire
        self.hooks: dict[str, list[GateHook]] = {"backward-pre": [], "backward": []}
        self._callers: list[Hook] = []  # those with functions of the caller, for messages
        self._running: list[_Call] = []  # the calls that have begun, innermost last
        self._thread = thread
        self._module = module
        self._handles: list[Any] = []  # of the forward hooks that put inputs and outputs in gates

    def add(self, hook: "GateHook", direction: str, *, first: bool) -> Callable[[], None]:
        """Add a hook to those of its direction, ``first`` or last; return a function that removes
        it."""
        # the module's forward hooks come with the first hook, and go with the last
        if not self._handles:
            enter: Callable[..., Any] = self._enter
            leave: Callable[..., Any] = self._leave
            register_pre: Callable[[Any], Any] = BeforeEvery
            register: Callable[[Any], Any] = register_module_forward_hook
            if self._module is None:  # a hook that calls modules would meet itself endlessly
                enter = unless_in_hook(enter)
                leave = unless_in_hook(leave)
            else:
                register_pre = partial(self._module.register_forward_pre_hook, with_kwargs=True)
                register = self._module.register_forward_hook
            self._handles.append(
                Registered(enter, register_pre, self._thread, self._callers).handle
            )
            self._handles.append(Registered(leave, register, self._thread, self._callers).handle)
        hooks = self.hooks[direction]
        hooks.insert(0 if first else len(hooks), hook)
        # functions of this package are not wrapped in a `Hook`
        caller_hooks = [hook.fn] if isinstance(hook.fn, Hook) else []
        self._callers += caller_hooks

        def remove() -> None:
            """Remove the hook; without any, gradients pass unchanged."""
            hooks.remove(hook)
            for caller in caller_hooks:
                self._callers.remove(caller)
            if not any(self.hooks.values()):
                # from now on gradients pass unchanged, also in graphs of earlier passes
                while self._handles:
                    self._handles.pop().remove()
                self._running.clear()  # nothing will notice that these calls end

        return remove

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a call of a module with backward hooks, as a forward-pre hook: its inputs pass a
        gate."""
        call = _Call(self, module)
        self._running.append(call)
        return call.enter(args, kwargs)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """End the latest call of a module with backward hooks, as a forward hook: its outputs pass
        a gate."""
        while self._running:
            call = self._running.pop()
            if call.module is module:  # those above it raised, and were not left
                return call.leave(output)
        return None


@dataclass(frozen=True, eq=False)
class GateHook:
    """A hook of a module on gradients, for all calls or for those that ``is_meant`` says while they
    begin."""

    fn: Callable[..., Any]
    is_meant: Callable[[], bool] | None = None


@dataclass(frozen=True)
class _Gated:
    """Which of the ``count`` values of a call pass through one gate, by their ``places``."""

    count: int
    places: list[int]

    def spread(self, gradients: Gradients) -> Gradients:
        """Gradients of the gate's tensors, placed among all ``count`` values of the call; None at
        the others."""
        by_place = dict(zip(self.places, gradients, strict=True))
        return tuple(by_place.get(i) for i in range(self.count))

    def picked(self, gradients: Gradients) -> Gradients:
        """The gradients of the tensors that pass the gate, out of those of all values of the
        call."""
        return tuple(gradients[i] for i in self.places)


class _Call:
    """One call of one module: it holds the gradients of the outputs until those of the inputs have
    arrived."""

    def __init__(self, owner: Gates, module: nn.Module) -> None:
        """Note which hooks are for this call, and that they wait for gradients alone."""
        self._owner = owner
        self.module = module
        # `is_meant` knows only while the call begins which call of the module it is
        hooks = [hook for of_direction in owner.hooks.values() for hook in of_direction]
        self._meant = {hook for hook in hooks if hook.is_meant is None or hook.is_meant()}
        for hook in self._meant:
            # from here on, it is not the layer that has not run
            if isinstance(hook.fn, Hook):
                hook.fn.why_unfired = Hook.why_unfired
        # kept from when the backward pass meets the outputs until it meets the inputs
        self._grad_output: Gradients | None = None
        # the number of autograd's next Node: those of this call have none below it
        self._began = torch._C._autograd._get_sequence_nr()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass the input tensors of a call through a gate; return the arguments that the module
        gets, or None if none requires a gradient."""
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        values = [*args, *(kwargs[name] for name in names)]
        gated_values, self._inputs = _through(self._at_inputs, values)
        places = self._inputs.places
        # With the gate's Node: another one when the call ends shows that the module has overwritten
        # the alias, and so the caller's tensor. The gate copies leaves, which share no memory.
        self._aliased_inputs = [
            (values[i], gated_values[i], gated_values[i].grad_fn)
            for i in places
            if not values[i].is_leaf
        ]
        if not places:
            return None
        by_name = dict(zip(names, gated_values[len(args) :], strict=True))
        return tuple(gated_values[: len(args)]), {**kwargs, **by_name}

    def leave(self, output: Any) -> Any:
        """Pass the outputs of a call through a gate; return what replaces them, or None. An input
        that was overwritten in place gets its history from the module's result."""
        paths, values = _laid_out(output)
        aliased_inputs = self._aliased_inputs
        self._aliased_inputs = []  # the graph keeps this call, but needs no tensors of it
        overwritten = [
            (tensor, alias) for tensor, alias, node in aliased_inputs if alias.grad_fn is not node
        ]
        gated_values, self._outputs = _through(self._at_outputs, values, began=self._began)
        # The caller may hold an input that was overwritten: it gets the history, and is the output
        # if the module has returned its alias.
        for tensor, alias in overwritten:
            place = next((i for i, value in enumerate(values) if value is alias), None)
            continue_from(tensor, alias if place is None else gated_values[place])
            if place is not None:
                gated_values[place] = tensor
        if all(map(operator.is_, gated_values, values)):
            return None
        by_path = dict(zip(paths, gated_values, strict=True))
        return nested.edit(output, lambda path, tensor: by_path[path])

    def _changed(
        self, direction: str, gradients: Gradients, *other_gradients: Gradients
    ) -> Gradients:
        """Call the hooks of one direction that are for this call, each on what the one before
        returned; ``other_gradients`` are passed along (``grad_output``)."""
        for hook in self._owner.hooks[direction]:
            changed = (
                hook.fn(self.module, gradients, *other_gradients) if hook in self._meant else None
            )
            gradients = gradients if changed is None else changed
        return gradients

    def _at_outputs(self, gradients: Gradients) -> Gradients:
        """Call the backward-pre hooks on the gradients of the outputs; return those that go on into
        the module. Runs in the backward pass before the module's own part."""
        grad_output = self._changed("backward-pre", self._outputs.spread(gradients))
        if self._inputs.places:
            self._grad_output = grad_output
        else:  # no input requires a gradient: nothing more will come
            self._changed("backward", self._inputs.spread(()), grad_output)
        return self._outputs.picked(grad_output)

    def _at_inputs(self, gradients: Gradients) -> Gradients:
        """Call the backward hooks on the gradients of the inputs and outputs; return the input
        gradients that go on. Runs in the backward pass, after the module's own."""
        grad_output = self._grad_output
        self._grad_output = None
        if grad_output is None:  # nothing came through the outputs
            return gradients
        grad_input = self._changed("backward", self._inputs.spread(gradients), grad_output)
        return self._inputs.picked(grad_input)


def _through(
    on_gradients: Callable[[Gradients], Gradients], values: Sequence[Any], began: float = math.inf
) -> tuple[list[Any], _Gated]:
    """Pass the tensors of a call that require gradients through one gate; return all values, and
    the places of those tensors. ``on_gradients`` gets their gradients in the backward pass."""
    gated_values = list(values)
    tensor_places = [
        i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad
    ]
    if not tensor_places or not torch.is_grad_enabled():
        return gated_values, _Gated(len(values), [])
    if torch._C._are_functorch_transforms_active():
        raise HookError(
            "backward hooks on modules must run outside transforms of torch.func; leave the "
            "transform out"
        )
    # tensors that the call itself made (since sequence number `began`; none of its inputs), and
    # that are no views, keep their identity; for the others an alias stands
    first_places: dict[int, int] = {}  # of a tensor that occurs several times, the first
    for i in reversed(tensor_places):
        node = values[i].grad_fn
        if node is not None and node._sequence_nr() >= began and not values[i]._is_view():
            first_places[id(values[i])] = i
    kept_places = sorted(first_places.values())
    aliased_places = [i for i in tensor_places if i not in kept_places]
    # they note the version counters when they are made, before the gate raises them
    keepers = [_unsafe_preserve_version_counter(values[i]) for i in kept_places]
    gated = _Gate.apply(
        on_gradients, len(kept_places), *(values[i] for i in (*kept_places, *aliased_places))
    )
    for keeper in keepers:  # and restore them, since no value has changed
        keeper.__exit__()
    for i, alias in zip(aliased_places, gated[len(kept_places) :], strict=True):
        gated_values[i] = alias
    return gated_values, _Gated(len(values), [*kept_places, *aliased_places])


def _laid_out(output: Any) -> tuple[list[nested.Path], list[Any]]:
    """The items of a module's output, with the paths to them: its own items, then tensors in
    containers inside these. Backward hooks get gradients in this order."""
    if isinstance(output, torch.Tensor):
        return [()], [output]
    contents = [((key,), value) for key, value in nested.items(output)]
    if any(not isinstance(value, torch.Tensor) for _, value in contents):
        contents += [(path, tensor) for path, tensor in nested.paths(output) if len(path) > 1]
    return [path for path, _ in contents], [value for _, value in contents]
