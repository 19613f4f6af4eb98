"""`HookGroup`: hooks on modules, tensors and Nodes, for as long as a ``with`` block lasts."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import Node, register_multi_grad_hook
from torch.jit import RecursiveScriptModule  # type: ignore[attr-defined]
from torch.nn.modules import module as global_hooks

from explain._utils.errors import HookError, LayerError, warn
from explain._utils.modules import submodule
from explain._utils.nested import SwappedInputs, first_tensor
from explain._utils.signals import Shared, SignalSafe, at_fork, deferring_signals
from explain.hooks.attention_parts import NO_ATTENTION, AttentionHook
from explain.hooks.full_backward import GateHook, Gates
from explain.hooks.guard import (
    EVERY_MODULE,
    ForwardHook,
    GradientHook,
    Hook,
    ModuleGradientHook,
    is_ours,
)
from explain.hooks.handles import BeforeEvery, Handle, Registered, unless_in_hook
from explain.hooks.layer_names import LayerPlace, Where, find_places
from explain.hooks.preserve import is_in_untouched_block, plain_sequences


class HookGroup(SignalSafe["HookGroup"]):
    """Registers hooks, and removes all of them when the block ends, whatever ended it.

    Every method that registers a hook returns its `Handle`, to remove that hook alone. Hooks of one
    kind fire in the order in which they were registered. Hooks on modules are also reached by calls
    that other threads make of the same model; they ignore those calls. Hooks on tensors and Nodes
    belong to one graph and need no such guard; a group without a model takes these, and hooks on
    every module (``every_…``). Names of layers may say which call is meant, counted in each call of
    the model: ``"conv@1"`` is the second.

    A hook may return None, or a replacement for what it was given. One that takes the wrong
    arguments, returns the wrong number or shape of gradients, edits a gradient in place, or raises,
    is named in a `HookError` together with the layer and the direction.

    A copy of the model that is made meanwhile has none of the hooks. When a block ends without an
    error although some hook on modules, tensors or Nodes never fired, an `ExplainWarning` names it
    and says why. It does so only if there is a sign that something ran (another hook or a module
    around the layer, autograd recorded operations, or a gradient was accumulated), and if no hook
    of the same function, or on the same place, fired either.

    Args:
        model: the model whose layers are hooked; it does not limit hooks on every module.

    Raises:
        HookError: a hook does not fit its place, or the group is closed. LayerError: a layer is not
            in the model.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    >>> shapes = []
    >>> with HookGroup(model) as group:
    ...     _ = group.forward(nn.ReLU, lambda module, args, output: shapes.append(output.shape))
    ...     _ = group.backward(
    ...         "0", lambda module, grad_input, grad_output: shapes.append(grad_output[0].shape)
    ...     )
    ...     model(torch.ones(1, 2)).sum().backward()
    >>> shapes, len(model[1]._forward_hooks)
    ([torch.Size([1, 2]), torch.Size([1, 2])], 0)
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """Prepare a group without hooks; those on modules will act for calls of the present
        thread."""
        self._model = model
        self._thread = threading.get_ident()
        self._handles: dict[Handle, None] = {}
        self._undo: list[Callable[[], None]] = []
        """What removes the hooks that `put` has registered."""
        self._gates: dict[nn.Module | None, Gates] = {}
        """By module; those of every module under None."""
        self._closed = False
        self._plain_sequences: Shared | None = None
        """What keeps padded sequences plain tensors while the block runs; see `plain_sequences`."""
        self._signs_at_first_hook: Any = None
        """`_signs_of_work` when the first hook was registered that should fire, None before that:
        another value at the end shows that something has run."""
        self._has_run = False
        """Whether a module that holds a hooked layer has run."""

    def on_enter(self) -> "HookGroup":
        """Enter the block; inside an explanation, a forked child process will remove these
        hooks."""
        if is_in_untouched_block():
            _of_explanations.add(self)
        elif self._model is not None:  # such a block itself keeps sequences plain
            self._plain_sequences = plain_sequences(self._model)
            self._plain_sequences.on_enter()
        return self

    def on_exit(self, error: BaseException | None) -> None:
        """Remove all hooks, and warn of those that never fired if the block ended without an
        error."""
        message = self._unfired_hooks() if self._handles and error is None else None
        self._remove()
        if self._plain_sequences is not None:
            self._plain_sequences.on_exit(error)
        _of_explanations.discard(self)
        if message is not None:
            warn(message)

    @deferring_signals
    def remove(self) -> None:
        """Remove every hook of the group, the latest first; calling it again does nothing.

        A group takes no hooks after that.
        """
        self._remove()

    def _remove(self) -> None:
        """Close the group, and remove its hooks, the latest first."""
        self._closed = True
        while self._handles:
            next(reversed(self._handles)).remove()
        while self._undo:
            self._undo.pop()()

    def __len__(self) -> int:
        """The number of places that hooks of the group are on."""
        return sum(len(handle.hooks) for handle in self._handles)

    def __repr__(self) -> str:
        name = f"HookGroup({'' if self._model is None else type(self._model).__name__})"
        if self._closed:
            return f"{name}, closed"
        return "\n  ".join([f"{name}, {len(self)} hooks", *map(repr, self._handles)])

    # Hooks on modules

    def forward_pre(
        self,
        where: Where,
        fn: Callable[..., Any],
        *,
        with_kwargs: bool = False,
        prepend: bool = False,
    ) -> Handle:
        """Call ``fn(module, args)`` before each selected module; what it returns replaces its
        inputs.

        ``with_kwargs`` makes it ``fn(module, args, kwargs)``, which returns a pair of both;
        ``prepend`` puts it before all other hooks of this kind on the module.
        """
        options = {"with_kwargs": with_kwargs, "prepend": prepend}
        return self._on_calls(where, fn, "forward_pre", options)

    def forward(
        self,
        where: Where,
        fn: Callable[..., Any],
        *,
        with_kwargs: bool = False,
        always: bool = False,
        prepend: bool = False,
    ) -> Handle:
        """Call ``fn(module, args, output)`` after each selected module; what it returns replaces
        ``output``.

        ``with_kwargs`` makes it ``fn(module, args, kwargs, output)``; with ``always`` it is called
        even if the module raised, with ``output=None``; ``prepend`` puts it before all other hooks
        of this kind on the module.

        Of a name such as ``"conv:input"``, the output is the first tensor that the layer is given:
        the hook is called before the layer, and may return another tensor in its place.
        ``"attn:q"``, ``:k``, ``:v``, ``:pattern`` and ``:heads`` are the parts of the attention
        that is computed inside the layer, however it is written: queries, keys, values, attention
        weights, and the result of each head.
        """
        options = {"with_kwargs": with_kwargs, "always_call": always, "prepend": prepend}
        return self._on_calls(where, fn, "forward", options)

    def backward_pre(
        self, where: Where, fn: Callable[..., Any], *, prepend: bool = False
    ) -> Handle:
        """Call ``fn(module, grad_output)`` before the backward of each selected module; it may
        return a new one.

        ``prepend`` puts it before the group's other hooks of this kind on the module.
        """
        return self._on_gradients(where, fn, "backward-pre", ["module", "grad_output"], prepend)

    def backward(self, where: Where, fn: Callable[..., Any], *, prepend: bool = False) -> Handle:
        """Call ``fn(module, grad_input, grad_output)`` when a selected module's gradients are
        known.

        Both are tuples with a gradient or None for each argument and each output; what is returned
        replaces ``grad_input``. Behind the positional arguments come those keyword arguments that
        are tensors, in the order of the call; behind the outputs, the tensors in containers inside
        the output. Inputs that require no gradient are None. In-place operations inside the module
        or behind it do no harm. ``prepend`` puts the hook before the group's other hooks of this
        kind on the module.

        An output that the module also passes on in another way, in a list or an attribute, has all
        its gradients in ``grad_output``. Where the output is a view of another tensor, only those
        come that arrive by what was returned.
        """
        return self._on_gradients(
            where, fn, "backward", ["module", "grad_input", "grad_output"], prepend
        )

    # Hooks on every module that runs in this thread, of any model, also one that is made later.
    # Calls that a hook on modules makes itself are left out, since they would never end.

    def every_forward_pre(self, fn: Callable[..., Any], *, with_kwargs: bool = False) -> Handle:
        """Call ``fn(module, args)`` before every module that runs; what it returns replaces its
        inputs.

        These hooks come before those on chosen modules. ``with_kwargs`` is that of `forward_pre`.
        """
        return self._on_every_call(fn, "forward_pre", with_kwargs)

    def every_forward(self, fn: Callable[..., Any], *, with_kwargs: bool = False) -> Handle:
        """Call ``fn(module, args, output)`` after every module that runs; what it returns replaces
        ``output``.

        These hooks come before those on chosen modules. ``with_kwargs`` is that of `forward`.
        """
        return self._on_every_call(fn, "forward", with_kwargs)

    def every_backward_pre(self, fn: Callable[..., Any]) -> Handle:
        """Call ``fn(module, grad_output)`` before the backward of every module that ran; it may
        return a new one."""
        return self._on_every_gradient(fn, "backward-pre", ["module", "grad_output"])

    def every_backward(self, fn: Callable[..., Any]) -> Handle:
        """Call ``fn(module, grad_input, grad_output)`` when the gradients of a module that ran are
        known; what it returns replaces ``grad_input``. The tuples are those of `backward`."""
        return self._on_every_gradient(fn, "backward", ["module", "grad_input", "grad_output"])

    # Hooks on tensors and Nodes, which act in any thread that runs backward

    def tensor(self, tensor: torch.Tensor, fn: Callable[..., Any]) -> Handle:
        """Call ``fn(gradient)`` when the gradient of ``tensor`` has been computed; what it returns
        replaces it."""
        where = _hookable(tensor)
        return self._in_graph(
            tensor.register_hook, GradientHook, fn, where, "gradient", ["gradient"]
        )

    def leaf(self, leaf: torch.Tensor, fn: Callable[..., Any], *, after: bool = False) -> Handle:
        """Call ``fn(gradient)`` before a leaf accumulates it; with ``after``, ``fn(leaf)`` when it
        has."""
        if not leaf.is_leaf:
            raise HookError(
                "leaf must be a leaf of the graph, such as a parameter, got a computed tensor; use "
                "tensor"
            )
        if not after:
            return self.tensor(leaf, fn)
        where = _hookable(leaf)
        register = leaf.register_post_accumulate_grad_hook
        # it is given the leaf, no gradient, so a plain `Hook` checks it
        return self._in_graph(
            register, Hook, fn, where, direction="after accumulation", argument_names=["leaf"]
        )

    def tensors(
        self,
        tensors: Sequence[torch.Tensor],
        fn: Callable[..., Any],
        *,
        mode: Literal["all", "any"] = "all",
    ) -> Handle:
        """Call ``fn(gradients)`` once all gradients are ready, or ``fn(gradient)`` once the first
        of them is."""
        for tensor in tensors:
            _hookable(tensor)
        register = partial(register_multi_grad_hook, tuple(tensors), mode=mode)
        where = f"{len(tensors)} tensors"
        return self._in_graph(register, GradientHook, fn, where, f"{mode} gradients", ["gradients"])

    def node(self, node: Node, fn: Callable[..., Any]) -> Handle:
        """Call ``fn(grad_inputs, grad_outputs)`` after a Node has run; what it returns replaces
        ``grad_inputs``.

        The Node that accumulates a leaf's gradient, which PyTorch drops together with its hooks
        when nothing holds it, is kept as long as the hook.
        """
        takes = ["grad_inputs", "grad_outputs"]
        return self._on_node(node, node.register_hook, fn, "after", takes)

    def node_pre(self, node: Node, fn: Callable[..., Any]) -> Handle:
        """Call ``fn(grad_outputs)`` before a Node runs; what it returns replaces
        ``grad_outputs``."""
        return self._on_node(node, node.register_prehook, fn, "before", ["grad_outputs"])

    def after_backward(self, fn: Callable[..., Any]) -> Handle:
        """Call ``fn()`` once, when the backward pass that is running now is done; to be used from
        another hook."""
        places = ["the running backward pass"]
        handle = self._open(Hook, fn, places, direction="at its end", argument_names=[])

        def call() -> None:
            """Call the hook at the end of the backward pass, unless its handle has been removed."""
            if not handle.removed:  # PyTorch cannot remove such a hook, so it does nothing instead
                handle.remove()
                _hook_of(handle, fn)()

        try:
            torch.autograd.Variable._execution_engine.queue_callback(call)
        except RuntimeError:
            handle.remove()
            raise HookError(
                "after_backward() must be called while a backward pass runs; call it from a hook"
            ) from None
        return handle

    # How they are registered

    def _open(
        self,
        hook_class: type[Hook],
        fn: Callable[..., Any],
        places: Sequence[str],
        direction: str,
        argument_names: Sequence[str],
    ) -> Handle:
        """A new handle for a caller's function, with a checked `Hook` for each of ``places``,
        registered nowhere yet; for a function of this package, without hooks."""
        if self._closed:
            raise HookError(
                "group must be open to take hooks, but it is closed; make a new HookGroup"
            )
        if is_ours(fn):
            return Handle((), self._handles)
        hooks = [hook_class(fn, place, direction) for place in places]
        hooks[0].must_take(argument_names)  # all of them call one function
        if self._signs_at_first_hook is None:
            self._signs_at_first_hook = self._signs_of_work()
        return Handle(hooks, self._handles)

    @deferring_signals
    def _in_graph(
        self,
        register: Callable[[Any], Any],
        hook_class: type[Hook],
        fn: Callable[..., Any],
        where: str,
        direction: str,
        argument_names: Sequence[str],
    ) -> Handle:
        """Wrap a caller's function, which must take ``argument_names``, as a hook in any thread,
        and register it on tensors or a Node by PyTorch's ``register``."""
        handle = self._open(hook_class, fn, [where], direction, argument_names)
        handle.place(register, _hook_of(handle, fn), hooks=handle.hooks)
        return handle

    def _on_node(
        self,
        node: Node,
        register: Callable[[Any], Any],
        fn: Callable[..., Any],
        direction: str,
        argument_names: Sequence[str],
    ) -> Handle:
        """Register a caller's hook on a Node. The Node that accumulates a leaf's gradient is kept
        alive as long as the hook."""
        where = f"Node {node.name()}"
        handle = self._in_graph(register, GradientHook, fn, where, direction, argument_names)
        if node.name().endswith("AccumulateGrad"):
            # the method holds the list, and so the Node, until it is called last
            handle.undo.insert(0, [node].clear)
        return handle

    def _places(self, where: Where) -> list[tuple[str, LayerPlace, nn.Module]]:
        """The layers that a caller selects by ``where``: their names in messages, their places, and
        the modules to hook."""
        if self._model is None:
            raise HookError(
                "HookGroup() without a model cannot hook layers; pass the model to hook layers"
            )
        places = find_places(self._model, where)
        return [
            (f"layer {name!r}", place, module_of(self._model, place))
            for name, place in places.items()
        ]

    @deferring_signals
    def _on_calls(
        self,
        where: Where,
        fn: Callable[..., Any],
        kind: Literal["forward_pre", "forward"],
        options: dict[str, bool],
    ) -> Handle:
        """Register a caller's forward hook at all places that ``where`` selects: a module's calls,
        its first input tensor (``:input``), or a part of the attention inside it (``:q``)."""
        places = self._places(where)
        handle = self._open_on_calls(
            fn, [name for name, _, _ in places], kind, options["with_kwargs"]
        )
        for number, (name, place, module) in enumerate(places):
            hooks = handle.hooks[number : number + 1]  # a function of this package has none
            hook = _hook_of(handle, fn, number)
            # a name with a call (`@1`): the hook acts on that call alone
            counter = None if place.call is None else CallCounter(place.call, name)
            hook_of_call = hook if counter is None else counter.only(hook)
            if place.part == "input":
                # the first tensor may lie in a container of the caller's: it is put back there when
                # the call ends, or with the hooks if the call raised
                swap = InputSwap(
                    partial(_replace_first, name, hook_of_call, options["with_kwargs"])
                )
                register = partial(
                    module.register_forward_pre_hook, with_kwargs=True, prepend=options["prepend"]
                )
                handle.place(register, swap.enter, self._thread, hooks)
                handle.place(module.register_forward_hook, swap.leave, self._thread)
                handle.undo.append(swap.restore_all)
            elif place.part:
                for checked_hook in hooks:
                    checked_hook.why_unfired = f"the layer did not run, or {NO_ATTENTION}"
                self._on_attention(
                    handle, module, AttentionHook(name, place.part, hook_of_call), hooks
                )
            else:
                handle.place(
                    partial(getattr(module, f"register_{kind}_hook"), **options),
                    hook_of_call,
                    self._thread,
                    hooks,
                )
            self._count(handle, module, counter)
            self._note_runs_around(handle, place.module)
        return handle

    def _open_on_calls(
        self, fn: Callable[..., Any], places: Sequence[str], kind: str, with_kwargs: bool
    ) -> Handle:
        """A new handle for a caller's forward hook of a ``kind``; see `_open`."""
        argument_names = ["module", "args"]
        if with_kwargs:
            argument_names.append("kwargs")
        if kind == "forward":
            argument_names.append("output")
        return self._open(ForwardHook, fn, places, kind.replace("_", "-"), argument_names)

    @deferring_signals
    def _on_every_call(
        self, fn: Callable[..., Any], kind: Literal["forward_pre", "forward"], with_kwargs: bool
    ) -> Handle:
        """Register a caller's forward hook on every module that runs."""
        handle = self._open_on_calls(fn, [EVERY_MODULE], kind, with_kwargs)
        hook = _hook_of(handle, fn)
        # PyTorch has no function for hooks before every module that take keyword arguments
        register: Callable[[Any], Any] = BeforeEvery
        if kind == "forward":
            register = partial(global_hooks.register_module_forward_hook, with_kwargs=with_kwargs)
        elif not with_kwargs:
            register = global_hooks.register_module_forward_pre_hook
        handle.place(register, unless_in_hook(hook), self._thread, handle.hooks)
        # with keyword arguments, PyTorch leaves this flag behind
        flags: dict[int, Any] = global_hooks._global_forward_hooks_with_kwargs
        handle.undo.append(partial(flags.pop, handle.id, None))
        return handle

    @deferring_signals
    def _on_every_gradient(
        self, fn: Callable[..., Any], direction: str, argument_names: Sequence[str]
    ) -> Handle:
        """Register a caller's hook on the gradients of every module that runs."""
        handle = self._open(ModuleGradientHook, fn, [EVERY_MODULE], direction, argument_names)
        hook = GateHook(_hook_of(handle, fn))
        gates = self._gates.setdefault(None, Gates(self._thread, module=None))
        handle.undo.append(gates.add(hook, direction, first=False))
        return handle

    def _on_attention(
        self, handle: Handle, module: nn.Module, hook: AttentionHook, hooks: Sequence[Hook]
    ) -> None:
        """Register a caller's hook on a part of the attention inside a module."""
        handle.place(
            partial(module.register_forward_pre_hook, with_kwargs=True),
            hook.begin,
            self._thread,
            hooks,
        )
        handle.place(
            partial(module.register_forward_hook, always_call=True), hook.end, self._thread
        )
        handle.undo.append(hook.close)

    @deferring_signals
    def _on_gradients(
        self,
        where: Where,
        fn: Callable[..., Any],
        direction: str,
        argument_names: Sequence[str],
        prepend: bool,
    ) -> Handle:
        """Register a caller's hook on the gradients of all modules that ``where`` selects;
        ``prepend`` puts it before others of the group on a module."""
        places = self._places(where)
        for name, place, _ in places:
            if place.part:
                raise HookError(
                    f"hook on {name} must be on its output, got another part; hook the layer, and "
                    "grad_input"
                )
        handle = self._open(
            ModuleGradientHook, fn, [name for name, _, _ in places], direction, argument_names
        )
        for number, (name, place, module) in enumerate(places):
            counter = None if place.call is None else CallCounter(place.call, name)
            is_meant = None if counter is None else counter.is_meant
            hook = GateHook(_hook_of(handle, fn, number), is_meant)
            gates = self._gates.setdefault(module, Gates(self._thread, module))
            handle.undo.append(gates.add(hook, direction, first=prepend))
            self._count(handle, module, counter)
            self._note_runs_around(handle, place.module)
        return handle

    def _count(self, handle: Handle, module: nn.Module, counter: "CallCounter | None") -> None:
        """Register the hooks that count a module's calls, before all other hooks on it; each call
        of the model starts from 0."""
        if counter is None or self._model is None:
            return
        handle.place(
            partial(module.register_forward_pre_hook, prepend=True), counter.begin, self._thread
        )
        if module is not self._model:
            handle.place(
                partial(self._model.register_forward_pre_hook, prepend=True),
                counter.restart,
                self._thread,
            )

    # Hooks that never fired

    def _note_runs_around(self, handle: Handle, layer: str) -> None:
        """Note when a module runs that holds a caller's hooked layer, whose name is given: without
        gradients, nothing else shows that something has run."""
        while handle.hooks and layer and self._model is not None:
            layer = layer.rpartition(".")[0]
            module = submodule(self._model, layer)
            handle.place(module.register_forward_pre_hook, self._note_run, self._thread)

    def _note_run(self, module: nn.Module, args: Any) -> None:
        """Note that a module with a hooked layer in it runs: a forward-pre hook."""
        self._has_run = True

    def _signs_of_work(self) -> Any:
        """A value that changes when this thread records operations, or when a gradient of the model
        is accumulated."""
        parameters = () if self._model is None else self._model.parameters()
        leaf = next((parameter for parameter in parameters if parameter.requires_grad), None)
        gradient = None if leaf is None else leaf.grad
        version = None if gradient is None else (id(gradient), gradient._version)
        return torch._C._autograd._get_sequence_nr(), version

    def _unfired_hooks(self) -> str | None:
        """The warning about hooks that should have fired by now, on one line; None if there are
        none, or nothing has run."""
        # functions of this package, whose handles have no hooks, need not fire
        expected = [handle for handle in self._handles if handle.hooks]
        # Of several with the same function or place, it is enough that one has fired: layers that
        # were not used are then no surprise.
        fired = set[tuple[str, Any]]()
        for handle in expected:
            if handle.fired:
                fired |= _function_and_places(handle)
        unfired = [handle for handle in expected if not _function_and_places(handle) & fired]
        has_run = self._has_run or self._signs_of_work() != self._signs_at_first_hook
        if not unfired or not (fired or has_run):
            return None
        first = unfired[0]
        more = f"; nor did {len(unfired) - 1} more" if len(unfired) > 1 else ""
        return f"{first} never fired: {first.hooks[0].why_unfired}{more}"


