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

from explain.checks.answers import Answer, Answers, Verdict
from explain.checks.dependence import DependsOnClass, DependsOnModel
from explain.checks.faithfulness import Faithful
from explain.checks.questions import SAME, Question
from explain.checks.stability import Stable
from explain.checks.verdict import answers_of, check_explained, check_maps, method_behind, questions

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
