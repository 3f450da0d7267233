"""The Fashion-MNIST network in its three forms against torch, its files, and its command."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
torch = pytest.importorskip("torch")

import needle as ndl  # noqa: E402
import torch2needle.relax  # noqa: E402, F401  (registers torch's functions)
from needle.course.tvm import fashion  # noqa: E402

pytestmark = pytest.mark.skipif(ndl.default_device() == ndl.cpu_numpy(), reason="needle's kernels need NDArrays")
TRAINED = Path(__file__).parents[2] / "shared" / "data" / "fashion_mnist_conv_params.npz"
BATCH = 4


def weights(channels: int = 32, hidden: int = 100) -> fashion.Weights:
    def normal(*shape: int) -> np.ndarray:
        return (np.random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype("float32")

    return {
        "conv2d_weight": normal(channels, 1, 3, 3),
        "conv2d_bias": normal(channels),
        "linear0_weight": normal(hidden, channels * 13 * 13),
        "linear0_bias": normal(hidden),
        "linear1_weight": normal(10, hidden),
        "linear1_bias": normal(10),
    }


def in_torch(w: fashion.Weights, images: np.ndarray) -> np.ndarray:
    t = {k: torch.from_numpy(v) for k, v in w.items()}
    y = torch.conv2d(torch.from_numpy(images), t["conv2d_weight"], t["conv2d_bias"]).relu()
    y = torch.nn.functional.max_pool2d(y, 2).flatten(1)
    y = torch.nn.functional.linear(y, t["linear0_weight"], t["linear0_bias"]).relu()
    return torch.nn.functional.linear(y, t["linear1_weight"], t["linear1_bias"]).numpy()


FORMS: dict[str, Callable] = {
    **fashion.FORMS,
    "torch": lambda w, batch: fashion.network(w, batch, lambda b: fashion.VendorCalls(b, "env.torch")),
}


@pytest.mark.parametrize("source", ["random", "trained"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, source: str) -> None:
    if source == "trained" and not TRAINED.is_file():
        pytest.skip("no trained weights beside the repository")
    w = weights() if source == "random" else fashion.read_weights(TRAINED)
    images = np.random.random_sample((BATCH + 2, 1, 28, 28)).astype("float32")  # the last call is not full
    module = FORMS[form](w, BATCH)
    got, want = fashion.Predictor(module, BATCH)(images), in_torch(w, images)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    text = module.script()
    prefix = {"vendor": "env", "torch": "env.torch"}.get(form)
    assert ("call_dps_packed" in text) == (prefix is not None)
    assert prefix is None or f'"{prefix}.conv2d"' in text
    assert ("conv2d_init" in text and "T.vectorized(" in text) == (form == "scheduled")


# -- files ---------------------------------------------------------------------------------------------------------------


def test_weights_come_back_from_npz_and_pickle(tmp_path: Path) -> None:
    w = weights(2, 3)
    np.savez(tmp_path / "w.npz", **w)
    (tmp_path / "w.pkl").write_bytes(pickle.dumps(w))
    (tmp_path / "double.pkl").write_bytes(pickle.dumps({k: v.astype("float64") for k, v in w.items()}, 2))
    for name in ("w.npz", "w.pkl", "double.pkl"):
        got = fashion.read_weights(tmp_path / name)
        assert got.keys() == w.keys()
        for k, v in w.items():
            assert got[k].dtype == "float32"
            np.testing.assert_array_equal(got[k], v)


class Evil:
    def __reduce__(self) -> Any:
        return (RAN.append, (1,))


RAN: list[int] = []


def test_bad_weights(tmp_path: Path) -> None:
    w = weights(2, 3)
    bad: dict[str, tuple[Any, str]] = {
        "missing": (
            {k: v for k, v in w.items() if k != "linear0_bias"},
            "expects an array linear0_bias of 1 axes, got nothing",
        ),
        "rank": (w | {"linear1_weight": w["linear1_bias"]}, r"linear1_weight of 2 axes, got shape \(10,\)"),
        "shape": (w | {"linear0_weight": w["linear0_weight"][:, :-1]}, r"linear0_weight expects shape \(3, 338\)"),
        "channels": (w | {"conv2d_weight": np.zeros((2, 3, 3, 3), "float32")}, "kernels of one channel"),
        "calls": ({"conv2d_weight": Evil()}, "holds more than plain data"),
        "objects": (w | {"conv2d_bias": np.array([None])}, "not of numbers"),
    }
    for name, (content, text) in bad.items():
        (tmp_path / name).write_bytes(pickle.dumps(content))
        with pytest.raises(ValueError, match=text):
            fashion.read_weights(tmp_path / name)
    assert not RAN
    np.savez(tmp_path / "objects.npz", conv2d_weight=np.array([None]))
    with pytest.raises(ValueError, match="is no npz file of arrays"):
        fashion.read_weights(tmp_path / "objects.npz")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        fashion.read_weights(tmp_path / "nothing")


def write_images(folder: Path, images: np.ndarray, classes: np.ndarray) -> None:
    head = struct.pack(">4B3I", 0, 0, 8, 3, *images.shape)
    (folder / "t10k-images-idx3-ubyte").write_bytes(head + images.astype("uint8").tobytes())
    (folder / "t10k-labels-idx1-ubyte").write_bytes(
        struct.pack(">4BI", 0, 0, 8, 1, len(classes)) + classes.astype("uint8").tobytes()
    )


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    w = weights(4, 6)
    np.savez(tmp_path / "w.npz", **w)
    pixels = np.random.randint(0, 256, (10, 28, 28))
    classes = in_torch(w, (pixels[:, None] / 255).astype("float32")).argmax(1)
    classes[:2] = (classes[:2] + 1) % 10  # two mistakes
    write_images(tmp_path, pixels, classes)
    drawn = tmp_path / "drawn.png"
    flags = ["--weights", str(tmp_path / "w.npz"), "--data", str(tmp_path), "--picture", str(drawn), "--show"]
    assert fashion.main([*flags, "--batch-size", "4"]) == 0
    text = capsys.readouterr().out
    assert text.count("accuracy 0.8000 on 10 images") == 3
    assert all(f"# {title}\n" in text for title in ("translated", "fused", "vendor calls", "scheduled"))
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    assert fashion.main(["--weights", str(drawn), "--data", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
