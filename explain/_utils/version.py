"""The version of the package, and whether another distribution has the same import."""

import functools
import importlib

__version__ = "0.3.0"

SUMMARY = "See why a PyTorch vision model said what it said"
"""Of this package, before it had a name of its own."""


@functools.cache
def check_distribution() -> None:
    """Warn, once, if the distribution ``explain`` of PyPI is installed, which overwrites files of this one."""
    from explain._utils.errors import warn

    metadata = importlib.import_module("importlib.metadata")  # takes too long to be imported with the package
    try:
        other = metadata.metadata("explain")
    except metadata.PackageNotFoundError:
        return
    if not str(other["Summary"]).startswith(SUMMARY):
        got = f"explain {other['Version']} too, which is another project"
        remedy = "run pip uninstall explain, and then pip install --force-reinstall --no-deps explain-hooks"
        warn(f"the distribution explain-hooks must be the only one that imports as explain, got {got}; {remedy}")
