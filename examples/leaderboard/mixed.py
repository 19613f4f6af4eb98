"""Means over networks, with intervals that hold for other networks: a linear mixed model by
statsmodels.

Random effects are the kind of evidence, the architecture, and the training: the seed with the side
of the images. They are crossed; where so few networks cannot tell
them apart, kinds are part of the residuals. So an interval (95 %) speaks of other kinds, architectures and
seeds of the same sort. It takes Student's t with one degree of freedom less than there are
architectures: four of them say little of a fifth, and intervals are as wide as that.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import pandas
from scipy import stats
from statsmodels.formula.api import mixedlm, ols

LEVEL = 0.95
EFFECTS = ("architecture", "training", "kind")
FEWEST = 4  # networks, for an interval
SMALL = 1e-9


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
    if count < FEWEST or np.ptp(rows["value"]) < SMALL:
        return Estimate(float(rows["value"].mean()), np.nan, np.nan, count)
    rows["training"] = rows["side"].astype(str) + "-" + rows["seed"].astype(str)
    effects = [name for name in EFFECTS if 1 < rows[name].nunique() < count]
    fit = _fitted(rows, effects)
    groups = rows["architecture"].nunique()
    degrees = groups - 1 if groups > 1 else count - 1
    mean = float(fit.params["Intercept"])
    reach = float(stats.t.ppf((1 + LEVEL) / 2, degrees) * fit.bse["Intercept"])
    return Estimate(mean, mean - reach, mean + reach, count)


def _fitted(rows: pandas.DataFrame, effects: list[str]):
    """The model with these random effects. So few networks may not tell them apart from the rest:
    then the last effect is left to the residuals."""
    if not effects:
        return ols("value ~ 1", rows).fit()
    components = {name: f"0 + C({name})" for name in effects}
    model = mixedlm("value ~ 1", rows, groups=np.ones(len(rows)), vc_formula=components)
    with warnings.catch_warnings():
        # a variance at its border, zero, is what a small one is estimated as
        warnings.simplefilter("ignore")
        try:
            fit = model.fit(reml=True, method=["powell"])
        except np.linalg.LinAlgError:
            return _fitted(rows, effects[:-1])
    return fit if np.isfinite(fit.bse["Intercept"]) else _fitted(rows, effects[:-1])
