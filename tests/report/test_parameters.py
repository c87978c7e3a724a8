"""One table of parameters: what the notebooks' own cells say, and every wrong value refused with the valid ones."""

import ast
import math
import re
import subprocess
import sys

import nbformat
import pytest
from click.testing import CliRunner
from papermill.cli import papermill

from kvnb import paths
from kvnb.report import parameters


def parameters_cell(notebook):
    cells = nbformat.read(paths.NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells
    return next(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", []))


@pytest.mark.parametrize("notebook", parameters.TABLES)
def test_defaults_are_the_notebooks_own(notebook):
    assigned = [node for node in ast.parse(parameters_cell(notebook)).body if isinstance(node, ast.Assign)]
    in_cell = {node.targets[0].id: ast.literal_eval(node.value) for node in assigned}
    assert in_cell == {parameter.name: parameter.default for parameter in parameters.TABLES[notebook]}
    parameters.check(notebook, in_cell)


def test_every_notebook_has_a_table():
    assert sorted(parameters.TABLES) == sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"grd": "full"}, "'grd' is not one of .*grid.*; did you mean grid?"),
        ({"grid": "ful"}, "'ful' is not one of .*full.*did you mean full"),
        ({"copies": ["torch.index_pt"]}, "'torch.index_pt' is not one of .*; did you mean torch.index_put?"),
        ({"copies": []}, r'copies: \[\] must be "all" or a list of names'),
        ({"timers": ["grph"]}, "did you mean graph"),
        ({"device": "gpu"}, "auto, cpu, cuda or cuda:N"),
        ({"workers": 0}, "workers: 0 must be at least 1"),
        ({"workers": True}, "workers: True must be an int"),
        ({"rounds": "3"}, "rounds: '3' must be an int"),
        ({"run": "../x"}, "run: '../x' must be letters"),
        ({"run": 7}, "run: 7 must be a string"),
        ({"run": ".hidden"}, "begin with a letter or digit"),
        ({"run": "x" * 101}, "100 at most"),
        ({"copies_from": "nowhere.py"}, "nowhere.py does not exist"),
        ({"copies_from": "kvnb"}, "kvnb is a folder"),
        ({"grid": ""}, "'' is not one of quick"),
        ({"grid": False}, r"grid: False must be a string \(.* quoted in YAML\); valid: quick, full"),
        ({"copies": "kvnb"}, 'copies: .*"all" or a list of names; valid: kvnb'),
        ({"copies": ["kvnb", "kvnb"]}, "copies: 'kvnb' is there 2 times"),
        ({"copies": [["kvnb"]]}, r"copies: \['kvnb'\] must be a string .*; valid: kvnb"),
        ({"timers": [1e-3]}, "timers: 0.001 must be a string .*; valid: graph, call"),
    ],
)
def test_wrong_values_are_refused_with_what_is_valid(values, told):
    with pytest.raises(ValueError, match=told):
        parameters.check("02_measure", values)


@pytest.mark.parametrize(
    ("notebook", "typed", "arrives", "told"),
    [
        ("02_measure", ["-p", "workers", "7e12345"], math.inf, "workers: inf must be an int, in digits"),
        ("02_measure", ["-p", "workers", "1e-3"], 0.001, "workers: 0.001 must be an int"),
        ("02_measure", ["-p", "rounds", "true"], "true", "rounds: 'true' must be an int"),
        ("02_measure", ["-p", "rounds", "True"], True, "rounds: True must be an int"),
        ("02_measure", ["-p", "rounds", "3.0"], 3.0, "rounds: 3.0 must be an int"),
        ("02_measure", ["-y", "rounds: 1e-3"], "1e-3", "rounds: '1e-3' must be an int"),
        ("02_measure", ["-y", "rounds: 7e12345"], "7e12345", "rounds: '7e12345' must be an int"),
        ("02_measure", ["-p", "run", "20261130"], 20261130, "run: 20261130 must be a string .papermill -r"),
        ("02_measure", ["-p", "copies", "kvnb"], "kvnb", "copies: 'kvnb' must be .* a list of names; valid: kvnb"),
        ("02_measure", ["-p", "grid", "None"], None, "grid: None must be a string .*valid: quick, full"),
        ("04_null_block", ["-y", "live: no"], False, "live: False must be a string .*YAML.; valid: auto, yes, no"),
        ("04_null_block", ["-p", "live", "true"], "true", "live: 'true' is not one of auto, yes, no"),
        ("03_compare", ["-p", "runs", "1e-3"], 0.001, 'runs: 0.001 must be "newest" or a list'),
    ],
)  # fmt: skip
def test_what_papermill_makes_of_a_value_is_refused(tmp_path, notebook, typed, arrives, told):
    """By papermill's own command line, up to where a kernel would start."""
    made = tmp_path / "made.ipynb"
    fixed = ["--prepare-only", "--kernel", "python3", "--language", "python"]
    done = CliRunner().invoke(papermill, [str(paths.NOTEBOOKS / f"{notebook}.ipynb"), str(made), *fixed, *typed])
    assert done.exit_code == 0, done.output
    cells = nbformat.read(made, as_version=4).cells
    values = {}
    exec(next(cell.source for cell in cells if "injected-parameters" in cell.metadata.get("tags", [])), {}, values)
    assert list(values.values()) == [arrives]
    with pytest.raises(ValueError, match=told):
        parameters.check(notebook, values)


