"""What a recording needs of PyTorch that has no public name, of PyTorch 2.6 to 2.15."""

import inspect
import linecache
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import BackwardHook

from explain.recording.operations import KnownOperation, known_operation

aten = torch.ops.aten
_MODULE_CALL = nn.Module._call_impl.__code__
_NO_CONTEXT = torch.autograd.Function.setup_context
"""What functions have whose ``forward`` takes the context."""


@dataclass(frozen=True)
class OperatorFacts:
    """What an operator's schema says about it. Arguments are named by their position, or by their
    name if they are keywords."""

    name: str
    """Its name in the table; without the end of its in-place form, if it is that."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """All arguments by name, each with what it is if it is not given, or None."""
    tensors: tuple[int | str, ...] | None = None
    """The arguments that may hold tensors; None if any may."""
    writes: tuple[int | str, ...] = ()
    """The arguments that it writes into."""
    is_view: bool = False
    """Whether its results share the memory of its arguments."""
    is_random: bool = False
    moves_itself: bool = False
    """Whether it changes the shape of a tensor in place, as ``t_``, and writes no values."""
    is_constant: bool = False
    """Whether the record has its results as constants: they are drawn at random, or memory of a
    shape and type."""
    leaves: str | None = None
    """What it is called, if it gives values to somebody else than PyTorch."""
    is_composite: bool = False
    """Whether it has no kernel of its own, but calls other operators."""
    definition: Callable[..., Any] | None = None
    """What it is by other operators, which are recorded instead."""

    @cached_property
    def operation(self) -> KnownOperation:
        """What the table says of it."""
        return known_operation(self.name)


@cache
def facts_of(operator: Any) -> OperatorFacts:
    """What an operator writes into and shares memory with, by its schema."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return OperatorFacts(getattr(operator, "__name__", str(operator)))
    tensors: list[int | str] = []
    writes: list[int | str] = []
    for position, argument in enumerate(schema.arguments):
        key = argument.name if argument.kwarg_only else position
        if "Tensor" in str(argument.type):
            tensors.append(key)
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(key)
    name = schema.name.removeprefix("aten::")
    is_composite = _is_composite(operator)
    is_random = torch.Tag.nondeterministic_seeded in operator.tags
    # new_zeros, ones_like and so on read nothing of their argument but its shape and type
    reads_shape_alone = name.startswith("new_") or name.endswith("_like")
    leaves = "item()" if name == "_local_scalar_dense" else None
    if name.startswith(("c10d::", "_c10d_functional::")):  # from other processes
        leaves = name
    returned = [result.alias_info for result in schema.returns if result.alias_info is not None]
    return OperatorFacts(
        name=name.removesuffix("_") if writes else name,
        defaults={argument.name: argument.default_value for argument in schema.arguments},
        tensors=tuple(tensors),
        writes=tuple(writes),
        # the schema of `_unsafe_view` does not say so
        is_view=name == "_unsafe_view" or any(not info.is_write for info in returned),
        is_random=is_random,
        is_constant=is_random or reads_shape_alone or leaves is not None,
        leaves=leaves,
        moves_itself=torch.Tag.inplace_view in operator.tags,
        is_composite=is_composite,
        definition=operator.decompose if is_composite else _definitions().get(operator),
    )


def _is_composite(operator: Any) -> bool:
    """Whether an operator only calls others."""
    name = operator.name()
    is_known = torch._C._dispatch_has_kernel(name)
    return is_known and torch._C._dispatch_has_kernel_for_dispatch_key(
        name, "CompositeImplicitAutograd"
    )


_HIDDEN_WRITES = {
    # running statistics; in training mode alone
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
}
"""Operators that write into arguments without a word in their schema, and the flag that decides."""


def writes_of(facts: OperatorFacts, args: tuple[Any, ...]) -> tuple[int | str, ...]:
    """The arguments that a call of an operator writes into, those that its schema hides too."""
    hidden = _HIDDEN_WRITES.get(facts.name)
    if hidden is None:
        return facts.writes
    positions, flag = hidden
    if not args[flag]:
        return facts.writes
    return (*facts.writes, *(position for position in positions if args[position] is not None))


# Operators that are fused, or draw random numbers: what they compute, in operators of the table.


