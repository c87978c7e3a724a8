"""What README promises: its example is a copy that passes the checks, its commands are verbs that exist."""

import re

import pytest

import kvnb
from kvnb import copies, paths

README = (paths.ROOT / "README.md").read_text()


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_the_example_copy_writes_the_right_bits(layout, tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "REGISTRY", dict(copies.REGISTRY))
    code = re.search(r"<!-- example: my_copy\.py -->\n```python\n(.+?)```", README, re.DOTALL)[1]
    file = tmp_path / "my_copy.py"
    file.write_text(code)
    assert copies.load_from(file) == ["mine"]
    case = kvnb.Case(33, 2, 64, layout=layout, cache_bytes=1 << 20, padding=0.25)
    kvnb.check(copies.REGISTRY["mine"], case, "cpu")


def test_its_commands_exist():
    makefile = (paths.ROOT / "Makefile").read_text()
    known = set(re.search(r"^MEASURING := (.+)$", makefile, re.MULTILINE)[1].split())
    known |= set(re.search(r"^KNOWN := \$\(MEASURING\) (.+)$", makefile, re.MULTILINE)[1].split())
    commands = [re.split(r"\s", command.split("#")[0].strip()) for command in re.findall(r"\bmake [^`\n]+", README)]
    commands = [command for command in commands if re.match(r"^[a-z]+$", command[1])]
    assert len(commands) > 5
    for _, verb, *variables in commands:
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb
        assert {variable.split("=")[0] for variable in variables if "=" in variable} <= known, variables
