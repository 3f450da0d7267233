"""Leaves out each barrier of the GPU kernels in turn and runs the tests of its file in the emulation, whose errors must tell:

    python tests/gpu_mutations.py [--wave 64] [--method watch|seeds] [FILE...]

watch: every access is looked at (csrc/gpu/emulation_races.cpp). seeds: results alone, at three seeds. It needs build-gpu,
compiles one or two files for a barrier, and writes a row of profiling/results/gpu-mutations.json after each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPU, BUILD, RESULTS = ROOT / "csrc/gpu", ROOT / "build-gpu", ROOT / "profiling/results/gpu-mutations.json"
BARRIER = re.compile(r"\b(?:block|wave)_sync\(\);")
# What is compiled anew for a file with barriers, and the tests that reach it.
REACH = {
    "attention.cu": (["attention"], "test_gpu_attention.py", "attention"),
    "attention_few.cu": (["attention_few"], "test_gpu_attention.py", "attention"),
    "attention_mma.cu": (["attention_mma"], "test_gpu_attention.py", "attention"),
    "chain.cu": (["chain"], "test_gpu_chains.py", "programs"),
    "columns.cuh": (["batch_norm", "linear_grad"], "test_gpu_rows.py", "batch_norm"),
    "depthwise.cu": (["depthwise"], "test_gpu_quads.py", "test_depthwise"),
    "distances.cu": (["distances"], "test_gpu_kernels.py", "cdist"),
    "gather.cu": (["gather"], "test_gpu_arrays.py", "scatter_add_rows"),
    "gemm.cu": (["gemm"], "test_gpu_kernels.py", "matmul or conv2d"),
    "movement.cu": (["movement"], "test_gpu_arrays.py", "transposed_copies"),
    "recurrent.cu": (["recurrent"], "test_gpu_arrays.py", "recurrent_layers"),
    "reduce.cu": (["reduce"], "test_gpu_arrays.py", "reductions or argmax"),
    "scan.cu": (["scan"], "test_gpu_lines.py", "running"),
    "sort.cu": (["sort"], "test_gpu_lines.py", "order and not 257"),
    "team.cuh": (["norm", "softmax"], "test_gpu_rows.py", "softmax or norm"),
}
FLAGS = ["-std=c++17", "-O2", "-w", "-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE", "-fno-gnu-unique"]
SEEDS = {"watch": (1,), "seeds": (1, 2, 3)}


def barriers(file: str) -> list[int]:
    return [n for n, line in enumerate((GPU / file).read_text().splitlines()) if BARRIER.search(line)]


def compiled(source: Path, folder: Path, wave: int, watched: bool) -> Path:
    made = folder / f"{source.stem}.o"
    flags = [*FLAGS, *(["-fsanitize=thread"] if watched else []), "-DNEEDLE_EMULATION", f"-DNEEDLE_WAVE={wave}"]
    subprocess.run(["g++", *flags, f"-I{folder}", f"-I{GPU.parent}", "-x", "c++", "-c", source, "-o", made], check=True)
    return made


def outcome(file: str, line: int | None, wave: int, method: str) -> str:
    """What the tests say without that line's barrier (of the file as it is, for None): "passed", or their first error."""
    users, tests, words = REACH[file]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(GPU, folder / "gpu")
        if line is not None:
            lines = (GPU / file).read_text().splitlines()
            lines[line] = BARRIER.sub(";", lines[line])
            (folder / "gpu" / file).write_text("\n".join(lines))
        made = [compiled(folder / "gpu" / f"{user}.cu", folder, wave, method == "watch") for user in users]
        if method == "watch":
            made.append(compiled(GPU / "emulation_races.cpp", folder, wave, False))
        built = BUILD / f"CMakeFiles/needle_emulation_w{wave}.dir/emulation"
        rest = [p for p in built.glob("*.cpp.o") if p.name.partition(".")[0] not in users]
        library = folder / f"libneedle_emulation_w{wave}.so"
        subprocess.run(["g++", "-shared", "-Wl,--no-undefined", *made, *rest, "-ldl", "-o", library], check=True)
        for seed in SEEDS[method]:
            only = ["-k", f"({words}) and emulation_w{wave}"]
            command = [
                sys.executable,
                *f"-m pytest tests/{tests} -x -q -s --no-header -p no:cacheprovider".split(),
                *only,
            ]
            settings = {"NEEDLE_GPU_LIBRARIES": name, "NEEDLE_EMULATION_SEED": str(seed), "PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
            if done.returncode:
                return error(done.stdout + done.stderr, seed)
    return "passed"


def error(text: str, seed: int) -> str:
    told = re.search(r"\[launch\] no barrier [^,]*", text) or re.search(r"^E +(.+)", text, re.M)
    return f"seed {seed}: " + (told[told.lastindex or 0] if told else text.strip().splitlines()[-1])[:120]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=list(REACH))
    parser.add_argument("--wave", type=int, default=32, choices=(32, 64))
    parser.add_argument("--method", choices=SEEDS, default="watch")
    args = parser.parse_args()
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    silent = 0
    for file in args.files:
        lines = (GPU / file).read_text().splitlines()
        for n, line in enumerate([None, *barriers(file)]):
            row = {"file": file, "barrier": n, "wave": args.wave, "method": args.method}
            row["before"] = "" if line is None else next(s.strip() for s in lines[line + 1 :] if s.strip())
            row["outcome"] = outcome(file, line, args.wave, args.method)
            silent += (row["outcome"] == "passed") != (line is None)
            print(row, flush=True)
            key = ("file", "barrier", "wave", "method")
            rows = [r for r in rows if any(r[k] != row[k] for k in key)] + [row]
            rows.sort(key=lambda r: [str(r[k]) for k in key])
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{silent} outcomes are not as they should be.")
    return silent > 0


if __name__ == "__main__":
    sys.exit(main())
