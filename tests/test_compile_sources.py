"""What needs no GPU to be known of csrc/: which headers it includes, that nvcc alone compiles it for every
architecture in use, and what the machine code of the 16-byte kernel does in which order.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
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


LAUNCHES = ("plain", "dependent", "dependent, late")  # enum class Launch


@dataclass(frozen=True)
class Instruction:
    name: str
    writes: str
    reads: str

    def reads_register(self, number: int) -> bool:
        return re.search(rf"\bR{number}\b", self.reads) is not None


@dataclass(frozen=True)
class Kernel:
    """A kernel's machine code. The last argument of its template says how it is launched."""

    mangled: str
    registers: int  # of a thread
    code: tuple[Instruction, ...]

    def places(self, *prefixes: str) -> list[int]:
        return [place for place, instruction in enumerate(self.code) if instruction.name.startswith(prefixes)]

    def before_the_first_load(self, *prefixes: str) -> int:
        return sum(place < self.places("LDG")[0] for place in self.places(*prefixes))

    @property
    def launch(self) -> str:
        return LAUNCHES[int(re.search("LaunchE([012])E", self.mangled)[1])]

    @property
    def dependent(self) -> bool:
        return self.launch != "plain"

    def __repr__(self) -> str:
        return self.mangled


@pytest.fixture(scope="module")
def kernels(nvcc, tmp_path_factory) -> list[Kernel]:
    """Every kernel that kvnb_copy.cu makes for sm_90, its instructions in order."""
    nvdisasm, cubin = nvdisasm_of(nvcc), tmp_path_factory.mktemp("sass") / "kvnb_copy.cubin"
    options = ["-std=c++17", "-O3", "-arch=sm_90", "-cubin", "-Xptxas=-v", "-o", cubin]
    command = [nvcc, *options, paths.CSRC / "kvnb_copy.cu"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = dict(re.findall(r"Compiling entry function '(\w+)' for 'sm_90'[^']*Used (\d+) registers", told))
    text = subprocess.run([nvdisasm, "-c", cubin], check=True, capture_output=True, text=True).stdout
    one = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^,;]*),?([^;]*);"
    sections = (section.partition(":") for section in re.split(r"^\.text\.", text, flags=re.MULTILINE)[1:])
    return [
        Kernel(name, int(registers[name]), tuple(Instruction(*parts) for parts in re.findall(one, body)))
        for name, _, body in sections
    ]


@pytest.fixture
def wide(kernels) -> list[Kernel]:
    """The kernels that move 16 bytes at a time."""
    wide = [kernel for kernel in kernels if kernel.places("LDG.E.128")]
    assert {kernel.dependent for kernel in wide} == {False, True}
    return wide


def test_every_16_byte_load_is_under_way_before_the_first_store(wide):
    for kernel in wide:
        loads, stores = kernel.places("LDG.E.128"), kernel.places("STG")
        assert len(loads) == len(stores), kernel
        assert len(loads) % 2 == 0, kernel  # K and V
        assert stores == kernel.places("STG.E.128"), kernel
        assert max(loads) < min(stores), kernel


def test_slot_and_rows_cost_one_memory_latency(wide):
    """Nothing reads what a load brings, the slot or a row, before the last load is under way."""
    for kernel in wide:
        loads = kernel.places("LDG")
        assert len(loads) > len(kernel.places("LDG.E.128")), kernel  # rows, and a slot
        for place in loads:
            width = {"128": 4, "64": 2}.get(kernel.code[place].name.removeprefix("LDG.E.").split(".")[0], 1)
            first = int(kernel.code[place].writes.removeprefix("R"))
            between = kernel.code[place + 1 : max(loads) + 1]
            brought = range(first, first + width)
            assert not [i for i in between for register in brought if i.reads_register(register)], kernel


def test_only_other_sizes_cost_a_multiplication_for_the_token(kernels):
    """Beside the one of the slot's address, which all need."""
    multiplied = {
        name: {kernel.before_the_first_load("IMAD.WIDE") for kernel in kernels if name in kernel.mangled}
        for name in ("fast_kernel", "CompactPlan", "ApartPlan", "DividedPlan")
    }
    assert multiplied == {"fast_kernel": {2}, "CompactPlan": {1}, "ApartPlan": {1}, "DividedPlan": {2}}


