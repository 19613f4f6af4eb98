"""A check for your CI: a region that a model may not use, one that it must use, a new model that
agrees with the old one. Any test runner will do: each raises an `AssertionError`."""

from explain.testing.assertions import assert_agrees, assert_ignores, assert_uses

__all__ = ["assert_agrees", "assert_ignores", "assert_uses"]
