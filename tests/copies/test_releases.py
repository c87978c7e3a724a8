"""What vLLM releases ship: out of a wheel, into the cache, and launched with the arguments that each family takes."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow
import pytest
from typer.testing import CliRunner

from kvnb import cli, copies
from kvnb.bench import run as runs
from kvnb.bench.check import Expectation, WrongCopy, check
from kvnb.copies import Copy, releases
from kvnb.problem import inputs as inputs_of
from kvnb.problem.case import Case

BFLOAT16 = "13__nv_bfloat16S1_LNS_18Fp8KVCacheDataTypeE0E"
FIRST = "_ZN4vllm30reshape_and_cache_flash_kernelI"
REAL = {  # bfloat16 kernels of the nine wheels, as their cubins name them
    "0.4.2": f"{FIRST}N3c108BFloat16EEEvPKT_S5_PS3_S6_PKliiiiii",
    "0.6.6.post1": f"{FIRST}{BFLOAT16}EEvPKT_S5_PT0_S7_PKliiiiiiff",
    **dict.fromkeys(("0.8.5", "0.10.0", "0.10.1", "0.11.0"), f"{FIRST}{BFLOAT16}EEvPKT_S5_PT0_S7_PKlllllliiiPKfSB_"),
    **dict.fromkeys(("0.17.0", "0.25.0", "0.33.0"), f"{FIRST}{BFLOAT16}EEvPKT_S5_PT0_S7_PKlllllliiiPKfSB_i"),
}
SIX, EIGHT, TEN, ELEVEN = releases.FAMILIES
FAMILY_OF = dict(zip(REAL, (SIX, EIGHT, TEN, TEN, TEN, TEN, ELEVEN, ELEVEN, ELEVEN), strict=True))
ARCHS = ("sm_80", "sm_90")
CACHE = releases.FOLDER  # the reader's own


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setattr(releases, "FOLDER", tmp_path / "cache" / "releases")
    return releases.FOLDER


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(*flags) -> bytes of shipped_kernel.cu as a shared library; each set of flags is compiled once."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc to compile shipped_kernel.cu")
    made = {}

    def library(*flags: str) -> bytes:
        if flags not in made:
            out = tmp_path_factory.mktemp("shipped") / "library.so"
            archs = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in ARCHS]
            source = Path(__file__).with_name("shipped_kernel.cu")
            command = [nvcc, "-shared", "-Xcompiler", "-fPIC", "-cudart", "none", *archs, *flags, source, "-o", out]
            subprocess.run(command, check=True, capture_output=True)
            made[flags] = out.read_bytes()
        return made[flags]

    return library


@pytest.fixture
def shipped(build) -> bytes:
    return build("-DSTRIDE")


def wheel(folder: Path, library: bytes | None, version="0.99.1", name="vllm", member="_C.abi3.so", torch="2.11.0"):
    """A wheel with this library; returns its path."""
    path = folder / f"{name}-{version}-cp38-abi3-manylinux1_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        told = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: torch=={torch}\n"
        archive.writestr(f"{name}-{version}.dist-info/METADATA", told)
        archive.writestr("vllm/_moe_C.abi3.so", b"another library")
        if library is not None:
            archive.writestr(f"vllm/{member}", library)
    return path


# ------------------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize("version", REAL)
def test_the_family_of_every_release_is_read_from_its_symbol(version, monkeypatch):
    quantised = f"{FIRST}13__nv_bfloat16hLNS_18Fp8KVCacheDataTypeE1EEEvPKT_S5_PT0_S7_PKlllllliiiPKfSB_"
    kernels = {REAL[version]: 22, quantised: 33, "_ZN4vllm24reshape_and_cache_kernelIf": 44}
    monkeypatch.setattr(releases, "registers", lambda cubin: kernels)
    assert releases.describe(b"") == {
        "family": FAMILY_OF[version],
        "symbols": {"bfloat16": REAL[version]},
        "registers": {"bfloat16": 22},
    }


@pytest.mark.parametrize("rest", ["iiiiiid", "llllliiiPKfSB_ii", ""])
def test_an_unknown_family_is_refused_with_its_symbol(rest, monkeypatch):
    symbol = f"{FIRST}{BFLOAT16}EEvPKT_S5_PT0_S7_PKl{rest}"
    monkeypatch.setattr(releases, "registers", lambda cubin: {symbol: 1})
    with pytest.raises(ValueError, match=f"not in FAMILIES .* cannot launch it: {symbol}$"):
        releases.describe(b"")


def test_every_documented_release_has_its_call_and_registers():
    assert set(releases.DEFAULT_CALLS) == set(releases.REGISTERS) == set(REAL)
    assert [releases.DEFAULT_CALLS[version].layout for version in ("0.17.0", "0.33.0")] == ["NHD", "packed"]
    assert sorted(REAL, key=releases.numbers) == list(REAL)


def test_documented_registers_are_those_of_the_cache(monkeypatch):
    monkeypatch.setattr(releases, "FOLDER", CACHE)
    there = {r.version: r.facts["registers"] for r in releases.cached() if r.arch == "sm_90" and not r.damage}
    if not (known := {version for version in there if version in releases.REGISTERS}):
        pytest.skip("no documented release is cached for sm_90: kvnb releases 0.4.2 --arch sm_90")
    assert {version: there[version]["bfloat16"] for version in known} == {
        version: releases.REGISTERS[version] for version in known
    }


# The parameters of each family's kernel as its source has them, and what it writes: the packing is held against this.


def scalar(key, value, key_cache, value_cache, slots, block_stride, key_stride, value_stride, heads, size, block_size,
           k_scale=1.0, v_scale=1.0, *, row):  # fmt: skip
    """csrc/cache_kernels.cu at v0.4.2, and with two floats at v0.6.6.post1."""
    assert (k_scale, v_scale) == (1.0, 1.0)
    block, offset = divmod(int(slots[row]), block_size)
    for source, stride, cache in ((key, key_stride, key_cache), (value, value_stride, value_cache)):
        start, row_size = block * block_stride + offset * heads * size, heads * size
        cache[start : start + row_size] = source[row * stride : row * stride + row_size]


def strided(key, value, key_cache, value_cache, slots, block_stride, page_stride, head_stride, key_stride,
            value_stride, heads, size, block_size, k_scale, v_scale, scale_stride=0, *, row):  # fmt: skip
    """csrc/cache_kernels.cu at v0.8.5, and with one int more at v0.17.0."""
    assert k_scale == v_scale != 0 and scale_stride == 0
    block, offset = divmod(int(slots[row]), block_size)
    for source, stride, cache in ((key, key_stride, key_cache), (value, value_stride, value_cache)):
        for head in range(heads):
            start, taken = block * block_stride + offset * page_stride + head * head_stride, row * stride + head * size
            cache[start : start + size] = source[taken : taken + size]


@pytest.fixture
def fake_cuda(monkeypatch):
    """cuda.core, and a stream, that run a family's kernel on the CPU; yields the launches."""
    import ctypes

    import numpy as np
    import torch

    launches = []

    def launch(stream, config, kernel, *arguments):
        launches.append(SimpleNamespace(stream=stream, rows=config.grid, threads=config.block, kernel=kernel))
        family = kernel.family
        kinds = {"i": np.int32, "l": np.int64, "f": np.float32}
        codes = re.findall(r"PKf|S_|\w", family)
        assert [type(argument) for argument in arguments] == [int] * 5 + [kinds.get(code, int) for code in codes]

        def elements(address: int, kind=ctypes.c_int16, count=1 << 24):  # more than is there: only rows are touched
            return np.ctypeslib.as_array((kind * count).from_address(address))

        slots = elements(arguments[4], ctypes.c_int64, config.grid)
        kernel_of = scalar if family in (SIX, EIGHT) else strided
        for row in (slots >= 0).nonzero()[0]:
            rest = [int(argument) if codes[i] != "f" else argument for i, argument in enumerate(arguments[5:])]
            kernel_of(*map(elements, arguments[:4]), slots, *rest, row=int(row))

    core = ModuleType("cuda.core")
    core.launch, core.LaunchConfig = launch, SimpleNamespace
    core.Stream = SimpleNamespace(from_handle=lambda handle: f"stream {handle}")
    core.Device = lambda index: SimpleNamespace(set_current=lambda: None)

    def from_cubin(code: bytes):
        family = FAMILY_OF[code.decode()]
        return SimpleNamespace(get_kernel=lambda symbol: SimpleNamespace(symbol=symbol, family=family))

    core.ObjectCode = SimpleNamespace(from_cubin=from_cubin)
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    return launches