def _hook_of(handle: Handle, fn: Callable[..., Any], number: int = 0) -> Callable[..., Any]:
    """What PyTorch calls at one of a handle's places: the checked hook of a caller's function, but
    a function of this package itself."""
    hook: Callable[..., Any] = handle.hooks[number] if handle.hooks else fn
    return hook


# Hooks of this package: not checked, and they need not fire


def put(
    group: HookGroup,
    register: Callable[[Any], Any],
    fn: Callable[..., Any],
    *undo: Callable[[], None],
) -> None:
    """Register a hook of this package with one of PyTorch's ``register_…`` functions, for calls of
    the group's thread. It is removed with the group; ``undo`` are functions to call then."""
    group._undo += (*undo, Registered(fn, register, group._thread).handle.remove)


def put_node_pre(group: HookGroup, node: Node, fn: Callable[..., Any]) -> None:
    """Register a hook of this package that runs before a Node, for backward passes in any thread.
    Several hooks on one Node run in the order in which they are put."""
    # the method `clear` holds the list, and so the Node, which would die with its hook otherwise
    group._undo += ([node].clear, Registered(fn, node.register_prehook, None).handle.remove)


def put_swap(group: HookGroup, module: nn.Module, swap: "InputSwap") -> None:
    """Register the hooks of an `InputSwap` on a module: they replace tensors in its inputs until
    the call ends."""
    put(group, partial(module.register_forward_pre_hook, with_kwargs=True), swap.enter)
    put(group, module.register_forward_hook, swap.leave, swap.restore_all)


