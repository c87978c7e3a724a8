"""csrc/ built inline, once: torch.ops.kvnb from a cached library, keyed by everything that decides its bytes."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from kvnb import machine, paths

STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # torch 2.11: the oldest that kvnb supports
LIBRARIES = {  # name -> sources; the first defines the schemas and the CPU op, the second adds CUDA
    "kvnb_cpu": ("bindings.cpp", "cpu_copy.cpp"),
    "kvnb_cuda": ("bindings.cpp", "kvnb_copy.cu", "vllm_scalar.cu", "limits.cu"),
}
LEAST_CAPABILITY = (7, 5)
ADVICE = {  # what a compiler says -> what to type
    r"unsupported (GNU|clang) version": "this nvcc takes no {cxx}; install an older one and name it: CXX=g++-14",
    r"Unsupported gpu architecture": "nvcc is older than this GPU; install a newer CUDA {cuda} and name it: CUDA_HOME=",
    r"unrecognized command.line option.*-std=c\+\+": "{cxx} is too old; install a newer one and name it: CXX=g++-14",
    r"failed to map segment": "the cache may hold no programs (noexec); name another folder: KVNB_CACHE=",
    r"No space left on device|Disk quota exceeded": "no space in the cache; name a roomier folder: KVNB_CACHE=",
}
_loaded: dict[str, str] = {}  # library -> key it was loaded under, in this process


class BuildError(RuntimeError):
    """The ops cannot be built or loaded here; the message says what is missing and what to type."""


class _Rejected(BuildError):
    """What a compiler made of csrc/, or did not: it takes seconds to hear, and would be the same again."""


def load():
    """Build (or find) and load the ops; returns `torch.ops.kvnb`. The CUDA ops come along where torch sees a GPU.

    A cold build takes a few seconds, a warm start far less. Raises BuildError.
    """
    return load_for("cuda" if torch.cuda.is_available() else "cpu")


def load_for(device: str):
    """`load()`, with the ops of one device type only: "cpu" or "cuda". Raises BuildError."""
    _have(_libraries(device))
    return torch.ops.kvnb


def problem(device: str) -> str | None:
    """Why the ops of a device type cannot be had here, or None: the reason that unsupported rows carry."""
    if _loaded.keys() >= set(_names(device)):
        return None
    try:
        return _failure(_libraries(device), _environment())
    except BuildError as error:  # told in no time, and so anew each time: a notebook's user may have mended it
        return str(error)


def no_compiler() -> str | None:
    """Why nothing that needs a C++ compiler, such as torch.compile on a CPU, can run here, or None."""
    try:
        _cxx_program()
    except BuildError as error:
        return str(error)
    return None


@cache
def _failure(libraries: tuple[_Library, ...], environment: frozenset) -> str | None:
    """Why the compiler rejects these, or None: kept while they and the environment are the same, but for `load`."""
    try:
        _have(libraries)
    except _Rejected as error:
        return str(error)
    return None


def _environment() -> frozenset[tuple[str, str]]:
    return frozenset(os.environ.items())


def _names(device: str) -> list[str]:
    return ["kvnb_cpu", "kvnb_cuda"] if device == "cuda" else ["kvnb_cpu"]


@dataclass(frozen=True)
class _Library:
    """A library of LIBRARIES as it must be here: its key covers all that decides its bytes."""

    name: str
    key: str
    flags: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return paths.CACHE / "build" / f"{self.name}-{self.key}"

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.so"

    @property
    def complete(self) -> Path:
        """Written once the build ended well; holds the library's size, so that a truncated one is built anew."""
        return self.folder / "complete"

    @property
    def is_complete(self) -> bool:
        return (
            self.complete.exists() and self.file.exists() and self.complete.read_text() == str(self.file.stat().st_size)
        )


def _have(libraries: tuple[_Library, ...]) -> None:
    """Build those that are not there, and load all."""
    try:
        _build_all([library for library in libraries if not library.is_complete])
    except OSError as error:
        raise BuildError(
            f"cannot build in {paths.CACHE} ({error}); name a folder that can be written: KVNB_CACHE=/some/folder"
        ) from error
    for library in libraries:
        _load(library)