def cache_of(folder: Path, version: str, arch="sm_90", torch="", **files: bytes) -> releases.Release:
    """A cached release of a version whose cubin is its version's name."""
    files = {"kernel.cubin": version.encode()} | {name.replace("_", "."): data for name, data in files.items()}
    entry = folder / f"{version}-{arch}"
    entry.mkdir(parents=True)
    for name, content in files.items():
        (entry / name).write_bytes(content)
    facts = {"version": version, "arch": arch, "torch": torch, "family": FAMILY_OF[version]}
    facts |= {"symbols": {"bfloat16": REAL[version]}, "registers": {"bfloat16": 22}}
    facts["sha256"] = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    (entry / "release.json").write_text(json.dumps(facts))
    return next(r for r in releases.cached() if r.folder == entry)


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
@pytest.mark.parametrize("version", ["0.4.2", "0.6.6.post1", "0.10.0", "0.33.0"])
def test_the_cubin_is_launched_with_what_its_family_takes(version, layout, folder, fake_cuda):
    case = Case(9, 3, 8, block_size=4, cache_bytes=1 << 14, layout=layout, source="qkv", padding=0.2)
    inputs = inputs_of.make(case, "cpu", slot_count=2)
    step = releases._bind_cubin(cache_of(folder, version), inputs)
    expected = Expectation(inputs)
    for slots in inputs.slots:
        step(slots)(inputs.keys[0], inputs.values[0])
        expected.apply([(inputs.keys[0], inputs.values[0], slots)])
    if layout != "NHD" and version in ("0.4.2", "0.6.6.post1"):  # it knows one layout
        with pytest.raises(WrongCopy):
            expected.compare()
    else:
        expected.compare()
    first, *others = fake_cuda
    assert (first.rows, first.threads, first.stream) == (1, 24, "stream 7")  # loads the code before a capture
    assert [launch.rows for launch in others] == [9, 9]
    assert {launch.kernel.symbol for launch in fake_cuda} == {REAL[version]}


