"""csrc/ built inline: once, by two processes at a time, after a killed build, and else with one clear error."""

from __future__ import annotations

import math
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from programs import python_path, script

from kvnb import build, machine, paths

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


def start(code: str, cache: Path | str, stdin=None, **environment) -> subprocess.Popen:
    """A fresh Python with a build cache of its own ("": the user's)."""
    env = {**os.environ, "PYTHONPATH": python_path(paths.ROOT), "KVNB_CACHE": str(cache), **environment}
    pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
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


def test_who_waits_for_a_live_build_says_for_whom_and_a_dead_one_holds_nobody_up(built):
    [folder] = (path.parent for path in libraries(built))
    done = (folder / "complete").rename(folder / "done")
    lock, builder, name = f"{folder}.filelock", folder / "builder", f"process {{}} on {platform.node()}"
    holding = f"""
        import os, pathlib, sys, filelock
        with filelock.FileLock({lock!r}):
            pathlib.Path({str(builder)!r}).write_text({name!r}.format(os.getpid()))
            print("held", flush=True)
            sys.stdin.read()
    """
    holder = start(textwrap.dedent(holding), built, stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"
    waiter = start(LOAD, built)
    try:
        assert select.select([waiter.stderr], [], [], HANGING)[0], "it waits in silence"
        told = waiter.stderr.readline()
        assert told == f"kvnb: waiting for {name.format(holder.pid)}, which builds {folder}; if it hangs, end it\n"
        assert waiter.poll() is None
        done.rename(folder / "complete")
    finally:
        holder.kill()  # the lock's file, and its number in `builder`, stay
        holder.communicate()
    assert output(waiter) == "loaded\n"
    again = start(LOAD, built)
    assert again.communicate(timeout=HANGING) == ("loaded\n", "")


def test_a_truncated_library_is_built_anew(built):
    """Loading one would end Python with a bus error."""
    [library] = libraries(built)
    os.truncate(library, 3000)
    run(USE, built)


def test_a_library_that_does_not_load_is_named_with_the_line_that_removes_it(built):
    """As one copied from another machine; or torch's, rebuilt under the same version."""
    [library] = libraries(built)
    library.write_bytes(b"?" * library.stat().st_size)
    message = refusal("build.load_for('cpu')", built)
    assert message.startswith(f"{library} does not load")
    assert "invalid ELF header" in message or sys.platform != "linux"
    subprocess.run(["sh", "-c", re.search(r"to build it anew, type: (rm -r .*)\)", message)[1]], check=True)
    assert not library.parent.exists()


def test_unlike_machines_torches_and_compilers_share_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_loaded", {})
    here = build._library("kvnb_cpu").folder
    for target, name, value in (
        (torch, "__version__", "2.11.0+other"),
        (build.sysconfig, "get_platform", lambda: "linux-aarch64"),
        (build.platform, "libc_ver", lambda: ("glibc", "2.17")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            assert build._library("kvnb_cpu").folder != here, name
    monkeypatch.setenv("CXX", str(script(tmp_path / "compiler", "echo another compiler")))
    assert build._library("kvnb_cpu").folder != here


def test_a_home_with_a_space_and_arch_in_it(tmp_path):
    """Cache, csrc/, TMPDIR and torch itself: torch quotes its library folder nowhere, and reads "arch" as a flag."""
    home = tmp_path / "my arch 'home'"
    (home / "tmp").mkdir(parents=True)
    shutil.copytree(paths.CSRC, home / "csrc")
    (home / "site").symlink_to(Path(torch.__file__).parent.parent)
    code = f"from pathlib import Path; from kvnb import paths; paths.CSRC = Path({str(home / 'csrc')!r}); {USE}"
    code += "import torch; print(torch.__file__, paths.CACHE)"
    given = {"HOME": str(home), "XDG_CACHE_HOME": "", "TMPDIR": str(home / "tmp")}
    out = run(code, "", PYTHONPATH=python_path(home / "site", paths.ROOT), **given)
    assert out.count(str(home)) == 2


@pytest.mark.gpu
def test_a_home_with_a_space_and_arch_in_it_for_cuda(tmp_path):
    home = tmp_path / "my arch home"
    toolkit = home / "toolkit"
    (home / "tmp").mkdir(parents=True)
    toolkit.symlink_to(build._cuda_home())
    shutil.copytree(paths.CSRC, home / "csrc")
    code = f"""
        from pathlib import Path
        import torch
        from kvnb import build, paths
        paths.CSRC = Path({str(home / "csrc")!r})
        build.load_for("cuda")
        cache = torch.zeros(2, 4, 1, 1, device="cuda")
        row = torch.ones(1, 1, 1, device="cuda")
        torch.ops.kvnb.copy(row, row, cache, cache.clone(), torch.tensor([5], device="cuda"))
        print(cache.sum().item())
    """
    assert run(textwrap.dedent(code), home / "cache", CUDA_HOME=str(toolkit), TMPDIR=str(home / "tmp")) == "1.0\n"


def test_without_a_temporary_folder_that_torch_can_use_the_message_says_what_to_set(fresh, monkeypatch, tmp_path):
    (tmp_path / "my tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "my tmp"))
    monkeypatch.setattr(paths, "SCRATCH", (str(tmp_path / "gone"),))
    with pytest.raises(build.BuildError, match=r"has no space or quote; TMPDIR, .*/gone are none: set TMPDIR to one"):
        build.load_for("cpu")


def test_what_others_build_in_the_process_that_built_the_ops_still_builds(cache, tmp_path):
    """torch.compile on a CPU links against the folder that torch.utils.cpp_extension names."""
    code = """
        import torch
        from torch.utils import cpp_extension
        from kvnb import build
        before = vars(cpp_extension).copy()
        build.load_for("cpu")
        changed = [name for name, value in vars(cpp_extension).items() if before.get(name) is not value]
        assert not changed, changed
        print(torch.compile(lambda x: (x + 1).sin())(torch.zeros(1000)).sum().item())
    """
    given = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    assert float(run(textwrap.dedent(code), cache, **given)) == pytest.approx(1000 * math.sin(1))


def test_a_second_try_in_the_same_process_builds(cache, tmp_path):
    """As in a notebook, once the compiler is mended. While it is not, nobody waits for the same failure twice."""
    broken = script(
        tmp_path / "compiler", f'[ "$*" = --version ] && echo broken || {{ echo $* >> {tmp_path}/asked; exit 1; }}'
    )
    code = f"""
        import os
        from pathlib import Path
        from kvnb import build
        os.environ["CXX"] = "no-such"
        assert build.problem("cpu").startswith("no C++ compiler (no-such)")
        os.environ["CXX"] = {str(broken)!r}
        why = build.problem("cpu")
        assert why.startswith("building kvnb_cpu in "), why
        asked = Path({str(tmp_path / "asked")!r}).read_text()
        assert build.problem("cpu") == why
        assert Path({str(tmp_path / "asked")!r}).read_text() == asked
        os.environ["CXX"] = {shutil.which(os.environ.get("CXX", "c++"))!r}
        print(build.problem("cpu"))
    """
    assert run(textwrap.dedent(code), cache) == "None\n"


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
        script(compiler, real_compiler())
        run(USE, cache, CXX=str(compiler))  # while the dead build's compiler still runs
    finally:
        os.kill(int(compiling.read_text()), signal.SIGKILL)


def real_compiler() -> str:
    return f'exec {shutil.which(os.environ.get("CXX", "c++"))} "$@"'


def waiting_compiler(folder: Path) -> tuple[Path, Path]:
    """A compiler that never ends once it is asked to compile, and the file in which it then leaves its process id."""
    compiling = folder / "compiling"
    os.mkfifo(folder / "never")  # nothing ever writes to it
    wait = f"echo $$ > {compiling}.part; mv {compiling}.part {compiling}; exec cat {folder}/never"
    body = f'case "$*" in *bindings.cpp*) {wait};; esac\n{real_compiler()}'
    return script(folder / "compiler", body), compiling


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
    failing = 'case "$*" in *bindings.cpp*) echo "no such thing as C++" >&2; exit 1;; esac\n'
    compiler = script(tmp_path / "compiler", failing + real_compiler())
    message = refusal("build.load_for('cpu')", cache, CXX=str(compiler))
    assert message.startswith("building kvnb_cpu in ")
    assert "no such thing as C++" in message


@pytest.mark.skipif(sys.platform != "linux", reason="told from the ELF file's needed libraries")
def test_a_compiler_that_hides_its_runtime_is_refused_until_another_is_chosen(cache, tmp_path):
    """Exceptions of a library with a C++ runtime of its own would end Python, not reach it."""
    compiler = script(tmp_path / "compiler", f"{real_compiler()} -static-libstdc++")
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
    assert message.startswith(
        "loaded twice\ncsrc/ or its compilers (CXX, CUDA_HOME) changed after its ops were loaded: "
    )
    assert "restart this process" in message


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


# ------------------------------------------------------------------ faults that end before anything is built or loaded


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """This very process, on a machine where nothing is built."""
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(build, "_loaded", {})


def test_without_ninja_the_message_says_what_to_type_and_what_is_built_still_loads(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tools(tmp_path, leave_out=("ninja",))))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(build.BuildError, match=f"ninja is not installed; type: {tmp_path}/python -m pip install ninja"):
        build.load_for("cpu")
    library = build._library("kvnb_cpu")
    library.file.write_bytes(b"built")
    library.complete.write_text("5")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    build.load_for("cpu")
    assert build._loaded == {"kvnb_cpu": library.key}


def test_a_compiler_that_is_too_old_is_named(fresh, monkeypatch, tmp_path):
    real = shutil.which(os.environ.get("CXX", "c++"))
    words = "c++: error: unrecognized command line option '-std=c++20'; did you mean '-std=c++2a'?"  # gcc 7's
    old = script(tmp_path / "g++-7", f'case "$*" in *-std=c++*) echo "{words}" >&2; exit 1;; esac; exec {real} "$@"')
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(build.BuildError, match=r"g\+\+-7 is too old; install a newer one and name it: CXX=g\+\+-14"):
        build.load_for("cpu")


# ------------------------------------------------------------------------- what a CUDA build needs, told without a GPU


@pytest.fixture
def gpu_machine(fresh, monkeypatch, tmp_path):
    """torch as on a machine with a GPU (sm_90, CUDA 13.0) and a toolkit of that version, as far as build asks."""
    machine._listed_gpus.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Test GPU")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    (tmp_path / "driver").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "driver"), prepend=os.pathsep)
    script(tmp_path / "driver" / "nvidia-smi", "exit 9")
    fake_nvcc(tmp_path, "13.0")
    yield
    machine._listed_gpus.cache_clear()


def fake_nvcc(folder: Path, release: str) -> None:
    nvcc = folder / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    script(nvcc, f"echo 'Cuda compilation tools, release {release}, V{release}.1'")
    header = folder / "toolkit" / "include" / "cuda_runtime.h"
    header.parent.mkdir(exist_ok=True)
    header.touch()


@pytest.fixture
def a_gpu_in_the_machine(gpu_machine, tmp_path):
    script(tmp_path / "driver" / "nvidia-smi", "echo 'GPU 0: Test GPU (UUID: GPU-1)'; echo 'GPU 1: B (UUID: GPU-2)'")


@pytest.fixture
def real_nvcc(gpu_machine, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_HOME")
    try:
        version = build._version_of(str(build._cuda_home() / "bin" / "nvcc"))
    except build.BuildError as error:
        pytest.skip(f"needs nvcc: {error}")
    monkeypatch.setattr(torch.version, "cuda", re.search(r"release ([\d.]+)", version)[1])


def test_a_fitting_toolkit_is_taken(gpu_machine):
    assert "release 13.0" in build._cuda_toolkit()


def test_torch_without_cuda_is_named(gpu_machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(build.BuildError, match=r"torch .* is built without CUDA, and no NVIDIA GPU was found here"):
        build.load_for("cuda")


def test_torch_without_cuda_beside_a_gpu_says_what_to_type(a_gpu_in_the_machine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = (
        r"this machine has Test GPU, B, but torch .* is built without CUDA; type: .* -m pip install --force-reinstall"
    )
    with pytest.raises(build.BuildError, match=told):
        build.load_for("cuda")
    with pytest.raises(ValueError, match=f"device 'cuda:7' is not here; valid: auto, cpu.*; {told}"):
        machine.resolve_device("cuda:7")
    with pytest.warns(UserWarning, match=f"measuring the CPU: {told}"):
        assert machine.resolve_device("auto").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a CPU is what was asked for
    assert machine.gpu_unused() is None


def test_a_driver_too_old_for_torch_is_named(a_gpu_in_the_machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(build.BuildError, match=r"but torch .* for CUDA 13\.0 cannot use it: update the driver"):
        build.load_for("cuda")


def test_a_gpu_that_torch_does_not_see_is_named(gpu_machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(build.BuildError, match="sees no CUDA GPU, and no NVIDIA GPU was found here"):
        build.load_for("cuda")


def test_a_gpu_before_sm_75_is_named_wherever_it_sits(gpu_machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: [(9, 0), (7, 0)][i])
    with pytest.raises(
        build.BuildError, match="GPU 1, Test GPU, is sm_70, and kvnb needs sm_75.*CUDA_VISIBLE_DEVICES="
    ):
        build.load_for("cuda")


@pytest.mark.parametrize("lacks", ["nvcc", "cuda_runtime.h"])
def test_a_missing_toolkit_is_named(gpu_machine, monkeypatch, lacks):
    """nvcc alone, as some containers have it, compiles nothing."""
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: path.name != lacks and is_file(path))
    told = (
        r"no CUDA toolkit with nvcc .*install CUDA 13\.0.*CUDA_HOME=.* -m pip install 'cuda-toolkit\[nvcc.*==13\.0\.\*'"
    )
    with pytest.raises(build.BuildError, match=told):
        build.load_for("cuda")


def test_a_toolkit_of_another_major_is_named_until_a_fitting_one_is_named(gpu_machine, monkeypatch, tmp_path):
    """In one process, as in a notebook: by the variable, and by installing over the one that is there."""
    fake_nvcc(tmp_path, "12.4")
    assert "name a CUDA 13 toolkit: CUDA_HOME=" in build.problem("cuda")
    told = r"release 12\.4.*torch is built for CUDA 13\.0.*name a CUDA 13 toolkit: CUDA_HOME=/usr/local/cuda-13\.\d"
    with pytest.raises(build.BuildError, match=told):
        build.load_for("cuda")
    (tmp_path / "new").mkdir()
    fake_nvcc(tmp_path / "new", "13.0")
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_HOME", str(tmp_path / "new" / "toolkit"))
        assert "release 13.0" in build._cuda_toolkit()
    fake_nvcc(tmp_path, "13.1")
    assert "release 13.1" in build._cuda_toolkit()


def test_a_compiler_that_never_answers_is_named_and_waited_for_once(fresh, monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "never")
    compiler = script(tmp_path / "compiler", f"echo asked >> {tmp_path}/asked; exec cat {tmp_path}/never")
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(machine, "ANSWER_SECONDS", 0.5)
    for _ in range(2):
        assert build.problem("cpu").startswith(f"{compiler} --version gave no answer in 0.5 s; repair it, or set CXX")
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_a_driver_that_never_answers_is_named(gpu_machine, monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "never")
    script(tmp_path / "driver" / "nvidia-smi", f"exec cat {tmp_path}/never")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "ANSWER_SECONDS", 0.5)
    with pytest.warns(
        UserWarning, match="'nvidia-smi', '-L'.* timed out after 0.5 seconds: the driver hangs, so a GPU"
    ):
        assert machine.gpu_unused() is None


def test_a_gpu_newer_than_the_toolkit_is_named(real_nvcc, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (99, 0))
    told = r"nvcc fails: nvcc is older than this GPU; install a newer CUDA .* CUDA_HOME=(.|\n)*'compute_990'"
    with pytest.raises(build.BuildError, match=told):
        build._build_all([build._library("kvnb_cuda")])


def test_a_gcc_that_nvcc_does_not_take_is_named(real_nvcc, monkeypatch, tmp_path):
    """CXX chooses nvcc's compiler too, also from a folder with a space."""
    (tmp_path / "my arch tools").mkdir()
    real = shutil.which(os.environ.get("CXX", "c++"))
    new = script(tmp_path / "my arch tools" / "g++-99", f'exec {real} -U__GNUC__ -D__GNUC__=99 "$@"')
    monkeypatch.setenv("CXX", str(new))
    told = r"this nvcc takes no .*g\+\+-99; install an older one and name it: CXX=g\+\+-14\n(.|\n)*unsupported"
    with pytest.raises(build.BuildError, match=told):
        build._build_all([build._library("kvnb_cuda")])


def test_nvcc_that_takes_compiler_and_gpu_is_let_through(real_nvcc):
    build._try_nvcc(build._library("kvnb_cuda"))


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
