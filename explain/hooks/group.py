"""`HookGroup`: every kind of hook that PyTorch has, for as long as a ``with`` block lasts."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.autograd.graph import Node, register_multi_grad_hook, saved_tensors_hooks
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from explain.errors import HookError
from explain.hooks.full_backward import FullBackward
from explain.hooks.guard import Site, call, one_gradient, several_gradients, site_of
from explain.hooks.preserve import is_under_way
from explain.hooks.select import Where, select
from explain.interrupts import Unsplit, unsplit

Hook = Callable[..., Any]


class Handle(Protocol):
    """What PyTorch returns for a registered hook."""

    def remove(self) -> None: ...


class HookGroup(Unsplit["HookGroup"]):
    """Registers hooks, and removes all of them when the block ends, whatever ended it.

    Hooks fire in the order in which they were registered. Those on modules also fire for calls that other threads make
    of the same model; those calls pass through untouched. Hooks on tensors and Nodes belong to one graph and need no
    such guard; without a model, the group takes only those.

    A hook may return None, or what is to take the place of what it was given. One that takes the wrong arguments,
    returns the wrong number or shape of gradients, edits a gradient in place, or raises, is named in a `HookError`
    together with the layer and the direction.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    >>> shapes = []
    >>> with HookGroup(model) as group:
    ...     group.forward(nn.ReLU, lambda module, args, output: shapes.append(tuple(output.shape)))
    ...     group.backward("0", lambda module, grad_input, grad_output: shapes.append(tuple(grad_output[0].shape)))
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> shapes, len(model[1]._forward_hooks)
    ([(1, 2), (1, 2)], 0)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._handles: list[Handle] = []
        self._full: dict[nn.Module, FullBackward] = {}
        self._thread = threading.get_ident()
        self._alive = True
        _groups.add(self)

    def begin(self) -> HookGroup:
        if is_under_way():
            _of_explanations.add(self)
        return self

    def end(self, error: BaseException | None) -> None:
        self.remove()

    def __len__(self) -> int:
        return len(self._handles)

    @unsplit
    def remove(self) -> None:
        """Remove every hook of the group, the latest first; calling it again does nothing."""
        self._alive = False
        while self._handles:
            self._handles.pop().remove()
        self._full.clear()
        self._alive = True

    # Modules

    @unsplit
    def forward_pre(self, where: Where, fn: Hook, *, with_kwargs: bool = False) -> None:
        """Call ``fn(module, args)`` before each selected module; what it returns replaces its inputs.

        ``with_kwargs`` makes it ``fn(module, args, kwargs)``, which returns a pair of both.
        """
        takes = ("module", "args", "kwargs") if with_kwargs else ("module", "args")
        for module, site in self._sites(where, fn, "forward-pre", takes):
            self._handles.append(module.register_forward_pre_hook(self._guarded(site, fn), with_kwargs=with_kwargs))

    @unsplit
    def forward(self, where: Where, fn: Hook, *, with_kwargs: bool = False, always: bool = False) -> None:
        """Call ``fn(module, args, output)`` after each selected module; what it returns replaces ``output``.

        ``with_kwargs`` makes it ``fn(module, args, kwargs, output)``; with ``always`` it is called even if the module
        raised, with ``output=None``.
        """
        takes = ("module", "args", "kwargs", "output") if with_kwargs else ("module", "args", "output")
        for module, site in self._sites(where, fn, "forward", takes):
            hook = self._guarded(site, fn)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=with_kwargs, always_call=always))

    @unsplit
    def backward_pre(self, where: Where, fn: Hook) -> None:
        """Call ``fn(module, grad_output)`` before the backward of each selected module; it may return a new one."""
        for module, site in self._sites(where, fn, "backward-pre", ("module", "grad_output")):
            self._full_of(module).pre_hooks.append(_guarded_pre(site, fn))

    @unsplit
    def backward(self, where: Where, fn: Hook) -> None:
        """Call ``fn(module, grad_input, grad_output)`` when a selected module's gradients are known.

        Both are tuples with a gradient or None for each tensor argument and each output; what is returned replaces
        ``grad_input``. In-place operations inside the module or behind it do no harm, and inputs that require no
        gradient are None.
        """
        for module, site in self._sites(where, fn, "backward", ("module", "grad_input", "grad_output")):
            self._full_of(module).hooks.append(_guarded_full(site, fn))

    @unsplit
    def every_forward_pre(self, fn: Hook) -> None:
        """Call ``fn(module, args)`` before every module of the model that runs."""
        site = site_of(fn, "every module", "forward-pre", ("module", "args"))
        hook = self._of_this_model(self._guarded(site, fn))
        self._handles.append(global_hooks.register_module_forward_pre_hook(hook))

    @unsplit
    def every_forward(self, fn: Hook) -> None:
        """Call ``fn(module, args, output)`` after every module of the model that runs."""
        site = site_of(fn, "every module", "forward", ("module", "args", "output"))
        hook = self._of_this_model(self._guarded(site, fn))
        self._handles.append(global_hooks.register_module_forward_hook(hook))

    @unsplit
    def every_backward(self, fn: Hook) -> None:
        """Call ``fn(module, grad_input, grad_output)`` for every module that ran, as backward passes it."""
        site = site_of(fn, "every module", "backward", ("module", "grad_input", "grad_output"))
        full = FullBackward()
        full.hooks.append(_guarded_full(site, fn))
        self._handles.append(full)
        self._handles.append(global_hooks.register_module_forward_pre_hook(self._of_this_model(full.enter)))
        self._handles.append(global_hooks.register_module_forward_hook(self._of_this_model(full.leave)))

    # Tensors and the graph

    @unsplit
    def tensor(self, tensor: torch.Tensor, fn: Hook) -> None:
        """Call ``fn(gradient)`` when the gradient of ``tensor`` has been computed; what it returns replaces it."""
        site = self._tensor_site(tensor, fn, "gradient")
        self._handles.append(tensor.register_hook(_guarded_one(site, fn)))  # type: ignore[no-untyped-call]

    @unsplit
    def leaf(self, leaf: torch.Tensor, fn: Hook, *, after: bool = False) -> None:
        """Call ``fn(gradient)`` before a leaf accumulates it; with ``after``, ``fn(leaf)`` when it has."""
        if not leaf.is_leaf:
            raise HookError("leaf must be a leaf of the graph, such as a parameter, got a computed tensor; use tensor")
        if not after:
            self.tensor(leaf, fn)
            return
        site = self._tensor_site(leaf, fn, "after accumulation", takes=("leaf",))

        def accumulated(done: torch.Tensor) -> None:
            call(site, fn, done)

        self._handles.append(leaf.register_post_accumulate_grad_hook(accumulated))  # type: ignore[no-untyped-call]

    @unsplit
    def tensors(self, tensors: Sequence[torch.Tensor], fn: Hook, *, mode: Literal["all", "any"] = "all") -> None:
        """Call ``fn(gradients)`` once all gradients are ready, or ``fn(gradient)`` once the first of them is."""
        site = site_of(fn, f"{len(tensors)} tensors", f"{mode} gradients", ("gradients",))
        for tensor in tensors:
            _must_require_grad(tensor)

        def ready(found: Any) -> None:
            call(site, fn, found, gradients=[found] if isinstance(found, torch.Tensor) else list(found))

        self._handles.append(register_multi_grad_hook(tuple(tensors), ready, mode=mode))

    @unsplit
    def node(self, node: Node, fn: Hook) -> None:
        """Call ``fn(grad_inputs, grad_outputs)`` after a Node has run; what it returns replaces ``grad_inputs``."""
        site = site_of(fn, f"Node {node.name()}", "after", ("grad_inputs", "grad_outputs"))

        def after(grad_inputs: Any, grad_outputs: Any) -> Any:
            found = call(site, fn, grad_inputs, grad_outputs, gradients=[*grad_inputs, *grad_outputs])
            return several_gradients(site, grad_inputs, found)

        self._handles.append(node.register_hook(after))

    @unsplit
    def node_pre(self, node: Node, fn: Hook) -> None:
        """Call ``fn(grad_outputs)`` before a Node runs; what it returns replaces ``grad_outputs``."""
        site = site_of(fn, f"Node {node.name()}", "before", ("grad_outputs",))

        def before(grad_outputs: Any) -> Any:
            found = call(site, fn, grad_outputs, gradients=grad_outputs)
            return several_gradients(site, grad_outputs, found)

        self._handles.append(node.register_prehook(before))

    def after_backward(self, fn: Hook) -> None:
        """Call ``fn()`` once, when the backward pass that is running now is done; to be used from another hook."""
        site = site_of(fn, "the running backward pass", "at its end", ())

        def done() -> None:
            if self._alive:
                call(site, fn)

        try:
            torch.autograd.Variable._execution_engine.queue_callback(done)
        except RuntimeError:
            raise HookError("after_backward() must be called while a backward pass runs; call it from a hook") from None

    @unsplit
    def saved_tensors(self, pack: Hook, unpack: Hook) -> None:
        """Call ``pack(tensor)`` when autograd saves a tensor, and ``unpack(packed)`` when it needs the tensor back.

        It acts on what is computed by this thread until the group is removed.
        """
        packing = site_of(pack, "saved tensors", "pack", ("tensor",))
        unpacking = site_of(unpack, "saved tensors", "unpack", ("packed",))
        stack = ExitStack()
        stack.enter_context(
            saved_tensors_hooks(lambda t: call(packing, pack, t), lambda packed: call(unpacking, unpack, packed))
        )
        self._handles.append(_Closing(stack))

    # How it is done

    def _modules(self, where: Where) -> dict[str, nn.Module]:
        return select(self._needed_model(), where)

    def _needed_model(self) -> nn.Module:
        if self._model is None:
            raise HookError(
                "HookGroup() without a model can hook only tensors and Nodes; pass the model to hook layers"
            )
        return self._model

    def _is_own_call(self) -> bool:
        return threading.get_ident() == self._thread

    def _guarded(self, site: Site, fn: Hook) -> Hook:
        return lambda *given: call(site, fn, *given) if self._is_own_call() else None

    def _sites(self, where: Where, fn: Hook, direction: str, takes: Sequence[str]) -> Iterator[tuple[nn.Module, Site]]:
        """Yield each selected module with the site of a hook on it; whether the hook fits is looked at once."""
        modules = self._modules(where)
        first = site_of(fn, _layer(next(iter(modules))), direction, takes)
        for name, module in modules.items():
            yield module, Site(first.hook, _layer(name), direction)

    def _full_of(self, module: nn.Module) -> FullBackward:
        """Return the module's one pair of gates, so that all hooks on it fire in the order of their registration."""
        if module in self._full:
            return self._full[module]
        full = self._full[module] = FullBackward()
        enter = lambda *given: full.enter(*given) if self._is_own_call() else None  # noqa: E731
        leave = lambda *given: full.leave(*given) if self._is_own_call() else None  # noqa: E731
        self._handles.append(full)
        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave))
        return full

    def _of_this_model(self, hook: Hook) -> Hook:
        own = {id(module) for module in self._needed_model().modules()}
        return lambda module, *given: hook(module, *given) if self._is_own_call() and id(module) in own else None

    def _tensor_site(
        self, tensor: torch.Tensor, fn: Hook, direction: str, takes: Iterable[str] = ("gradient",)
    ) -> Site:
        _must_require_grad(tensor)
        return site_of(fn, f"a tensor of shape {tuple(tensor.shape)}", direction, tuple(takes))


