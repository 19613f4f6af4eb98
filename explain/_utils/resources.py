"""Texts that come with the package."""

from importlib import resources


def packaged_text(package: str, name: str) -> str:
    """Return the text of a file that is installed inside a package, such as a script of a page or
    the tables of a database; also from a package in a ZIP file.

    >>> "def packaged_text" in packaged_text("explain._utils", "resources.py")
    True
    """
    return resources.files(package).joinpath(name).read_text("utf-8")
