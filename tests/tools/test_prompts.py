"""Where prompts come from, and what is said when they don't."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tomadiff.tools.demo.prompts import PROMPTS
from tomadiff.tools.evaluate.prompts import article, load_prompts


def write(path: Path, text: str, encoding: str = "utf-8") -> str:
    path.write_bytes(text.encode(encoding))
    return str(path)


def test_imagenet_is_a_thousand_different_prompts_in_the_order_of_the_classes() -> None:
    prompts = load_prompts("imagenet")
    assert len(prompts) == len(set(prompts)) == 1000
    assert prompts[0] == "A photo of a tench."
    assert prompts[999] == "A photo of a toilet tissue."
    assert prompts[281] == "A photo of a tabby."


def test_names_that_two_classes_share_are_told_apart() -> None:
    prompts = load_prompts("imagenet")
    assert (prompts[134], prompts[517]) == ("A photo of a crane bird.", "A photo of a construction crane.")
    assert (prompts[638], prompts[639]) == ("A photo of a maillot.", "A photo of a tank suit.")


@pytest.mark.parametrize("name", ["ant", "Irish setter", "iPod", "hourglass", "umbrella", "EntleBucher"])
def test_an_before_a_vowel_that_is_heard(name: str) -> None:
    assert article(name) == "an"


@pytest.mark.parametrize("name", ["tench", "European gallinule", "unicycle", "hook", "CD player", "yawl"])
def test_a_before_anything_else(name: str) -> None:
    assert article(name) == "a"


def test_embedded_are_the_models_own_names() -> None:
    assert load_prompts("embedded") == list(PROMPTS)


def test_a_limit_takes_evenly_spaced_ones_of_our_own_lists() -> None:
    """ImageNet begins with four hundred animals."""
    assert load_prompts("imagenet", 3) == [load_prompts("imagenet")[i] for i in (0, 333, 666)]
    assert load_prompts("imagenet", 50) == load_prompts("imagenet")[::20]
    assert load_prompts("embedded", 95) == list(PROMPTS)[:95]
    assert load_prompts("embedded", 1000) == list(PROMPTS)


def test_a_prompt_is_there_once(tmp_path: Path) -> None:
    """Again, with the same seeds, it would be the same picture."""
    assert load_prompts(write(tmp_path / "p.txt", "a fox\nan owl\na fox\n")) == ["a fox", "an owl"]


def test_text_skips_blank_lines_and_comments(tmp_path: Path) -> None:
    source = write(tmp_path / "p.txt", "# mine\na fox\n\n  an owl  \n   # another\r\ntofu #3\n")
    assert load_prompts(source) == ["a fox", "an owl", "tofu #3"]
    assert load_prompts(source, 2) == ["a fox", "an owl"]


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    assert load_prompts(write(tmp_path / "p.txt", "über\n", "utf-8-sig")) == ["über"]


@pytest.mark.parametrize("column", ["prompt", "text", "Caption"])
def test_csv_takes_the_column_by_its_name(tmp_path: Path, column: str) -> None:
    source = write(tmp_path / "p.csv", f'id,{column}\n1,"a fox, red"\n2,"two\nlines"\n3,\n')
    assert load_prompts(source) == ["a fox, red", "two\nlines"]


def test_csv_takes_the_only_column(tmp_path: Path) -> None:
    assert load_prompts(write(tmp_path / "p.csv", "what\na fox\nan owl\n")) == ["a fox", "an owl"]


def test_jsonl_takes_strings_and_objects(tmp_path: Path) -> None:
    lines = ['"a fox"', "", '{"id": 1, "caption": "an owl"}', '{"prompt": "x\u2028x", "text": "y"}']
    source = write(tmp_path / "p.jsonl", "\n".join(lines))
    assert load_prompts(source) == ["a fox", "an owl", "x\u2028x"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "\n# nothing\n", "no prompts in it"),
        ("p.csv", "", "no prompts in it"),
        ("p.csv", "prompt\n", "no prompts in it"),
        ("p.jsonl", "\n", "no prompts in it"),
        ("p.csv", "id,name\n1,fox\n", "no column prompt or text or caption, only id, name"),
        ("p.csv", 'prompt\n"a" fox\n', "not a CSV file: after line 1"),
        ("p.csv", 'prompt\n"a fox, red"\nan owl, grey\n', "line 3 has more cells than .* commas in quotes"),
        ("p.jsonl", '"a fox"\n{"name": "owl"}\n', "line 2 is neither a string"),
        ("p.jsonl", "42\n", "line 1 is neither a string"),
        ("p.jsonl", '{"prompt": \n', "line 1 is not JSON"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(write(tmp_path / name, text))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not UTF-8"):
        load_prompts(write(tmp_path / "p.txt", "über\n", "latin-1"))


def test_unknown_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="known are imagenet, gemrec, embedded"):
        load_prompts("coco")
    with pytest.raises(ValueError, match=r"path of a \.txt, \.csv, \.jsonl file"):
        load_prompts(str(tmp_path / "p.parquet"))
    with pytest.raises(ValueError, match="no file"):
        load_prompts(str(tmp_path / "p.txt"))


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        load_prompts("embedded", limit)


def hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Any) -> None:
    """Put a `datasets` in place that has only what we use; None takes the real one away."""
    module = None
    if load_dataset is not None:
        module = ModuleType("datasets")
        module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_gemrec_comes_from_the_hub_each_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        asked.append((name, split, streaming))
        yield from ({"prompt": f"prompt {i % 90} "} for i in range(200))
        raise AssertionError("the rest is repetition: it must not be read")

    hub(monkeypatch, load_dataset)
    assert load_prompts("gemrec") == [f"prompt {i}" for i in range(90)]
    assert load_prompts("gemrec", 2) == ["prompt 0", "prompt 45"]
    assert asked[0] == ("MAPS-research/GEMRec-Metadata", "train", True)


def test_gemrec_without_datasets_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, None)
    with pytest.raises(ImportError, match="pip install datasets, or pass a file"):
        load_prompts("gemrec")


def test_gemrec_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to the hub\nand more")

    hub(monkeypatch, load_dataset)
    with pytest.raises(ValueError, match=r"\(no route to the hub\): go online, or pass a file"):
        load_prompts("gemrec")
