"""
Hooks
=====

The hooks of this package leave the model unchanged. You can use them to read
activations and gradients, or to change them.
"""

# %%
# ``inspect`` runs a model once and prints a table of its layers.

import torch
from torch import nn

from explain import hooks

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3),
    nn.ReLU(inplace=True),
    nn.Conv2d(8, 8, 3),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(1152, 4),
).eval()
x = torch.rand(2, 3, 16, 16)
print(hooks.inspect(model, x))

# %%
# ``capture`` records the activations of layers, and their gradients when you call
# ``backward``.

with hooks.capture(model, ["2", "3"]) as seen:
    model(x)[:, 0].sum().backward()
print({name: tuple(tensor.shape) for name, tensor in seen.activations.items()})
print({name: round(float(tensor.norm()), 4) for name, tensor in seen.gradients.items()})

# %%
# ``HookGroup`` registers every kind of hook that PyTorch has. The hooks of a group are
# removed when its block ends, also after an error. If a hook returns a value, it
# replaces the output or the gradient. Full-backward hooks work on in-place layers, too.

with hooks.HookGroup(model) as group:
    group.forward("1", lambda module, args, output: output * 2)
    group.backward(
        "1",
        lambda module, inputs, outputs: print(
            "gradient that arrives at the ReLU:", outputs[0].shape
        ),
    )
    model(x).sum().backward()
    print(group)

# %%
# ``FeatureExtractor`` is the model up to the layers that you name. Later layers do not
# run.

features = hooks.FeatureExtractor(model, ["1", "3"])(x)
print({name: tuple(tensor.shape) for name, tensor in features.items()})

# %%
# ``timeline`` lists the hooks that fire in a forward and a backward pass, in order.

print(hooks.timeline(model[:2], x))

# %%
# ``examples/hooks_tour.py`` shows every kind of hook, with numbers that you can check
# by hand.
