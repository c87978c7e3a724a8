"""What vLLM releases ship: the machine code of their wheels, launched as these releases launch it.

`kvnb releases 0.4.2 --arch sm_90` takes what holds `reshape_and_cache_flash_kernel` out of that wheel, into a cache
that may be copied to another host; `vllm==0.4.2` is a copy from then on:
  cubin  the kernel, through cuda-core on torch's stream. The launch is ours: timers `host` and `eager` say nothing
  op     the wheel's own op, where its library is built on torch's stable ABI and loads. Releases register one name, so
         a process can have one: the newest that its torch is recent enough for; its kernel is `vllm==X.cubin` too

A mangled name says what a kernel takes (FAMILIES); an unknown one is an error, never a guess. From the source at tag vX
(csrc/cache_kernels.cu; csrc/libtorch_stable/cache_kernels.cu since 0.25): each launches min(heads * head size, 512)
threads for each slot (before 0.6.6: for each row of key, of which there were as many); "auto" keeps the type, reads no
scale.

cuobjdump finds the same code, but NVIDIA's packages of it (13.2 to 13.5) end at the sm_90 code that CUDA 12.1 and 12.4
compiled (0.4.2, 0.6.6.post1: "Invalid ELF"). So fat binaries are walked here: a header of 64 bytes before each piece
says its kind, size, architecture and compression (as github.com/n-eiling/cuda-fatbin-decompression found).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import platform
import re
import struct
import subprocess
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvnb import paths
from kvnb.copies.base import GPU_TIMERS, NULL, Copy
from kvnb.problem.case import Case

if TYPE_CHECKING:
    import torch

    from kvnb.copies.base import Step
    from kvnb.problem.inputs import Inputs

FOLDER = paths.CACHE / "releases"
KERNEL = "30reshape_and_cache_flash_kernel"  # as mangled
SYMBOL = re.compile(rf"_ZN4vllm{KERNEL}I(.+?)EEvPKT_S\w?_P(?:T0|S\w?)_S\w?_PKl(\w+)")
AUTO = "LNS_18Fp8KVCacheDataTypeE0E"
DTYPES = {  # template arguments of the instances that keep the type; the others store fp8
    "N3c108BFloat16E": "bfloat16", "N3c104HalfE": "float16", "f": "float32",
    "13__nv_bfloat16S1_" + AUTO: "bfloat16", "tt" + AUTO: "float16", "ff" + AUTO: "float32",
}  # fmt: skip
FAMILIES = {  # codes of the parameters that follow key, value, key_cache, value_cache, slot_mapping: what they are
    "iiiiii": "block key value num_heads head_size block_size",
    "iiiiiiff": "block key value num_heads head_size block_size scale scale",
    "llllliiiPKfS_": "block page head key value num_heads head_size block_size scales scales",
    "llllliiiPKfS_i": "block page head key value num_heads head_size block_size scales scales scales_stride",
}  # block, page, head: strides of the caches; key, value: of a token
NUMPY = {"i": "int32", "l": "int64", "f": "float32"}  # pointers go as Python ints
VERSION = re.compile(r"\d+(\.\d+){2}(\.post\d+)?")  # whole: pip takes 0.33 and v0.33.0 for 0.33.0, too
CUDA_CORE = "0.5.0"  # the first whose cuda.core holds Device: before, all lay in cuda.core.experimental
ROW_PER_SLOT, VECTORS = (0, 6, 6), (0, 10, 1)  # first releases to launch a block per slot; to store 16 bytes at a time


class Call(NamedTuple):
    """How a release's default backend calls the op: kvnb's nearest layout, the backend's file at that tag, a note.

    K and V are slices of the projection (models/llama.py: qkv.split); torch.compile may give K a buffer of its own.
    """

    layout: str
    backend: str
    note: str = ""
    source: str = "qkv"


V1 = "vllm/v1/attention/backends/flash_attn.py"
OTHER_OP = "FlashInfer's call; the default, FlashAttention, filled an x-packed cache by another op, reshape_and_cache"
SIDE_BY_SIDE = "K and V of a block lie side by side: [num_blocks, 2, block_size, num_heads, head_size]"
DEFAULT_CALLS = {
    "0.4.2": Call("NHD", "vllm/attention/backends/flashinfer.py", OTHER_OP),
    "0.6.6.post1": Call("NHD", "vllm/attention/backends/flash_attn.py"),
    **dict.fromkeys(("0.8.5", "0.10.0", "0.10.1", "0.11.0", "0.17.0"), Call("NHD", V1)),
    "0.25.0": Call("NHD", V1, SIDE_BY_SIDE),
    "0.33.0": Call("packed", V1),
}
REGISTERS = dict(zip(DEFAULT_CALLS, (29, 29, 22, 22, 48, 56, 56, 40, 40), strict=True))  # a thread; bfloat16, sm_90


def numbers(version: str) -> tuple[int, ...]:
    """A version to compare by: "0.6.6.post1" is (0, 6, 6, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


# --------------------------------------------------------------------------------------------------- out of a wheel


def pieces(library: bytes) -> Iterator[tuple[str, slice, tuple | None]]:
    """(arch, or "" of what is no machine code; where; None or codec, packed and unpacked size) of each piece."""
    start = 0
    while (start := library.find(struct.pack("<IHH", 0xBA55ED50, 1, 16), start)) >= 0:
        here = start + 16
        start = here + struct.unpack_from("<Q", library, start + 8)[0]
        while here < start:
            kind, header, size, packed, arch, flags, unpacked = struct.unpack_from("<HxxIQI8xI8xQ8xQ", library, here)
            body = slice(here + header, here + header + size)
            if header < 64 or body.stop > start:
                raise ValueError(f"the header at byte {here} of the library's fat binaries is of an unknown form")
            codec = "lz4_raw" if flags & 0x2000 else "zstd" if flags & 0x8000 else None
            named = f"sm_{arch}{'a' if flags & 0x100000 else ''}" if kind == 2 else ""
            yield named, body, (codec, packed, unpacked) if codec else None
            here = body.stop


def cubin_for(library: bytes, arch: str, wheel: str) -> bytes:
    """The machine code for `arch` that holds the kernel, an ELF file. Raises ValueError naming what there is."""
    import pyarrow

    found: dict[str, set[bytes]] = {}
    for of, body, packing in pieces(library):
        code = library[body]
        if packing:
            codec, packed, unpacked = packing
            code = pyarrow.decompress(code[:packed], unpacked, codec=codec, asbytes=True)
        if of and KERNEL.encode() in code:
            found.setdefault(of, set()).add(code)
    if len(found.get(arch, ())) != 1:
        raise ValueError(f"arch: {wheel} has the kernel for {', '.join(found) or 'none'}, not (once) for {arch}")
    return found[arch].pop()


def thinned(library: bytes, arch: str) -> bytes:
    """The library, all code but that for `arch` zeroed: nothing moves, and 90 MB pack into 11 instead of 66."""
    thin = bytearray(library)
    for of, body, _ in pieces(library):
        if of.rstrip("a") != arch:
            thin[body] = bytes(body.stop - body.start)
    return bytes(thin)


def registers(cubin: bytes) -> dict[str, int]:
    """Mangled name -> registers per thread: the REGCOUNT records in the section .nv.info of an ELF file."""
    (table,), (size, count, names) = struct.unpack_from("<40xQ", cubin), struct.unpack_from("<58xHHH", cubin)
    sections = [struct.unpack_from("<I20xQQI", cubin, table + i * size) for i in range(count)]  # name, at, size, link

    def text(section: int, at: int) -> str:
        start = sections[section][1] + at
        return cubin[start : cubin.index(b"\0", start)].decode()

    named = {text(names, section[0]): section for section in sections}
    (_, here, length, _), (_, symbols, _, symbol_names) = named[".nv.info"], named[".symtab"]
    end, found = here + length, {}
    while here < end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, here)
        if (form, attribute) == (4, 0x2F):
            symbol, number = struct.unpack_from("<II", cubin, here + 4)
            (at,) = struct.unpack_from("<I", cubin, symbols + 24 * symbol)
            found[text(symbol_names, at)] = number
        here += 4 + (size if form == 4 else 0)
    return found


