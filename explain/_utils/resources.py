"""Texts that come with the package."""

from importlib import resources


def packaged_text(room: str, name: str) -> str:
    """Return a text file of a room.

    >>> packaged_text("store", "tables.sql")[:23]
    '-- The tables of a run.'
    """
    return resources.files(f"explain.{room}").joinpath(name).read_text("utf-8")
