"""What is checked and measured on a CUDA or ROCm machine, offline and in phases of under nine minutes:

  build               the core and the GPU library, for this Python and this GPU alone
  sanitize [TOOL..]   the self-check, and a sample of the kernels' tests, under compute-sanitizer
  test [WORD..]       the tests of GPU kernels, fusions and models: file by file, or all at once where pytest-xdist is there
  choose [WORD..]     our kernels or the vendor's: what each model's problems get, both times, and the time by kind of step
  bench [ROW..]       needle beside torch eager and torch.compile (gpu_rows.py); `timm`: 30 models that nothing was tuned on
  report              all of it as text

Each phase writes FOLDER/PHASE.json after every part and, called again, goes on with what is not there; --again does all anew.
Nothing is downloaded, and no .git and no virtual environment are needed: the machine's own Python has torch, numpy, safetensors,
tqdm, pybind11, scikit-build-core, pytest, pytest-timeout and hypothesis. --device emulation rehearses everything at tiny sizes;
--rehearse does so with a sample of each phase and ends with their times, and with what would be left out on hardware and why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("needle", "torch2needle", "operator_fusion")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
TESTS = (
    "test_gpu*.py",
    "test_fusion*.py",
    "test_contract*.py",
    "test_rules*.py",
    "test_kernel_table.py",
    "test_main_job.py",
)
PROBE = "needle_gpu_probe"  # runs the self-check of a library
TORCH = "2.13"  # of csrc/torch, which uses what LibTorch's stable ABI has since then
OPENS = """
import json, platform, sys, torch, needle as ndl
device = ndl.emulation() if sys.argv[1] == "emulation" else ndl.hip() if torch.version.hip else ndl.cuda()
device.require()
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
found = {"needle": ndl.__file__, "python": platform.python_version(), "torch": torch.__version__, "gpu": gpu}
print(json.dumps(found | device.vendors()))
"""
REASONS = {124: "the time was up", 127: "not found"}


class Check:
    """One call: what was asked for, where things lie, and the phase's results so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.until = time.monotonic() + 60 * args.minutes
        self.work, self.out = args.work.resolve(), args.out.resolve()
        self.site = self.work / "site"
        self.out.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = {} if args.again else self.read(args.phase)

    def read(self, phase: str) -> dict[str, Any]:
        path = self.out / f"{phase}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def put(self, part: str, result: dict[str, Any]) -> None:
        self.results[part] = result
        path = self.out / f"{self.args.phase}.json"
        path.with_suffix(".part").write_text(json.dumps(self.results, indent=1) + "\n")
        os.replace(path.with_suffix(".part"), path)

    def good(self, part: str) -> bool:
        return bool(self.results.get(part, {}).get("good"))

    def left(self) -> float:
        return self.until - time.monotonic()

    def environment(self) -> dict[str, str]:
        """The built packages, and neither the checkout's own nor installed ones."""
        path = os.pathsep.join(map(str, (self.site, ROOT / "profiling", ROOT / "tests")))
        kept = {k: v for k, v in os.environ.items() if k != "NEEDLE_GPU_LIBRARIES"}
        return kept | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}

    def run(self, title: str, *command: object) -> dict[str, Any]:
        """Runs a part within the phase's time; what it printed is shown and its end kept."""
        print(f"\n== {title}", flush=True)
        start = time.monotonic()
        with open(self.work / "log", "w+") as log:
            process = subprocess.Popen(
                [str(c) for c in command],
                cwd=ROOT,
                env=self.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                code = process.wait(max(1, self.left()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = 124
            log.seek(0)
            text = log.read()
        print(text[-4000:], end="", flush=True)
        why = {} if code == 0 else {"why": REASONS.get(code, f"exit code {code}"), "tail": text[-2000:]}
        return {"good": code == 0, "seconds": round(time.monotonic() - start, 1), **why}


# -- build ---------------------------------------------------------------------------------------------------------------


def gpu_options(device: str) -> list[str]:
    """How the library is built, for the GPU at hand alone."""
    if device == "emulation":
        return ["-DNEEDLE_EMULATION=ON"]
    import torch

    if torch.version.hip:
        architecture = torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
        return ["-DNEEDLE_HIP=ON", f"-DNEEDLE_HIP_ARCHITECTURES={architecture}"]
    major, minor = torch.cuda.get_device_capability()
    wheels = ";".join(p for p in sys.path if (Path(p) / "nvidia").is_dir())
    return ["-DNEEDLE_CUDA=ON", f"-DNEEDLE_CUDA_ARCHITECTURES={major}{minor}", f"-DNEEDLE_WHEELS={wheels}"]


def for_this_torch() -> str:
    """Why torch.ops.needle is left out, or nothing."""
    import torch

    version = torch.__version__
    return "" if version.startswith(f"{TORCH}.") else f"torch.ops.needle is built for torch {TORCH}, this is {version}"


def build(check: Check) -> None:
    import pybind11

    for package in PACKAGES:
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / package, check.site / package, ignore=ignored, dirs_exist_ok=True)
    why = for_this_torch()
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    common = ["cmake", *generator, "-DCMAKE_BUILD_TYPE=Release"]
    core = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    core += [] if why else ["-DNEEDLE_TORCH=ON"]
    make(
        check,
        "core",
        [*common, "-S", ROOT, *core],
        ["_core", *([] if why else ["needle_torch"])],
        "_core*.so",
        "libneedle.so",
    )
    for library in (check.args.built or check.work / "core").rglob("libneedle_torch.so") if not why else ():
        shutil.copy(library, check.site / "needle")
    check.put("torch.ops.needle", {"good": True, **({"why": why} if why else {})})
    options = [*common, "-S", ROOT / "csrc" / "gpu", *gpu_options(check.args.device)]
    make(check, "gpu", options, ["all"], "libneedle_[!t]*.so", PROBE)
    ended = check.run("what was built opens", sys.executable, "-c", OPENS, check.args.device)
    text = (check.work / "log").read_text().strip().splitlines()
    check.put("opens", ended | (json.loads(text[-1]) if ended["good"] else {}))


def make(check: Check, name: str, configure: list[Any], targets: list[str], *files: str) -> None:
    """Configures and builds a part and puts its libraries beside needle; --built brings libraries that are there."""
    where = check.work / name
    ended = check.run(f"{name}: configure", *configure, "-B", where)
    libraries = lambda folder: [p for pattern in files for p in sorted(folder.rglob(pattern))]  # noqa: E731
    found = libraries(check.args.built) if check.args.built else []
    if ended["good"] and not found:
        jobs = ["--parallel", str(os.cpu_count())]
        ended = check.run(f"{name}: build", "cmake", "--build", where, "--target", *targets, *jobs)
        found = libraries(where)
    for library in found if ended["good"] else ():
        place = check.site / "needle" / ("lib" if library.name == "libneedle.so" else "")  # as `_core` looks for it
        place = check.site if library.name == PROBE else place
        place.mkdir(exist_ok=True)
        shutil.copy(library, place)
    check.put(name, ended | {"files": [p.name for p in found]})


# -- test, sanitize ------------------------------------------------------------------------------------------------------


def device_name(device: str) -> str:
    if device == "emulation":
        return "emulation_w32"
    import torch

    return "hip" if torch.version.hip else "cuda"


def pytest(*arguments: object) -> list[object]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]


def sample(device: str) -> list[object]:
    """A few tests that reach most kinds of kernels."""
    return pytest("-x", "tests/test_gpu.py", "-k", f"{device} and (64-64-64 or strided)")


def sanitize(check: Check) -> None:
    tool, device = shutil.which("compute-sanitizer"), device_name(check.args.device)
    own_check = [check.site / PROBE, check.site / "needle" / f"libneedle_{device}.so"]
    for kind in parts(check, TOOLS):
        if not tool:
            check.put(kind, {"good": False, "why": "compute-sanitizer is missing"})
            continue
        options = [tool, "--tool", kind, "--error-exitcode", "1", "--target-processes", "all"]
        ended = check.run(f"{kind}: self-check", *options, *own_check)
        check.put(kind, check.run(f"{kind}: tests", *options, *sample(device)) if ended["good"] else ended)


def test_files() -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in TESTS for p in (ROOT / "tests").glob(pattern))


