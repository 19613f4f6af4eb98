"""Hooks on chosen modules of a model: before and after their forward and their backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from explain.hooks.gates import Gates
from explain.hooks.guard import guarded_full, guarded_pre
from explain.hooks.handles import Handle, Hook, Hooks
from explain.hooks.select import Where
from explain.hooks.structure import Lent, Loans


class OnModules(Hooks):
    """The kinds of hooks on chosen modules."""

    def __init__(self, model: nn.Module | None = None, *, all_threads: bool = False) -> None:
        super().__init__(model, all_threads=all_threads)
        self._gates: dict[nn.Module, Gates] = {}

    def forward_pre(self, where: Where, fn: Hook, *, with_kwargs: bool = False, prepend: bool = False) -> Handle:
        """Call ``fn(module, args)`` before each selected module; what it returns replaces its inputs.

        ``with_kwargs`` makes it ``fn(module, args, kwargs)``, which returns a pair of both; ``prepend`` puts it before
        all other hooks of this kind on the module.
        """
        takes = ("module", "args", "kwargs") if with_kwargs else ("module", "args")
        modules, sites = self._on_modules(where, fn, "forward-pre", takes)
        registers = [module.register_forward_pre_hook for module in modules]
        return self._add_on(sites, registers, fn, self._expect(sites[0], fn), with_kwargs=with_kwargs, prepend=prepend)

    def forward(
        self, where: Where, fn: Hook, *, with_kwargs: bool = False, always: bool = False, prepend: bool = False
    ) -> Handle:
        """Call ``fn(module, args, output)`` after each selected module; what it returns replaces ``output``.

        ``with_kwargs`` makes it ``fn(module, args, kwargs, output)``; with ``always`` it is called even if the module
        raised, with ``output=None``; ``prepend`` puts it before all other hooks of this kind on the module.
        """
        takes = ("module", "args", "kwargs", "output") if with_kwargs else ("module", "args", "output")
        modules, sites = self._on_modules(where, fn, "forward", takes)
        registers = [module.register_forward_hook for module in modules]
        options = {"with_kwargs": with_kwargs, "always_call": always, "prepend": prepend}
        return self._add_on(sites, registers, fn, self._expect(sites[0], fn), **options)

    def backward_pre(self, where: Where, fn: Hook, *, prepend: bool = False) -> Handle:
        """Call ``fn(module, grad_output)`` before the backward of each selected module; it may return a new one.

        ``prepend`` puts it before the group's other hooks of this kind on the module.
        """
        modules, sites = self._on_modules(where, fn, "backward-pre", ("module", "grad_output"))
        gates = [self._gates_of(module) for module in modules]
        places = (
            gate.adding(gate.pre_hooks, guarded_pre(site, fn), prepend=prepend)
            for gate, site in zip(gates, sites, strict=True)
        )
        return self._add(sites, places, self._expect(sites[0], fn, gates))

    def backward(self, where: Where, fn: Hook, *, prepend: bool = False) -> Handle:
        """Call ``fn(module, grad_input, grad_output)`` when a selected module's gradients are known.

        Both are tuples with a gradient or None for each argument and each output; what is returned replaces
        ``grad_input``. Behind the positional arguments come those keyword arguments that are tensors, in the order of
        the call; behind the outputs, the tensors in containers inside the output. Inputs that require no gradient are
        None. In-place operations inside the module or behind it do no harm. ``prepend`` puts the hook before the
        group's other hooks of this kind on the module.

        An output that the module also passes on in another way, in a list or an attribute, has all its gradients in
        ``grad_output``. Where the output is a view of another tensor, only those come that arrive by what was returned.
        """
        modules, sites = self._on_modules(where, fn, "backward", ("module", "grad_input", "grad_output"))
        gates = [self._gates_of(module) for module in modules]
        places = (
            gate.adding(gate.hooks, guarded_full(site, fn), prepend=prepend)
            for gate, site in zip(gates, sites, strict=True)
        )
        return self._add(sites, places, self._expect(sites[0], fn, gates))

    def lending(
        self,
        where: Where,
        enter: Callable[[nn.Module, Any, Any], Lent | None],
        leave: Callable[[Lent | None, Any], Any] = lambda lent, output: None,
    ) -> Handle:
        """Give a module what ``enter(module, args, kwargs)`` lends it, until its call ends.

        What ``leave(lent, output)`` returns then replaces ``output``.
        """
        loans = Loans()
        handle = self.forward_pre(where, lambda *given: loans.begin(enter(*given)), with_kwargs=True)
        handle.undo.append(loans)
        after = self.forward(where, lambda module, args, output: leave(loans.end(), output))
        handle.undo.append(after)
        return handle

    def _gates_of(self, module: nn.Module) -> Gates:
        """Return the module's one pair of gates, so that all hooks on it fire in the order of their registration."""
        if module not in self._gates:
            self._gates[module] = Gates(self._thread, module)
        return self._gates[module]
