"""Names transformer blocks, and reads the score off the output of each of them (LeGrad)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from explain._utils.errors import MethodError, raised
from explain._utils.modules import submodule
from explain._utils.nested import first_tensor, replace_first
from explain.data.inputs import Inputs
from explain.engine.recorded_pass import RecordedPass
from explain.engine.settings import raise_unless_of_network
from explain.hooks import HookGroup
from explain.hooks.attention import joined_heads
from explain.hooks.graph import Reach, differentiate, graph, normalises_over_batch
from explain.hooks.layer_names import place_of
from explain.hooks.preserve import start_over, untouched
from explain.layers.grids import NetworkGrids
from explain.layers.summary import summary_of
from explain.recording.attention import attentions_in, heads_together
from explain.targets import Target

_REMEDY = "use it for vision transformers (ViT, DeiT), and gradcam or layercam otherwise"


def attention_layers(model: nn.Module, inputs: Inputs) -> list[str]:
    """The names of the innermost modules that compute an attention, in the order of the pass, as a
    recorded one shows it; kept in the network's summary."""
    summary = summary_of(model, inputs)
    if "attentions" not in summary.chosen:
        called = {call.name for call in summary.calls}
        first = inputs.first() if summary.alone else inputs  # as the summary was made
        with untouched(model), HookGroup(model) as group, ExitStack() as stack:
            whole = RecordedPass.begin(stack, group, model, first, {first.path: first.x})
            output = first.call(model)
        whole.finish(output)
        names: dict[str, None] = {}
        for attention in attentions_in(whole.recording.steps):
            name = attention.module
            while name and name not in called:  # such as lists of modules
                name = name.rpartition(".")[0]
            names[name] = None
        whole.close()
        summary.chosen["attentions"] = [*names]
    return summary.chosen["attentions"]  # type: ignore[no-any-return]


def transformer_blocks(model: nn.Module, inputs: Inputs) -> list[str]:
    """Name the transformer blocks of a network, in order: of the modules that hold exactly one
    attention, the largest. A head that pools the tokens by attention is none."""
    attentions = [name for name in attention_layers(model, inputs) if name]

    def contained_attentions(module_name: str) -> int:
        return sum(f"{name}.".startswith(f"{module_name}.") for name in attentions)

    blocks = []
    for attention in attentions:
        # from the outermost on: of a.b.c these are a, a.b, a.b.c
        ancestors = accumulate(attention.split("."), "{}.{}".format)
        blocks.append(next((a for a in ancestors if contained_attentions(a) == 1), attention))
    # a head comes behind the blocks whose tokens it pools, so the first is never one
    behind_others = [
        block
        for previous, block in pairwise(blocks)
        if not _is_pooling_head(model, previous, block)
    ]
    return blocks[:1] + behind_others


def _is_pooling_head(model: nn.Module, previous: str, block: str) -> bool:
    """Whether a module with attention is no block, but a head that pools tokens: of another type
    than the ``previous`` block, and outside of the module that holds that."""
    # the paths of the modules that hold both, with a dot in front; "" is the model
    holder_of_previous = f".{previous}".rpartition(".")[0]
    holder = f".{block}".rpartition(".")[0]
    is_other_type = type(submodule(model, block)) is not type(submodule(model, previous))
    is_outside = holder_of_previous.startswith(holder) and holder_of_previous != holder
    return is_other_type and is_outside


def explained_blocks(model: nn.Module, inputs: Inputs) -> list[str]:
    """Name the transformer blocks whose output depends on the explained image, in order; not those
    of a text tower. All blocks are taken if none depends on it."""
    names = transformer_blocks(model, inputs)
    holders = {name.rpartition(".")[0] for name in names}
    if len(holders) < 2:  # a single tower, so that of the image
        return names
    depends = {call.name: call.depends for call in summary_of(model, inputs).calls}
    return [name for name in names if depends.get(name)] or names