def test_the_pair_kernel_waits_for_one_line_of_parameters(kernels):
    """Parameters begin at 0x210; before them lie what every kernel reads: its stack, its grid, a descriptor.

    Heads of the source that lie apart cost one constant of the next line; other sizes cost the stores a second line,
    whose constants are fetched with an index, behind the last load.
    """
    for kernel in [kernel for kernel in kernels if "pair_kernel" in kernel.mangled]:
        read = {int(at, 16) for one in kernel.code for at in re.findall(r"c\[0x0\]\[(0x\w+)\]", one.reads)}
        line, late = {at for at in read if at >= 0x210}, kernel.places("LDC")
        if "DividedPlan" in kernel.mangled:
            assert line <= set(range(0x210, 0x238, 4)), kernel
            late = [place for place in late if re.search(r"\[R\d+\+0x2[3-7]\w\]", kernel.code[place].reads)]
            assert len(late) >= 6, kernel
            assert min(late) > max(kernel.places("LDG")), kernel
            continue
        assert not [place for place in late if re.search(r"\[R", kernel.code[place].reads)], kernel
        assert line == set(range(0x210, 0x240, 8)) | (read & set(range(0x214, 0x244, 4))), kernel
        assert {at for at in line if at >= 0x240} == ({0x240} if "ApartPlan" in kernel.mangled else set()), kernel


def test_nothing_bounds_a_thread_where_pairs_fill_the_blocks(kernels):
    bounded = {}
    for kernel in kernels:
        if found := re.search(r"pair_kernelI.*[jm]Lb([01])E", kernel.mangled):
            bounded.setdefault(found[1], set()).add(bool(kernel.before_the_first_load("VIMNMX", "ISETP")))
    assert bounded == {"0": {True}, "1": {False}}


def test_a_dependent_launch_waits_before_it_reads_anything(kernels):
    for kernel in kernels:
        waits = kernel.places("ACQBULK")
        assert len(waits) == kernel.dependent, kernel
        assert not waits or waits[0] < min(kernel.places("LDG")), kernel


def test_the_next_kernel_may_launch_before_this_one_waits_or_late_before_it_loads(kernels):
    """Behind the loads, ptxas moves griddepcontrol.launch_dependents (PREEXIT) behind the wait for the slot."""
    for kernel in kernels:
        lets, waits, loads = (kernel.places(name) for name in ("PREEXIT", "ACQBULK", "LDG"))
        assert len(lets) == kernel.dependent, kernel
        if kernel.launch == "dependent":
            assert lets[0] < waits[0], kernel
        elif kernel.dependent:
            assert waits[0] < lets[0] < loads[0], kernel


def test_slots_are_loaded_to_stay_in_l2_or_as_rows_are(kernels):
    """A load with a cache hint has a descriptor of its own. The fast kernel gives one to threads of one pair."""
    staying = []
    for kernel in [kernel for kernel in kernels if "general_kernel" not in kernel.mangled]:
        slot, *rows = (re.search(r"desc\[(UR\d+)\]", kernel.code[at].reads)[1] for at in kernel.places("LDG"))
        stays = re.search(r"pair_kernelI.*[jm]Lb[01]ELb1E|fast_kernelI[jm]Li1E", kernel.mangled) is not None
        assert (slot not in rows) == stays, kernel
        staying.append(stays)
    assert {*staying} == {True, False}


def test_a_multiprocessor_can_hold_the_threads_that_a_launch_counts_on(kernels):
    """sm_90 has 65,536 registers: for 2,048 threads of one pair each, 1,536 of two, 1,024 of four."""
    for kernel in kernels:
        pairs = re.search(r"fast_kernelI[jm]Li([124])E", kernel.mangled)
        assert kernel.registers <= {"1": 32, "2": 40, "4": 64}[pairs[1] if pairs else "1"], kernel


def test_no_kernel_spills_to_local_memory(kernels):
    names = [kernel.mangled for kernel in kernels]
    assert sum("fast_kernel" in name for name in names) == 2 * (3 + 2 + 2)  # int64 and int32 slots; late: one pair only
    for plan in ("CompactPlan", "ApartPlan", "DividedPlan"):
        assert sum(plan in name for name in names) == 2 * 2 * 2 * 3, plan
    assert sum("general_kernel" in name for name in names) == 5 * 3  # vector widths, launches
    assert [kernel for kernel in kernels if kernel.places("LDL", "STL")] == []
