"""The plans on docs/planning.md are what the command says, a model of billions among them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from normattn.cli.app import main

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
SHOWN = re.compile(
    r"^<!-- planned -->\n```bash\n(.*?)\n```\n\n```text\n(.*?)\n```$", re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")
EXAMPLES = SHOWN.findall(PAGE.read_text("utf-8"))


def numbers(text: str) -> list[float]:
    return [float(each.replace(",", "")) for each in NUMBER.findall(text)]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize(("line", "shown"), EXAMPLES)
def test_a_plan_is_as_shown(line: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To 5 %: another version of torch may keep a tensor more or less."""
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line)[1:])
    assert ended.value.code == 0
    said = capsys.readouterr().out.strip()
    assert NUMBER.sub("#", said) == NUMBER.sub("#", shown)
    assert numbers(said) == pytest.approx(numbers(shown), rel=0.05)
