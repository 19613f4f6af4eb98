"""Full-backward hooks that survive in-place operations, and the gates that they rest on."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from explain._utils import nested
from explain._utils.errors import HookError
from explain.hooks.graph import Overwritten
from explain.hooks.registration import Calls, Flag, OnEveryModule, OnModule, Plain, Scope

FullHook = Callable[[nn.Module, Any, Any], Any]
PreHook = Callable[[nn.Module, Any], Any]
Gradients = tuple[torch.Tensor | None, ...]


class _Gate(torch.autograd.Function):
    """Passes on aliases (copies of leaves); in backward, passes the gradients to ``act``, and on what it returns."""

    @staticmethod
    def forward(ctx: Any, act: Callable[[Gradients], Gradients], *tensors: torch.Tensor) -> Gradients:
        ctx.act = act
        ctx.set_materialize_grads(False)
        return tuple([tensor.clone() if tensor.is_leaf else tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (None, *ctx.act(gradients))


class _OwnGate(_Gate):
    """Passes on the first ``count`` tensors themselves, with a new history, and aliases of the others."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, act: Callable[[Gradients], Gradients], count: int, *tensors: torch.Tensor
    ) -> Gradients:
        ctx.act = act
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors[:count])
        aliases = [tensor.clone() if tensor.is_leaf else tensor.detach() for tensor in tensors[count:]]
        return (*tensors[:count], *aliases)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (None, None, *ctx.act(gradients))


class Removable(Protocol):
    """A handle: what PyTorch returns for a registered hook."""

    def remove(self) -> None: ...


class Undo:
    """The handle of what a function undoes."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


class Gates:
    """The full-backward hooks and pre-hooks of one module; of every module of ``scope`` that runs, if none is given.

    Each call has a record of its own: a module that runs three times in one forward pass meets its hook three times in
    backward, each time with the gradients of that call. ``calls`` counts them. Gates hold nothing of their group: the
    graph holds them, and the two would keep each other alive forever.
    """

    def __init__(self, thread: int | None, module: nn.Module | None, scope: Scope | None = None) -> None:
        self.hooks: list[FullHook] = []
        self.pre_hooks: list[PreHook] = []
        self.calls = 0
        self.only: dict[FullHook | PreHook, Calls] = {}
        """Of hooks for one call of their module alone: which one."""
        self._open: dict[int, list[_Call]] = {}  # by thread
        self._thread, self._module, self._scope = thread, module, scope
        self._placed: list[Removable] = []

    def add(self, hooks: list[Any], fn: Callable[..., Any], *, first: bool = False, only: Calls | None = None) -> Undo:
        """Add a hook to one of the two lists of hooks."""
        if only is not None:
            self.only[fn] = only
        if not self._placed:
            self._place()
        hooks.insert(0 if first else len(hooks), fn)

        def remove() -> None:
            if fn in hooks:
                hooks.remove(fn)
            if not (self.hooks or self.pre_hooks):
                self._remove()

        return Undo(remove)

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self.calls += 1
        call = _Call(self, module)
        self._open.setdefault(threading.get_ident(), []).append(call)
        return call.enter(args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        calls = self._open.get(threading.get_ident(), [])
        while calls:
            call = calls.pop()
            if call.module is module:  # those above it never returned: their forward raised
                return call.leave(output)
        return None

    def _place(self) -> None:
        if self._module is not None:
            enter, leave = OnModule(None, self.enter, self._thread), OnModule(None, self.leave, self._thread)
            enter.handle = self._module.register_forward_pre_hook(enter, with_kwargs=True)
            self._placed.append(enter.handle)
            leave.handle = self._module.register_forward_hook(leave)
            self._placed.append(leave.handle)
            return
        assert self._scope is not None
        self._placed.append(BeforeEvery(OnEveryModule(None, self.enter, self._thread, self._scope)))
        out = OnEveryModule(None, self.leave, self._thread, self._scope)
        self._placed.append(global_hooks.register_module_forward_hook(out))

    def _remove(self) -> None:
        """Remove the gates; from now on gradients pass unchanged, also those of forward passes that are done."""
        while self._placed:
            self._placed[-1].remove()
            self._placed.pop()
        self.only.clear()
        self._open.clear()


class _Call:
    """One call of one module: what came in at the output gate is kept until the input gate knows the rest."""

    def __init__(self, owner: Gates, module: nn.Module) -> None:
        self.owner, self.module = owner, module
        self._left_out = {hook for hook, only in owner.only.items() if not only.is_meant()}
        self.grad_output: Gradients | None = None
        self._began = torch._C._autograd._get_sequence_nr()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)] if kwargs else []
        values = [*args, *(kwargs[name] for name in names)] if names else args
        self.inputs = len(values)
        passed, self._where = _through(self._at_inputs, values)
        self._lent = [(values[i], passed[i], passed[i].grad_fn) for i in self._where if not values[i].is_leaf]
        if not self._where:
            return None
        if not names:
            return tuple(passed), kwargs
        return tuple(passed[: len(args)]), {**kwargs, **dict(zip(names, passed[len(args) :], strict=True))}

    def leave(self, output: Any) -> Any:
        lone = isinstance(output, torch.Tensor)
        paths, values = ([()], [output]) if lone else _laid_out(output)
        lent, self._lent = self._lent, []
        overwritten = [(tensor, alias) for tensor, alias, node in lent if alias.grad_fn is not node]
        passed, self._out = _through(self._at_outputs, values, self._is_own)
        self.outputs = len(values)
        for tensor, alias in overwritten:
            _go_on(tensor, alias, values, passed)
        if lone:
            return None if passed[0] is output else passed[0]
        if all(map(operator.is_, passed, values)):
            return None
        made = dict(zip(paths, passed, strict=True))
        return nested.edit(output, lambda path, tensor: made[path])

    def _is_own(self, output: torch.Tensor) -> bool:
        """Whether an output itself may be passed on: the call made it, and it is not a view."""
        node: Any = output.grad_fn
        return node is not None and node._sequence_nr() >= self._began and not output._is_view()

    def _of_this_call(self, hooks: list[Any]) -> list[Any]:
        return [hook for hook in hooks if hook not in self._left_out] if self._left_out else hooks

    def _at_outputs(self, gradients: Gradients) -> Gradients:
        given = _spread(gradients, self._out, self.outputs)
        for pre in self._of_this_call(self.owner.pre_hooks):
            changed = pre(self.module, given)
            given = given if changed is None else changed
        if self._where:
            self.grad_output = given
        else:  # no input requires a gradient: nothing more will come
            for hook in self._of_this_call(self.owner.hooks):
                hook(self.module, (None,) * self.inputs, given)
        return tuple(given[i] for i in self._out)

    def _at_inputs(self, gradients: Gradients) -> Gradients:
        grad_output, self.grad_output = self.grad_output, None
        if grad_output is None:  # nothing came through the outputs
            return gradients
        given = _spread(gradients, self._where, self.inputs)
        for hook in self._of_this_call(self.owner.hooks):
            changed = hook(self.module, given, grad_output)
            given = given if changed is None else changed
        return tuple(given[i] for i in self._where)


def _through(
    act: Callable[[Gradients], Gradients], values: Sequence[Any], is_own: Callable[[torch.Tensor], bool] | None = None
) -> tuple[list[Any], list[int]]:
    """Pass the tensors among ``values`` that are part of a graph through one gate; return all, and where those were.

    Those that are its own come first, each of them once.
    """
    passed = list(values)
    where = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad]
    if not where or not torch.is_grad_enabled():
        return passed, []
    if torch._C._are_functorch_transforms_active():
        raise HookError(
            "backward hooks on modules must be used with backward() or torch.autograd.grad, but a transform of "
            "torch.func is running; hook the module's forward, or leave the transform out"
        )
    if is_own is not None and len(where) == 1 and is_own(values[where[0]]):
        _set_going(act, [values[where[0]]], [])
        return passed, where
    own = {} if is_own is None else {id(values[i]): i for i in reversed(where) if is_own(values[i])}
    first = sorted(own.values())
    others = [i for i in where if i not in first]
    aliases = _set_going(act, [values[i] for i in first], [values[i] for i in others])
    for i, alias in zip(others, aliases, strict=True):
        passed[i] = alias
    return passed, [*first, *others]


def _set_going(
    act: Callable[[Gradients], Gradients], own: list[torch.Tensor], others: list[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Give tensors a gate for their history; return aliases of others that come through the same gate."""
    if not own:
        return _Gate.apply(act, *others)  # type: ignore[no-any-return]
    keepers = [_unsafe_preserve_version_counter(tensor) for tensor in own]
    aliases = _OwnGate.apply(act, len(own), *own, *others)[len(own) :]
    for keeper in keepers:  # their values have not been touched
        keeper.__exit__()
    return aliases  # type: ignore[no-any-return]


