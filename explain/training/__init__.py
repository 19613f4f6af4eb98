"""Training: gradients clipped and watched, photos explained every so many steps.

clipper       gradients clipped before they are accumulated
flow          gradients watched from layer to layer; units that get no gradient
parameters    a hook on the gradient of every parameter
monitor       `Monitor`: photos explained during training
photos        these photos, as they are given to the model
store         the file that they are stored in
film          how the map of a photo changed
lightning     a callback for Lightning
tensorboard   a board for TensorBoard
"""

from explain.training.clipper import GradientClipper
from explain.training.film import film
from explain.training.flow import DeadUnits, GradientFlow
from explain.training.monitor import Monitor

__all__ = ["DeadUnits", "GradientClipper", "GradientFlow", "Monitor", "film"]