def describe(cubin: bytes) -> dict:
    """Family, symbols and registers by dtype of the copy kernel in a cubin. Raises ValueError for an unknown one."""
    found = {"family": "", "symbols": {}, "registers": {}}
    for symbol, number in registers(cubin).items():
        if KERNEL not in symbol:
            continue
        known = SYMBOL.fullmatch(symbol)
        family = re.sub(r"S\w?_", "S_", known[2]) if known else ""
        if family not in FAMILIES:
            raise ValueError(f"not in FAMILIES of kvnb/copies/releases.py, so kvnb cannot launch it: {symbol}")
        if dtype := DTYPES.get(known[1]):
            found["family"], found["symbols"][dtype], found["registers"][dtype] = family, symbol, number
    if not found["symbols"]:
        raise ValueError("no kernel of the wheel is an instance of DTYPES in kvnb/copies/releases.py")
    return found


def open_wheel(wheel: Path) -> tuple[dict, str, bytes]:
    """(version and required torch, name of the library that holds the kernel, the library) of a vLLM wheel."""
    if not wheel.is_file():
        raise ValueError(f"wheel: there is no file {wheel}")
    try:
        return _library_in(wheel)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"wheel: {wheel.name} is not a whole wheel ({error}): fetch it again") from error


def _library_in(wheel: Path) -> tuple[dict, str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        told = next((archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")), "")
        fields = r"^(Name|Version|Requires-Dist: torch\b)[ :=(]*([^\s:;)=(][^\s;)]*)"
        told = dict(re.findall(fields, told, re.MULTILINE))
        if told.get("Name") != "vllm":
            raise ValueError(f"wheel: {wheel.name} is of {told.get('Name', 'nothing')}, not of vllm")
        if "Version" not in told:
            raise ValueError(f"wheel: {wheel.name} does not say its version: fetch it again")
        libraries = [name for name in names if re.fullmatch(r"vllm/[^/]+\.so", name)]
        for name in sorted(libraries, key=lambda name: not name.startswith("vllm/_C")):
            if KERNEL.encode() in (library := archive.read(name)):
                version = told["Version"].partition("+")[0]
                return {"version": version, "torch": told.get("Requires-Dist: torch", "")}, name, library
    raise ValueError(f"wheel: {wheel.name} is for another platform: no library in it holds the CUDA kernel")


# -------------------------------------------------------------------------------------------------------- the cache


@dataclass(frozen=True)
class Release:
    """A cached release: its folder `<version>-<arch>`, what release.json says, and what is wrong with it, if anything.

    release.json holds version, arch, torch (as the wheel requires it), family, symbols and registers by dtype,
    from (file -> sha256: wheel, library), sha256 (file -> sha256: those of the folder).
    """

    folder: Path
    facts: dict = field(compare=False)
    damage: str = field(default="", compare=False)

    @property
    def version(self) -> str:
        return self.folder.name.rpartition("-")[0]

    @property
    def arch(self) -> str:
        return self.folder.name.rpartition("-")[2]

    def broken(self, why: str) -> str:
        return f"vllm=={self.version} in the cache: {why}; mend it: kvnb releases {self.version} --arch {self.arch}"

    def read(self, name: str) -> bytes:
        """A file of the folder. Raises ValueError, with the line that mends it, where it is not what was cached."""
        content = (self.folder / name).read_bytes() if (self.folder / name).is_file() else b""
        if self.damage or hashlib.sha256(content).hexdigest() != self.facts["sha256"].get(name):
            raise ValueError(self.damage or self.broken(f"{name} has changed"))
        return content


def cached() -> list[Release]:
    """What the cache holds, oldest first; reads release.json only, and a damaged one is said in `damage`."""
    found = []
    for folder in FOLDER.glob("[0-9]*-sm_[0-9]*"):
        try:
            facts = json.loads((folder / "release.json").read_text())
            lacks = {"torch", "family", "symbols", "registers", "sha256"} - {*facts}
            error = f"release.json lacks {', '.join(sorted(lacks))}" if lacks else ""
        except (OSError, ValueError, TypeError) as wrong:
            error = f"release.json cannot be read ({wrong})"
        found.append(Release(folder, {}, Release(folder, {}).broken(error)) if error else Release(folder, facts))
    return sorted(found, key=lambda release: (numbers(release.version), release.arch))


@contextmanager
def within() -> Iterator[Path]:
    """A folder in the cache, for a while. Raises ValueError where it, or what is done in it, cannot be written."""
    try:
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=FOLDER) as scratch:
            yield Path(scratch)
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"cannot write {FOLDER} ({why}): set KVNB_CACHE to a folder that can be") from error


def keep(wheel: Path, arch: str, wanted: str = "") -> Release:
    """Put a wheel's kernel for `arch`, and its library where torch can load it, into the cache: all of it, or nothing.

    Raises ValueError for a wheel that is not vLLM's, not `wanted`, or has no code for `arch`.
    """
    told, name, library = open_wheel(wheel)
    if wanted and told["version"] != wanted:
        raise ValueError(f"wheel: {wheel.name} is {told['version']}, not {wanted}")
    files = {"kernel.cubin": cubin_for(library, arch, wheel.name)}
    facts = told | {"arch": arch} | describe(files["kernel.cubin"])
    if "stable" in name and b"reshape_and_cache_flash(Tensor" in library:
        files["library.so.xz"] = lzma.compress(thinned(library, arch))
    with wheel.open("rb") as file:
        facts["from"] = {wheel.name: hashlib.file_digest(file, "sha256").hexdigest()}
    facts["from"][name] = hashlib.sha256(library).hexdigest()
    facts["sha256"] = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    files["release.json"] = (json.dumps(facts, indent=1) + "\n").encode()
    with within() as scratch:
        fresh, target = scratch / "entry", FOLDER / f"{told['version']}-{arch}"
        fresh.mkdir()
        for name, content in files.items():
            (fresh / name).write_bytes(content)
        if target.exists():
            target.rename(scratch / "old")
        fresh.rename(target)
    return Release(target, facts)


def fetch(versions: list[str], arch: str | None, wheel: Path | None = None) -> Iterator[Release]:
    """Cache releases for `arch` (None: this GPU's), one after another, from PyPI or a wheel on disk.

    What is cached and whole stays. Raises ValueError, with what to do, where a release cannot be had; of several, at
    the end, the others being cached and each error told on stderr.
    """
    arch = arch or this_arch()
    if not re.fullmatch(r"sm_\d+", arch):
        raise ValueError(f"arch: {arch!r} is not like sm_90")
    if odd := [version for version in versions if not VERSION.fullmatch(version)]:
        raise ValueError(f"versions: {', '.join(odd)}: not of the form X.Y.Z or X.Y.Z.postN, such as 0.6.6.post1")
    if wheel and len(versions) > 1:
        raise ValueError("wheel: holds one version, and several are named")
    if wheel:
        yield keep(wheel, arch, *versions)
        return
    found, failed = {version: _whole(version, arch) for version in versions}, []
    if None in found.values():
        with within():  # before minutes of downloads
            pass
    for version, release in found.items():
        try:
            release = release or _fetched(version, arch)
        except ValueError as error:
            if len(found) == 1:
                raise
            print(f"kvnb: {error}", file=sys.stderr)
            failed.append(version)
        else:
            yield release
    if failed:
        raise ValueError(f"not cached: {', '.join(failed)}")


def _whole(version: str, arch: str) -> Release | None:
    """What is cached of a release; None where that is nothing, or, said on stderr, where it is damaged."""
    there = next((r for r in cached() if (r.version, r.arch) == (version, arch) and not r.damage), None)
    try:
        for name in there.facts["sha256"] if there else ():
            there.read(name)
    except ValueError as damage:
        print(f"kvnb: {damage}: doing so", file=sys.stderr)
        return None
    return there


def _fetched(version: str, arch: str) -> Release:
    with tempfile.TemporaryDirectory() as scratch:
        return keep(download(version, Path(scratch)), arch, version)


def download(version: str, folder: Path) -> Path:
    """pip-download the Linux wheel of a version, whatever runs here; pip draws its bar on stderr."""
    machine = platform.machine() if platform.machine() in ("x86_64", "aarch64") else "x86_64"
    tags = [f"--platform=manylinux{tag}_{machine}" for tag in ("1", "2014", "_2_28", "_2_31")]
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", *tags]  # 0.4.2 has a wheel per Python
    options += ["--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, f"vllm=={version}"]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        why = _reason(done.stderr)
        raise ValueError(f"no wheel of vllm=={version} ({why}); one on disk: kvnb releases --wheel FILE")
    return next(folder.glob("*.whl"))


def _reason(said: str) -> str:
    """Why pip failed: its last line of ERROR, or the last of all, as that of a traceback is.

    An index that it cannot reach is, to pip, one that has no version.
    """
    lines = [line for line in said.splitlines() if line.strip()] or ["pip does not say why"]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    if not errors or errors[-1] == "ERROR: Exception:":
        return lines[-1]
    none = "No matching distribution" in errors[-1] and any("(from versions: none)" in line for line in errors)
    return "no connection to an index that has vllm" if none else errors[-1]


def this_arch() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("arch: no GPU here to take it from; name one: --arch sm_90")
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def line(release: Release) -> str:
    """A release in one line, for the terminal."""
    if release.damage:
        return release.damage
    size = sum(path.stat().st_size for path in release.folder.iterdir()) / 1e6
    facts = release.facts
    layout = DEFAULT_CALLS[release.version].layout if release.version in DEFAULT_CALLS else "?"
    return (
        f"vllm=={release.version:12} {release.arch:6} {facts['registers'].get('bfloat16', 0):3} registers  {layout:6} "
        f"{size:5.1f} MB: {', '.join(facts['sha256'])}"
    )


# ------------------------------------------------------------------------------------------------------- the copies


def arguments(family: str, tensors: tuple[torch.Tensor, ...], scale: torch.Tensor) -> list:
    """What the kernel of a family takes. `tensors`: key, value, key_cache, value_cache, slot_mapping; scale `[1]`."""
    import numpy as np

    key, value, blocks, _, _ = tensors
    means = dict(zip(("block", "page", "head"), blocks.stride()), key=key.stride(0), value=value.stride(0))
    means |= {"num_heads": key.shape[1], "head_size": key.shape[2], "block_size": blocks.shape[1]}
    means |= {"scale": 1.0, "scales": scale.data_ptr(), "scales_stride": 0}  # 0: one scale for all heads
    codes = re.findall(r"PKf|S_|\w", family)
    taken = [means[name] for name in FAMILIES[family].split()]
    typed = [np.dtype(NUMPY[code]).type(it) if code in NUMPY else it for code, it in zip(codes, taken, strict=True)]
    return [tensor.data_ptr() for tensor in tensors] + typed


@cache
def _kernel(release: Release, dtype: str, device: int):
    from cuda.core import Device, ObjectCode

    Device(device).set_current()
    return ObjectCode.from_cubin(release.read("kernel.cubin")).get_kernel(release.facts["symbols"][dtype])


def _bind_cubin(release: Release, inputs: Inputs) -> Step:
    import torch
    from cuda.core import LaunchConfig, Stream, launch

    case, scale = inputs.case, torch.ones(1, device=inputs.device)
    kernel = _kernel(release, case.dtype, inputs.device.index)
    threads = min(case.num_kv_heads * case.head_size, 512)
    per_slot = numbers(release.version) >= ROW_PER_SLOT

    def step(slot_mapping):
        if slot_mapping.dtype != torch.int64:
            raise ValueError(f"slot_mapping is {slot_mapping.dtype}, and vLLM's kernel reads torch.int64")

        def write(key, value):
            rows = len(slot_mapping if per_slot else key)
            if rows:  # a grid cannot be empty
                stream = Stream.from_handle(torch.cuda.current_stream(inputs.device).cuda_stream)
                tensors = (key, value, inputs.key_cache, inputs.value_cache, slot_mapping)
                taken = arguments(release.facts["family"], tensors, scale)
                launch(stream, LaunchConfig(grid=rows, block=threads), kernel, *taken)

        return write

    # A first launch, of one row of padding, loads the code, so that no capture of a graph has to.
    step(torch.full((1,), -1, device=inputs.device))(inputs.keys[0][:1], inputs.values[0][:1])
    return step


@cache
def _op(release: Release) -> tuple:
    """(the wheel's own op, "") or (None, why its library does not load)."""
    import torch

    content = lzma.decompress(release.read("library.so.xz"))
    with tempfile.TemporaryDirectory() as folder:  # what is loaded outlives its file
        (Path(folder) / "library.so").write_bytes(content)
        try:
            torch.ops.load_library(Path(folder) / "library.so")
            return torch.ops._C_cache_ops.reshape_and_cache_flash.default, ""
        except (OSError, RuntimeError, AttributeError) as error:
            cause = str(error.__cause__ or error).splitlines()[0]
            why = f"its library does not load into torch {torch.__version__} ({cause})"
    warnings.warn(f"vllm=={release.version} launches its cubin: {why}", stacklevel=2)
    return None, why


def _bind_op(release: Release, inputs: Inputs) -> Step:
    import torch

    op, _ = _op(release)
    if op is None:
        return _bind_cubin(release, inputs)
    key_cache, value_cache, scale = inputs.key_cache, inputs.value_cache, torch.ones(1, device=inputs.device)

    def step(slot_mapping):
        def write(key, value):
            op(key, value, key_cache, value_cache, slot_mapping, "auto", scale, scale)

        return write

    return step


def unsafe(version: str, case: Case) -> str | None:
    """Why the kernel would fault, hang or leave its tensors; what else it does wrong is the check's to find."""
    if case.value_head_size != case.head_size:
        return "takes one head size for K and V"
    elements = case.num_kv_heads * case.head_size
    row, _ = case.row_bytes
    if numbers(version) >= VECTORS and row % 16:
        return f"stores 16 bytes at a time and does not look: units of {row} bytes would be misaligned"
    if numbers(version) >= VECTORS and case.layout != "NHD" and elements < 32:
        return f"gives each head a warp, and {elements} threads are none: it would never end"
    return None


def _for_this_gpu(releases: list[Release]) -> Release:
    """The one of a version's releases whose code this GPU runs. Raises ValueError where there is none."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("needs a CUDA GPU")
    here = int(this_arch()[3:])
    there = {int(release.arch[3:]): release for release in releases}
    fit = [arch for arch in there if arch // 10 == here // 10 and arch <= here]
    if not fit:
        archs = ", ".join(release.arch for release in releases)
        raise ValueError(f"is cached for {archs} only: kvnb releases {releases[0].version} --arch sm_{here}")
    best = there[max(fit)]
    if best.damage:
        raise ValueError(best.damage)
    return best


def _cuda_core_lacks() -> str | None:
    try:
        found = metadata.version("cuda-core")
    except metadata.PackageNotFoundError:
        return "cuda-core is not installed"
    if numbers(found) < numbers(CUDA_CORE):
        return f"cuda-core {found} has no cuda.core.Device: {CUDA_CORE} or later is needed"
    return None


def copy_of(name: str, releases: list[Release], own_op: bool) -> Copy:
    """The copy that a version's releases, one per arch, make: its op, or its cubin."""
    version = releases[0].version

    def bind(inputs: Inputs) -> Step:
        return (_bind_op if own_op else _bind_cubin)(_for_this_gpu(releases), inputs)

    def supports(case: Case, policy: str, timer: str) -> str | None:
        if reason := unsafe(version, case):
            return reason
        try:
            release = _for_this_gpu(releases)
            why = _op(release)[1] if own_op else "launched as a cubin"
        except ValueError as error:
            return str(error)
        if case.dtype not in release.facts["symbols"]:
            return f"has no instance for {case.dtype}"
        if why and timer in ("host", "eager"):
            return f"{why}: the host's part of a launch is kvnb's, not vLLM's"
        return _cuda_core_lacks() if why else None

    bind.__doc__ = f"vLLM {version}'s {'own op, from the library' if own_op else 'kernel, as compiled'} in its wheel"
    files = (release.folder / "release.json" for release in releases)  # holds the hashes of all else
    sources = tuple(file for file in files if file.is_file())
    return Copy(name, "peer", ("skip", *NULL), bind, timers=GPU_TIMERS, supports=supports, sources=sources)


def op_version(releases: list[Release]) -> str | None:
    """The release whose own op a process can have; None where an installed vLLM will register the same name.

    A library on the stable ABI of one torch loads into later ones.
    """
    able = [release for release in releases if "library.so.xz" in release.facts.get("sha256", ())]
    if not able or find_spec("vllm"):
        return None
    running = numbers(metadata.version("torch"))[:2]
    fit = [release.version for release in able if numbers(release.facts["torch"])[:2] <= running]
    return max(fit, key=numbers, default=None)


def copies() -> Iterator[Copy]:
    """The copies that the cache makes now."""
    releases = cached()
    own = op_version(releases)
    for version in dict.fromkeys(release.version for release in releases):
        of = [release for release in releases if release.version == version]
        yield copy_of(f"vllm=={version}", of, version == own)
        if version == own:
            yield copy_of(f"vllm=={version}.cubin", of, False)


COPIES = tuple(copies())


def superseded(name: str) -> bool:
    """Whether a copy is of an older release than the newest cached: grid releases measures it, others when asked."""
    version = name.removeprefix("vllm==").removesuffix(".cubin")
    return name.startswith("vllm==") and numbers(version) < max(numbers(copy.name[6:]) for copy in COPIES)