def _libraries(device: str) -> tuple[_Library, ...]:
    return tuple(map(_library, _names(device)))


def _library(name: str) -> _Library:
    _sources(name)
    cuda = name == "kvnb_cuda"
    compilers = _cxx() + (_cuda_toolkit() if cuda else "")
    flags = tuple(_cuda_flags()) if cuda else ()
    library = _Library(name, _key(compilers, flags), flags)
    if _loaded.get(name, library.key) != library.key:
        raise BuildError(
            "csrc/ or its compilers (CXX, CUDA_HOME) changed after its ops were loaded: restart this process (in "
            "JupyterLab: the kernel)"
        )
    return library


def _load(library: _Library) -> None:
    if library.name in _loaded:
        return
    try:
        torch.ops.load_library(str(library.file))
    except OSError as error:
        again = f"to build it anew, type: rm -r {shlex.quote(str(library.folder))}"
        raise BuildError(_advised(f"{library.file} does not load ({again})", _words(error))) from error
    _loaded[library.name] = library.key


def _build_all(cold: list[_Library]) -> None:
    """Build side by side what no other process has built meanwhile; a killed build leaves nothing that blocks."""
    with ExitStack() as locks:
        for library in cold:
            locks.enter_context(_alone(library))
        cold = [library for library in cold if not library.is_complete]
        if cold:
            cuda = any(library.name == "kvnb_cuda" for library in cold)
            with _tools(cuda) as plain, ThreadPoolExecutor() as pool:
                list(pool.map(partial(_build_once, plain=plain), cold))


@contextmanager
def _alone(library: _Library) -> Iterator[None]:
    """Hold a build folder's lock, which the system releases when its holder dies, unlike torch's own `lock`."""
    lock, fix = Path(f"{library.folder}.filelock"), "name a folder that can be written: KVNB_CACHE=/some/folder"
    with ExitStack() as stack:
        try:
            stack.enter_context(paths.held(lock, library.folder / "builder", f"builds {library.folder}", fix))
        except ValueError as error:
            raise BuildError(f"cannot build in {paths.CACHE}: {error}") from error
        yield


def _build_once(library: _Library, plain: str) -> None:
    for left in (library.folder / "lock", library.complete, library.file):  # by a build that was killed
        left.unlink(missing_ok=True)
    if library.name == "kvnb_cuda":
        _try_nvcc(library)
    _build(library, plain)
    _refuse_private_runtime(library)
    library.complete.write_text(str(library.file.stat().st_size))


