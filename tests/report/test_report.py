"""`kvnb report` and `kvnb render` as a whole, on recorded runs; notebooks are stood in for by tiny ones."""

import re
import shutil
import sys
from pathlib import Path

import fixture_runs
import nbformat
import pytest
from markupsafe import escape
from typer.testing import CliRunner

from kvnb import cli, machine, paths
from kvnb.bench import results, run
from kvnb.copies import REGISTRY
from kvnb.problem.case import Case, grid
from kvnb.report import answers, front, null_block

CASES = [Case(tokens, 8, cache_bytes=1 << 26) for tokens in fixture_runs.CPU_TOKENS]


def small_grid(name, *device):
    """Grid `full` of a CPU is what the run `mine` holds."""
    return CASES if (name, *device) == ("full", "cpu") else grid(name, *device)


@pytest.fixture
def place(tmp_path, monkeypatch, run_files):
    """A root with a live CPU run `mine`, a recorded GPU run, and notebooks of one cell each."""
    folders = {"LOCAL": "data/local", "RECORDED": "data/recorded", "REPORTS": "reports", "NOTEBOOKS": "notebooks"}
    monkeypatch.setattr(run, "grid", small_grid)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    for name, folder in folders.items():
        monkeypatch.setattr(paths, name, tmp_path / folder)
        (tmp_path / folder).mkdir(parents=True)
    record = paths.RECORDED / "h200" / "2026-11-30_full_0123abc.parquet"
    record.parent.mkdir()
    here = machine.describe(machine.resolve_device("cpu"))
    mine = results.load(run_files[0]).assign(**{name: here[name] for name in run.SAME_WHEN_FINISHED})
    mine["copy_version"] = [REGISTRY[name].version for name in mine["copy"]]
    results.save(mine, paths.LOCAL / "mine.parquet")
    shutil.copy(run_files[1], record)
    cells = {"01_copies": "1", "02_measure": "run", "03_compare": "runs", "06_timers": "run, live"}
    cells["04_null_block"] = "runs, globals().get('live')"
    for name, cell in cells.items():
        write_notebook(name, cell)
    return tmp_path


def write_notebook(name, source):
    parameters = nbformat.v4.new_code_cell("", metadata={"tags": ["parameters"]})
    cells = [nbformat.v4.new_markdown_cell(f"# {name}"), parameters, nbformat.v4.new_code_cell(source)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), paths.NOTEBOOKS / f"{name}.ipynb")


def report_mine(*more):
    """`kvnb report` on the finished run, asking for what it holds."""
    return CliRunner().invoke(cli.app, ["report", *held("mine"), *more])


def held(name):
    """The options that ask for what a finished run holds."""
    samples = results.load(paths.LOCAL / f"{name}.parquet")
    sizes = {"--workers": samples["worker"].max() + 1, "--rounds": samples["round"].max() + 1}
    copies = ",".join(sorted(set(samples["copy"])))
    asked = ["--run", name, "--device", "cpu", "--grid", "full", "--copies", copies]
    return [*asked, *(str(part) for pair in sizes.items() for part in pair)]


def test_a_finished_run_is_not_taken_for_another(place):
    done = report_mine("--grid", "quick")
    assert done.exit_code == 2
    assert "mine.parquet is a finished run without grid quick; choose another run name" in done.output
    assert not (paths.REPORTS / "mine").exists()


def test_a_report_of_the_live_and_the_recorded_run(place):
    done = report_mine()
    assert done.exit_code == 0, done.output
    index = paths.REPORTS / "latest" / "index.html"
    assert done.stdout.splitlines()[-1] == str(paths.REPORTS / "mine" / "index.html")
    assert index.resolve().parent == paths.REPORTS / "mine"
    assert (index.parent / ".gitignore").read_text() == "*\n"
    for path in (paths.LOCAL / "mine.parquet", *paths.RECORDED.rglob("*.parquet")):
        assert answers.headline(answers.Run(results.load(path))) in done.output
    compared = nbformat.read(index.parent / "03_compare.ipynb", as_version=4).cells[-1].outputs[0].data["text/plain"]
    assert "data/local/mine.parquet" in compared
    assert "data/recorded/h200/2026-11-30_full_0123abc.parquet" in compared
    assert str(place) not in compared


