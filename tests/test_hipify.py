"""scripts/hipify: plain HIP that says what the one GPU source says, by the names that torch's hipify gives."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC, SCRIPT = ROOT / "csrc", ROOT / "scripts" / "hipify"
HIP_INCLUDE, BITCODE = Path("/usr/include/hip/hip_runtime.h"), "/usr/lib/x86_64-linux-gnu/amdgcn/bitcode"


@pytest.fixture(scope="module")
def hipify() -> ModuleType:
    spec = importlib.util.spec_from_loader("hipify_script", SourceFileLoader("hipify_script", str(SCRIPT)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("plain")
    subprocess.run([sys.executable, SCRIPT, "--out", out], check=True)
    return out


def test_names_are_those_of_torch(hipify: ModuleType) -> None:
    """The header makes cudaX and hipX of one X, or says both; torch's table has to map one to the other."""
    from torch.utils.hipify.cuda_to_hip_mappings import CUDA_TO_HIP_MAPPINGS

    table: dict[str, str] = {}
    for part in CUDA_TO_HIP_MAPPINGS:
        for cuda, hip in part.items():
            table.setdefault(cuda, hip if isinstance(hip, str) else hip[0])
    header = (CSRC / "gpu/portable.cuh").read_text()
    names = hipify.neutral_names(header)
    said = dict(re.findall(r"^#define (gpu\w+) (cuda\w+)$", header, re.M))
    assert {"gpuMalloc", "gpuStream_t"} <= set(names)
    for neutral, hip in names.items():
        cuda = said.get(neutral, "cuda" + hip.removeprefix("hip"))
        assert table.get(cuda) == hip, neutral
    structs = dict(re.findall(r"using (\w+) = ((?:hip|cuda)\w+);", header))
    assert structs == {"DeviceProperty": "cudaDeviceProp"} and table["cudaDeviceProp"] in header


def sources() -> list[str]:
    """Without endings; of vendor's libraries those for HIP."""
    others = {"emulated", "cublaslt", "cudnn"}
    found = (p.relative_to(CSRC / "gpu").with_suffix("") for p in (CSRC / "gpu").rglob("*.cu"))
    return sorted(str(p) for p in found if p.stem not in others)


def preprocessed(path: Path, include: list[Path]) -> str:
    """What the compiler sees under HIP, without whitespace."""
    flags = ["-E", "-P", "-x", "c++", "-std=c++17", "-D__HIP__", "-D__HIPCC__"]
    command = ["g++", *flags, *(f"-I{i}" for i in include), str(path)]
    return "".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("name", sources())
def test_means_the_same(name: str, plain: Path, tmp_path: Path) -> None:
    """Token for token what the original is when compiled as HIP."""
    (tmp_path / "hip").mkdir()
    (tmp_path / "hip/hip_runtime.h").write_text("")
    shown = preprocessed(plain / f"gpu/{name}.hip", [tmp_path, plain, CSRC])
    assert shown == preprocessed(CSRC / f"gpu/{name}.cu", [tmp_path, CSRC])
    assert "hipMalloc" in shown or name != "backend"


def test_nothing_neutral_is_left(plain: Path) -> None:
    """In code; comments may speak of CUDA and of the emulation."""
    found = [p for p in (plain / "gpu").rglob("*") if p.is_file()]
    assert {str(p.relative_to(plain / "gpu").with_suffix("")) for p in found if p.suffix == ".hip"} == set(sources())
    for path in found:
        code = re.sub(r"//.*", "", path.read_text())
        assert not re.findall(
            r"\b(?:gpu|cuda)[A-Z]\w*|\bGPU_SHARED\b|\bNEEDLE_(?:EMULATION|VENDOR)\b|emulation::", code
        ), path


@pytest.mark.parametrize("name", sources())
def test_compiles(name: str, plain: Path) -> None:
    if not (shutil.which("clang++-19") and HIP_INCLUDE.exists() and Path(BITCODE).exists()):
        pytest.skip("the HIP toolchain is missing")
    toolchain = ["-x", "hip", "--offload-arch=gfx90a", "--rocm-path=/usr", f"--rocm-device-lib-path={BITCODE}"]
    flags = ["-std=c++17", "-fsyntax-only", f"-I{plain}", f"-I{CSRC}"]
    subprocess.run(["clang++-19", *toolchain, *flags, str(plain / f"gpu/{name}.hip")], check=True)


NESTED = """\
#if defined(NEEDLE_EMULATION)
a
#elif defined(__HIP__)
b
#ifdef OTHER
c
#elif SOME > 2
d
#else
e
#endif
#else
f
#ifdef OTHER
g
#endif
#endif
#ifndef __HIP__
h
#else
i
#endif
"""


def test_branches(hipify: ModuleType) -> None:
    assert hipify.resolve(NESTED) == "b\n#ifdef OTHER\nc\n#elif SOME > 2\nd\n#else\ne\n#endif\ni\n"


def test_refuses_what_it_cannot_settle() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "nothing.hip"], capture_output=True, text=True)
    assert done.returncode != 0 and re.match(
        r"\[hipify\] expects one of .*matmul\.hip.*, got nothing\.hip\.", done.stderr
    )
