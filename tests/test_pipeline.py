"""The pipeline scripts at small sizes: what they write, and what they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
pytest.importorskip("sklearn")

import pipeline
import report
import stages
from pictures import as_pixels, picture_crops
from pipeline import OptionError, Options

ROOT = Path(__file__).parents[1]
STAGES = ["torch eager", "torch channels_last", "needle eager", "needle fused", "needle compiled"]
CASES = {
    "resnet18": Options("resnet18", height=64, width=64, classes=10, rounds=2, pictures=4),
    "unet": Options("unet", height=48, width=64, classes=3, rounds=1, pictures=3, base=8, batch=2),
}


@pytest.fixture(scope="module", params=CASES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The document of a run, and the folder that it was written to."""
    threads = torch.get_num_threads()
    result, images = stages.run(CASES[request.param])
    torch.set_num_threads(threads)
    folder = tmp_path_factory.mktemp(request.param)
    document = report.document([result])
    assert report.write(folder, document, [images]) == folder / "index.html"
    return document, folder


def test_json(written: tuple[dict[str, Any], Path]) -> None:
    document, folder = written
    data = json.loads((folder / "profile.json").read_text())
    assert data == json.loads(json.dumps(document))
    (r,) = data["results"]
    assert [s["name"] for s in r["stages"]] == STAGES
    for s in r["stages"]:
        assert 0 < s["min"] <= s["median"] <= s["max"]
        assert len(s["times"]) == r["rounds"]
        assert 0 <= s["float64"] <= r["limit"] < 1e-4
    assert r["stages"][0]["speedup"]["torch eager"] == {"median": 1, "min": 1, "max": 1}
    assert list(r["seconds"]) == ["convert", "fuse", "compile", "first_result"]
    assert r["seconds"]["first_result"] > sum(r["seconds"][k] for k in ("convert", "fuse", "compile")) * 0.99
    assert set(r["profiles"]) == {"eager", "fused", "compiled"}
    for p in r["profiles"].values():
        assert sum(row["share"] for row in p["rows"]) == pytest.approx(1)
    assert sum(r["fusion"]["counts"].values()) == len(r["fusion"]["fired"]) > 0
    assert r["profiles"]["compiled"]["memory"]["peak"] <= r["profiles"]["compiled"]["memory"]["arena"]
    assert "tmp" not in json.dumps(data)  # no paths of this machine


def test_convolutions_do_the_same_operations_in_every_form(written: tuple[dict[str, Any], Path]) -> None:
    """Fusing and compiling change where operations run, not how many a convolution takes."""
    (r,) = written[0]["results"]
    sums = [sum(row["flops"] for row in p["rows"] if "conv" in row["op"]) for p in r["profiles"].values()]
    assert len(set(sums)) == 1 and sums[0] > 0


def test_agreement(written: tuple[dict[str, Any], Path]) -> None:
    (r,) = written[0]["results"]
    agreement = r["agreement"]
    assert list(agreement["agree"]) == STAGES
    assert len(agreement["by_picture"]) == agreement["pictures"]
    assert agreement["agree"]["torch eager"] == 1
    assert min(agreement["agree"].values()) > 0.99


