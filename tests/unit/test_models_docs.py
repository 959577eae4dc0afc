"""docs/models.md says of each family what tests show."""

from pathlib import Path

from families.table import lines


def test_the_table_is_that_of_the_tests() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert "\n".join(lines()) in text, "python tests/families/table.py prints the table as it should be"
