from tests.cli.conftest import typed

__all__ = ["typed"]
