"""csrc/ built inline: once, by two processes at a time, after a killed build, and else with one clear error."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from kvnb import build, paths

HANGING = 120  # s after which a build that takes a few counts as blocked
LOAD = "from kvnb import build; build.load_for('cpu'); print('loaded')"
USE = LOAD + textwrap.dedent("""
    import torch
    cache = torch.zeros(2, 4, 1, 1)
    torch.ops.kvnb.copy(torch.ones(1, 1, 1), torch.ones(1, 1, 1), cache, cache.clone(), torch.tensor([5]))
    assert cache.sum() == 1
""")


@pytest.fixture
def cache(tmp_path) -> Path:
    """Of a fresh machine: nothing is built."""
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def built_once(tmp_path_factory) -> Path:
    built = tmp_path_factory.mktemp("built")
    run(LOAD, built)
    return built


@pytest.fixture
def built(built_once, tmp_path) -> Path:
    """A cache that holds csrc/ as it is, built by an earlier process."""
    return shutil.copytree(built_once, tmp_path / "built")


def start(code: str, cache: Path, **environment) -> subprocess.Popen:
    """A fresh Python with a build cache of its own."""
    env = {**os.environ, "PYTHONPATH": str(paths.ROOT), "KVNB_CACHE": str(cache), **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=env, **pipes)


def run(code: str, cache: Path, **environment) -> str:
    return output(start(code, cache, **environment))


def output(process: subprocess.Popen) -> str:
    """What a process printed; it must succeed, and must not wait for ever."""
    try:
        out, error = process.communicate(timeout=HANGING)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("the build hangs")
    assert process.returncode == 0, error
    return out


def refusal(code: str, cache: Path, **environment) -> str:
    """The message of the BuildError that `code` ends in."""
    catching = f"""
from kvnb import build
try:
{textwrap.indent(textwrap.dedent(code), "    ")}
except build.BuildError as error:
    print(error)
else:
    raise SystemExit("nothing was raised")
"""
    return run(catching, cache, **environment)


def libraries(cache: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*.so")}


def test_a_second_process_reuses_the_library(built):
    before = libraries(built)
    run(USE, built)
    assert len(before) == 1
    assert libraries(built) == before


def test_two_processes_may_build_at_once(cache):
    both = [start(USE, cache) for _ in range(2)]
    assert [output(process).strip() for process in both] == ["loaded", "loaded"]
    assert len(libraries(cache)) == 1


def test_the_lock_that_a_dead_build_left_blocks_nothing(built):
    """torch waits for ever on a file `lock` in the build folder, whoever made it."""
    [library] = libraries(built)
    (library.parent / "complete").unlink()
    library.unlink()
    (library.parent / "lock").touch()
    run(USE, built)
    assert not (library.parent / "lock").exists()


def test_a_build_killed_half_way_does_not_block_the_next(cache, tmp_path):
    compiler, compiling = waiting_compiler(tmp_path)
    victim = start(LOAD, cache, CXX=str(compiler))
    try:
        while not compiling.exists():
            assert victim.poll() is None, victim.communicate()[1]
            time.sleep(0.01)
        victim.kill()
        victim.wait()
        assert list(cache.rglob("lock")), "the build died before torch took its lock: this test shows nothing"
        compiler.write_text("#!/bin/sh\n" + real_compiler())
        run(USE, cache, CXX=str(compiler))  # while the dead build's compiler still runs
    finally:
        os.kill(int(compiling.read_text()), signal.SIGKILL)


def real_compiler() -> str:
    return f'exec {shutil.which(os.environ.get("CXX", "c++"))} "$@"\n'


def waiting_compiler(folder: Path) -> tuple[Path, Path]:
    """A compiler that never ends once it is asked to compile, and the file in which it then leaves its process id."""
    compiling, compiler = folder / "compiling", folder / "compiler"
    os.mkfifo(folder / "never")  # nothing ever writes to it
    wait = f"echo $$ > {compiling}.part; mv {compiling}.part {compiling}; exec cat {folder}/never"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *bindings.cpp*) {wait};; esac\n' + real_compiler())
    compiler.chmod(0o755)
    return compiler, compiling


def test_ninja_need_not_be_on_path(cache, tmp_path):
    """A notebook kernel's PATH often lacks the environment's bin folder."""
    run(USE, cache, PATH=str(tools(tmp_path, leave_out=("ninja",))))


def tools(folder: Path, leave_out: tuple[str, ...]) -> Path:
    """A folder of links to every program on PATH except some."""
    links = folder / "bin"
    links.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            if program.name not in leave_out and not (links / program.name).exists():
                (links / program.name).symlink_to(program)
    return links


def test_without_a_compiler_the_message_says_what_to_install(cache, tmp_path):
    message = refusal("build.load_for('cpu')", cache, CXX="", PATH=str(tools(tmp_path, leave_out=("c++", "g++"))))
    assert message.startswith("no C++ compiler")
    assert "apt install g++" in message
    assert "CXX" in message


def test_a_compiler_that_fails_gives_its_own_last_words(cache, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *bindings.cpp*) echo "no such thing as C++" >&2; exit 1;; esac\n' + real_compiler()
    )
    compiler.chmod(0o755)
    message = refusal("build.load_for('cpu')", cache, CXX=str(compiler))
    assert message.startswith("building kvnb_cpu in ")
    assert "no such thing as C++" in message


@pytest.mark.skipif(sys.platform != "linux", reason="told from the ELF file's needed libraries")
def test_a_compiler_that_hides_its_runtime_is_refused_until_another_is_chosen(cache, tmp_path):
    """Exceptions of a library with a C++ runtime of its own would end Python, not reach it."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\n" + real_compiler().replace('"$@"', '"$@" -static-libstdc++'))
    compiler.chmod(0o755)
    for _ in range(2):  # what the first try left behind must not pass for a finished build
        message = refusal("build.load_for('cpu')", cache, CXX=str(compiler))
        assert message.startswith(f"{compiler} links the C++ runtime statically")
        assert "set CXX" in message
    run(USE, cache, CXX=shutil.which("c++"))