def attention_gradients(model: nn.Module, inputs: Inputs, target: Any) -> list[Tensor]:
    """For each transformer block, the gradient ``(N, heads, T, T)`` in its attention of the score
    read off its output (LeGrad). ``target`` makes the target of samples from their images."""
    blocks = explained_blocks(model, inputs)
    if len(blocks) < 2:
        raise MethodError(
            f"legrad must have at least two transformer blocks, got {len(blocks)} in "
            f"{type(model).__name__}; {_REMEDY}"
        )
    # Each block's output tokens are averaged, and the mean takes the place of every token on the
    # way into what comes after the last block; so whichever token the network reads, it reads the
    # mean. One forward and one backward pass do for all blocks: the last block returns a batch with
    # the outputs of all of them, and each block starts a graph of its own.
    grids = NetworkGrids(model, inputs)
    # a layer that is known by its name has its grid whatever the shape
    block_grids = [grids.grid((len(inputs), 0, 0), name) for name in blocks]
    image_dim = 1 if any(grid is not None and grid.of_images for grid in block_grids) else 0
    token_dim = 1 - image_dim
    starts: list[Tensor] = []
    means: list[Tensor] = []
    nodes: list[Any] = []
    """Where in the graph each block's result is: `start` checks that the next block follows from
    it."""

    def start(value: Any) -> Tensor:
        """A new leaf with the tokens that a block is given, to which its gradients go."""
        tokens = _tokens(value)
        # all but the first must be given what is computed from the result of the one before
        if nodes and not Reach([], ends=[nodes[-1]]).of(tokens.grad_fn):
            raise MethodError(
                "legrad must have blocks that follow each other, got others; use attnlrp"
            )
        starts.append(tokens.detach().requires_grad_())
        return starts[-1]

    def end(value: Any) -> Tensor | None:
        """Note the mean token that a block gives, repeated for all tokens; at the last block, give
        the means of all blocks in one batch, in the place of its output."""
        tokens = _tokens(value)
        if means and tokens.shape != means[0].shape:
            raise MethodError(
                f"legrad must have blocks of one size, got also {tuple(tokens.shape)}; use attnlrp"
            )
        nodes.append(tokens.grad_fn)
        mean = tokens.mean(token_dim, keepdim=True)
        # in the place of each token: whichever the network reads, it is the mean
        means.append(mean.expand_as(tokens))
        is_last = len(means) == len(blocks)
        return torch.cat(means, image_dim) if is_last else None

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        new = end(first_tensor(output))
        return None if new is None else replace_first(output, new)

    start_over(written=False)  # the random numbers of the first pass
    with HookGroup(model) as group, torch.enable_grad():
        for first, last in _block_ends(model, inputs, blocks):
            group.forward_pre(first, partial(with_first, change=start), with_kwargs=True)
            if place_of(last, model).part:  # the input of a module
                after = place_of(last, model).module
                group.forward_pre(after, partial(with_first, change=end), with_kwargs=True)
            else:
                group.forward(last, leave)
        images = torch.arange(len(inputs), device=inputs.x.device).repeat(len(blocks))
        wanted: Target = target(images)
        try:
            with ExitStack() as stack:
                explained = {path: inputs.tensor(path) for path in inputs.paths}
                whole = RecordedPass.begin(stack, group, model, inputs, explained)
                output = inputs.replaced(explained).call(model)
            total = wanted.pick(output, len(images))[0].sum()
        except MethodError:
            raise
        except Exception as error:  # networks raise errors of all kinds, or give too few scores
            raise_unless_of_network(error)
            must = "have layers behind the blocks that take a batch of any size"
            said = raised(error).partition(";")[0]
            raise MethodError(f"legrad must {must}, but {said}; {_REMEDY}") from error
    whole.finish(output, attention=True)
    records = whole.attention
    whole.close()
    if normalises_over_batch(graph(total)):
        raise MethodError(
            "legrad must have a network that does not normalise over its batch, but it does; use "
            "attnlrp"
        )
    gradients = []
    with HookGroup() as group:
        for record in records:
            record.watch(group)
        of_means = differentiate(total, means, retain_graph=True)
        # one block after the other: in a block that is no module, shortcuts lead past its start
        for start_tokens, mean, of_mean in zip(starts, means, of_means, strict=True):
            for record in records:
                record.gradient = None  # that of another block
            differentiate(mean, [start_tokens], of_mean, retain_graph=True)
            # none reaches the attention of a text tower, as it does not depend on the blocks
            reached = [record for record in records if record.gradient is not None]
            for heads in heads_together(reached)[:1]:  # the block's only attention, if it has one
                of_heads = [head.gradient for head in heads if head.gradient is not None]
                gradients.append(joined_heads(heads, of_heads, len(inputs)))
    if len(gradients) != len(blocks):
        raise MethodError(
            f"legrad must see the attention of each of the {len(blocks)} blocks, got "
            f"{len(gradients)}"
        )
    return gradients


def _block_ends(model: nn.Module, inputs: Inputs, blocks: Sequence[str]) -> list[tuple[str, str]]:
    """For each block, the module that is given its tokens, and the layer that gives its result,
    which may be the input of what is called next."""
    called = [call.name for call in summary_of(model, inputs).calls]
    ends = []
    for block in blocks:
        calls_inside = [i for i, name in enumerate(called) if name.startswith(f"{block}.")]
        if block in called or not calls_inside:
            ends.append((block, block))
            continue
        # A list of modules is never called itself: it begins with the first of them that is, and
        # ends with the input of what is called next, or with the output of the module that holds
        # all.
        first = next(name for name in called if name.rpartition(".")[0] == block)
        next_call = calls_inside[-1] + 1
        after = called[next_call] if next_call < len(called) else ""  # "" is the model
        if not f"{block}.".startswith(f"{after}."):  # which does not hold the block
            # of the modules that hold the next call, the outermost that is called and lies beside
            # the block: its input is what the block gives
            outermost_first = accumulate(after.split("."), "{}.{}".format)
            beside = [name for name in outermost_first if not f"{block}.".startswith(f"{name}.")]
            after = f"{next(name for name in beside if name in called)}:input"
        ends.append((first, after))
    return ends


def with_first(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Any], Any]
) -> Any:
    """The arguments ``(args, kwargs)`` of a call with ``change`` applied to the module's first one;
    None if ``change`` gives None."""
    if args:
        changed = change(args[0])
        return None if changed is None else ((changed, *args[1:]), kwargs)
    # the order of keywords in a call says nothing, so the signature tells the first; what goes into
    # its ``**kwargs`` comes behind
    parameters = inspect.signature(module.forward).parameters
    by_signature = [name for name in parameters if name in kwargs]
    key = next(iter([*by_signature, *kwargs]), "")
    changed = change(kwargs.get(key))
    return None if changed is None else ((), {**kwargs, key: changed})


def _tokens(tensor: Any) -> Tensor:
    """A block's input or output, if that is a sequence of tokens ``(N, T, D)``, or with images
    second; else an error that names its shape."""
    if not isinstance(tensor, Tensor) or tensor.ndim != 3:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise MethodError(
            f"legrad must have blocks that take and give tokens (N, T, D), got {shape}; {_REMEDY}"
        )
    return tensor
