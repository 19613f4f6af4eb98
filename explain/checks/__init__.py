"""Sanity checks of the maps of a photo, each with a figure, a threshold and the reason.

    base          a check (a metric with a threshold), its result, and the verdict on a photo
    dependence    does the map depend on the model, and on the class?
    faithfulness  is it faithful? A permutation test against copies of the map in other places
    stability     is it stable under small changes of the photo?
    verdict       `check_maps`: maps of one photo in, a verdict out; and the maps of an `Explanation`

`explain.Explanation.check` runs all checks.
"""

from explain.checks.base import Verdict
from explain.checks.faithfulness import Faithful
from explain.checks.verdict import check_maps

__all__ = ["Faithful", "Verdict", "check_maps"]