def _try_nvcc(library: _Library) -> None:
    """Raise BuildError unless nvcc takes this compiler and knows these GPUs: told in no time, and by itself."""
    nvcc = str(_cuda_home() / "bin" / "nvcc")
    command = [nvcc, *shlex.split(" ".join(library.flags)), "-E", "-x", "cu", os.devnull, "-o", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _Rejected(_advised(f"{nvcc} fails", done.stderr))


def _build(library: _Library, plain: str) -> None:
    """Compile with ninja through torch.utils.cpp_extension (which also loads the result)."""
    from torch.utils import cpp_extension

    cuda = library.name == "kvnb_cuda"
    try:
        cpp_extension.load(
            name=library.name,
            sources=[str(source) for source in _sources(library.name)],
            extra_cflags=["-O3", STABLE_ABI, *(["-DUSE_CUDA", "-DKVNB_CUDA"] if cuda else [])],
            extra_cuda_cflags=list(library.flags),
            extra_ldflags=[f"-L{plain}"] if cuda else [],
            build_directory=str(library.folder),
            is_python_module=False,
            with_cuda=cuda,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise _Rejected(_advised(f"building {library.name} in {library.folder} failed", _words(error))) from error


def _refuse_private_runtime(library: _Library) -> None:
    """A library with a C++ runtime of its own inside crashes Python where it should raise ValueError."""
    needs = library.file.read_bytes()
    if sys.platform == "linux" and b"libstdc++.so" not in needs and b"libc++.so" not in needs:
        raise _Rejected(
            f"{_cxx_program()} links the C++ runtime statically, so that an error in a kernel's arguments would crash "
            "Python; set CXX to a compiler that does not, for example CXX=/usr/bin/c++"
        )


def _advised(what: str, said: str) -> str:
    """A message of the compiler's last words, after what to type where they are words we know."""
    known = [advice for words, advice in ADVICE.items() if re.search(words, said)]
    advice = "; ".join(known).format(cxx=_cxx_program(), cuda=torch.version.cuda)
    return f"{what}: {advice}\n{_tail(said)}" if known else f"{what}:\n{_tail(said)}"


@contextmanager
def _tools(cuda: bool) -> Iterator[str]:
    """torch.utils.cpp_extension told of ninja, compiler and toolkit; yields a folder without a space in its path.

    torch looks for ninja on PATH, and for its own default compiler where CXX is not set. It hands paths to a shell
    without quotes: links in that folder stand for them. pip's CUDA has `libcudart.so.13`, torch asks for `.so`.
    """
    from torch.utils import cpp_extension

    for library in LIBRARIES:  # else a second try in this process builds nothing
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(library, None)
    path, cxx = os.environ["PATH"], os.environ.get("CXX")
    links = {"TORCH_LIB_PATH": Path(torch.__file__).parent / "lib", **({"CUDA_HOME": _cuda_home()} if cuda else {})}
    theirs = {name: getattr(cpp_extension, name) for name in links}  # and torch.compile's
    os.environ["PATH"] = os.pathsep.join([str(_ninja().parent), path])
    os.environ["CXX"] = _cxx_program()
    try:
        with _plain_folder() as plain:
            for name, folder in links.items():
                Path(plain, name).symlink_to(folder)
                setattr(cpp_extension, name, f"{plain}/{name}")
            for runtime in sorted(Path(plain).glob("CUDA_HOME/lib/libcudart.so.*"))[:1]:
                Path(plain, "libcudart.so").symlink_to(runtime)
            yield plain
    finally:
        for name, value in theirs.items():
            setattr(cpp_extension, name, value)
        os.environ["PATH"] = path
        if cxx is None:
            del os.environ["CXX"]


def _plain_folder() -> tempfile.TemporaryDirectory:
    made = paths.private_folder(lambda place: shlex.quote(place) == place)
    if made is None:
        raise BuildError(
            "building needs a temporary folder that can be written to and whose path has no space or quote; TMPDIR, "
            f"{', '.join(paths.SCRATCH)} are none: set TMPDIR to one"
        )
    return made


def _words(error: Exception) -> str:
    return "\n".join(map(str, filter(None, (error, error.__cause__))))  # torch hides the loader's own words in a cause


def _tail(text: str, lines: int = 30) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def _sources(name: str) -> list[Path]:
    found = [paths.CSRC / source for source in LIBRARIES[name]]
    missing = [path.name for path in found if not path.is_file()]
    if missing:
        raise BuildError(
            f"{paths.CSRC} lacks {', '.join(missing)}: kvnb builds its kernels from csrc/, so it needs the whole "
            "repository; clone it and run from there, or `pip install -e .` in the clone"
        )
    return found


def _key(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    system = sysconfig.get_platform(), *platform.libc_ver()  # a home may be shared by unlike machines
    for part in (compiler, *flags, torch.__version__, sys.implementation.cache_tag, STABLE_ABI, *system):
        digest.update(part.encode() + b"\0")
    for path in sorted(filter(Path.is_file, paths.CSRC.iterdir())):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _ninja() -> Path:
    """ninja's executable: on PATH, or in the package that pip installed (a notebook kernel's PATH may lack it)."""
    beside_python = Path(sys.executable).parent / "ninja"
    found = shutil.which("ninja") or (str(beside_python) if beside_python.exists() else None)
    if found is None:
        try:
            import ninja
        except ImportError:
            raise BuildError(f"ninja is not installed; type: {sys.executable} -m pip install ninja") from None
        found = str(Path(ninja.BIN_DIR) / "ninja")
    return Path(found)


def _cxx() -> str:
    """The C++ compiler's version line."""
    return _version_of(_cxx_program())


def _cxx_program() -> str:
    """The C++ compiler: CXX where it is set, else c++, g++ or clang++."""
    name = os.environ.get("CXX", "c++")
    candidates = [name] if "CXX" in os.environ else [name, "g++", "clang++"]
    found = next(filter(None, map(shutil.which, candidates)), None)
    if found is None:
        raise BuildError(
            f"no C++ compiler ({name}) on PATH; install one (Debian, Ubuntu: apt install g++; macOS: xcode-select "
            "--install) or set CXX"
        )
    return found


def _cuda_home() -> Path:
    """Folder of the CUDA toolkit: CUDA_HOME, CUDA_PATH, nvcc on PATH, /usr/local/cuda, or pip's nvcc."""
    on_path = shutil.which("nvcc")
    homes = [
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        on_path and Path(on_path).resolve().parent.parent,
    ]
    homes += ["/usr/local/cuda", *(Path(folder) / "nvidia" / "cu13" for folder in sys.path if folder)]
    for home in filter(None, homes):
        headers = [Path(home) / "include", *Path(home).glob("targets/*/include")]
        if (Path(home) / "bin" / "nvcc").is_file() and any((folder / "cuda_runtime.h").is_file() for folder in headers):
            return Path(home)
    cuda = torch.version.cuda
    raise BuildError(
        "no CUDA toolkit with nvcc and headers (CUDA_HOME, PATH, /usr/local/cuda, Python's packages): install CUDA "
        f"{cuda} and name it, CUDA_HOME=/usr/local/cuda-{cuda}, or type: {sys.executable} -m pip install "
        f"'cuda-toolkit[nvcc,cudart]=={cuda}.*'"
    )


def _cuda_toolkit() -> str:
    """nvcc's version text, after checking that it can serve this torch and these GPUs."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        built = "sees no CUDA GPU" if torch.version.cuda else "is built without CUDA"
        raise BuildError(machine.gpu_unused() or f"torch {torch.__version__} {built}, and no NVIDIA GPU was found here")
    for i, (major, minor) in enumerate(_capabilities()):
        if (major, minor) < LEAST_CAPABILITY:
            raise BuildError(
                f"GPU {i}, {torch.cuda.get_device_name(i)}, is sm_{major}{minor}, and kvnb needs sm_75 or later; "
                "beside a newer GPU, hide this one: CUDA_VISIBLE_DEVICES="
            )
    version = _version_of(str(_cuda_home() / "bin" / "nvcc"))
    release = re.search(r"release (\d+)\.(\d+)", version)
    major = torch.version.cuda.split(".")[0]
    if release is None or release[1] != major:
        beside = sorted(map(str, Path("/usr/local").glob(f"cuda-{major}.*")), reverse=True)
        raise BuildError(
            f"nvcc in {_cuda_home()} is CUDA {release[0] if release else 'unknown'}, torch is built for CUDA "
            f"{torch.version.cuda}, and their majors must agree; name a CUDA {major} toolkit: "
            f"CUDA_HOME={beside[0] if beside else f'/usr/local/cuda-{torch.version.cuda}'}"
        )
    return version


def _capabilities() -> list[tuple[int, int]]:
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


def _cuda_flags() -> list[str]:
    """Machine code for the visible GPUs, given explicitly (torch drops its own list when a flag contains "arch"), and
    the compiler of the C++ sources for nvcc too: left alone it takes whatever gcc is first on PATH."""
    targets = (f"-gencode=arch=compute_{a}{b},code=sm_{a}{b}" for a, b in sorted(set(_capabilities())))
    return ["-O3", *targets, f"-ccbin={shlex.quote(_cxx_program())}"]


def _version_of(program: str) -> str:
    said = _said(program, Path(program).stat().st_mtime_ns, _environment())
    if said is None:
        raise BuildError(
            f"{program} --version gave no answer in {machine.ANSWER_SECONDS} s; repair it, or set CXX or CUDA_HOME to "
            "another"
        )
    return said


@cache
def _said(program: str, changed: int, environment: frozenset) -> str | None:
    """What a program answers to --version; None: nothing in time, kept too, so that nobody waits for it twice."""
    asked = [program, "--version"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=machine.ANSWER_SECONDS).stdout
    except subprocess.TimeoutExpired:
        return None
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise BuildError(
            f"{program} --version failed: {said.strip()}; repair it, or set CXX or CUDA_HOME to another"
        ) from error
