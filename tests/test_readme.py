"""What README promises: its example is a copy, complete and short, that every figure shows; its commands exist."""

import ast
import re

import pandas as pd
import pytest
import yaml
from matplotlib.text import Text
from typer.testing import CliRunner

import kvnb
from kvnb import cli, copies, paths
from kvnb.bench import stats
from kvnb.report import answers, plots

README = (paths.ROOT / "README.md").read_text()
EXAMPLE = re.search(r"<!-- example: my_copy\.py -->\n```python\n(.+?)```", README, re.DOTALL)[1]


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example in a file; what it registers is gone after its tests."""
    file = tmp_path_factory.mktemp("example") / "my_copy.py"
    file.write_text(EXAMPLE)
    before = dict(copies.REGISTRY)
    yield file
    copies.REGISTRY.clear()
    copies.REGISTRY.update(before)


@pytest.fixture(scope="module")
def measured(example):
    """Samples of the example and of copies to compare it with, by the command line, as `make measure` calls it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "LOCAL", example.parent)
        chosen = ["--copies", "kvnb,torch.index_put,limit.copy.memcpy,mine", "--device", "cpu", "--run", "example"]
        fast = ["--copies-from", str(example), "--workers", "1", "--rounds", "1"]
        done = CliRunner().invoke(cli.app, ["measure", *chosen, *fast])
        assert done.exit_code == 0, done.output
    return kvnb.load(example.with_name("example.parquet"))


def test_the_example_is_complete_in_ten_lines():
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 10
    assert max(map(len, EXAMPLE.splitlines())) <= 110
    used = {node.id for node in ast.walk(ast.parse(EXAMPLE)) if isinstance(node, ast.Name)}
    assert {"Copy", "register"} <= used


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
@pytest.mark.parametrize("source", ["contiguous", "qkv"])
def test_the_example_copy_writes_the_right_bits(layout, source, example):
    assert copies.load_from(example) == ["mine"]
    case = kvnb.Case(33, 2, 64, layout=layout, source=source, cache_bytes=1 << 20, padding=0.25)
    kvnb.check(copies.REGISTRY["mine"], case, "cpu")


def test_the_example_copy_is_measured_in_every_case(measured):
    mine = measured[measured["copy"] == "mine"]
    assert set(mine["status"]) == {"ok"} and set(mine["part"]) == {"step", "write"}
    assert set(mine["num_tokens"]) == {case.num_tokens for case in kvnb.grid("quick", "cpu")}


@pytest.mark.parametrize("timers", [["wall"], ["graph", "eager"]], ids=["cpu", "gpu"])
def test_every_figure_of_a_report_shows_the_example_copy(timers, measured, monkeypatch):
    """A GPU's figures draw the same samples, under a GPU's name and timers."""
    monkeypatch.setattr(stats, "LIMIT_BYTES", 0)  # which these sizes do not reach
    named = [measured.assign(timer=timer, gpu="" if timer == "wall" else "GPU") for timer in timers]
    run = answers.Run(pd.concat(named, ignore_index=True))
    drawn = {figure for figure in answers.FIGURES if not answers.figure_data(figure, run).empty}
    assert drawn >= {"latency", "limit", "step"} | {"eager"} & set(timers)
    for figure in drawn - {"heads"}:  # which is kvnb against one PyTorch copy a cell, and names none
        texts = {text.get_text() for text in plots.make(figure, run).findobj(Text)}
        assert "mine" in texts, figure
        assert "mine" in answers.alt(figure, run), figure
    assert "mine" in set(answers.verdict_table(run).iloc[:, 1])


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


def test_its_citation_names_this_version():
    told = yaml.safe_load((paths.ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= told.keys()
    assert (told["version"], told["license"]) == (kvnb.__version__, "Apache-2.0")