def test(check: Check) -> None:
    name = device_name(check.args.device)
    # Of models the small ones: the others take minutes of float64 torch on the CPU.
    chosen = ["-k", f"{name} and (small or not test_main_job)"]
    files = list(parts(check, test_files()))
    if check.args.device == "cuda" and len(files) > 1 and importlib.util.find_spec("xdist"):
        os.environ["OMP_NUM_THREADS"] = "1"  # references on the CPU, a process for each core
        workers = ["-n", max(1, (os.cpu_count() or 2) - 2), "--timeout-method", "thread"]
        ended = check.run(f"{len(files)} files", *pytest(*files, *chosen, *workers))
        for file in files:
            check.put(file, ended)
        return
    for file in parts(check, files):
        check.put(file, check.run(file, *pytest(file, *chosen)))
        if check.results[file].get("why") == "exit code 5":
            check.put(file, {"good": True, "why": "no test of it is for this device"})


def parts(check: Check, names: Iterable[str]) -> Iterable[str]:
    """Those asked for that are not good yet, while there is time."""
    words = check.args.words
    for name in names:
        if (words and not any(w in name for w in words)) or check.good(name):
            continue
        if check.left() < 5:
            print("[gpu_check] the time is up (--minutes): the next call goes on here.")
            return
        yield name


