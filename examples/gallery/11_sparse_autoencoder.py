"""
Insert and explain a sparse autoencoder
=======================================

A channel of a network often stands for several things at once. A sparse autoencoder
writes a layer's vectors as sums of a few directions out of many, its latents, each of
which hopefully stands for one thing. This tutorial trains one, puts it into the
network, and explains and ablates its latents like channels.
"""

# %%
# The data are parts of five pictures. A capture gives what ``layer3`` gives for each
# batch of them, and a memory map of NumPy keeps it in a file: the activations of a data
# set need not fit into memory.

import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import explain
from explain.data.images import load_image
from explain.hooks import Ablate, Replace, capture, intervene
from explain.render.sheets import Tile, table

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"

explainer = explain.Explainer("tiny")
model = explainer.model
names = explainer.categories

files = "chelsea.png", "coffee.png", "astronaut.png", "rocket.jpg", "grace_hopper.jpg"
random.seed(0)
parts = []
for name in files:
    photo = load_image(assets / name)
    for _ in range(80):
        side = int(min(photo.size) * random.uniform(0.3, 0.9))
        left = random.randint(0, photo.width - side)
        top = random.randint(0, photo.height - side)
        parts.append(photo.crop((left, top, left + side, top + side)))
inputs = torch.cat([explainer.as_input(part) for part in parts])

file = Path(tempfile.mkdtemp()) / "layer3.npy"
activations = None
for start in range(0, len(inputs), 50):
    with torch.no_grad(), capture(model, "layer3") as captured:
        model(inputs[start : start + 50])
    batch = captured.activations["layer3"].half().numpy()
    if activations is None:
        shape = (len(inputs), *batch.shape[1:])
        activations = np.lib.format.open_memmap(file, "w+", np.float16, shape)
    activations[start : start + 50] = batch
print(activations.shape, activations.dtype)

# %%
# The autoencoder
# ---------------
#
# An encoder, a decoder, and between them only the 16 largest of 768 latents at each
# position of the map (Gao et al. 2024). It learns to give back what it is given.


class Largest(nn.Module):
    """Keep the k largest values at each position, and set the others to zero."""

    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x):
        least = x.topk(self.k, dim=1).values[:, -1:]
        return x.relu() * (x >= least)


class Autoencoder(nn.Module):
    def __init__(self, channels, latents, k):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.encoder = nn.Conv2d(channels, latents, 1)
        self.latents = Largest(k)
        self.decoder = nn.Conv2d(latents, channels, 1, bias=False)

    def forward(self, x):
        return self.decoder(self.latents(self.encoder(x - self.mean))) + self.mean


data = torch.from_numpy(activations.astype("float32"))
vectors = data.movedim(1, -1).flatten(0, -2)

torch.manual_seed(0)
sae = Autoencoder(vectors.shape[1], 768, 16)
with torch.no_grad():
    mean = vectors.mean(0)
    sae.mean.copy_(mean[:, None, None])
    some = vectors[torch.randperm(len(vectors))[:768]]
    directions = nn.functional.normalize(some - mean)
    sae.decoder.weight.copy_(directions.T[:, :, None, None])
    sae.encoder.weight.copy_(directions[:, :, None, None])
    sae.encoder.bias.zero_()
optimizer = torch.optim.Adam(sae.parameters(), lr=1e-3)
variance = vectors.var(0).mean()
for step in range(201):
    batch = vectors[torch.randint(len(vectors), (256,))][:, :, None, None]
    loss = (sae(batch) - batch).square().mean() / variance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"step {step}: {1 - loss.item():.0%} of the variance explained")

# %%
# Inside the network
# ------------------
#
# ``Replace`` puts it behind ``layer3``. What follows sees only what the autoencoder
# wrote. The predictions stay almost the same.

sae.requires_grad_(False).eval()
inserted = Replace("layer3", sae, name="sae")
photos = [load_image(assets / name) for name in files[:4]]
for name, photo in zip(files, photos, strict=False):
    before, sure = explainer(photo).predictions[0]
    after, then = explainer(photo, interventions=[inserted]).predictions[0]
    print(f"{name:<18} {before} {sure:.0%} -> {after} {then:.0%}")

# %%
# Its layers have names now: ``layer3/sae.latents`` is captured and explained like any
# other. The effect of a latent on a score is about its value times its gradient.

cat = explainer.as_input(photos[0])
target = int(model(cat).argmax())
with intervene(model, [inserted]), capture(model, "layer3/sae.latents") as seen:
    model(cat)[0, target].backward()
values = seen.activations["layer3/sae.latents"]
effects = (values * seen.gradients["layer3/sae.latents"])[0].sum((1, 2))
best = effects.argsort(descending=True)[:4].tolist()
active = (values[0].flatten(1) > 0).any(1).sum()
print(f"{int(active)} of 768 latents are active in the photo of the cat")
print({latent: round(float(effects[latent]), 2) for latent in best}, names[target])

# %%
# What do they stand for?
# -----------------------
#
# Each row is a latent: the six parts of the pictures that activate it most.

with torch.no_grad():
    codes = sae.latents(sae.encoder(data - sae.mean)).amax((2, 3))
rows = []
for latent in best:
    strongest = []
    seen_files = {}
    for i in codes[:, latent].argsort(descending=True).tolist():
        if seen_files.get(i // 80, 0) < 3:  # at most three parts of one picture
            seen_files[i // 80] = seen_files.get(i // 80, 0) + 1
            strongest.append(i)
    small = [parts[i].resize((110, 110)) for i in strongest[:6]]
    rows.append([Tile(each, f"latent {latent}") for each in small])
table(rows, tile=110)

# %%
# Explained and ablated
# ---------------------
#
# Where are they in the cat? Grad-CAM at the latents, and then without these four:
# together they carry a good part of the answer.

without = [inserted, Ablate("layer3/sae.latents", channels=best)]
layer = "layer3/sae.latents"
maps = explainer(photos[0], target=target, layer=layer, interventions=[inserted])
altered = explainer(photos[0], target=target, layer=layer, interventions=without)
for title, each in (("all latents", maps), ("without four", altered)):
    label, probability = each.predictions[0]
    print(f"{title}: {label} {probability:.0%}")
table(
    [[Tile(each.overlay("gradcam")) for each in (maps, altered)]],
    ["Grad-CAM at the latents", "without four of them"],
)