def damage(path):
    """Cut off, as by a clone whose disk was full."""
    path.write_bytes(path.read_bytes()[:-200])


def test_damaged_records_cost_a_report_these_alone(place, monkeypatch):
    """And they are known before anything is measured; of two of one day, either may be the newest."""
    monkeypatch.setitem(sys.modules, "altair", None)
    folder = paths.RECORDED / "h200"
    damaged = [next(folder.iterdir()), *(folder / f"2026-11-30_{name}.parquet" for name in ("releases_1", "padding_2"))]
    damage(damaged[0])
    for path in (*damaged[1:], folder / "2026-11-30_padding_3.parquet"):
        path.write_bytes(b"PAR1")
    write_notebook("05_releases", "runs")
    done = report_mine()
    assert done.exit_code == 0, done.output
    before, _, after = done.stderr.partition("kvnb: 01_copies took")
    told = re.findall(r"^kvnb: a recorded run left out: (\S+) is not a complete run file", before, re.M)
    assert told == [str(damaged[0]), str(folder / "2026-11-30_padding_3.parquet"), str(damaged[1])]
    assert before.count("`git checkout -- ") == 3 and after
    mine = answers.load(paths.LOCAL / "mine.parquet")
    assert answers.headline(mine) in done.stdout
    assert answers.answer(mine) in (paths.REPORTS / "mine" / "summary.md").read_text()
    assert not (paths.REPORTS / "mine" / "05_releases.html").exists()


def test_an_older_record_that_is_damaged_is_named_on_the_page(place):
    record = next(paths.RECORDED.rglob("*.parquet"))
    other = record.with_name("2026-11-29_full_4567def.parquet")
    other.write_bytes(b"PAR1")
    run = answers.load(record)
    placed, told = front.elsewhere(run, record)
    assert placed == answers.placed(run) and placed
    assert told.startswith(f"Another run, {other.name}, is left out: {other} is not a complete run file")


@pytest.mark.parametrize("name", ["2026-11-30_full_0123abc", "2026-11-29_full_4567def", "2026-11-30_padding_0123abc"])
def test_a_damaged_record_is_refused_before_what_was_rendered_is_overwritten(place, name):
    (paths.REPORTS / "h200").mkdir()
    kept = paths.REPORTS / "h200" / "index.html"
    kept.write_text("of a sound one")
    (paths.RECORDED / "h200" / f"{name}.parquet").write_bytes(b"PAR1")
    for command in (["render"], ["goals"])[: 2 if "11-30_full" in name else 1]:
        done = CliRunner().invoke(cli.app, command)
        assert (done.exit_code, f"{name}.parquet is not a complete run file" in done.stderr) == (2, True), done.output
    assert [path.name for path in kept.parent.iterdir()] == ["index.html"] and kept.read_text() == "of a sound one"


def test_rendering_the_record_twice_gives_the_same_bytes(place):
    def rendered():
        done = CliRunner().invoke(cli.app, ["render", "--gpu", "h200"])
        assert done.exit_code == 0, done.output
        return {path.name: path.read_bytes() for path in (paths.REPORTS / "h200").iterdir()}

    first = rendered()
    pages = [f"{name}.{kind}" for name in ("03_compare", "04_null_block", "06_timers") for kind in ("html", "ipynb")]
    assert sorted(first) == [*pages, "explore.html", "index.html", "latency.png", "summary.md"]
    timers = nbformat.read(paths.REPORTS / "h200" / "06_timers.ipynb", as_version=4).cells[-1].outputs[0]
    assert timers.data["text/plain"] == "('data/recorded/h200/2026-11-30_full_0123abc.parquet', 'no')"
    (paths.REPORTS / "h200" / "07_runs.html").write_text("an earlier report's, which compared two runs")
    assert rendered() == first
    assert not (paths.REPORTS / "latest").exists()