@pytest.mark.parametrize("version", ["0.4.2", "0.6.6.post1", "0.10.0", "0.33.0"])
def test_keys_and_values_may_lie_at_strides_of_their_own(version, folder, fake_cuda):
    import torch

    inputs = inputs_of.make(Case(9, 3, 8, block_size=4, cache_bytes=1 << 14), "cpu")
    apart = torch.cat([inputs.values[0]] * 2, dim=1)[:, :3]
    assert apart.stride(0) == 2 * inputs.keys[0].stride(0)
    expected = Expectation(inputs)
    releases._bind_cubin(cache_of(folder, version), inputs)(inputs.slots[0])(inputs.keys[0], apart)
    expected.apply([(inputs.keys[0], inputs.values[0], inputs.slots[0])])
    expected.compare()


@pytest.mark.parametrize(("version", "rows"), [("0.4.2", 9), ("0.6.6.post1", 5), ("0.33.0", 5)])
def test_a_row_per_slot_or_per_key_as_the_release_has_it(version, rows, folder, fake_cuda):
    inputs = inputs_of.make(Case(9, 40, 16, cache_bytes=1 << 18), "cpu")
    step = releases._bind_cubin(cache_of(folder, version), inputs)
    step(inputs.slots[0][:5])(inputs.keys[0], inputs.values[0])
    step(inputs.slots[0][:0])(inputs.keys[0][:0], inputs.values[0][:0])
    assert [(launch.rows, launch.threads) for launch in fake_cuda] == [(1, 512), (rows, 512)]
    with pytest.raises(ValueError, match="slot_mapping is torch.int32, and vLLM's kernel reads torch.int64"):
        step(inputs.slots[0].int())


# ---------------------------------------------------------------------------------------------------- out of a wheel


@pytest.mark.parametrize("flags", [("--compress-mode=none",), ("--compress-mode=size",)])
def test_a_wheel_becomes_a_copy(flags, build, folder, tmp_path):
    kept = releases.keep(wheel(tmp_path, build("-DSTRIDE", *flags)), "sm_90")
    assert [path.name for path in folder.iterdir()] == ["0.99.1-sm_90"]
    assert sorted(path.name for path in kept.folder.iterdir()) == ["kernel.cubin", "release.json"]
    facts = json.loads((kept.folder / "release.json").read_text())
    assert (facts["family"], facts["torch"], facts["arch"]) == (ELEVEN, "2.11.0", "sm_90")
    assert set(facts["symbols"]) == set(facts["registers"]) == {"bfloat16", "float16", "float32"}
    assert facts["symbols"]["bfloat16"] == REAL["0.33.0"]
    assert all(1 <= number <= 32 for number in facts["registers"].values())
    assert list(facts["from"]) == ["vllm-0.99.1-cp38-abi3-manylinux1_x86_64.whl", "vllm/_C.abi3.so"]
    assert str(tmp_path) not in json.dumps(facts)  # it may be carried to another machine
    assert kept.read("kernel.cubin")[:4] == b"\x7fELF"
    [copy] = releases.copies()
    assert (copy.name, copy.family) == ("vllm==0.99.1", "peer")
    assert copy.title == "vLLM 0.99.1's kernel, as compiled in its wheel"


@pytest.mark.parametrize("flags", [("--compress-mode=none",), ("--compress-mode=size",)])
def test_cuobjdump_finds_the_same_code(flags, build, tmp_path):
    tool = shutil.which("cuobjdump") or next(
        (str(at) for folder in sys.path for at in Path(folder).glob("nvidia/cu*/bin/cuobjdump")), None
    )
    if tool is None:
        pytest.skip("needs cuobjdump: pip install nvidia-cuda-cuobjdump")
    library = build("-DSTRIDE", *flags)
    (tmp_path / "library.so").write_bytes(library)

    def told(*options: str) -> str:
        command = [tool, "-arch", "sm_90", *options, "library.so"]
        return subprocess.run(command, cwd=tmp_path, check=True, stdout=-1, stderr=subprocess.STDOUT, text=True).stdout

    told("-xelf", "all")
    ours = releases.cubin_for(library, "sm_90", "w")
    assert ours in [path.read_bytes() for path in tmp_path.glob("*.cubin")]
    used = re.findall(r"Function (\w+):\s+REG:(\d+)", told("-res-usage"))
    assert {name: int(number) for name, number in used} == releases.registers(ours)