@deferring_signals
def note_runs(
    group: HookGroup,
    modules: Mapping[str, nn.Module],
    measure: Callable[[str, Any], None] | None = None,
) -> list[str]:
    """Return a list to which the name of each module is added when it has run, once for each call.
    ``measure`` is called with the name and the output."""
    names = list[str]()

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        names.append(name)
        if measure is not None:
            measure(name, output)

    for name, module in modules.items():
        put(group, module.register_forward_hook, partial(note, name))
    return names


def module_of(model: nn.Module, place: LayerPlace) -> nn.Module:
    """The module that a hook on ``place`` is registered on."""
    module = submodule(model, place.module)
    if isinstance(module, RecursiveScriptModule):
        must = "must be a module that takes hooks, got a scripted one"
        raise LayerError(f"layer {place.module!r} {must}; name another")
    return module


def _function_and_places(handle: Handle) -> set[tuple[str, Any]]:
    """What counts as the same hook for the warning about unfired hooks: its function and its
    places, each with its direction."""
    first = handle.hooks[0]  # all call one function; those that a loop makes share their code
    function = getattr(first.fn, "__code__", id(first.fn))
    places = {(hook.direction, hook.where) for hook in handle.hooks}
    return {(first.direction, function), *places}


class CallCounter:
    """Counts the calls of a module from 0 in each call of its model, and says whether the one that
    is meant runs."""

    def __init__(self, number: int, where: str) -> None:
        """Prepare to count: ``number`` is the call that is meant, ``where`` the layer's name in
        messages."""
        self._number = number
        self._where = where
        self._running = -1

    def begin(self, *arguments: Any) -> None:
        """Count a call of the module: a forward-pre hook, registered before all others."""
        self._running += 1

    def restart(self, *arguments: Any) -> None:
        """Start from 0, since a call of the whole model begins."""
        self._running = -1

    def is_meant(self) -> bool:
        """Whether the call of the module that runs now is the one that the name means."""
        if torch._C._current_graph_task_id() != -1:
            raise HookError(
                f"hook on {self._where} must be outside checkpoints, which run it again; hook all "
                "calls"
            )
        return self._running == self._number

    def only(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls ``fn`` in the one call that is meant, and returns None in
        others."""
        return lambda *arguments: fn(*arguments) if self.is_meant() else None


class InputSwap:
    """Replaces tensors in a module's inputs until its call ends, as ``change(module, args,
    kwargs)`` says. What ``end(swapped, output)`` returns replaces ``output``."""

    def __init__(
        self,
        change: Callable[..., SwappedInputs | None],
        end: Callable[[SwappedInputs | None, Any], Any] = lambda swapped, output: None,
    ) -> None:
        """Prepare a swap: ``change`` chooses the tensors to replace in each call, ``end`` may
        replace the output."""
        self._change = change
        self._end = end
        self._running: list[SwappedInputs | None] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace tensors in the inputs of a call that begins: a forward-pre hook with kwargs."""
        swapped = self._change(module, args, kwargs)
        self._running.append(swapped)
        return None if swapped is None else swapped.inputs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the original tensors back in their containers when the call ends: a forward hook.
        What ``end`` returns replaces the output."""
        swapped = self._running.pop() if self._running else None
        if swapped is not None:
            swapped.restore()
        return self._end(swapped, output)

    def restore_all(self) -> None:
        """Put the tensors back after calls that raised, for which `leave` was not called."""
        while self._running:
            swapped = self._running.pop()
            if swapped is not None:
                swapped.restore()


def _replace_first(
    where: str, fn: Callable[..., Any], with_kwargs: bool, module: nn.Module, args: Any, kwargs: Any
) -> SwappedInputs | None:
    """Call a caller's hook on the first tensor of a module's inputs; the result swaps in what the
    hook returned. None if the hook returned None. ``where`` is the layer's name in messages."""
    first_input = first_tensor((args, kwargs))
    if first_input is None:
        raise LayerError(f"{where} must be given a tensor, got none; choose another layer")
    new = fn(module, args, kwargs, first_input) if with_kwargs else fn(module, args, first_input)
    if new is None:
        return None
    if not isinstance(new, torch.Tensor):
        raise HookError(f"hook on {where} must return a tensor or None, got {type(new).__name__}")
    return SwappedInputs((args, kwargs), lambda tensor: new if tensor is first_input else tensor)


def _hookable(tensor: torch.Tensor) -> str:
    """The name of a tensor in messages."""
    if not tensor.requires_grad:
        raise HookError(
            "tensor must require a gradient to be hooked, got one that does not; enable gradients "
            "first"
        )
    return f"a tensor of shape {tuple(tensor.shape)}"


_of_explanations: set[HookGroup] = set()


def _begin_child() -> None:
    """Remove the hooks of explanations in a process that has just been forked: these continue only
    in its parent."""
    for group in list(_of_explanations):
        group.remove()


at_fork(after_in_child=_begin_child)
