"""
Hooks
=====

Everything in this package is built on hooks that leave the model as they found it.
You can use them yourself, to look into a model or to change what flows through it.
"""

# %%
# ``inspect`` runs a model once and makes a table of what each layer did.

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
# ``capture`` records the activations of layers, and, once you call ``backward``,
# their gradients.

with hooks.capture(model, ["2", "3"]) as seen:
    model(x)[:, 0].sum().backward()
print({name: tuple(tensor.shape) for name, tensor in seen.activations.items()})
print({name: round(float(tensor.norm()), 4) for name, tensor in seen.gradients.items()})

# %%
# ``HookGroup`` registers any kind of hook that PyTorch has. All hooks of a group are
# gone when its block ends, also after an error. A hook that returns something changes
# what flows on. Full-backward hooks work on in-place layers, too.

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
# ``FeatureExtractor`` is the model up to the layers that you name. What comes after
# them is not run.

features = hooks.FeatureExtractor(model, ["1", "3"])(x)
print({name: tuple(tensor.shape) for name, tensor in features.items()})

# %%
# Which hook fires when? ``timeline`` lists the events of a forward and a backward
# pass, in their order.

print(hooks.timeline(model[:2], x))

# %%
# ``examples/hooks_tour.py`` walks through every kind of hook, with numbers that you
# can work out on paper.
