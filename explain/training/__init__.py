"""Training: gradients clipped and watched, photos explained every so many steps.

gradients     clipped before they are accumulated; watched from layer to layer; units that get none
monitor       `Monitor`: when photos are explained during a training
photos        which photos these are, and what is asked of them
writing       the file that they are stored in, and a log for TensorBoard
film          how the map of a photo changed
prior         `AttributionPrior`: a penalty on explanations, for the loss
lightning     a callback for Lightning
"""

from explain.training.film import film
from explain.training.gradients import DeadUnits, GradientClipper, GradientFlow
from explain.training.monitor import Monitor
from explain.training.prior import AttributionPrior

__all__ = ["AttributionPrior", "DeadUnits", "GradientClipper", "GradientFlow", "Monitor", "film"]