class StageCells(HTMLParser):
    """Texts of the stage table: (stage, field) -> text; and every text of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.cells: dict[tuple[str, str], str] = {}
        self.text = ""
        self._stage, self._key = "", None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        self._stage = given.get("data-stage", "") if tag == "tr" else self._stage
        self._key = (self._stage, given["data-field"]) if "data-field" in given else None

    def handle_endtag(self, tag: str) -> None:
        self._key = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._key:
            self.cells[self._key] = self.cells.get(self._key, "") + data


def test_page_shows_the_numbers_of_the_json(written: tuple[dict[str, Any], Path]) -> None:
    _, folder = written
    (r,) = json.loads((folder / "profile.json").read_text())["results"]
    page = (folder / "index.html").read_text()
    shown = StageCells(page)
    for s in r["stages"]:
        name = s["name"]
        assert shown.cells[name, "median ms"] == f"{1e3 * s['median']:.3f}"
        assert shown.cells[name, "min"] == f"{1e3 * s['min']:.3f}"
        assert shown.cells[name, "max"] == f"{1e3 * s['max']:.3f}"
        for peer, ratio in s["speedup"].items():
            numbers = [float(v) for v in re.findall(r"[\d.]+", shown.cells[name, f"against {peer}"])]
            assert numbers == [pytest.approx(ratio[k], abs=0.006) for k in ("median", "min", "max")]
        assert float(shown.cells[name, "error, float64"]) == pytest.approx(s["float64"], rel=0.06)
        assert float(shown.cells[name, "error, float32"]) == pytest.approx(s["float32"], rel=0.06)
        assert shown.cells[name, "agree"] == f"{100 * r['agreement']['agree'][name]:.2f}%"
    for value in r["seconds"].values():
        assert f"{value:.3f} s" in shown.text
    for pattern in r["fusion"]["counts"]:
        assert pattern in shown.text
    assert f"{len(r['profiles']['compiled']['rows'])} steps" in shown.text
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", page)
    assert page.count("data:image/jpeg;base64,") == r["agreement"]["pictures"]
    assert all(f"All {len(p['rows'])} rows" in page for p in r["profiles"].values())


def test_trace(written: tuple[dict[str, Any], Path]) -> None:
    document, folder = written
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len(titles) == 3
    steps = [e for e in events if e["ph"] == "X"]
    assert len(steps) == sum(len(p["timeline"]) for p in document["results"][0]["profiles"].values())


def test_console_fits(written: tuple[dict[str, Any], Path]) -> None:
    text = report.console(written[0])
    assert all(name in text for name in STAGES)
    tables = [line for line in text.splitlines() if "conv2d" in line]
    assert tables and max(map(len, tables)) <= 120


def test_too_large_an_error_ends_the_program(written: tuple[dict[str, Any], Path]) -> None:
    document = json.loads(json.dumps(written[0]))
    report.require_agreement(document)
    document["results"][0]["stages"][3]["float64"] = float("nan")
    with pytest.raises(SystemExit, match=r"needle fused differs from float64 torch by nan, the limit is"):
        report.require_agreement(document)


class TestPictures:
    def test_seeded(self) -> None:
        a, b, c = picture_crops(3, 40, 60), picture_crops(3, 40, 60), picture_crops(3, 40, 60, seed=1)
        assert a.shape == (3, 3, 40, 60) and a.dtype == torch.float32 and a.is_contiguous()
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert torch.equal(picture_crops(2, 40, 60), a[:2])  # more pictures begin with the same ones

    def test_normalised_by_imagenet(self) -> None:
        x = picture_crops(4, 32, 32)
        assert -2.2 < x.min() < 0 < x.max() < 2.7
        pixels = as_pixels(x[0])
        assert pixels.shape == (32, 32, 3) and pixels.dtype == "uint8" and pixels.std() > 5


class TestOptions:
    def options(self, *argv: str) -> Options:
        options = pipeline.parse(["resnet18", "resnet50"], CASES["resnet18"], argv)
        pipeline.check(options)
        return options

    def test_flags(self) -> None:
        o = self.options("--model", "resnet50", "--batch", "3", "--height", "70", "--rounds", "9", "--threads", "1")
        assert (o.model, o.batch, o.height, o.width, o.rounds, o.threads) == ("resnet50", 3, 70, 64, 9, 1)

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--dtype", "float16"], r"^\[pipeline\] --dtype expects float32, got float16\.$"),
            (["--batch", "0"], r"^\[pipeline\] --batch expects at least 1, got 0\.$"),
            (["--weights", "missing.pt"], r"^\[pipeline\] --weights expects an existing file, got missing\.pt\.$"),
            (["--weights", "weights.bin"], r"^\[pipeline\] --weights expects a \.pt or \.safetensors file, got weights\.bin\.$"),
        ],
    )  # fmt: skip
    def test_refused(self, argv: list[str], message: str) -> None:
        with pytest.raises(OptionError, match=message):
            self.options(*argv)

    @pytest.mark.parametrize("device", ["cuda", "hip"])
    def test_missing_device(self, device: str) -> None:
        with pytest.raises(OptionError, match=rf"^\[{device}\] .*\.$|^\[pipeline\] models run on device cpu only"):
            stages.run(Options("resnet18", 64, 64, 10, device=device))

    def test_weights(self, tmp_path: Path) -> None:
        from safetensors.torch import save_file

        model = stages.build(CASES["resnet18"])
        with torch.no_grad():
            model.fc.bias += 1  # type: ignore[union-attr,operator]
        torch.save(model.state_dict(), tmp_path / "w.pt")
        save_file(model.state_dict(), tmp_path / "w.safetensors")
        for name in ("w.pt", "w.safetensors"):
            o = self.options("--weights", str(tmp_path / name))
            loaded = stages.build(o)
            assert torch.equal(loaded.fc.bias, model.fc.bias)  # type: ignore[union-attr,arg-type]
        (tmp_path / "bad.pt").write_bytes(b"not a state dict")
        with pytest.raises(OptionError, match=r"^\[pipeline\] bad\.pt cannot be read as a state dict"):
            stages.build(self.options("--weights", str(tmp_path / "bad.pt")))
        with pytest.raises(OptionError, match=r"^\[pipeline\] w\.pt does not fit resnet50"):
            stages.build(self.options("--model", "resnet50", "--weights", str(tmp_path / "w.pt")))


def run_script(environment: dict[str, str], name: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "profiling" / name), *argv]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_script_with_the_numpy_backend(tmp_path: Path, script_environment: dict[str, str]) -> None:
    """The oracle's backend has no compiled stage; everything else is the same."""
    argv = ["--backend", "np", "--base", "4", "--height", "32", "--width", "32", "--rounds", "1", "--pictures", "1"]
    done = run_script(script_environment, "profile_full_pipeline_unet.py", *argv, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (r,) = json.loads((tmp_path / "profile.json").read_text())["results"]
    assert [s["name"] for s in r["stages"]] == STAGES[:4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.html", "profile.json", "trace.json"]


def test_script_says_one_sentence(script_environment: dict[str, str]) -> None:
    done = run_script(script_environment, "profile_full_pipeline_resnet.py", "--dtype", "float16")
    assert done.returncode == 1
    assert done.stderr == "[pipeline] --dtype expects float32, got float16.\n"
    assert done.stdout == ""


def test_interrupt_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "time_stages", interrupted)
    argv = ["--height", "32", "--width", "32", "--out", str(tmp_path / "report")]
    with pytest.raises(SystemExit) as e:
        pipeline.main(["resnet18"], CASES["resnet18"], argv)
    assert e.value.code == 130
    assert "interrupted; nothing was written." in capsys.readouterr().out
    assert not (tmp_path / "report").exists()
