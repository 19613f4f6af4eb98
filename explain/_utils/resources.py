"""Texts that come with the package."""

from importlib import resources


def packaged_text(package: str, name: str) -> str:
    """Return the text of a file that is installed inside a package, such as a script of a page;
    also from a package in a ZIP file."""
    return resources.files(package).joinpath(name).read_text("utf-8")
