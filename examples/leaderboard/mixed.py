"""Means over networks, with intervals that hold for other networks: a linear mixed model in which
architecture and seed are random, by statsmodels.

The kinds of marks are fixed effects, coded so that the intercept is the plain mean of the kinds,
and so are the sides of the images. The architecture has a random intercept, and so has each seed of
training within it. Intervals (95 %) take Student's t with one degree of freedom less than there are
architectures: four of them say little of a fifth, and intervals are as wide as that. For what works
on one architecture alone, intervals are over its networks.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import pandas
from scipy import stats
from statsmodels.formula.api import mixedlm, ols

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its interval; ``networks`` is of how many networks it is."""

    mean: float
    low: float
    high: float
    networks: int

    def __str__(self) -> str:
        if np.isnan(self.mean):
            return "–"
        if np.isnan(self.low):
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


def estimate(table: pandas.DataFrame) -> Estimate:
    """The mean of a column ``value``, of which each row is of one network: its ``kind``,
    ``architecture``, ``side`` and ``seed``.

    >>> rows = [("and", "plain", 32, 0, 1.0), ("and", "plain", 32, 1, 3.0)]
    >>> columns = ["kind", "architecture", "side", "seed", "value"]
    >>> estimate(pandas.DataFrame(rows, columns=columns)).mean
    2.0
    """
    rows = table.dropna(subset=["value"]).reset_index(drop=True)
    count = len(rows)
    if count == 0:
        return Estimate(np.nan, np.nan, np.nan, 0)
    terms = [f"C({name}, Sum)" for name in ("kind", "side") if rows[name].nunique() > 1]
    formula = "value ~ " + " + ".join(["1", *terms])
    parameters = 1 + sum(rows[name].nunique() - 1 for name in ("kind", "side"))
    architectures = rows["architecture"].nunique()
    rows["training"] = rows["side"].astype(str) + "-" + rows["seed"].astype(str)
    if count <= parameters or np.ptp(rows["value"]) < 1e-12:
        return Estimate(float(rows["value"].mean()), np.nan, np.nan, count)
    if architectures == 1:
        fit = ols(formula, rows).fit()
        degrees = count - parameters
    else:
        fit = _mixed(formula, rows)
        degrees = architectures - 1
    mean = float(fit.params["Intercept"])
    reach = float(stats.t.ppf((1 + LEVEL) / 2, degrees) * fit.bse["Intercept"])
    return Estimate(mean, mean - reach, mean + reach, count)


def _mixed(formula: str, rows: pandas.DataFrame):
    """The fitted model; a seed has an effect of its own where there are several."""
    components = {"training": "0 + C(training)"} if rows["training"].nunique() > 1 else None
    model = mixedlm(formula, rows, groups="architecture", re_formula="1", vc_formula=components)
    with warnings.catch_warnings():
        # a variance at its border, zero, is what a small one is estimated as
        warnings.simplefilter("ignore")
        return model.fit(reml=True, method=["powell"])
