"""Full-backward hooks that survive in-place operations, and the gates that they rest on."""

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from explain._utils import nested
from explain._utils.errors import HookError
from explain.hooks.graph import continue_from
from explain.hooks.guard import GradientHook
from explain.hooks.handles import Registered, Site

Gradients = tuple[torch.Tensor | None, ...]


class _Gate(torch.autograd.Function):
    """Passes on its first ``count`` tensors themselves, with a new history, and aliases of the others (copies of
    leaves); in backward, passes the gradients to ``act``, and on what it returns."""

    @staticmethod
    def forward(ctx: Any, act: Callable[[Gradients], Gradients], count: int, *tensors: torch.Tensor) -> Gradients:
        ctx.act = act
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*tensors[:count])
        aliases = [tensor.clone() if tensor.is_leaf else tensor.detach() for tensor in tensors[count:]]
        return (*tensors[:count], *aliases)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return (None, None, *ctx.act(gradients))


class Gates:
    """The full-backward hooks and pre-hooks of one module.

    Each call has a record of its own: a module that runs three times in one forward pass meets its hook three times in
    backward, each time with the gradients of that call. ``calls`` counts them. Gates hold nothing of their group: the
    graph holds them, and the two would keep each other alive forever.
    """

    def __init__(self, thread: int | None, module: nn.Module) -> None:
        self.hooks: list[GradientHook] = []
        self.pre_hooks: list[GradientHook] = []
        self.calls = 0
        self._sites: list[Site] = []
        self._running: list[_Call] = []
        self._thread = thread
        self._module = module
        self._remove: list[Callable[[], None]] = []

    def add(self, hook: GradientHook, direction: str, *, first: bool) -> Callable[[], None]:
        """Add a hook, ``first`` or last, to those of its direction; return what removes it."""
        if not self._remove:
            before = partial(self._module.register_forward_pre_hook, with_kwargs=True)
            self._remove.append(Registered(self.enter, self._sites, self._thread).placed(before))
            after = self._module.register_forward_hook
            self._remove.append(Registered(self.leave, self._sites, self._thread).placed(after))
        hooks = self.hooks if direction == "backward" else self.pre_hooks
        hooks.insert(0 if first else len(hooks), hook)
        self._sites.append(hook.site)

        def remove() -> None:
            if hook in hooks:
                hooks.remove(hook)
                self._sites.remove(hook.site)
            if self.hooks or self.pre_hooks:
                return
            while self._remove:  # from now on gradients pass unchanged, also those of forward passes that are done
                self._remove[-1]()
                self._remove.pop()
            self._running.clear()

        return remove

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls += 1
        call = _Call(self, module)
        self._running.append(call)
        return call.enter(args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return self._running.pop().leave(output) if self._running else None


class _Call:
    """One call of one module: it holds the gradients of the outputs until those of the inputs have arrived."""

    def __init__(self, owner: Gates, module: nn.Module) -> None:
        self.owner = owner
        self.module = module
        hooks = [*owner.pre_hooks, *owner.hooks]
        self._left_out = [hook for hook in hooks if hook.counter is not None and not hook.counter.is_meant()]
        """Hooks for another call of the module than this one."""
        self.grad_output: Gradients | None = None
        self._began = torch._C._autograd._get_sequence_nr()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor)]
        values = [*args, *(kwargs[name] for name in names)]
        self.inputs = len(values)
        passed, self._where = _through(self._at_inputs, values)
        self._lent = [(values[i], passed[i], passed[i].grad_fn) for i in self._where if not values[i].is_leaf]
        if not self._where:
            return None
        return tuple(passed[: len(args)]), {**kwargs, **dict(zip(names, passed[len(args) :], strict=True))}

    def leave(self, output: Any) -> Any:
        paths, values = _laid_out(output)
        lent = self._lent
        self._lent = []
        overwritten = [(tensor, alias) for tensor, alias, node in lent if alias.grad_fn is not node]
        passed, self._out = _through(self._at_outputs, values, self._began)
        self.outputs = len(values)
        for tensor, alias in overwritten:  # the history of an input goes on from what the module made of it
            place = next((i for i, value in enumerate(values) if value is alias), None)
            continue_from(tensor, alias if place is None else passed[place])
            if place is not None:
                passed[place] = tensor
        if all(map(operator.is_, passed, values)):
            return None
        made = dict(zip(paths, passed, strict=True))
        return nested.edit(output, lambda path, tensor: made[path])

    def _changed(self, hooks: list[GradientHook], given: Gradients, *more: Gradients) -> Gradients:
        """Call those hooks that are for this call; what one returns replaces what the next one is given."""
        for hook in hooks:
            changed = None if hook in self._left_out else hook(self.module, given, *more)
            given = given if changed is None else changed
        return given

    def _at_outputs(self, gradients: Gradients) -> Gradients:
        given = self._changed(self.owner.pre_hooks, _spread(gradients, self._out, self.outputs))
        if self._where:
            self.grad_output = given
        else:  # no input requires a gradient: nothing more will come
            self._changed(self.owner.hooks, (None,) * self.inputs, given)
        return tuple(given[i] for i in self._out)

    def _at_inputs(self, gradients: Gradients) -> Gradients:
        grad_output = self.grad_output
        self.grad_output = None
        if grad_output is None:  # nothing came through the outputs
            return gradients
        given = self._changed(self.owner.hooks, _spread(gradients, self._where, self.inputs), grad_output)
        return tuple(given[i] for i in self._where)


def _through(
    act: Callable[[Gradients], Gradients], values: Sequence[Any], began: float = math.inf
) -> tuple[list[Any], list[int]]:
    """Pass the tensors among ``values`` that are part of a graph through one gate; return all, and where those were.

    Those that the call made since it ``began``, and that are no views, come first and are passed on themselves.
    """
    passed = list(values)
    where = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad]
    if not where or not torch.is_grad_enabled():
        return passed, []
    if torch._C._are_functorch_transforms_active():
        raise HookError("backward hooks on modules must run outside transforms of torch.func; leave the transform out")
    made_here = (i for i in reversed(where) if values[i].grad_fn is not None and not values[i]._is_view())
    first = sorted({id(values[i]): i for i in made_here if values[i].grad_fn._sequence_nr() >= began}.values())
    others = [i for i in where if i not in first]
    keepers = [_unsafe_preserve_version_counter(values[i]) for i in first]
    made = _Gate.apply(act, len(first), *(values[i] for i in (*first, *others)))
    for keeper in keepers:  # their values have not been touched
        keeper.__exit__()
    for i, alias in zip(others, made[len(first) :], strict=True):
        passed[i] = alias
    return passed, [*first, *others]


def _laid_out(output: Any) -> tuple[list[nested.Path], list[Any]]:
    """Return the contents of a container and the ways to them: its own items, then the tensors in containers inside."""
    if isinstance(output, torch.Tensor):
        return [()], [output]
    found = [((key,), value) for key, value in nested.items(output)]
    if any(not isinstance(value, torch.Tensor) for _, value in found):
        found += [(path, tensor) for path, tensor in nested.paths(output) if len(path) > 1]
    return [path for path, _ in found], [value for _, value in found]


def _spread(gradients: Gradients, where: list[int], count: int) -> Gradients:
    """Put gradients at the places of their tensors, and None at the others."""
    found = dict(zip(where, gradients, strict=True))
    return tuple(found.get(i) for i in range(count))