def fat_binary(*parts: tuple[int, int, bytes]) -> bytes:
    """A fat binary of (arch, flags, code), packed as its flags say."""
    body = b""
    for arch, flags, code in parts:
        codec = {0x2000: "lz4_raw", 0x8000: "zstd"}.get(flags & 0xA000)
        packed = pyarrow.compress(code, codec=codec, asbytes=True) if codec else code
        size = len(packed) + -len(packed) % 8
        sizes = (len(packed), len(code)) if codec else (0, 0)
        body += struct.pack("<HHIQI8xI8xQ8xQ", 2, 0x101, 64, size, sizes[0], arch, flags, sizes[1])
        body += packed.ljust(size, b"\0")
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@pytest.mark.parametrize("flags", [0x11, 0x2011, 0x8011])
def test_every_packing_is_undone(flags):
    code = releases.KERNEL.encode() * 9
    library = fat_binary((80, 0x11, b"x"), (90, flags, code)) + fat_binary((90, flags | 0x100000, 2 * code))
    assert releases.cubin_for(b"ELF" + library, "sm_90", "w") == code
    assert releases.cubin_for(b"ELF" + library, "sm_90a", "w") == 2 * code
    with pytest.raises(ValueError, match=r"arch: w has the kernel for sm_90, sm_90a, not \(once\) for sm_80"):
        releases.cubin_for(library, "sm_80", "w")


def test_a_fat_binary_of_another_form_is_refused():
    library = fat_binary((90, 0x11, b"code" * 4))
    with pytest.raises(ValueError, match="the header at byte 16 .* unknown form"):
        releases.cubin_for(library[:20] + b"\x20" + library[21:], "sm_90", "w")


def test_a_library_on_the_stable_abi_is_kept_without_the_code_of_other_gpus(shipped, folder, tmp_path):
    kept = releases.keep(wheel(tmp_path, shipped, member="_C_stable_libtorch.abi3.so"), "sm_90")
    library = lzma.decompress(kept.read("library.so.xz"))
    assert len(library) == len(shipped) != library.count(b"\0")
    assert releases.cubin_for(library, "sm_90", "w") == kept.read("kernel.cubin")
    with pytest.raises(ValueError, match=r"has the kernel for sm_90, not"):
        releases.cubin_for(library, "sm_80", "w")


def test_a_wheel_with_an_unknown_kernel_leaves_nothing(build, folder, tmp_path):
    with pytest.raises(ValueError, match=r"cannot launch it: _ZN4vllm30reshape_and_cache_flash_kernelI\w+fSB_d$"):
        releases.keep(wheel(tmp_path, build("-DUNKNOWN")), "sm_90")
    assert not folder.exists()


# ------------------------------------------------------------------------------------- errors, each before anything


def run(*arguments):
    return CliRunner().invoke(cli.app, ["releases", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["0.4.2", "--arch", "90"], "arch: '90' is not like sm_90"),
        (["0.4.2", "0.8.5", "--arch", "sm_90", "--wheel", "w.whl"], "wheel: holds one version, and several are named"),
        (["--arch", "sm_90", "--wheel", "w.whl"], "wheel: there is no file w.whl"),
        (["--arch", "sm_90"], "arch: goes with a version or a wheel; without any of these, what is cached is listed"),
        (["v0.4.2", "0.8.5", "0.33", "--arch", "sm_90"], "v0.4.2, 0.33: not of the form X.Y.Z or X.Y.Z.postN"),
        *(([odd, "--arch", "sm_90"], f"versions: {odd}: not of the form") for odd in ("0.4.2.0", "0.4.2rc1", "4", "a")),
    ],
)
def test_wrong_words_are_refused_before_anything(arguments, told, folder, monkeypatch):
    commands = fake_pip(monkeypatch, None)
    result = run(*arguments)
    assert (result.exit_code, told in result.output) == (2, True), result.output
    assert not folder.exists() and not commands


def test_without_a_gpu_the_arch_has_to_be_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("0.4.2")
    assert (result.exit_code, "no GPU here to take it from; name one: --arch sm_90" in result.output) == (2, True)


def test_a_wheel_that_will_not_do_is_refused(shipped, folder, tmp_path):
    for path, arch, told in (
        (wheel(tmp_path, shipped, name="torch"), "sm_90", "torch-0.99.1-.* is of torch, not of vllm"),
        (wheel(tmp_path, shipped, version=""), "sm_90", "does not say its version: fetch it again"),
        (wheel(tmp_path, None, version="0.99.2"), "sm_90", "is for another platform: no library in it holds"),
        (wheel(tmp_path, shipped), "sm_75", r"has the kernel for sm_(80|90), sm_(80|90), not \(once\) for sm_75"),
    ):
        with pytest.raises(ValueError, match=told):
            releases.keep(path, arch)
    with pytest.raises(ValueError, match="is 0.99.1, not 0.4.2"):
        releases.keep(wheel(tmp_path, shipped), "sm_90", "0.4.2")
    assert not folder.exists()


