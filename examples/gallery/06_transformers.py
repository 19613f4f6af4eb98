"""
Vision transformers
===================

A transformer has no feature maps, but tokens and attention. CAM methods work on its
tokens, and some methods are made for its attention.
"""

# %%
# Trained transformers are large downloads:
# ``explain.Explainer("timm:vit_small_patch16_224")`` takes one. This tutorial trains
# a very small one. The task: one disc is coloured, and four are grey. Is it red,
# green or blue?

import torch
import torch.nn.functional as F
from torchvision.models import VisionTransformer

LABELS = ["red", "green", "blue"]


def drawn(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (N, 3, 32, 32) from 0 to 1, and the colour of the coloured disc."""
    rows, columns = torch.meshgrid(
        torch.arange(32.0), torch.arange(32.0), indexing="ij"
    )
    place = 4 + 24 * torch.rand(count, 5, 2, 1, 1, generator=generator)
    discs = (rows - place[:, :, 0]) ** 2 + (columns - place[:, :, 1]) ** 2 < 12
    pictures = 0.2 * torch.rand(count, 3, 32, 32, generator=generator)
    colour = torch.randint(3, (count,), generator=generator)
    coloured = 0.1 + 0.8 * F.one_hot(colour, 3)
    for i in range(5):  # the coloured one comes last, so that no other covers it
        shade = coloured if i == 4 else torch.full((count, 3), 0.5)
        pictures = torch.where(discs[:, i, None], shade[:, :, None, None], pictures)
    return pictures, colour


torch.manual_seed(0)
model = VisionTransformer(
    image_size=32, patch_size=4, num_layers=3, num_heads=4, hidden_dim=48, mlp_dim=96,
    num_classes=3,
)  # fmt: skip
torch.nn.init.normal_(model.heads.head.weight, std=0.02)
generator = torch.Generator().manual_seed(0)
optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
for _ in range(100):
    x, colour = drawn(32, generator)
    loss = F.cross_entropy(model(x), colour)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
x, colour = drawn(200, generator)
with torch.no_grad():
    print(
        f"right on {(model(x).argmax(1) == colour).float().mean():.0%} of new pictures"
    )

# %%
# CAM methods find the tokens before the last attention by themselves, and lay them
# out on their grid. The class token is left out.

import explain

found = explain.attribute(model, x[:4], "hirescam")
print(found.layer, tuple(found.values.shape))

# %%
# ``legrad`` asks how the score reacts to the attention of every block. ``rollout``
# follows attention through all blocks, and asks about no class. ``attnlrp`` hands the
# score back through the network, down to the pixels. In these pictures, what has no
# evidence is dark.

from torchvision.transforms.functional import to_pil_image

from explain.render import Tile, overlay, table

methods = ["legrad", "rollout", "attnlrp"]
maps = explain.attribute_all(model, x[:2], methods)
photos = [to_pil_image(picture).resize((192, 192), 0) for picture in x[:2]]
rows = [
    [photo, *(overlay(photo, maps[name].heatmap[i], "spotlight") for name in methods)]
    for i, photo in enumerate(photos)
]
table([[Tile(picture) for picture in row] for row in rows], ["photo", *methods])

# %%
# Which of them finds the coloured disc? Count how much of the heat lies on it.

on_disc = (x - x.mean(1, keepdim=True)).abs().amax(1) > 0.3
maps = explain.attribute_all(model, x, methods)
for name in methods:
    heat = maps[name].heatmap
    share = (heat * on_disc).sum((1, 2)) / heat.sum((1, 2)).clamp(min=1e-12)
    print(f"{name:8} {share.mean():.0%} on the disc")
print(f"chance   {on_disc.float().mean():.0%}")

# %%
# In this network, the relevance of the pixels is the most precise. A CAM of the
# tokens before the last block is not: by then, attention has carried the colour to
# other tokens. Before the first block, it is still in its place.

for block in (2, 0):
    layer = f"encoder.layers.encoder_layer_{block}.ln_1"
    heat = explain.attribute(model, x, "hirescam", layer=layer).heatmap
    share = (heat * on_disc).sum((1, 2)) / heat.sum((1, 2)).clamp(min=1e-12)
    print(f"hirescam before block {block}: {share.mean():.0%} on the disc")