@pytest.mark.parametrize("left", ["nothing", "all but bindings.cpp"])
def test_without_csrc_the_message_says_to_clone(cache, tmp_path, left):
    csrc = tmp_path / "csrc"
    if left != "nothing":
        shutil.copytree(paths.CSRC, csrc)
        (csrc / "bindings.cpp").unlink()
    code = f"""
        from pathlib import Path
        from kvnb import paths
        paths.CSRC = Path({str(csrc)!r})
        build.load_for('cpu')
    """
    message = refusal(code, cache)
    assert message.startswith(f"{csrc} lacks bindings.cpp")
    assert "clone" in message


def test_editing_csrc_after_loading_asks_for_a_restart(built, tmp_path):
    csrc = shutil.copytree(paths.CSRC, tmp_path / "csrc")
    code = f"""
        from pathlib import Path
        from kvnb import paths
        paths.CSRC = Path({str(csrc)!r})
        build.load_for('cpu')
        build.load_for('cpu')
        print("loaded twice")
        source = paths.CSRC / 'cpu_copy.cpp'
        source.write_text(source.read_text() + '// edited')
        build.load_for('cpu')
    """
    message = refusal(code, built)
    assert message.startswith("loaded twice\ncsrc/ changed after its ops were loaded: restart this process")


def test_editing_csrc_makes_another_library(built, tmp_path):
    csrc = shutil.copytree(paths.CSRC, tmp_path / "csrc")
    load = f"from pathlib import Path; from kvnb import paths; paths.CSRC = Path({str(csrc)!r}); {LOAD}"
    first = libraries(built)
    run(load, built)
    assert libraries(built) == first  # the same bytes elsewhere are the same library
    (csrc / "kv_index.h").write_text((csrc / "kv_index.h").read_text() + "// edited\n")
    run(load, built)
    assert len(libraries(built)) == 2
    assert first.items() <= libraries(built).items()


# ------------------------------------------------------------------------- what a CUDA build needs, told without a GPU


@pytest.fixture
def gpu_machine(monkeypatch, tmp_path):
    """torch as on a machine with a GPU (sm_90, CUDA 13.0) and a toolkit of that version, as far as build asks."""
    for cached in (build._cuda_home, build._cuda_toolkit, build.problem):
        cached.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Test GPU")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    fake_nvcc(tmp_path, "13.0")
    yield
    for cached in (build._cuda_home, build._cuda_toolkit, build.problem):
        cached.cache_clear()


def fake_nvcc(folder: Path, release: str) -> None:
    nvcc = folder / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    header = folder / "toolkit" / "include" / "cuda_runtime.h"
    header.parent.mkdir(exist_ok=True)
    header.touch()


def test_a_fitting_toolkit_is_taken(gpu_machine):
    assert "release 13.0" in build._cuda_toolkit()


def test_torch_without_cuda_is_named(gpu_machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(build.BuildError, match=r"torch .* is built without CUDA.*type: pip install"):
        build.load_for("cuda")


def test_torch_without_cuda_beside_a_gpu_says_so(gpu_machine, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(build.BuildError, match="although this machine has an NVIDIA GPU"):
        build.load_for("cuda")


def test_a_gpu_that_torch_does_not_see_is_named(gpu_machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(build.BuildError, match="torch sees no CUDA GPU"):
        build.load_for("cuda")


def test_a_gpu_before_sm_75_is_named(gpu_machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    with pytest.raises(build.BuildError, match="Test GPU is sm_70; kvnb needs sm_75 or later"):
        build.load_for("cuda")


@pytest.mark.parametrize("lacks", ["nvcc", "cuda_runtime.h"])
def test_a_missing_toolkit_is_named(gpu_machine, monkeypatch, lacks):
    """nvcc alone, as some containers have it, compiles nothing."""
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: path.name != lacks and is_file(path))
    with pytest.raises(build.BuildError, match=r"no CUDA toolkit with nvcc .*install .*CUDA 13\.0.*set CUDA_HOME"):
        build.load_for("cuda")


def test_a_toolkit_of_another_major_is_named(gpu_machine, tmp_path):
    fake_nvcc(tmp_path, "12.4")
    with pytest.raises(build.BuildError, match=r"release 12\.4.*torch is built for CUDA 13\.0.*set CUDA_HOME"):
        build.load_for("cuda")


def test_copies_carry_the_reason_as_their_own(gpu_machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    from kvnb.copies import REGISTRY
    from kvnb.problem.case import Case

    case = Case(4, cache_bytes=1 << 22)
    assert "without CUDA" in REGISTRY["kvnb"].reason_against(case, "skip", "graph", "cuda")
    assert REGISTRY["torch.index_put"].reason_against(case, "null_slot", "graph", "cuda") is None


# ----------------------------------------------------------------------------------------------- what an import costs

HEAVY = (
    "torch",
    "triton",
    "vllm",
    "matplotlib",
    "seaborn",
    "scipy",
    "papermill",
    "nbconvert",
    "torch.utils.cpp_extension",
)


def test_import_loads_nothing_heavy(built):
    out = run(f"import sys, kvnb; print([name for name in {HEAVY} if name in sys.modules])", built)
    assert out.strip() == "[]"


def test_a_warm_start_loads_no_extension_builder(built):
    heavy = [name for name in HEAVY if name != "torch"]
    out = run(f"{LOAD}; import sys; print([name for name in {heavy} if name in sys.modules])", built)
    assert out.split("\n")[1] == "[]"