def _attention(original: Any) -> Callable[..., Any]:
    """Attention by its definition, a softmax between two products, in the place of a fused kernel;
    with empty results beside it."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        options = original._schema.arguments[3:]  # behind query, key and value
        named = {option.name: option.default_value for option in options}
        named |= dict(zip([option.name for option in options], args, strict=False))
        named |= kwargs
        result = aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            named.get("attn_bias", named.get("attn_mask")),  # each kernel has one of these names
            named["dropout_p"],
            named["is_causal"],
            scale=named.get("scale"),
        )[0]
        unused = [query.new_zeros(()) for _ in original._schema.returns[1:]]
        return (result, *unused)

    return attention


def _convolution(*args: Any) -> Tensor:
    """A convolution, as traced programs write it: with switches for its kernels."""
    result: Tensor = aten.convolution(*args[:9])
    return result


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Dropout as a product with a mask that the kernel has drawn, which relevance can follow."""
    scale: float = 1
    if train is not False:  # None: as in training
        scale = 1 / (1 - p) if p < 1 else 0
    result = torch.empty_like(x)
    mask = torch.empty_like(x, dtype=torch.bool)
    aten.native_dropout.out(x, p, train, out0=result, out1=mask)
    return x * (mask * scale), mask


def _random_leaky_relu(
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A leaky ReLU as a product with slopes that the kernel has drawn and keeps in ``noise``."""
    if not training:
        sloped: Tensor = aten.leaky_relu(x, (lower + upper) / 2)
        return sloped
    result = torch.empty_like(x)
    aten.rrelu_with_noise.out(x, noise, lower, upper, training, generator, out=result)
    return x * noise


def _trilinear(
    first: Tensor,
    second: Tensor,
    third: Tensor,
    new_dims_of_first: list[int],
    new_dims_of_second: list[int],
    new_dims_of_third: list[int],
    summed_dims: list[int],
    unroll_dim: int = 1,
) -> Tensor:
    """A sum of products of three factors: the second weighs the products of the others, as in a
    bilinear layer."""
    factors = []
    all_new_dims = (new_dims_of_first, new_dims_of_second, new_dims_of_third)
    for factor, new_dims in zip((first, second, third), all_new_dims, strict=True):
        for dim in new_dims:
            factor = factor.unsqueeze(dim)
        factors.append(factor)
    product = factors[0] * factors[2] * factors[1]
    return product.sum(summed_dims) if summed_dims else product


@cache
def _definitions() -> dict[Any, Callable[..., Any]]:
    """The operators that are recorded as others, each with a function that calls those."""
    operators: dict[Any, Callable[..., Any]] = {
        aten._convolution.default: _convolution,
        aten._convolution.deprecated: _convolution,
        aten.native_dropout.default: _dropout,
        aten.rrelu_with_noise.default: _random_leaky_relu,
        aten._trilinear.default: _trilinear,
    }
    for name in (
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
        "flash_attention_for_cpu",
    ):
        operator = getattr(aten, f"_scaled_dot_product_{name}").default
        operators[operator] = _attention(operator)
    return operators


def scripts_as_written(
    modules: Iterable[torch.jit.ScriptModule] = (),
) -> AbstractContextManager[None]:
    """Run scripted code as it was written: once it has run, it is run in another way otherwise,
    which hides derivatives. What scripted ``modules`` have been made into is forgotten."""
    for module in modules:
        for name in module._c._method_names():
            module._c._get_method(name)._debug_flush_compilation_cache()
    context: AbstractContextManager[None] = torch.jit.optimized_execution(False)  # type: ignore[attr-defined]
    return context


class _HiddenOnceLoaded:
    """What a mode does with an operator, as ``torch._compile`` asks for it at each call: hidden
    from PyTorch's compiler, or as it is where no compiler is loaded, which would take a second."""

    def __init__(self, dispatch: Any) -> None:
        self._dispatch = dispatch

    def __getattr__(self, name: str) -> Any:
        """The function to call now, under the name by which ``torch._compile`` keeps it."""
        if name != "__dynamo_disable":
            raise AttributeError(name)
        if "torch._dynamo" not in sys.modules:
            return self._dispatch
        hidden = torch._dynamo.disable(self._dispatch)  # type: ignore[no-untyped-call]
        setattr(self, name, hidden)
        return hidden


class NotForCompilers:
    """A dispatch mode that PyTorch's compiler does not look into, and that does not load it."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dispatch: Any = _HiddenOnceLoaded(cls.__dict__["__torch_dispatch__"])
        cls.__torch_dispatch__ = _disable_dynamo(dispatch)  # type: ignore[attr-defined]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch is to hide the mode itself, by what loads the compiler."""
        return False


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Run operators as if no dispatch mode were on."""
    context: AbstractContextManager[Any] = _disable_current_modes()
    return context


@contextmanager
def dispatching_autograd(active: bool) -> Iterator[None]:
    """Let operators pass autograd, or not: then a dispatch mode is shown what is called before
    autograd is, and may call it itself."""
    key = torch._C.DispatchKey
    guard = torch._C._SetExcludeDispatchKeyGuard
    with (
        guard(key.AutogradFunctionality, not active),
        guard(key.AutogradOther, not active),
        guard(key.ADInplaceOrView, not active),
    ):
        yield


# Which module runs


def tensors_by_name(
    modules: Mapping[nn.Module, str], kind: Literal["parameter", "buffer"]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters or the buffers of modules, each with its path."""
    for module, path in modules.items():
        prefix = f"{path}." if path else ""
        tensors = module._parameters if kind == "parameter" else module._buffers
        for name, tensor in tensors.items():
            if tensor is not None:
                yield prefix + name, tensor


@dataclass(eq=False)
class FunctionCall:
    """A call of a function with a derivative of its own."""

    function: type[torch.autograd.Function]
    args: tuple[Any, ...]


@dataclass(eq=False)
class Running:
    """A call that is under way."""

    frame: types.FrameType | None = None
    """Its frame on Python's stack."""
    module: str = ""
    """The path of the innermost module."""
    number: int = 0
    """Which call of that module it is."""
    function: FunctionCall | None = None
    """The outermost `torch.autograd.Function` around it."""
    has_gradient: bool = False
    """Whether gradients are recorded, though they are switched off meanwhile."""
    nodes: "Mapping[str, Running] | None" = None
    """If it runs a graph: the calls that the nodes of the graph, by their names, were part of."""

    @property
    def innermost(self) -> "Running":
        """The call itself, or the one that the graph's node that runs was part of."""
        if self.nodes is None or self.frame is None:
            return self
        # a graph is run as code: one line for each node, which is assigned to the node's name, with
        # or without a type: "name : type = ..."
        line = linecache.getline(self.frame.f_code.co_filename, self.frame.f_lineno)
        name = line.partition("=")[0].partition(":")[0]
        return self.nodes.get(name.strip(), self)


class CallStack:
    """Tells which module of a model runs, and which of its calls it is, from Python's stack. It
    registers no hooks: other threads may run the model meanwhile."""

    def __init__(self, paths: Mapping[nn.Module, str]) -> None:
        # Code is known by its id, which no other gets while modules and functions keep it alive.
        # That of a graph is its module's alone, since each GraphModule has a class of its own.
        self._paths = paths
        self._functions: dict[int, type[torch.autograd.Function]] = {}
        """The functions with a derivative of their own that ran, by the code of ``forward``."""
        self._graphs = {
            id(type(module).forward.__code__): module.graph
            for module in paths
            if isinstance(module, torch.fx.GraphModule)
        }
        self._call_counts = Counter[str]()
        """How many calls each module has had, by its path."""
        self._running = [Running()]
        """The calls that are under way, the innermost last; the first is outside of all modules."""
        self._depths: dict[types.FrameType | None, int] = {None: 1}
        """How many calls are under way once that of a frame is the innermost."""

    def now(self) -> Running:
        """The innermost call that is under way."""
        # up the stack to the innermost frame that is known; what lies below that has ended
        entered = []
        frame: types.FrameType | None = sys._getframe(1)
        while frame not in self._depths:
            assert frame is not None
            code = frame.f_code
            key = id(code)
            is_call = code is _MODULE_CALL or key in self._graphs
            if is_call or (key not in _PLAIN_CODES and self._is_function(code)):
                entered.append(frame)
            frame = frame.f_back
        for ended in self._running[self._depths[frame] :]:
            del self._depths[ended.frame]
        del self._running[self._depths[frame] :]
        while entered:
            frame = entered.pop()
            self._running.append(self._entered(frame, self._running[-1]))
            self._depths[frame] = len(self._running)
        return self._running[-1].innermost

    def _is_function(self, code: types.CodeType) -> bool:
        """Whether code is that of a function with a derivative of its own."""
        key = id(code)
        if key not in self._functions:
            functions = _forward_codes()
            if key not in functions:
                _PLAIN_CODES[key] = code
                return False
            self._functions[key] = functions[key]
        return True

    def _entered(self, frame: types.FrameType, around: Running) -> Running:
        """The call of a frame inside another; what is no part of the model belongs to that."""
        running = replace(around, frame=frame, nodes=None)
        function = self._functions.get(id(frame.f_code))
        graph = self._graphs.get(id(frame.f_code))
        if function is not None and not has_own_derivative(function):
            # gradients are switched off inside, but it has those of the operators that it calls
            running.has_gradient = True
        elif function is not None:
            running.function = around.function or _function_call(frame, function)
        elif graph is not None:
            running.nodes = self._calls_in(graph, around)
        # all other frames that are entered are of `nn.Module._call_impl`
        elif (path := self._paths.get(frame.f_locals["self"])) is not None:
            running.module = path
            running.number = self._call_counts[path]
            self._call_counts[path] += 1
        return running

    def _calls_in(self, graph: torch.fx.Graph, around: Running) -> dict[str, Running]:
        """The call of a module that each node of a graph was part of before it was traced."""
        calls = {}
        counts_before = self._call_counts.copy()
        for node in graph.nodes:
            stack = node.meta.get("nn_module_stack")
            if not stack or node.op == "call_module":  # modules that are called have frames
                continue
            innermost = next(reversed(stack))  # of its second call: path@1
            traced_path = stack[innermost][0]  # beside its class
            path = ".".join(filter(None, [around.module, traced_path]))
            number = counts_before[path] + int(innermost.partition("@")[2] or 0)
            calls[node.name] = replace(around, frame=None, module=path, number=number)
            if path != around.module:  # whose call has been counted
                self._call_counts[path] = max(self._call_counts[path], number + 1)
        return calls

    def close(self) -> None:
        """Let go of the frames."""
        self._running.clear()
        self._depths.clear()


def has_own_derivative(function: type[torch.autograd.Function]) -> bool:
    """Whether a function has another derivative than the operators inside."""
    # PyTorch's own that give operators a derivative, save memory, wait for processes, or call hooks
    modules = ("torch.utils.checkpoint", "torch.nn.parallel.", "torch._library.")
    return not (function is BackwardHookFunction or function.__module__.startswith(modules))


_PLAIN_CODES: dict[int, types.CodeType] = {}
"""The code that has run and is no function with a derivative of its own, by its id."""


def _forward_codes() -> Mapping[int, type[torch.autograd.Function]]:
    """The functions with a derivative of their own, by the id of the code of their ``forward``."""
    functions = torch.autograd.Function.__subclasses__()
    for function in functions:  # the list grows meanwhile, by subclasses of subclasses
        functions += function.__subclasses__()
    return _codes_of(tuple(functions))


@lru_cache(maxsize=1)
def _codes_of(
    functions: tuple[type[torch.autograd.Function], ...],
) -> Mapping[int, type[torch.autograd.Function]]:
    """The same of certain functions."""
    codes = {}
    for function in functions:
        forward: Any = function.forward
        while hasattr(forward, "__wrapped__"):
            forward = forward.__wrapped__
        codes[id(getattr(forward, "__code__", None))] = function
    # the result of this one is a view, which is made after its `forward` has ended, but inside this
    codes[id(BackwardHook._apply_on_tensors.__code__)] = BackwardHookFunction
    return codes


def _function_call(frame: types.FrameType, function: type[torch.autograd.Function]) -> FunctionCall:
    """The call of a function with a derivative of its own, from the frame of its ``forward``."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount]
    args = [frame.f_locals[name] for name in names]
    if code.co_flags & inspect.CO_VARARGS:  # *args has its name behind those of keywords
        args += frame.f_locals[code.co_varnames[code.co_argcount + code.co_kwonlyargcount]]
    if function.setup_context is _NO_CONTEXT:  # then `forward` takes the context first
        context = args.pop(0)
        function = getattr(type(context), "_forward_cls", function)
    return FunctionCall(function, tuple(args))


def computed_from(tensor: Tensor, sources: Collection[torch.autograd.graph.Node]) -> bool:
    """Whether the graph of autograd leads from a tensor to one of the nodes ``sources``."""
    waiting = [tensor.grad_fn] if sources else []
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node in sources:
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def function_behind(tensor: Tensor) -> type[torch.autograd.Function] | None:
    """The function that gave a tensor, if it has a derivative of its own."""
    try:
        node = tensor.grad_fn
    except RuntimeError:  # one of several views, and another one has been overwritten
        return None
    function = getattr(type(node), "_forward_cls", None)
    return function if function is not None and has_own_derivative(function) else None