# -- choose, bench, report -----------------------------------------------------------------------------------------------


def rows(check: Check) -> None:
    """gpu_rows.py in a process of its own; when one ends in a row, say by a fault of the device, the next goes on behind it."""
    path = check.out / f"{check.args.phase}.json"
    if check.args.again:
        path.unlink(missing_ok=True)
    while True:
        before = len(check.read(check.args.phase).get("rows", []))
        options = ["--device", check.args.device, "--json", path, "--minutes", max(0, check.left() / 60 - 1)]
        options += ["--mode", check.args.mode]
        command = [ROOT / "profiling" / "gpu_rows.py", check.args.phase, *check.args.words, *options]
        ended = check.run(check.args.phase, sys.executable, *command)
        check.results = check.read(check.args.phase)
        if ended["good"] or check.left() < 60 or len(check.results.get("rows", [])) == before:
            check.results["ended"] = ended
            return


def report(check: Check) -> None:
    found = {phase: check.read(phase) for phase in PHASES if phase != "report"}
    lines = [f"gpu_check on {platform.node() or 'this machine'}, Python {platform.python_version()}"]
    for phase, results in found.items():
        lines += ["", f"== {phase}" + ("" if results else ": not run")]
        for part, result in results.items():
            if part == "rows":
                lines += [row_text(r) for r in result]
            elif isinstance(result, dict):
                how = "good" if result.get("good") else "failed"
                lines.append(f"{part}: {how}" + (f", {result['why']}" if "why" in result else ""))
                lines += [f"  {o['name']}: {o['text']}" for o in result.get("libraries", [])]
            else:
                lines.append(f"{part}: {result}")
    (check.out / "report.txt").write_text("\n".join(lines) + "\n")
    (check.out / "gpu-check.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(lines))
    check.results = {}


def row_text(result: dict[str, Any]) -> str:
    cells = [f"{n} {v:.3g} ms" for n, v in result.get("ms", {}).items()]
    cells += [f"{n} / needle {m:.2f} ({a:.2f}-{b:.2f})" for n, (m, a, b) in result.get("ratios", {}).items()]
    if "choices" in result:
        taken = [c["taken"] for c in result["choices"]]
        cells += [f"{taken.count(t)} by {t}" for t in sorted(set(taken))]
    cells += [f"{n} unmeasured: {why}" for n, why in result.get("unmeasured", {}).items()]
    return f"{result['row']}, {result['precision']}: " + "; ".join(cells)


# -- rehearsal -----------------------------------------------------------------------------------------------------------

ROWS = ["linear-relu", "encoder S=6, batch 2, tf32"]
SAMPLE = {"sanitize": ["memcheck"], "test": ["test_gpu_memory"], "choose": ROWS, "bench": ROWS}


def left_out() -> list[str]:
    """What this machine lacks for phases on hardware, in sentences."""
    needs = {
        "cmake": "nothing can be built",
        "nvcc": "no library for CUDA can be built (for ROCm it is clang that is needed)",
        "compute-sanitizer": "sanitize fails",
    }
    lacks = [f"{tool} is missing, so {result}" for tool, result in needs.items() if not shutil.which(tool)]
    if not any((Path(p) / "nvidia").is_dir() for p in sys.path):
        lacks.append(
            "no wheels of cuDNN or cuBLAS lie here; unless the toolkit has them, products and convolutions are ours alone"
        )
    return lacks + ([for_this_torch()] if for_this_torch() else [])


def rehearse(args: argparse.Namespace) -> int:
    """Every phase anew in the emulation, until one fails; then their times and what would be left out."""
    common = ["--device", "emulation", "--out", str(args.out), "--work", str(args.work), "--again"]
    common += ["--minutes", str(args.minutes), *(["--built", str(args.built)] if args.built else [])]
    lines, code = [], 0
    for phase in PHASES:
        start = time.monotonic()
        code = main([phase, *SAMPLE.get(phase, []), *common])
        lines.append(f"{phase}: {time.monotonic() - start:.0f} s{', failed' if code else ''}")
        if code:
            break
    print(
        "\n".join(
            [
                "",
                "[gpu_check] rehearsed in the emulation:",
                *lines,
                "Left out on hardware:",
                *(left_out() or ["nothing"]),
            ]
        )
    )
    return code


PHASES = {"build": build, "sanitize": sanitize, "test": test, "choose": rows, "bench": rows, "report": report}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("phase", choices=PHASES, nargs="?")
    add("--rehearse", action="store_true", help="a sample of every phase in the emulation")
    add("words", nargs="*", help="only tools, files or rows with one of these in their names")
    add("--out", type=Path, default=ROOT / "build" / "gpu-check" / "out", help="where the results go")
    add("--work", type=Path, default=ROOT / "build" / "gpu-check", help="where is built; keep it between the phases")
    add("--minutes", type=float, default=8.5, help="of this call: what does not fit is left to the next")
    add("--again", action="store_true", help="forget the phase's results")
    add("--device", choices=("cuda", "emulation"), default="cuda", help="cuda is ROCm's name in torch, too")
    add("--mode", default="max-autotune", help="of torch.compile in bench")
    add("--built", type=Path, help="build: take _core and libneedle_* from this folder, and only configure")
    args = parser.parse_args(argv)
    if not args.phase and not args.rehearse:
        parser.error("names a phase, or --rehearse")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    if args.rehearse:
        return rehearse(args)
    check = Check(args)
    check.work.mkdir(parents=True, exist_ok=True)
    if args.device == "cuda" and args.phase != "report":
        import torch

        if not torch.cuda.is_available():
            print("[gpu_check] this machine has no GPU that torch can use; --device emulation rehearses without one.")
            return 1
    if args.phase not in ("build", "report") and not (check.site / "needle").is_dir():
        print("[gpu_check] nothing is built yet: `scripts/gpu_check build` comes first.")
        return 1
    PHASES[args.phase](check)
    parts_ = [r for r in check.results.values() if isinstance(r, dict)]
    good = all(r.get("good") for r in parts_)
    print(f"\n[gpu_check] {args.phase}: {'done' if good else 'failed'}; results are in {check.out}.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
