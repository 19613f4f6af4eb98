"""
Gradients in training
=====================

If training stalls or the loss jumps, the gradients may be too small or too large. Two
tools measure and limit them.
"""

# %%
# Ten layers with sigmoids. ``GradientFlow`` records the gradient of every parameter in
# each step.

import torch
import torch.nn.functional as F
from torch import nn

from explain.training import GradientClipper, GradientFlow

torch.manual_seed(0)


def deep(activation: type[nn.Module]) -> nn.Sequential:
    layers = [layer for _ in range(9) for layer in (nn.Linear(32, 32), activation())]
    return nn.Sequential(*layers, nn.Linear(32, 2))


def train(model: nn.Module, steps: int = 20, rate: float = 0.1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), rate)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
        optimizer.step()


with GradientFlow(model := deep(nn.Sigmoid)) as flow:
    train(model)
flow.plot()

# %%
# ``verdicts`` compares each layer with the last one, where the backward pass starts.

for name, verdict in flow.verdicts().items():
    if name.endswith("weight"):
        print(f"{name:10} {verdict}")

# %%
# With ReLU and a good initialisation, the gradients reach the first layer.

model = deep(nn.ReLU)
for layer in model:
    if isinstance(layer, nn.Linear):
        nn.init.kaiming_normal_(layer.weight)
with GradientFlow(model) as flow:
    train(model)
flow.plot()

# %%
# ``GradientClipper`` limits each gradient before it is added to ``.grad``, and counts
# how often.

with GradientClipper(model, norm=0.05) as clipper:
    train(model)
print("clipped in 20 steps:", dict(list(clipper.clipped.items())[:4]))

# %%
# ``examples/training.py`` trains a convolutional network in four ways, and plots its
# gradients.
