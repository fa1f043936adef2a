"""docs/families.md says what the tests are parametrised with."""

import importlib.util
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("make_families", Path(__file__).parents[2] / "docs" / "make_families.py")
families = importlib.util.module_from_spec(spec)
spec.loader.exec_module(families)


def test_page_is_up_to_date():
    page = families.page()
    assert families.PAGE.read_text() == page, "run python docs/make_families.py"
    rows = {line.split(" | ")[0]: line for line in page.splitlines() if line.startswith("| ")}
    assert rows["| qwen2_5_vl"].count("yes") == 10 and "no" in rows["| diffllama"].split(" | ")[-1]


def test_a_yes_comes_from_a_tests_parameters():
    @pytest.mark.parametrize("family", ["a", "b"])
    @pytest.mark.parametrize(("split", "name"), [(1, "c"), (2, "d")])
    def test():
        pass

    assert families.parameters(test, "family") == ["a", "b"] and families.parameters(test, "name") == ["c", "d"]
    assert families.parameters(test, "kind") == families.parameters(lambda: None, "family") == []


def test_every_cell_has_a_value_and_every_family_without_vllm_a_reason():
    table, _, below = families.PAGE.read_text().partition("\n## Not supported\n")
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    first, *of_families = rows[: next(i for i, row in enumerate(rows) if row[0].strip() == "column")]
    assert len(first) == 12 and first[-1].strip() == "vLLM" and len(of_families) > 100
    for row in of_families:
        name, *cells = (cell.strip() for cell in row)
        assert len(cells) == 11 and {*cells} <= {"yes", "no", "plain", "text"}, name
        assert cells[-1] == "yes" or name in below, name
