"""Targets: from a model's output to the one number per image that is explained.

    base              what a target is; sums of targets; class scores in an output
    classes           one score for a whole image: a class, a yes or no, a similarity
    regions           a class within a region
    detections        a detected box, found again in perturbed images; as text: "cup@2",
                      "person@320,200", "box 120,40,300,380"
    detector_outputs  what detectors return, in one form
    per_image         a target of its own for each image; single numbers of an output
    text              the similarity of a photo and a text
    answer            the log-probability of an answer in words
    tokenizer         tokens of texts, and the words that they make up
    packed            photos that a processor has cut into patches
    functions         any function of the output; other numbers to differentiate than the target's
                      score
    resolve           what a caller may pass as a target: an index, a label, a difference, a
                      function
    labels            labels of classes, their synonyms, and the class that a label stands for
    outputs           how a model's outputs become probabilities

A target is a frozen value with a ``name`` and a ``pick`` that takes the model's output and gives
the score ``(N,)`` and what was picked: the class indices ``(N,)``, or None for scores that are not
a class. Targets add up: ``a - b`` is one.

A single neuron is explained as an output of the network that ends at its layer. A tuple then says
which neuron it is, here in channel 3 at row 2 and column 1; a function of the features can be
anything else:

>>> import explain, torch
>>> from explain.hooks import FeatureExtractor
>>> model = torch.nn.Sequential(
...     torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 8, 3), torch.nn.Flatten()
... )
>>> features = FeatureExtractor(model, "2", graph=True)
>>> neuron = explain.attribute(features, torch.rand(1, 3, 9, 9), "saliency", target=(3, 2, 1))
>>> window = neuron.values[..., 2:7, 1:6]  # the pixels that it sees
>>> neuron.target, bool(window.any()), bool(window.count_nonzero() == neuron.values.count_nonzero())
('(3, 2, 1)', True, True)
>>> a_channel = lambda found: found["2"][:, 3].mean((1, 2))
>>> explain.attribute(features, torch.rand(1, 3, 9, 9), "saliency", target=a_channel).score.shape
torch.Size([1])
"""

from explain.targets.answer import Answer
from explain.targets.base import Target
from explain.targets.classes import BinaryLogit, ClassTarget, Similarity, TopClass
from explain.targets.classes import Predicted as Predicted
from explain.targets.detections import Detections
from explain.targets.functions import ScoreTarget
from explain.targets.regions import Segmentation
from explain.targets.resolve import Difference, as_target
from explain.targets.text import Text

__all__ = [
    "Answer",
    "BinaryLogit",
    "ClassTarget",
    "Detections",
    "Difference",
    "ScoreTarget",
    "Segmentation",
    "Similarity",
    "Target",
    "Text",
    "TopClass",
    "as_target",
]
