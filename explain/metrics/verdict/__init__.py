"""A verdict: which maps of a photo stand up to questions, each with a figure, an answer and the reason.

    answers     an answer, all answers about a map, and the verdict on a photo
    asking      what a question is
    randomness  does the map depend on the model?
    classes     does it depend on the class?
    places      is it faithful? A permutation test against the same map laid elsewhere
    stability   does it stay as it is where the photo hardly changes?
    lighter     methods that run the model very often are asked with fewer samples
    checking    `check_maps`: maps of one photo in, a verdict out
    explained   the maps of an `Explanation`

A question is a metric with a judgement. `explain.Explanation.check` asks all of them.
"""

from explain.metrics.verdict.answers import Answer, Answers, Verdict
from explain.metrics.verdict.asking import SAME, Question
from explain.metrics.verdict.checking import check_maps, questions
from explain.metrics.verdict.classes import DependsOnClass
from explain.metrics.verdict.explained import answers_of, check_explained, method_behind
from explain.metrics.verdict.places import Faithful
from explain.metrics.verdict.randomness import DependsOnModel
from explain.metrics.verdict.stability import Stable

__all__ = [
    "SAME",
    "Answer",
    "Answers",
    "DependsOnClass",
    "DependsOnModel",
    "Faithful",
    "Question",
    "Stable",
    "Verdict",
    "answers_of",
    "check_explained",
    "check_maps",
    "method_behind",
    "questions",
]
