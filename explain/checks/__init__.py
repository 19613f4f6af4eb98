"""Sanity checks of the maps of a photo, each with a figure, a threshold and the reason.

    sanity        a check (a metric with a threshold) and its result; the checks: does the map depend on model and
                  class? Is it faithful (a permutation test against the map in other places)? Is it stable under small
                  changes of the photo?
    verdict       the verdict on a photo, and `check_maps`: maps of one photo in, a verdict out; a summary of verdicts

`explain.Explanation.check` runs all checks.
"""

from explain.checks.sanity import Faithful
from explain.checks.verdict import Verdict

__all__ = ["Faithful", "Verdict"]