def shown_by_null_block(folder):
    cells = nbformat.read(folder / "04_null_block.ipynb", as_version=4).cells
    return cells[-1].outputs[0].data["text/plain"]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_report_answers_todo_1_with_and_without_a_run_of_grid_padding(place, padding_file, recorded):
    name = "data/recorded/h200/2026-11-30_padding_0123abc.parquet"
    if recorded:
        shutil.copy(padding_file, place / name)
    done = report_mine()
    assert done.exit_code == 0, done.output
    held = null_block.load(place / name) if recorded else None
    index = (paths.REPORTS / "mine" / "index.html").read_text()
    for question, told in null_block.decision(held, null_block.replayed()):
        assert f"{question}: {told}" in done.output and str(escape(told)) in index
    assert ("No run of grid padding is recorded yet" in index) == (not recorded)
    assert shown_by_null_block(paths.REPORTS / "mine") == f"({[name] if recorded else 'newest'!r}, None)"


def test_what_null_block_measures_is_answered_for(place, padding_file):
    """A notebook that measures stands in: its run is in the index, and another's that ends meanwhile is not."""
    write_notebook(
        "04_null_block", "import shutil, sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(cli.__file__).parents[1])!r})\n"
        "from kvnb import paths\nfrom kvnb.bench import run\nfrom kvnb.report import null_block\n"
        "def measure(*asked, path, **more):\n    path.parent.mkdir()\n"
        "    for made in ('another', path.stem):\n"
        f"        shutil.copy({str(padding_file)!r}, path.with_stem(made))\n    return path\n"
        "run.measure, paths.ROOT, paths.LOCAL = measure, Path.cwd(), Path('data/local').absolute()\n"
        "null_block.measured('cpu', 'yes', [])"
    )  # fmt: skip
    done = report_mine()
    assert done.exit_code == 0, done.output
    assert done.output.count(null_block.decisions([padding_file])[0][0][1]) == 1
    (mine,) = {path.stem for path in paths.LOCAL.glob("padding/*")} - {"another"}
    index, page = ((paths.REPORTS / "mine" / f"{name}.html").read_text() for name in ("index", "04_null_block"))
    assert f"padding/{mine}.parquet" in index and "another.parquet" not in index
    assert f"Measured now: <code>data/local/padding/{mine}.parquet</code>." in page


def record_releases(by_release):
    results.save(by_release.samples, paths.RECORDED / "h200" / "2026-11-30_releases_0123abc.parquet")
    write_notebook("05_releases", "runs")


def test_a_recorded_run_of_releases_is_rendered_beside_the_comparison(place, by_release):
    record_releases(by_release)
    done = CliRunner().invoke(cli.app, ["render"])
    assert done.exit_code == 0, done.output
    folder = paths.REPORTS / "h200"
    told = nbformat.read(folder / "05_releases.ipynb", as_version=4).cells[-1].outputs[0].data["text/plain"]
    assert told == "['data/recorded/h200/2026-11-30_releases_0123abc.parquet']"
    index = (folder / "index.html").read_text()
    assert escape(answers.release_headline(by_release)) in index and 'href="05_releases.html"' in index
    compared = nbformat.read(folder / "03_compare.ipynb", as_version=4).cells[-1].outputs[0].data["text/plain"]
    assert "releases" not in compared


def test_a_report_shows_recorded_releases_too(place, by_release):
    record_releases(by_release)
    done = report_mine()
    assert done.exit_code == 0, done.output
    assert (paths.REPORTS / "mine" / "05_releases.html").is_file()


def test_a_gpu_without_a_record_is_refused(place):
    done = CliRunner().invoke(cli.app, ["render", "--gpu", "h20"])
    assert (done.exit_code, "'h20' is not one of h200; did you mean h200?" in done.output) == (2, True)


def test_there_must_be_a_record_to_render(place):
    shutil.rmtree(paths.RECORDED / "h200")
    done = CliRunner().invoke(cli.app, ["render"])
    assert (done.exit_code, "no run is recorded yet" in done.output) == (2, True)
