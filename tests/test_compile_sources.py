"""What needs no GPU to be known of csrc/: which headers it includes, that nvcc alone compiles it for every
architecture in use, and what the machine code of the 16-byte kernel does in which order.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvnb import build, paths

CUDA_SOURCES = sorted(paths.CSRC.glob("*.cu"))
ARCHITECTURES = (75, 80, 90, 100, 120)
STABLE_ABI = re.compile(r"torch/(csrc/stable/|csrc/inductor/aoti_torch/c/shim\.h$|headeronly/)")


def included(source: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', source.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "source", sorted(set(paths.CSRC.iterdir()) - {paths.CSRC / "bindings.cpp"}), ids=lambda path: path.name
)
def test_kernels_know_no_torch(source):
    foreign = [name for name in included(source) if re.match(r"torch|ATen|c10|pybind11|Python\.h", name)]
    assert foreign == []


def test_bindings_include_the_stable_abi_only():
    names = [name for name in included(paths.CSRC / "bindings.cpp") if "/" in name or name.endswith(".h")]
    assert [name for name in names if not STABLE_ABI.match(name)] == ["launch.h"]


@pytest.fixture(scope="module")
def nvcc() -> str:
    try:
        return str(build._cuda_home() / "bin" / "nvcc")
    except build.BuildError as error:
        pytest.skip(f"needs nvcc: {error}")


@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda path: path.name)
def test_nvcc_alone_compiles_it_for_every_architecture(nvcc, source, tmp_path):
    listed = subprocess.run([nvcc, "--list-gpu-code"], check=True, capture_output=True, text=True).stdout
    known = [arch for arch in ARCHITECTURES if f"sm_{arch}" in listed.split()]
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in known]
    command = [
        nvcc,
        "-std=c++17",
        "-O3",
        "-Werror=all-warnings",
        "-t=2",
        *targets,
        "-c",
        str(source),
        "-o",
        str(tmp_path / "o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if len(known) < len(ARCHITECTURES):
        pytest.skip(f"compiled for sm {known}; this nvcc does not know the others of {ARCHITECTURES}")


# ------------------------------------------------------------------------------------------------ machine code, sm_90


def nvdisasm_of(nvcc: str) -> str:
    """nvdisasm: beside nvcc, on PATH, or from the package nvidia-cuda-nvdisasm."""
    places = [
        Path(nvcc).parent,
        *(Path(folder) / "nvidia" / cuda / "bin" for folder in sys.path for cuda in ("cu12", "cu13")),
    ]
    found = next(
        (str(place / "nvdisasm") for place in places if (place / "nvdisasm").is_file()), shutil.which("nvdisasm")
    )
    if found is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    return found


@pytest.fixture(scope="module")
def kernels(nvcc, tmp_path_factory) -> dict[str, list[str]]:
    """Instructions, in order, of every kernel that kvnb_copy.cu makes for sm_90, by mangled name."""
    nvdisasm, cubin = nvdisasm_of(nvcc), tmp_path_factory.mktemp("sass") / "kvnb_copy.cubin"
    subprocess.run(
        [nvcc, "-std=c++17", "-O3", "-arch=sm_90", "-cubin", "-o", cubin, paths.CSRC / "kvnb_copy.cu"], check=True
    )
    text = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    kernels = {}
    for section in re.split(r"^\.text\.", text, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition(":")
        kernels[name] = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", body)
    return kernels


def kernel(kernels: dict[str, list[str]], pairs: int, dependent: bool, vector: str = "5uint4") -> list[str]:
    [name] = [name for name in kernels if f"copy_kernelI{vector}Li{pairs}ELb{int(dependent)}E" in name]
    return kernels[name]


@pytest.mark.parametrize("dependent", [False, True], ids=["plain", "dependent"])
@pytest.mark.parametrize("pairs", [1, 2])
def test_every_16_byte_load_is_under_way_before_the_first_store(kernels, pairs, dependent):
    instructions = kernel(kernels, pairs, dependent)
    loads = [i for i, name in enumerate(instructions) if name.startswith("LDG.E.128")]
    stores = [i for i, name in enumerate(instructions) if name.startswith("STG")]
    assert len(loads) == len(stores) == 2 * pairs  # K and V
    assert all(instructions[i].startswith("STG.E.128") for i in stores)
    assert max(loads) < min(stores)


@pytest.mark.parametrize("pairs", [1, 2])
def test_a_dependent_launch_waits_before_it_reads_anything(kernels, pairs):
    instructions = kernel(kernels, pairs, dependent=True)
    assert instructions.index("ACQBULK") < min(i for i, name in enumerate(instructions) if name.startswith("LDG"))
    assert "ACQBULK" not in kernel(kernels, pairs, dependent=False)


def test_no_kernel_spills_to_local_memory(kernels):
    assert len(kernels) == 5 * 2 * 2  # vector widths, pairs, dependent or not
    local = {name for name, instructions in kernels.items() for i in instructions if i.startswith(("LDL", "STL"))}
    assert local == set()
