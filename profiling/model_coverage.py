"""How many of the listed models convert and match torch: `python profiling/model_coverage.py --full|--sample|--models NAME ...`

Every model runs in a process of its own with a limit on time and memory (zoo/worker.py). Results go to --json after each model,
beside those that the file holds already; --resume leaves out models that it holds. --table writes them as a page.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from needle import isa
from needle.profiler import cpu_name

LIST = Path(__file__).parent / "zoo" / "models.json"
HARD = LIST.with_name("models_hard.json")  # zoo/hard/README.md
TYPES = LIST.with_name("models_types.json")  # zoo/types.py
PACKAGES = LIST.with_name("models_packages.json")  # of packages that nobody tuned for
LISTS = {"usual": LIST, "hard": HARD, "types": TYPES, "packages": PACKAGES}
STAGES = ("torch", "convert", "plain", "fused", "compiled", "free", "altered")
ONNX = ("torch", "convert", "onnx")  # of --onnx
DYNAMO = ("torch", "fallback", "dynamo")  # of --dynamo
TRAIN = ("torch", "train")  # of --train
FORMS = ("plain", "fused", "compiled", "free")
SECONDS = 240  # of processor time, so that other work on the machine does not count; WAIT: of the clock
WAIT = 3600
SAMPLE = (  # what CI runs: small, and together most rules
    *("torchvision/mobilenet_v3_small", "torchvision/shufflenet_v2_x0_5", "torchvision/squeezenet1_1"),
    *("torchvision/regnet_x_400mf", "torchvision/resnet18", "torchvision/efficientnet_b0"),
    *("timm/convnext_atto", "timm/ghostnet_050", "timm/resnest14d", "timm/pvt_v2_b0", "timm/test_vit_relpos"),
    *("timm/starnet_s1", "timm/xcit_nano_12_p8_224", "monai/UNet"),
    *("transformers/BertForSequenceClassification", "transformers/GPT2LMHeadModel", "transformers/T5EncoderModel"),
    *("transformers/ConvNextForImageClassification", "audio/CRNN", "audio/DeepSpeech2"),
)
ALTERED = {"hook": "a hook that changes a layer's result", "no_grad": "a layer without gradients"}
Row = dict[str, Any]


def run(name: str, seconds: int, stages: Sequence[str] = STAGES) -> Row:
    """The stages of one model by name; a process that ends early leaves the reason in the stage it was in."""
    here = str(Path(__file__).parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)]),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "zoo.worker", name, str(seconds), *stages]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
        try:
            out, err = process.communicate(timeout=WAIT)
            last = next((line.strip() for line in reversed(err.split("\n")) if line.strip()), "nothing was printed")
            reason = f"ended with exit status {process.returncode}: {last}"[:300] if process.returncode else ""
            if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
                reason = f"took more than {seconds} s of processor time"
        except subprocess.TimeoutExpired:
            process.kill()
            out, reason = process.communicate()[0], f"took more than {WAIT} s"
    row: Row = {}
    for line in out.splitlines():
        if line.startswith('{"stage"'):
            facts = json.loads(line)
            row[facts.pop("stage")] = facts
    if reason:
        stage = next((s for s in stages if s not in row), stages[-1])
        row[stage] = {"ok": False, "reason": reason}
    return row


def passed(row: Row, form: str) -> bool:
    return bool(row.get(form, {}).get("ok"))


def complaint(row: Row, stages: Sequence[str] = STAGES) -> str:
    """Why the first stage that failed did, or an empty string; a size that capture fixed and the net refuses is no failure."""
    for stage in stages:
        facts = row.get(stage, {"ok": False, "reason": "did not run"})
        if not facts["ok"] and not facts.get("fixed"):
            return f"{stage}: {reason_of(facts)}"
    return ""


def reason_of(facts: Row) -> str:
    if facts.get("missing"):
        return "; ".join(f"{m['op']} ({m['count']}x): {m['reason']}" for m in facts["missing"])
    if "inputs" in facts:
        return next(f"{i['shapes']}: {reason_of(i)}" for i in facts["inputs"] if not i["ok"] and not i.get("fixed"))
    if "changes" in facts:
        return next(f"{name}: {reason_of(row)}" for name, row in facts["changes"].items() if not row["ok"])
    if "error" in facts:
        return f"error {facts['error']:.1e}, torch's own {facts['torch_error']:.1e}"
    return facts.get("reason", "torch's output is not finite")


def percent(part: int, whole: int) -> str:
    return f"{part} / {whole} ({100 * part / max(whole, 1):.3g} %)"


def page(rows: dict[str, Row]) -> str:
    """The results as Markdown: shares by library, what failed and why, every model."""
    libraries: dict[str, list[Row]] = collections.defaultdict(list)
    for name, row in rows.items():
        libraries[name.partition("/")[0]].append(row)
    groups = [*libraries.items(), ("all", list(rows.values()))]
    lines = ["| | plain | fused | compiled | other sizes |", "|---|---|---|---|---|"]
    for library, own in groups:
        cells = [percent(sum(passed(r, f) for r in own), len(own)) for f in FORMS]
        fixed = sum(bool(r.get("free", {}).get("fixed")) for r in own)
        cells[-1] += f", {fixed} refused" if fixed else ""
        lines.append(f"| {library} | {' | '.join(cells)} |")
    lines += ["", "Refused: torch.export fixed a size, and the net says so for others."]
    altered: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows.values():
        for change, facts in row.get("altered", {}).get("changes", {}).items():
            altered[change].append(facts)
    for change, found in altered.items():
        refused = sum(bool(f.get("refused")) for f in found)
        equal = sum(f["ok"] for f in found) - refused
        lines += ["", f"With {ALTERED[change]}: {equal} of {len(found)} equal torch, {refused} are refused."]
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    for name, row in rows.items():
        if text := complaint(row):
            reasons[text].append(name)
    lines += ["", "Failures, by the first stage that failed:" if reasons else "No failures."]
    lines += [""] if reasons else []
    for text, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"- {', '.join(names)}: {text}".replace("|", "\\|"))
    lines += ["", "Error against float64 torch, of the largest output; in brackets float32 torch's own:", ""]
    lines += ["| model | parameters, M | plain | compiled |", "|---|---|---|---|"]
    for name, row in rows.items():
        millions = row.get("torch", {}).get("parameters", 0) / 1e6
        lines.append(f"| {name} | {millions:.1f} | {shown(row, 'plain')} | {shown(row, 'compiled')} |")
    return "\n".join(lines) + "\n"


def shown(row: Row, form: str) -> str:
    facts = row.get(form, {})
    return f"{facts['error']:.1e} ({facts['torch_error']:.1e})" if "error" in facts else "-"


def write(path: Path, rows: dict[str, Row]) -> None:
    """A JSON object with a line for each model."""
    lines = ",\n".join(f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in rows.items())
    path.write_text(f'{{"cpu": {json.dumps(cpu_name())}, "isa": {json.dumps(isa())}, "models": {{\n{lines}\n}}}}\n')


def report(name: str, row: Row, stages: Sequence[str], forms: Sequence[str]) -> None:
    told = "  ".join(f"{f} {'ok' if passed(row, f) else 'no'}" for f in forms)
    seconds = sum(s.get("seconds", 0) for s in row.values())
    print(f"{name:44} {told}  {seconds:5.1f} s  {complaint(row, stages)[:200]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--full", action="store_true", help="every model of the list")
    what.add_argument("--sample", action="store_true", help="the fixed sample that CI runs; fails if one of them does")
    what.add_argument("--models", nargs="+", metavar="NAME", help="names, or beginnings of names, of the list")
    parser.add_argument("--list", choices=LISTS, default="usual", help="which list --full and --models mean")
    parser.add_argument("--onnx", action="store_true", help="as ONNX files in onnxruntime, in place of the other forms")
    parser.add_argument("--dynamo", action="store_true", help='with fallback="torch" and under torch.compile instead')
    parser.add_argument("--train", action="store_true", help="a compiled training step beside torch's instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="processor time for each model")
    args = parser.parse_args()
    stages = ONNX if args.onnx else DYNAMO if args.dynamo else TRAIN if args.train else STAGES
    forms = FORMS if stages is STAGES else DYNAMO[1:] if args.dynamo else stages[-1:]
    file = LIST if args.sample else LISTS[args.list]
    listed = [e["name"] for e in json.loads(file.read_text())]
    chosen = listed if args.full else [n for n in listed if n in SAMPLE]
    if args.models:
        chosen = [n for n in listed if n.startswith(tuple(args.models))]
    if not chosen:
        raise SystemExit(f"[coverage] expects names of {file.name}, got {' '.join(args.models)}.")
    rows: dict[str, Row] = {}
    if args.json and args.json.exists():
        rows = json.loads(args.json.read_text())["models"]
    for name in chosen:
        if not (args.resume and name in rows):
            rows[name] = run(name, args.seconds, stages)
            print(f"{chosen.index(name) + 1:3} / {len(chosen)}", end="  ")
            report(name, rows[name], stages, forms)
        if args.json:  # after every model, so that an interrupted run keeps what it has
            write(args.json, {n: rows[n] for n in listed if n in rows})
    if args.table:
        args.table.write_text(page({n: rows[n] for n in listed if n in rows}))
    failed = [n for n in chosen if complaint(rows[n], stages)]
    for form in forms:
        print(f"{form:9} {percent(sum(passed(rows[n], form) for n in chosen), len(chosen))}")
    if args.dynamo:
        made, native = (sum(rows[n].get("dynamo", {}).get(key, 0) for n in chosen) for key in ("graphs", "native"))
        print(f"graphs of torch.compile in needle {percent(native, made)}")
    if args.train and (ratios := sorted(r["train"]["ratio"] for n in chosen if passed(r := rows[n], "train"))):
        print(f"torch's time over ours {ratios[0]:.2f} at least, {ratios[len(ratios) // 2]:.2f} in the middle")
    if args.sample and failed:
        raise SystemExit(f"[coverage] {len(failed)} models of the sample fail (first: {failed[0]}).")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
