"""Texts that come with the package."""

from importlib import resources


def packaged_text(package: str, name: str) -> str:
    """Return a text file that lies in a package.

    >>> "def packaged_text" in packaged_text("explain._utils", "resources.py")
    True
    """
    return resources.files(package).joinpath(name).read_text("utf-8")
