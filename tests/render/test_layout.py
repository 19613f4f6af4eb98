"""Tables of numbers: escaped, and in columns."""

from __future__ import annotations

from explain._utils.html import table_html


def test_tables_are_escaped_and_numbers_stand_at_the_right() -> None:
    table = table_html(["<layer>"], [["a\x1b<b>"], ["12"]], "x & y")
    assert "<layer>" not in table
    assert r"a\x1b&lt;b&gt;" in table
    assert '<td style="text-align: right">12</td>' in table
    assert "<caption>x &amp; y</caption>" in table
