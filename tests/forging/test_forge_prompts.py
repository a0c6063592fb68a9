"""The prompts that a head learns from: many, distinct, and none of those that the benches ask."""

import runpy
from pathlib import Path

import pytest

from mtplx.errors import SettingsError
from worker.forge import prompts
from worker.forge.prompts import Prompt

ROOT = Path(__file__).parents[2]


def test_there_are_thousands_of_distinct_ones_the_same_for_a_seed() -> None:
    found = prompts.chosen(None, 0)
    assert len(found) == len(set(found)) == prompts.COUNT >= 5000
    assert found == prompts.chosen(None, 0)
    assert set(found) != set(prompts.chosen(None, 1))


def test_all_kinds_of_text_are_asked_for() -> None:
    asked = [one.asked for one in prompts.chosen(None, 0)]
    for words, least in {"```python": 900, "quote": 200, "story": 500, "What": 500, "email": 50}.items():
        assert sum(words in one for one in asked) > least, words
    begun = [one for one in prompts.chosen(None, 0) if one.begun]
    assert len(begun) > 300
    assert all(one.begun.rsplit("```python\n", 1)[-1].strip() in one.asked for one in begun)


def test_code_in_prompts_is_python() -> None:
    for one in prompts.chosen(None, 0)[:600]:
        if "```python\n" in one.asked:
            compile(one.asked.split("```python\n")[1].split("```")[0], "prompt", "exec")


def test_no_bench_asks_what_the_head_has_learned() -> None:
    """Nor does any sentence or line of code of a bench's prompts stand in one of ours."""
    bench = runpy.run_path(str(ROOT / "bench" / "conversations.py"))
    ours = "\n".join(one.asked + "\n" + one.begun for one in prompts.chosen(None, 0))
    held_out = [said for one in bench["conversations"]() for said in one.said]
    assert len(held_out) >= 8
    shared = ("import json", "import time", "from pathlib import Path")
    for said in held_out:
        assert said not in ours
        for line in said.replace(". ", ".\n").splitlines():
            if len(line.strip()) > 30 and line.strip() not in shared:
                assert line.strip() not in ours


def test_a_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('How are you?\n\n{"prompt": "Write code.", "begun": "```"}\n{"prompt": "Go on."}\n')
    assert prompts.read(file) == [Prompt("How are you?"), Prompt("Write code.", "```"), Prompt("Go on.")]
    assert sorted(prompts.chosen(file, 3)) == sorted(prompts.read(file))
    file.write_text('fine\n{"text": 1}\n')
    with pytest.raises(SettingsError, match="line 2 of"):
        prompts.read(file)
    with pytest.raises(SettingsError, match="cannot be read"):
        prompts.read(tmp_path / "missing")
