"""Answers of image-text models, explained word by word.

sampling   where a processor puts a photo in the model's pixels, found by trying
reading    a processor's inputs of a photo and a prompt; the model as a function of them
scoring    the probability of each word, for altered photos and with words left out
occlusion  what each word loses without each square of the photo, and without each word
maps       the maps of words by any method, laid on the photo
grounding  whether a word depends on the photo, or is guessed from language
evidence   the smallest regions that are enough for a word, or that it cannot do without
page       the page whose words show their maps
result     what an answer rests on: pictures, records, plain values
explainer  `AnswerExplainer`: a photo and a prompt in, an answer out
"""

from explain.answers.explainer import AnswerExplainer
from explain.answers.result import Answered, ExplainedWord

__all__ = ["AnswerExplainer", "Answered", "ExplainedWord"]