_groups: weakref.WeakSet[HookGroup] = weakref.WeakSet()
_of_explanations: weakref.WeakSet[HookGroup] = weakref.WeakSet()


def registered() -> set[int]:
    """The numbers under which PyTorch keeps the hooks of all groups."""
    handles = [handle for group in list(_groups) for handle in list(group._handles)]
    return {handle.id for handle in handles if isinstance(handle, RemovableHandle)}


def _begin_child() -> None:
    """Take away, in a process that has just been forked, the hooks of explanations: these go on in its parent only."""
    for group in list(_of_explanations):
        group.remove()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


class _Closing:
    """A context as a handle."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def remove(self) -> None:
        self._stack.close()


def _layer(name: str) -> str:
    return f"layer {name!r}"


def _must_require_grad(tensor: torch.Tensor) -> None:
    if not tensor.requires_grad:
        raise HookError("tensor must require a gradient to be hooked, got one that does not; enable gradients first")


def _guarded_one(site: Site, fn: Hook) -> Hook:
    return lambda gradient: one_gradient(site, gradient, call(site, fn, gradient, gradients=[gradient]))


def _guarded_pre(site: Site, fn: Hook) -> Hook:
    def pre(module: nn.Module, grad_output: Any) -> Any:
        return several_gradients(site, grad_output, call(site, fn, module, grad_output, gradients=grad_output))

    return pre


def _guarded_full(site: Site, fn: Hook) -> Hook:
    def full(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        found = call(site, fn, module, grad_input, grad_output, gradients=[*grad_input, *grad_output])
        return several_gradients(site, grad_input, found)

    return full