def fake_pip(monkeypatch, source: Path | None, said: str = "") -> list:
    """pip download, replaced: copies `source`, or fails with `said`; returns the commands."""
    commands = []

    def run(command, **streams):
        commands.append(command)
        if source:
            shutil.copy(source, command[command.index("--dest") + 1])
        return SimpleNamespace(returncode=0 if source else 1, stderr=said)

    monkeypatch.setattr(releases.subprocess, "run", run)
    return commands


RETRY = "WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)': /simple/vllm/\n"
MISSING = "ERROR: No matching distribution found for vllm==0.8.5"
FOUND = "ERROR: Could not find a version that satisfies the requirement vllm==0.8.5 (from versions: {})\n"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (RETRY + FOUND.format("none") + MISSING, "no connection to an index that has vllm"),
        (RETRY + FOUND.format("0.8.4, 0.9.0") + MISSING + "\n\n", MISSING),  # the second try was answered
        (RETRY + "ERROR: Exception:\nTraceback ...\nConnectionError: Max retries\n", "ConnectionError: Max retries"),
        ("ERROR: OSError: [Errno 28] No space left\nWARNING: a connection", "ERROR: OSError: [Errno 28] No space left"),
        ("python: No module named pip\n", "python: No module named pip"),
        ("", "pip does not say why"),
    ],
)  # fmt: skip
def test_a_failed_download_names_the_version_pips_reason_and_the_way_out(said, why, monkeypatch, folder):
    fake_pip(monkeypatch, None, said)
    result = run("0.8.5", "--arch", "sm_90")
    assert result.exit_code == 2
    assert f"kvnb: no wheel of vllm==0.8.5 ({why}); one on disk: kvnb releases --wheel FILE\n" == result.stderr
    assert not list(folder.iterdir())


def test_a_release_that_fails_keeps_no_other_from_the_cache(monkeypatch, shipped, folder, tmp_path):
    fake_pip(monkeypatch, wheel(tmp_path, shipped))
    result = run("0.99.0", "0.99.1", "0.99.2", "--arch", "sm_90")
    assert (result.exit_code, [release.version for release in releases.cached()]) == (2, ["0.99.1"])
    assert result.stdout.startswith("vllm==0.99.1 ") and result.stderr.splitlines() == [
        *(f"kvnb: wheel: vllm-0.99.1-cp38-abi3-manylinux1_x86_64.whl is 0.99.1, not {v}" for v in ("0.99.0", "0.99.2")),
        "kvnb: not cached: 0.99.0, 0.99.2",
    ]


def test_a_cache_that_cannot_be_written_is_said_before_any_download(monkeypatch, shipped, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(releases, "FOLDER", tmp_path / "file" / "releases")
    commands = fake_pip(monkeypatch, wheel(tmp_path, shipped))
    for arguments in (["0.4.2", "0.8.5"], ["--wheel", wheel(tmp_path, shipped)]):
        result = run(*arguments, "--arch", "sm_90")
        assert (result.exit_code, result.stderr) == (2, (
            f"kvnb: cannot write {releases.FOLDER} (Not a directory): set KVNB_CACHE to a folder that can be\n"
        )), result.output  # fmt: skip
    assert not commands


def test_a_full_disk_leaves_nothing_and_says_so(monkeypatch, shipped, folder, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    path = wheel(tmp_path, shipped)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ValueError, match=r"cannot write .*releases \(No space left on device\): set KVNB_CACHE to"):
        releases.keep(path, "sm_90")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("harm", ["cut", "bytes", "text"])
def test_a_damaged_wheel_is_to_be_fetched_again(harm, shipped, folder, tmp_path):
    path = wheel(tmp_path, shipped)
    whole, middle = path.read_bytes(), path.stat().st_size // 2
    assert shipped[:100] in whole, "stored, not packed: a changed byte is a wrong checksum"
    harmed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    path.write_bytes({"cut": whole[:-100], "bytes": harmed, "text": b"Not found"}[harm])
    result = run("--wheel", path, "--arch", "sm_90")
    why = {"cut": "File is not a zip file", "text": "File is not a zip file"}.get(harm, "Bad CRC-32 for file")
    assert result.exit_code == 2 and result.stderr.startswith(f"kvnb: wheel: {path.name} is not a whole wheel ({why}")
    assert result.stderr.endswith("): fetch it again\n") and not folder.exists()


def test_what_is_cached_and_whole_is_not_fetched_again(monkeypatch, shipped, folder, tmp_path):
    commands = fake_pip(monkeypatch, wheel(tmp_path, shipped))
    for _ in range(2):
        assert "vllm==0.99.1" in run("0.99.1", "--arch", "sm_90").output
    assert len(commands) == 1 and "vllm==0.99.1" in commands[0] and "--python-version=3.11" in commands[0]
    (folder / "0.99.1-sm_90" / "kernel.cubin").write_bytes(b"damaged")
    assert "kernel.cubin has changed; mend it" in run("0.99.1", "--arch", "sm_90").output
    assert len(commands) == 2
    assert next(iter(releases.cached())).read("kernel.cubin")[:4] == b"\x7fELF"


def test_a_killed_fetch_leaves_nothing(monkeypatch, shipped, folder, tmp_path):
    """Killed while the files are written: no entry, and none of what was there is lost."""
    code = f"""
import os, signal, sys
from pathlib import Path
from kvnb.copies import Copy, releases
releases.FOLDER = Path({str(folder)!r})
if len(sys.argv) > 2:
    write = Path.write_bytes
    Path.write_bytes = lambda path, data: write(path, data[:9]) and os.kill(os.getpid(), signal.SIGKILL)
releases.keep(Path(sys.argv[1]), "sm_90")
"""
    path = wheel(tmp_path, shipped)
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run([*command, "kill"], check=False).returncode == -9
    assert releases.cached() == [] and list(releases.copies()) == []
    subprocess.run(command, check=True)
    before = releases.cached()[0].read("kernel.cubin")
    assert subprocess.run([*command, "kill"], check=False).returncode == -9
    assert releases.cached()[0].read("kernel.cubin") == before


def test_the_list_says_what_is_cached(folder, shipped, tmp_path):
    assert "no release is cached in" in run().output
    for version in ("0.33.0", "0.4.2", "0.10.1"):
        releases.keep(wheel(tmp_path, shipped, version=version), "sm_90")
    lines = run().output.splitlines()
    assert [line.split()[0] for line in lines] == ["vllm==0.4.2", "vllm==0.10.1", "vllm==0.33.0"]
    assert "sm_90" in lines[0] and "registers" in lines[0] and "kernel.cubin" in lines[0] and "packed" in lines[2]


# ----------------------------------------------------------------------------------------------- copies and reasons


@pytest.fixture
def gpu(monkeypatch):
    """torch.cuda as on a GPU of some capability, with cuda-core there."""
    real = releases.metadata.version

    def pretend(capability=(9, 0), available=True):
        monkeypatch.setattr("torch.cuda.is_available", lambda: available)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: capability)
        monkeypatch.setattr(releases.metadata, "version", lambda name: "1.2.2" if name == "cuda-core" else real(name))

    pretend()
    return pretend