NOT_MEANT = (True, False, 0, -1, 0.5, math.inf, math.nan, "", "true", "1e-3", "no such", [], [1], [[]], [""], {}, None)


def test_every_parameter_refuses_what_is_not_meant_and_says_what_is(record_property):
    """One ValueError that names the parameter, whatever comes."""
    refused = 0
    for notebook, table in parameters.TABLES.items():
        for parameter in table:
            for value in NOT_MEANT:
                named = (notebook, parameter.name, value) in [("02_measure", "run", name) for name in ("true", "1e-3")]
                if named or value is None is parameter.default:
                    continue
                told = f"^{parameter.name}: .*(must be|is not|does not|at least|is a f)"
                with pytest.raises(ValueError, match=told) as refusal:
                    parameters.check(notebook, {parameter.name: value})
                assert ", ".join(parameter.valid) in str(refusal.value)
                refused += 1
            near = parameter.name + parameter.name[-1]
            names = ", ".join(other.name for other in table)
            told = f"{notebook}: parameter '{near}' is not one of {names}; did you mean {parameter.name}?"
            with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
                parameters.check(notebook, {near: parameter.default})
            refused += 1
    told = "malformed parameters, each refused with the valid choices before a kernel starts"
    record_property("trust", f"{refused} {told}")
    assert refused == 334


def test_a_file_of_copies_that_fails_is_named_with_its_line(tmp_path):
    mine = tmp_path / "mine.py"
    for code, told in (
        ("x = 1\nx / 0\n", "line 2: ZeroDivisionError"),
        ("def (", "SyntaxError: .*line 1"),
        ("\nx = int('many')", r"line 2: ValueError: invalid literal for int\(\)"),
        ("raise SystemExit(0)", "line 1: SystemExit: 0"),
        ("def f():\n    import sys\n    sys.exit()\nf()", "line 3: SystemExit"),
        ("", "registers no copy; end it with"),
    ):
        mine.write_text(code)
        with pytest.raises(ValueError, match=rf"copies_from: .*mine\.py.*{told}"):
            parameters.check("02_measure", {"copies_from": str(mine)})


def test_runs_must_exist(tmp_path):
    parameters.check("03_compare", {"runs": "newest"})
    with pytest.raises(ValueError, match=r"gone\.parquet does not exist"):
        parameters.check("03_compare", {"runs": [str(tmp_path / "gone.parquet")]})
    (tmp_path / "2026-11-30_full_0123abc.parquet").touch()
    near = r"_ful_0123abc\.parquet does not exist; did you mean .*/2026-11-30_full_0123abc\.parquet\? .*data/local"
    with pytest.raises(ValueError, match=near):
        parameters.check("03_compare", {"runs": [str(tmp_path / "2026-11-30_ful_0123abc.parquet")]})
    with pytest.raises(ValueError, match='"newest" or a list'):
        parameters.check("03_compare", {"runs": "gone.parquet"})


def test_the_runs_to_compare_must_exist(tmp_path):
    parameters.check("07_runs", {"a": None, "b": __file__})
    with pytest.raises(ValueError, match=r"b: .*gone\.parquet does not exist"):
        parameters.check("07_runs", {"a": __file__, "b": str(tmp_path / "gone.parquet")})


def test_copies_of_a_file_are_valid_names(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from kvnb.copies import Copy, register\n"
        "def bind(inputs):\n    'Nothing.'\n"
        "register(Copy('test.mine', 'yours', ('skip',), bind))\n"
    )
    parameters.check("02_measure", {"copies": ["test.mine"], "copies_from": str(mine)})
    from kvnb import copies

    del copies.REGISTRY["test.mine"]


def test_the_table_imports_no_torch():
    code = "import sys, kvnb.report.parameters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
