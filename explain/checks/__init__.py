"""Sanity checks: which maps of a photo stand up to questions, each with a figure, an answer and the reason.

    answers       an answer, all answers about a map, and the verdict on a photo
    questions     what a question is: a metric with a judgement
    dependence    does the map depend on the model, and on the class?
    faithfulness  is it faithful? A permutation test against the same map in other places
    stability     does it stay the same where the photo hardly changes?
    verdict       `check_maps`: maps of one photo in, a verdict out; and the maps of an `Explanation`

`explain.Explanation.check` asks all questions.
"""

from explain.checks.answers import Answer, Answers, Verdict
from explain.checks.dependence import DependsOnClass, DependsOnModel
from explain.checks.faithfulness import Faithful
from explain.checks.questions import SAME, Question
from explain.checks.stability import Stable
from explain.checks.verdict import answers_of, check_explained, check_maps, default_questions, method_behind

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
    "default_questions",
    "method_behind",
]