def reason(version: str, timer="graph", name="", **fields) -> str | None:
    copies = {copy.name: copy for copy in releases.copies()}
    case = Case(16, cache_bytes=1 << 24, **fields)
    return copies[name or f"vllm=={version}"].reason_against(case, "skip", timer, "cuda")


@pytest.mark.parametrize(
    ("version", "fields", "told"),
    [
        ("0.4.2", {"value_head_size": 64}, "one head size"),
        ("0.10.0", {"num_kv_heads": 1, "head_size": 20}, None),  # element by element
        ("0.10.1", {"num_kv_heads": 1, "head_size": 20}, "units of 40 bytes would be misaligned"),
        ("0.10.1", {"num_kv_heads": 2, "head_size": 20}, None),
        ("0.10.1", {"num_kv_heads": 2, "head_size": 20, "layout": "HND"}, "units of 40 bytes would be misaligned"),
        ("0.33.0", {"num_kv_heads": 1, "head_size": 16, "layout": "packed"}, "would never end"),
        ("0.33.0", {"num_kv_heads": 1, "head_size": 16, "layout": "NHD"}, None),
        ("0.33.0", {"dtype": "float16"}, "has no instance for float16"),
        ("0.33.0", {"layout": "packed", "source": "qkv"}, None),
        ("0.4.2", {"layout": "packed"}, None),  # wrong, and harmless: for the check to find
    ],
)
def test_what_would_harm_is_refused_and_only_that(version, fields, told, folder, gpu):
    cache_of(folder, version)
    got = reason(version, **fields)
    assert got is None if told is None else told in got


def test_a_cubin_has_no_host_cost_of_its_own(folder, gpu):
    cache_of(folder, "0.4.2")
    assert [reason("0.4.2", timer) for timer in ("graph", "call")] == [None, None]
    for timer in ("host", "eager"):
        assert "launched as a cubin: the host's part of a launch is kvnb's" in reason("0.4.2", timer)