def _laid_out(output: Any) -> tuple[list[nested.Path], list[Any]]:
    """Return the contents of a container and the ways to them: its own items, then the tensors in containers inside."""
    found = [((key,), value) for key, value in nested.items(output)]
    if any(not isinstance(value, torch.Tensor) for _, value in found):
        found += [(path, tensor) for path, tensor in nested.paths(output) if len(path) > 1]
    return [path for path, _ in found], [value for _, value in found]


def _go_on(tensor: torch.Tensor, alias: torch.Tensor, values: Sequence[Any], passed: list[Any]) -> None:
    """Let the history of an overwritten input continue from what the module made of it."""
    place = next((i for i, value in enumerate(values) if value is alias), None)
    with _unsafe_preserve_version_counter(tensor):  # its values are not touched again
        Overwritten.apply(tensor, alias if place is None else passed[place])
    if place is not None:
        passed[place] = tensor


def _spread(gradients: Gradients, where: list[int], count: int) -> Gradients:
    """Put gradients at the places of their tensors, and None at the others."""
    found: list[torch.Tensor | None] = [None] * count
    for i, gradient in zip(where, gradients, strict=True):
        found[i] = gradient
    return tuple(found)


class BeforeEvery:
    """A hook before the forward of every module that receives the keyword arguments too.

    PyTorch passes them only to hooks that are noted in the module, even if the hook is one for every module. So a first
    hook makes a note in the module that is about to run, before PyTorch looks there for the second one.
    """

    def __init__(self, hook: OnEveryModule) -> None:
        self._noted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hook = hook
        self._first: RemovableHandle = global_hooks.register_module_forward_pre_hook(Plain(self._note))
        self._second: RemovableHandle = global_hooks.register_module_forward_pre_hook(hook)

    def _note(self, module: nn.Module, args: Any) -> None:
        wanting = module._forward_pre_hooks_with_kwargs
        if self._second.id not in wanting and self._hook.acts_for(module):
            self._noted.add(module)
            Flag(wanting, self._second.id)

    def remove(self) -> None:
        self._second.remove()
        self._first.remove()
        for module in list(self._noted):
            module._forward_pre_hooks_with_kwargs.pop(self._second.id, None)
