"""csrc/ built inline, once: torch.ops.kvnb from a cached library, keyed by everything that decides its bytes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

from kvnb import paths

STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # torch 2.11: the oldest that kvnb supports
LIBRARIES = {  # name -> sources; the first defines the schemas and the CPU op, the second adds CUDA
    "kvnb_cpu": ("bindings.cpp", "cpu_copy.cpp"),
    "kvnb_cuda": ("bindings.cpp", "kvnb_copy.cu", "vllm_scalar.cu", "limits.cu"),
}
LEAST_CAPABILITY = (7, 5)
_loaded: dict[str, str] = {}  # library -> key it was loaded under, in this process


class BuildError(RuntimeError):
    """The ops cannot be built or loaded here; the message says what is missing and what to type."""


def load():
    """Build (or find) and load the ops; returns `torch.ops.kvnb`. The CUDA ops come along where torch sees a GPU.

    A cold build takes a few seconds, a warm start far less. Raises BuildError.
    """
    return load_for("cuda" if torch.cuda.is_available() else "cpu")


def load_for(device: str):
    """`load()`, with the ops of one device type only: "cpu" or "cuda". Raises BuildError."""
    libraries = [_library(name) for name in (["kvnb_cpu", "kvnb_cuda"] if device == "cuda" else ["kvnb_cpu"])]
    cold = [library for library in libraries if not library.complete.exists()]
    with _ninja_on_path(), ThreadPoolExecutor() as pool:  # a cold start builds both side by side
        list(pool.map(_build_once, cold))
    for library in libraries:
        _load(library)
    return torch.ops.kvnb


@cache
def problem(device: str) -> str | None:
    """Why the ops of a device type cannot be had here, or None: the reason that unsupported rows carry."""
    try:
        load_for(device)
    except BuildError as error:
        return str(error)
    return None


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
    def complete(self) -> Path:
        """Exists once the build ended well."""
        return self.folder / "complete"


def _library(name: str) -> _Library:
    _sources(name)
    cuda = name == "kvnb_cuda"
    compiler = _cuda_toolkit() if cuda else _cxx()
    flags = tuple(_cuda_flags()) if cuda else ()
    library = _Library(name, _key(compiler, flags), flags)
    if _loaded.get(name, library.key) != library.key:
        raise BuildError("csrc/ changed after its ops were loaded: restart this process (in JupyterLab: the kernel)")
    return library


def _load(library: _Library) -> None:
    if library.name not in _loaded:
        torch.ops.load_library(str(library.folder / f"{library.name}.so"))
        _loaded[library.name] = library.key


def _build_once(library: _Library) -> None:
    """Build unless another process has meanwhile; a killed build leaves nothing that blocks the next."""
    library.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(
        f"{library.folder}.filelock"
    ):  # released by the system when its holder dies, unlike torch's own `lock`
        if not library.complete.exists():
            (library.folder / "lock").unlink(missing_ok=True)  # torch's, left by a killed build: we hold the real lock
            _build(library)
            _refuse_private_runtime(library)
            library.complete.touch()


def _build(library: _Library) -> None:
    """Compile with ninja through torch.utils.cpp_extension (which also loads the result)."""
    cuda = library.name == "kvnb_cuda"
    from torch.utils import cpp_extension

    if cuda:
        cpp_extension.CUDA_HOME = str(_cuda_home())
    try:
        cpp_extension.load(
            name=library.name,
            sources=[str(source) for source in _sources(library.name)],
            extra_cflags=["-O3", STABLE_ABI, *(["-DUSE_CUDA", "-DKVNB_CUDA"] if cuda else [])],
            extra_cuda_cflags=list(library.flags),
            build_directory=str(library.folder),
            is_python_module=False,
            with_cuda=cuda,
        )
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"building {library.name} in {library.folder} failed:\n{_tail(str(error))}") from error


def _refuse_private_runtime(library: _Library) -> None:
    """A library with a C++ runtime of its own inside crashes Python where it should raise ValueError."""
    needs = (library.folder / f"{library.name}.so").read_bytes()
    if sys.platform == "linux" and b"libstdc++.so" not in needs and b"libc++.so" not in needs:
        raise BuildError(
            f"{_cxx_program()} links the C++ runtime statically, so that an error in a kernel's arguments would crash "
            "Python; set CXX to a compiler that does not, for example CXX=/usr/bin/c++"
        )


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """torch looks for ninja on PATH, and for its own default compiler where CXX is not set."""
    path, cxx = os.environ["PATH"], os.environ.get("CXX")
    os.environ["PATH"] = os.pathsep.join([str(_ninja().parent), path])
    os.environ["CXX"] = _cxx_program()
    try:
        yield
    finally:
        os.environ["PATH"] = path
        if cxx is None:
            del os.environ["CXX"]


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
    for part in (compiler, *flags, torch.__version__, sys.implementation.cache_tag, STABLE_ABI):
        digest.update(part.encode() + b"\0")
    for path in sorted(filter(Path.is_file, paths.CSRC.iterdir())):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _ninja() -> Path:
    """ninja's executable: on PATH, or in the package that pip installed (a notebook kernel's PATH may lack it)."""
    beside_python = Path(sys.executable).parent / "ninja"
    found = shutil.which("ninja") or (str(beside_python) if beside_python.exists() else None)
    if found is None:
        try:
            import ninja
        except ImportError:
            raise BuildError("ninja is not installed; type: pip install ninja") from None
        found = str(Path(ninja.BIN_DIR) / "ninja")
    return Path(found)


@cache
def _cxx() -> str:
    """The C++ compiler's version line."""
    _ninja()
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


@cache
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
    raise BuildError(
        "no CUDA toolkit with nvcc and headers (CUDA_HOME, PATH, /usr/local/cuda): "
        f"install CUDA {torch.version.cuda}'s or set CUDA_HOME"
    )


@cache
def _cuda_toolkit() -> str:
    """nvcc's version text, after checking that it can serve this torch and GPU."""
    _cxx()
    if torch.version.cuda is None:
        beside = " although this machine has an NVIDIA GPU" if shutil.which("nvidia-smi") else ""
        raise BuildError(
            f"torch {torch.__version__} is built without CUDA{beside}; type: pip install --force-reinstall torch"
        )
    if not torch.cuda.is_available():
        raise BuildError("torch sees no CUDA GPU (nvidia-smi says whether the driver does)")
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        raise BuildError(
            f"{torch.cuda.get_device_name()} is sm_{capability[0]}{capability[1]}; kvnb needs sm_75 or later"
        )
    version = _version_of(str(_cuda_home() / "bin" / "nvcc"))
    release = re.search(r"release (\d+)\.(\d+)", version)
    if release is None or release[1] != torch.version.cuda.split(".")[0]:
        raise BuildError(
            f"nvcc in {_cuda_home()} is CUDA {release[0] if release else 'unknown'}, torch is built for CUDA "
            f"{torch.version.cuda}: their majors must agree; set CUDA_HOME to a CUDA {torch.version.cuda} toolkit"
        )
    return version


def _cuda_flags() -> list[str]:
    """Machine code for the visible GPUs. Given explicitly: torch drops its list when a path contains "arch"."""
    capabilities = sorted({torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())})
    return ["-O3", *(f"-gencode=arch=compute_{a}{b},code=sm_{a}{b}" for a, b in capabilities)]


def _version_of(program: str) -> str:
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise BuildError(
            f"{program} --version failed: {said.strip()}; repair it, or set CXX or CUDA_HOME to another"
        ) from error