@pytest.mark.parametrize(
    ("capability", "archs", "told"),
    [
        ((9, 0), ["sm_90"], None),
        ((8, 6), ["sm_80"], None),
        ((8, 0), ["sm_86"], "is cached for sm_86 only: kvnb releases 0.4.2 --arch sm_80"),
        ((9, 0), ["sm_80", "sm_86"], "is cached for sm_80, sm_86 only"),
        ((12, 0), ["sm_100"], "is cached for sm_100 only: kvnb releases 0.4.2 --arch sm_120"),
    ],
)
def test_a_gpu_runs_the_code_of_its_own_generation(capability, archs, told, folder, gpu):
    for arch in archs:
        cache_of(folder, "0.4.2", arch)
    gpu(capability)
    got = reason("0.4.2")
    assert got is None if told is None else told in got
    gpu(available=False)
    assert reason("0.4.2") == "needs a CUDA GPU"


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ("0.5.0", None),
        ("0.4.2", "cuda-core 0.4.2 has no cuda.core.Device: 0.5.0 or later is needed"),
        (None, "cuda-core is not installed"),
    ],
)
def test_a_cuda_core_that_cannot_launch_is_the_reason(found, told, folder, gpu, monkeypatch):
    cache_of(folder, "0.4.2")

    def version(name):
        assert name == "cuda-core"
        if found is None:
            raise releases.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(releases.metadata, "version", version)
    assert reason("0.4.2") == told


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', "{}", None])
def test_a_damaged_entry_is_said_when_it_is_used(content, folder, gpu):
    entry = cache_of(folder, "0.4.2").folder
    (entry / "release.json").unlink()
    if content is not None:
        (entry / "release.json").write_text(content)
    [copy] = releases.copies()
    assert copy.title and copy.version
    told = reason("0.4.2")
    assert told.startswith("vllm==0.4.2 in the cache: release.json")
    assert told.endswith("mend it: kvnb releases 0.4.2 --arch sm_90")
    assert told in run().output
    with pytest.raises(ValueError, match="mend it"):
        copy.bind(SimpleNamespace())


def test_a_changed_cubin_is_not_launched(folder, fake_cuda):
    release = cache_of(folder, "0.4.2")
    (release.folder / "kernel.cubin").write_bytes(b"0.8.5")
    inputs = inputs_of.make(Case(4, cache_bytes=1 << 20), "cpu")
    with pytest.raises(ValueError, match=r"kernel.cubin has changed; mend it: kvnb releases 0.4.2 --arch sm_90"):
        releases._bind_cubin(release, inputs)
    assert not fake_cuda


# -------------------------------------------------------------------------------------------------------- own op


def library_of(folder: Path, version: str, torch: str) -> releases.Release:
    release = cache_of(folder, version, torch=torch)
    content = lzma.compress(b"library of " + version.encode())
    (release.folder / "library.so.xz").write_bytes(content)
    facts = json.loads((release.folder / "release.json").read_text())
    facts["sha256"]["library.so.xz"] = hashlib.sha256(content).hexdigest()
    (release.folder / "release.json").write_text(json.dumps(facts))
    return next(r for r in releases.cached() if r.folder == release.folder)


@pytest.mark.parametrize(
    ("running", "installed", "own"),
    [("2.11.0+cu130", False, "0.25.0"), ("2.13.1", False, "0.25.0"), ("2.14.0", False, "0.33.0"),
     ("2.10.0", False, None), ("2.14.0", True, None)],
)  # fmt: skip
def test_one_op_per_process_the_newest_that_this_torch_can_load(running, installed, own, folder, monkeypatch):
    cache_of(folder, "0.17.0", torch="2.10.0")
    library_of(folder, "0.25.0", "2.11.0")
    library_of(folder, "0.33.0", "2.14.0")
    monkeypatch.setattr(releases.metadata, "version", lambda name: running)
    monkeypatch.setattr(releases, "find_spec", lambda name: installed)
    names = [copy.name for copy in releases.copies()]
    others = ["vllm==0.17.0", "vllm==0.25.0", "vllm==0.33.0"]
    assert names == sorted(others + ([f"vllm=={own}.cubin"] if own else []))


@pytest.fixture
def own(folder, gpu, monkeypatch):
    """vllm==0.25.0 with a library, in a torch that can have it."""
    monkeypatch.setattr(releases.metadata, "version", lambda name: "2.11.0")
    release = library_of(folder, "0.25.0", "2.11.0")
    yield release
    releases._op.cache_clear()


def test_the_op_is_called_as_vllm_calls_it(own, monkeypatch):
    import torch

    seen, calls = [], []
    monkeypatch.setattr(torch.ops, "load_library", lambda path: seen.append(Path(path).read_bytes()))
    op = SimpleNamespace(reshape_and_cache_flash=SimpleNamespace(default=lambda *arguments: calls.append(arguments)))
    monkeypatch.setattr(torch.ops, "_C_cache_ops", op, raising=False)
    for timer in ("graph", "call", "host", "eager"):
        assert reason("0.25.0", timer) is None
    assert "launched as a cubin" in reason("0.25.0", "host", "vllm==0.25.0.cubin")
    inputs = inputs_of.make(Case(4, cache_bytes=1 << 20), "cpu")
    copy = next(copy for copy in releases.copies() if copy.name == "vllm==0.25.0")
    assert copy.title == "vLLM 0.25.0's own op, from the library in its wheel"
    copy.bind(inputs)(inputs.slots[0])(inputs.keys[0], inputs.values[0])
    assert seen == [b"library of 0.25.0"]
    [(key, value, key_cache, value_cache, slots, kind, k_scale, v_scale)] = calls
    assert key is inputs.keys[0] and value is inputs.values[0] and slots.equal(inputs.slots[0])
    assert key_cache is inputs.key_cache and value_cache is inputs.value_cache and kind == "auto"
    assert k_scale is v_scale and k_scale.tolist() == [1.0] and k_scale.dtype == torch.float32


