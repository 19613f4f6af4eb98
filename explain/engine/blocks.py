"""Names transformer blocks, and reads the score off the output of each of them (LeGrad)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from explain._utils.errors import MethodError, note, raised
from explain._utils.nested import first_tensor, replace_first
from explain.data.inputs import Inputs
from explain.engine.settings import raise_unless_of_network
from explain.hooks import HookGroup
from explain.hooks.attention import attention, heads_together, joined_heads
from explain.hooks.capturing import read_outputs
from explain.hooks.graph import Reach, differentiate, graph, normalises_over_rows
from explain.hooks.preserve import untouched
from explain.layers.grids import NetworkGrids
from explain.layers.summary import summary_of
from explain.targets import Target

_REMEDY = "use it for vision transformers (ViT, DeiT), and gradcam or layercam otherwise"


def transformer_blocks(model: nn.Module) -> list[str]:
    """Name the transformer blocks of a network, in order: of the modules that hold exactly one
    attention, the largest.

    A head that pools the tokens by attention is none: it lies outside of the module that holds all
    others.

    >>> from torchvision.models import VisionTransformer
    >>> transformer_blocks(VisionTransformer(16, 4, 2, 2, 8, 16))
    ['encoder.layers.encoder_layer_0', 'encoder.layers.encoder_layer_1']
    """
    attentions: list[str] = []
    for name, module in model.named_modules():
        kind = type(module).__name__.lower()
        is_nested = any(name.startswith(f"{outer}.") for outer in attentions)
        if not is_nested and ("attention" in kind or "attn" in kind):
            attentions.append(name)

    def contained_attentions(module_name: str) -> int:
        return sum(f"{name}.".startswith(f"{module_name}.") for name in attentions)

    blocks = []
    for name in attentions:
        ancestors = accumulate(name.split("."), "{}.{}".format)
        blocks.append(next(a for a in ancestors if contained_attentions(a) == 1))
    return [
        name
        for number, name in enumerate(blocks)
        if not number or not _pools(model, blocks[number - 1], name)
    ]


def _pools(model: nn.Module, previous: str, name: str) -> bool:
    """Whether a module with attention pools tokens at the end, and is no block: of another type,
    outside of the stack.

    ``previous`` and ``name`` are dotted names; the stack is the module that holds the previous
    block. Such a head, as in some vision transformers, would otherwise be explained as a block.
    """
    stack = f".{previous}".rpartition(".")[0]
    holder = f".{name}".rpartition(".")[0]
    is_other_type = type(model.get_submodule(name)) is not type(model.get_submodule(previous))
    return is_other_type and stack.startswith(holder) and stack != holder


def explained_blocks(model: nn.Module, inputs: Inputs) -> list[str]:
    """Name the transformer blocks whose output depends on the explained image, in order; not those
    of a text tower.

    If there are several towers, a pass finds this out, and it is kept in the network's summary. All
    blocks are taken if no gradient leads to the input.
    """
    names = transformer_blocks(model)
    if len({name.rpartition(".")[0] for name in names}) < 2:
        return names
    summary = summary_of(model, inputs)
    if "blocks" not in summary.chosen:
        inputs_of_pass = inputs.first() if summary.alone else inputs
        summary.chosen["blocks"] = _reached(model, inputs_of_pass, names) or names
    return summary.chosen["blocks"]  # type: ignore[no-any-return]


def _reached(model: nn.Module, inputs: Inputs, names: Sequence[str]) -> list[str]:
    """Which of the named modules have an output that depends on the explained input, by the graph
    of one pass.

    `explained_blocks` keeps the result for all later calls. LeGrad and other methods of blocks
    explain these alone.
    """
    x = inputs.x.detach().clone().requires_grad_()
    with untouched(model, grad=True), HookGroup(model) as group:
        outputs = read_outputs(group, names, lambda tensor: tensor.grad_fn)
        inputs.detached().replaced(x).call(model)
    reach = Reach([x])
    return [name for name in names if outputs[name] and reach.of(outputs[name][-1])]


def attention_gradients(model: nn.Module, inputs: Inputs, target: Any) -> list[Tensor]:
    """For each transformer block, the gradient in its attention of the score read off its output
    (LeGrad).

    A list of ``(N, heads, T, T)``. Each block's output tokens are averaged, and the mean takes the
    place of every token on the way into what comes after the last block; so whichever token the
    network reads, it reads the mean. One forward and one backward pass do for all blocks: the last
    block returns a batch with the outputs of all of them, and each block starts a graph of its own.
    If the network refuses such a batch, it is run once for each block. ``target`` makes the target
    of rows from their images.

    Raises:
        MethodError: the network has no such blocks.
    """
    blocks = explained_blocks(model, inputs)
    if len(blocks) < 2:
        raise MethodError(
            f"legrad must have at least two transformer blocks, got {len(blocks)} in "
            f"{type(model).__name__}; {_REMEDY}"
        )
    try:
        return _read_out(model, inputs, target, blocks, range(len(blocks)))
    except MethodError:
        raise
    # layers behind the blocks may combine their output with tensors of one row for each image
    except Exception as error:
        raise_unless_of_network(error)
        note(f"legrad runs the model once for each block: {raised(error)}")
    return [
        gradient
        for i in range(len(blocks))
        for gradient in _read_out(model, inputs, target, blocks, [i])
    ]


def _read_out(
    model: nn.Module, inputs: Inputs, target: Any, blocks: Sequence[str], chosen: Sequence[int]
) -> list[Tensor]:
    """The gradients of `attention_gradients` for the blocks with the indices ``chosen``, in one
    forward pass.

    Hooks cut the graph before each block, and put the averaged tokens of all chosen blocks, one
    batch after the other, in place of the last block's output.
    """
    grids = NetworkGrids(model, inputs)
    # a layer that is known by its name has its grid whatever the shape
    block_grids = [grids.grid((len(inputs), 0, 0), name) for name in blocks]
    image_dim = 1 if any(grid is not None and grid.of_images for grid in block_grids) else 0
    starts: list[Tensor] = []
    means: list[Tensor] = []

    def cut_graph(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pre-hook of each transformer block in LeGrad: let its input tokens be a new leaf, so that
        its graph begins there.

        So one backward pass gives each block's gradients apart from those of the others. The leaves
        are collected in ``starts``.
        """

        def start(value: Any) -> Tensor:
            starts.append(_tokens(value).detach().requires_grad_())
            return starts[-1]

        return with_first(module, args, kwargs, start)

    def put_means_in(module: nn.Module, args: Any, output: Any) -> Any:
        """Hook of each transformer block in LeGrad: note its mean token, and at the last block go
        on with the means.

        The last block returns the means of the chosen blocks as one batch, each repeated for all
        tokens; other blocks' outputs stay as they are.
        """
        tokens = _tokens(first_tensor(output))
        if means and tokens.shape != means[0].shape:
            raise MethodError(
                f"legrad must have blocks of one size, got also {tuple(tokens.shape)}; use attnlrp"
            )
        means.append(tokens.mean(1 - image_dim, keepdim=True).expand_as(tokens))
        chosen_means = [means[i] for i in chosen] if len(means) == len(blocks) else []
        return replace_first(output, torch.cat(chosen_means, image_dim)) if chosen_means else None

    with HookGroup(model) as group, torch.enable_grad():
        for name in blocks:
            group.forward_pre(name, cut_graph, with_kwargs=True)
            group.forward(name, put_means_in)
        output = inputs.call(model)
        wanted: Target = target(
            torch.arange(len(inputs), device=inputs.x.device).repeat(len(chosen))
        )
        total = wanted.pick(output, len(inputs) * len(chosen))[0].sum()
    if normalises_over_rows(graph(total)):
        raise MethodError(
            "legrad must have a network that does not normalise over its batch, but it does; use "
            "attnlrp"
        )
    with HookGroup() as group:
        records = attention(total, group)
        differentiate(total, starts)
    # No gradient reaches the attention of a text tower, as it does not depend on the blocks.
    reached = [record for record in records if record.gradient is not None]
    gradients = []
    for start in starts:
        reach = Reach([start])
        of_block = heads_together([record for record in reached if reach.of(record.node)])
        if of_block:
            of_heads = [head.gradient for head in of_block[0] if head.gradient is not None]
            gradients.append(joined_heads(of_heads, len(inputs)))
    if len(gradients) != len(chosen):
        raise MethodError(
            f"legrad must see the attention of each of the {len(chosen)} blocks, got "
            f"{len(gradients)}"
        )
    return gradients


def with_first(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]
) -> Any:
    """The arguments of a hooked call with ``change`` applied to the module's first one; None if
    ``change`` gives None.

    For pre-hooks with keywords, which return ``(args, kwargs)``. The order of keywords in a call
    says nothing, so the module's signature tells the first.
    """
    if args:
        changed = change(args[0])
        return None if changed is None else ((changed, *args[1:]), kwargs)
    parameters = inspect.signature(module.forward).parameters
    by_signature = [name for name in parameters if name in kwargs]
    key = next(iter([*by_signature, *kwargs]), "")
    changed = change(kwargs.get(key))
    return None if changed is None else ((), {**kwargs, key: changed})


def _tokens(tensor: Any) -> Tensor:
    """Check that a block's input or output is a sequence of tokens with three dimensions, and
    return it.

    LeGrad's hooks call it; the tensor is ``(N, T, D)``, or with images second, and an error names
    another shape.
    """
    if not isinstance(tensor, Tensor) or tensor.ndim != 3:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise MethodError(
            f"legrad must have blocks that take and give tokens (N, T, D), got {shape}; {_REMEDY}"
        )
    return tensor
