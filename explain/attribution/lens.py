"""`lens`: the scores that each block would give, if it were the last."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from explain._utils.errors import LayerError, keywords
from explain._utils.html import aligned
from explain._utils.nested import replace_first
from explain.attribution.trace import blocks
from explain.data.inputs import Inputs, InputsLike
from explain.engine.output_kinds import reading
from explain.hooks import HookGroup, capture, preserve
from explain.hooks.layer_names import Where, select_places
from explain.hooks.unwrap import unwrapped
from explain.layers.frames import with_layout
from explain.targets import labels
from explain.targets.base import find_logits


@dataclass(frozen=True, eq=False)
class Lens:
    """What the last layers of a network make of each block's output; it prints itself as a table.
    The scores that follow the last of ``layers`` are the model's own."""

    layers: tuple[str, ...]
    # ``(blocks, N, K)``
    scores: torch.Tensor = field(repr=False)
    # ``(blocks, N, T, K)``, of each token alone: all tokens have its values; None where blocks give
    # maps
    tokens: torch.Tensor | None = field(default=None, repr=False)
    categories: Sequence[str] | None = field(default=None, repr=False)

    def rows(self) -> list[dict[str, Any]]:
        """The top class after each block: a dictionary for each block and image with layer, image,
        target and score.
        """
        rows = []
        for layer, scores in zip(self.layers, self.scores, strict=True):
            for image, of_image in enumerate(scores):
                best = int(of_image.argmax())
                label = labels.class_label(self.categories, best)
                rows.append(
                    {
                        "layer": layer,
                        "image": image,
                        "target": label,
                        "score": float(of_image[best]),
                    }
                )
        return rows

    def __str__(self) -> str:
        rows = [[row["layer"], f"{row['score']:.3g}", row["target"]] for row in self.rows()]
        return "\n".join(aligned(rows, to_the_right=[1]))


@keywords()
def lens(
    model: nn.Module,
    x: InputsLike,
    *,
    layers: Where | None = None,
    tokens: bool = False,
    categories: Sequence[str] | None = None,
) -> Lens:
    """Let the last layers of a network read what each of its blocks gives (nostalgebraist 2020).

    The output of each block takes the place of the last block's, so that the network's own pooling,
    normalisation and head read it, whatever they are.

    Args:
        model: a network whose blocks give tensors of one shape, such as a transformer.
        x: photos ``(N, C, H, W)``.
        layers: the blocks; by default those that give tensors of the last one's shape.
        tokens: also read each token alone.
        categories: the labels of the classes.

    Raises:
        ExplainError: the blocks differ in shape, or the model gives no class scores.

    >>> block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2), block, block[0], nn.Linear(2, 3))
    >>> x = torch.ones(1, 1, 2, 2)
    >>> found = lens(model, x, layers=["1", "2", "3"])
    >>> found.scores.shape, torch.allclose(found.scores[-1], model(x))
    (torch.Size([3, 1, 3]), True)
    """
    model = unwrapped(model)
    inputs = with_layout(model, x).detached()
    all_blocks = blocks(model, inputs, include_top_level=False)
    names = all_blocks if layers is None else select_places(model, layers)
    without_blocks = LayerError(
        "model must have blocks to be read by its last layers, got none; name the layers"
    )
    if not names:
        raise without_blocks
    with preserve.untouched(model), torch.no_grad(), reading(model, inputs, None, categories):
        # all blocks, as the last one is replaced even if others were named
        with capture(model, list(dict.fromkeys([*names, *all_blocks])), gradients=False) as records:
            output = inputs.call(model)
        find_logits(output, len(inputs))  # refuses a model without class scores
        outputs = {record.layer: record.activation for record in records.records}
        block_outputs = {name: values for name, values in outputs.items() if name in names}
        if not block_outputs:
            raise without_blocks
        shapes = [values.shape for values in block_outputs.values()]
        shape = shapes[-1]
        if layers is not None and len(set(shapes)) > 1:
            got = ", ".join(str(tuple(other)) for other in set(shapes))
            raise LayerError(f"layers must give tensors of one shape, got {got}")
        block_outputs = {
            name: values for name, values in block_outputs.items() if values.shape == shape
        }
        # the last such block: what follows it reads the others' outputs too
        last_block = [name for name, values in outputs.items() if values.shape == shape][-1]
        scores = torch.stack(
            [_read(model, inputs, last_block, values) for values in block_outputs.values()]
        )
        token_scores = None
        if tokens and len(shape) == 3:  # ``(N, T, D)``
            token_scores = torch.stack(
                [_read_tokens(model, inputs, last_block, v) for v in block_outputs.values()]
            )
    return Lens(tuple(block_outputs), scores, token_scores, categories)


def _read(model: nn.Module, inputs: Inputs, last_block: str, values: torch.Tensor) -> torch.Tensor:
    """The class scores ``(b, K)`` of the network if its last block gives these ``values`` ``(b,
    ...)``; ``b`` may be more than the images of ``inputs``.
    """
    with HookGroup(model) as group:
        group.forward(
            last_block, lambda module, args, output: replace_first(output, values.clone())
        )
        return find_logits(inputs.call(model), len(values)).clone().cpu()


def _read_tokens(
    model: nn.Module, inputs: Inputs, last_block: str, values: torch.Tensor
) -> torch.Tensor:
    """The class scores ``(N, T, K)`` of each token of a block alone, put in the place of all tokens
    before the last layers run. One image at a time, to save memory.
    """
    scores = []
    for image_number, tokens in enumerate(values):
        image = inputs.rows(torch.tensor([image_number]))
        repeated_tokens = tokens[:, None].expand(-1, len(tokens), -1)
        scores.append(_read(model, image, last_block, repeated_tokens))
    return torch.stack(scores)