def test_a_library_that_does_not_load_is_announced_and_the_cubin_runs(own, monkeypatch, fake_cuda):
    import torch

    def fails(path):
        raise OSError("undefined symbol: aoti_torch_new")

    monkeypatch.setattr(torch.ops, "load_library", fails)
    with pytest.warns(UserWarning, match=r"vllm==0\.25\.0 launches its cubin: its library does not load into torch"):
        told = reason("0.25.0", "host")
    assert "(undefined symbol: aoti_torch_new): the host's part of a launch is kvnb's" in told
    assert reason("0.25.0", "graph") is None
    inputs = inputs_of.make(Case(4, cache_bytes=1 << 20), "cpu")
    releases._bind_op(own, inputs)(inputs.slots[0])(inputs.keys[0], inputs.values[0])
    assert [launch.rows for launch in fake_cuda] == [1, 4]


def test_a_damaged_library_is_no_reason_to_fall_back(own):
    (own.folder / "library.so.xz").write_bytes(b"")
    assert "library.so.xz has changed; mend it: kvnb releases 0.25.0 --arch sm_90" in reason("0.25.0")


def test_the_cache_is_read_without_torch(folder):
    code = "import sys, kvnb.copies.releases; print({'torch', 'cuda', 'pyarrow', 'vllm'} & set(sys.modules))"
    cache_of(folder, "0.4.2")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"KVNB_CACHE": str(folder.parent)},
    )  # fmt: skip
    assert done.stdout == "set()\n"


# ------------------------------------------------------------------------------------------- the real ones, if asked

WHEELS = pytest.mark.skipif(
    not os.environ.get("KVNB_WHEELS"), reason="KVNB_WHEELS=1 downloads a wheel of vLLM (68 MB) and reads it"
)


@WHEELS
def test_the_wheel_of_0_4_2(folder):
    result = run("0.4.2", "--arch", "sm_90")
    assert result.exit_code == 0, result.output
    [release] = releases.cached()
    assert release.facts["family"] == SIX and release.facts["symbols"]["bfloat16"] == REAL["0.4.2"]
    assert release.facts["registers"] == dict.fromkeys(("bfloat16", "float16", "float32"), releases.REGISTERS["0.4.2"])
    assert release.facts["torch"] == "2.3.0" and not list(folder.glob(".*"))


# What a release writes wrongly: kvnb.check's verdict on it, by layout. Rows of keys, not of slots: one row too many.
WRONG = {"0.4.2": ("NHD", "HND", "packed"), "0.6.6.post1": ("HND", "packed")}


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
@pytest.mark.parametrize("copy", releases.COPIES, ids=lambda copy: copy.name)
def test_every_cached_release_writes_the_right_bits_or_is_known_not_to(copy, layout):
    case = Case(37, 8, 128, cache_bytes=1 << 22, layout=layout, source="qkv", padding=0.2)
    if reason := copy.reason_on(case, "skip", "cuda"):
        pytest.skip(reason)
    if layout in WRONG.get(copy.name.removeprefix("vllm=="), ()):
        with pytest.raises(WrongCopy):
            check(copy, case, "cuda")
    else:
        check(copy, case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [copy.name for copy in releases.COPIES])
def test_a_release_is_captured_in_a_graph_as_one_node(name):
    import torch

    from kvnb.bench.timing import Gpu

    copy = next(copy for copy in releases.COPIES if copy.name == name)
    inputs = inputs_of.make(Case(37, cache_bytes=1 << 22), "cuda")
    if reason := copy.reason_on(inputs.case, "skip", "cuda"):
        pytest.skip(reason)
    write = copy.bind(inputs)(inputs.slots[0])
    graph = Gpu(torch.device("cuda", 0)).capture([lambda: write(inputs.keys[0], inputs.values[0])])
    assert graph.nodes == 1
    expected = Expectation(inputs)
    graph.replay()
    torch.cuda.synchronize()
    expected.apply([(inputs.keys[0], inputs.values[0], inputs.slots[0])])
    expected.compare()


def test_all_leaves_older_releases_to_the_grid_that_compares_them(monkeypatch, tmp_path):
    old, new, cubin = "vllm==0.9.2", "vllm==0.10.0", "vllm==0.10.0.cubin"
    made = {name: Copy(name, "peer", ("skip",), print) for name in (old, new, cubin)}
    monkeypatch.setattr(releases, "COPIES", tuple(made.values()))
    monkeypatch.setattr(copies, "REGISTRY", copies.REGISTRY | made)

    def chosen(names: str | list[str]) -> list[str]:
        return runs.planned("cpu", "quick", names, "all", None, 1, 1, tmp_path / "run.parquet")[0].copies

    assert [name for name in made if releases.superseded(name)] == [old]
    assert {new, cubin, "kvnb"} <= set(chosen("all"))
    assert old not in chosen("all")
    assert chosen([old]) == [old]
    assert not releases.superseded("kvnb")
