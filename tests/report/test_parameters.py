"""One table of parameters: what the notebooks' own cells say, and every wrong value refused with the valid ones."""

import ast
import subprocess
import sys

import nbformat
import pytest

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
        ({"copies": "kvnb"}, 'copies: .*"all" or a list'),
        ({"timers": ["grph"]}, "did you mean graph"),
        ({"device": "gpu"}, "auto, cpu, cuda or cuda:N"),
        ({"workers": 0}, "workers: 0 must be at least 1"),
        ({"workers": True}, "workers: True must be an int"),
        ({"rounds": "3"}, "rounds: '3' must be an int"),
        ({"run": "../x"}, "run: '../x' must be letters"),
        ({"run": 7}, "run: 7 must be a string"),
        ({"run": ".hidden"}, "begin with a letter or digit"),
        ({"copies_from": "nowhere.py"}, "nowhere.py does not exist"),
    ],
)
def test_wrong_values_are_refused_with_what_is_valid(values, told):
    with pytest.raises(ValueError, match=told):
        parameters.check("02_measure", values)


def test_runs_must_exist(tmp_path):
    parameters.check("03_compare", {"runs": "newest"})
    with pytest.raises(ValueError, match=r"gone\.parquet does not exist"):
        parameters.check("03_compare", {"runs": [str(tmp_path / "gone.parquet")]})
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
