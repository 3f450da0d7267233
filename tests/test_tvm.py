"""needle models through TVM: export, fusion, tuning, executables, the evaluation command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

import torch
import tvm

import needle as ndl
import needle.tvm as nt
from needle import nn
from needle.course.tvm import schedules
from needle.op import Spec, Unsupported
from needle.tvm import eval as evaluation
from needle.tvm import require, tuning
from needle.tvm.networks import NETWORKS, network

FUSED = "fused_te_matmul_te_broadcast_to_te_ewise_add_te_relu"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NEEDLE_CACHE", str(tmp_path))
    yield tmp_path


def inputs(name: str, batch: int) -> ndl.Tensor:
    x = NETWORKS[name][1](batch)
    return ndl.Tensor(x, dtype=str(x.dtype), requires_grad=False)


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)).eval()


def test_fused_function_of_a_layer_stands_twice_in_an_mlp() -> None:
    module = nt.fuse(nt.to_tvm_tensor(network("mlp"), inputs("mlp", 8)))
    assert nt.functions(module).count(FUSED) == 2
    assert FUSED in {v.name_hint for v in module.get_global_vars()}


def test_reshape_stays_outside_of_the_fused_functions_before_it() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.ReLU()).eval()
    assert nt.functions(nt.fuse(nt.to_tvm_tensor(net, Spec((2, 3, 2)))))[-1] == FUSED


@pytest.mark.parametrize("mode", ["noopt", "fusion"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_agree_with_needle(name: str, mode: str) -> None:
    """At batch 1 and 8: of one module, or of two where the batch is not the first axis."""
    net, free = network(name), name != "lstm"
    exe = nt.compile(net, (inputs(name, 4),), mode, symbolic_batch=True) if free else None
    for batch in (1, 8):
        x = inputs(name, batch)
        want, got = net(x).numpy(), (exe or nt.compile(net, (x,), mode))(x).numpy()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


def test_a_model_that_counts_its_batch_is_refused_a_free_one() -> None:
    def f(x: ndl.Tensor) -> ndl.Tensor:
        return x * float(x.shape[0])

    with pytest.raises(Unsupported, match="batch"):
        nt.to_tvm_tensor(f, Spec((2, 3)), symbolic_batch=True)


def test_values_of_the_example_are_not_baked_in() -> None:
    net = network("transformer")
    exe = nt.compile(net, (inputs("transformer", 2),), "fusion")
    x = ndl.Tensor(30 * np.random.randn(2, 64, 128).astype("float32"), requires_grad=False)
    np.testing.assert_allclose(exe(x).numpy(), net(x).numpy(), rtol=1e-4, atol=1e-4)


def test_parameters_as_inputs() -> None:
    net, x = small_mlp(), ndl.Tensor(np.random.randn(3, 16).astype("float32"))
    module = nt.to_tvm_tensor(net, x, params_as_inputs=True)
    values = nt.parameter_values(net, x)
    assert len(module["main"].params) == 1 + len(values) == 7
    exe = nt.TvmExecutable(module, nt.build(module, nt.target_of("cpu")), "cpu")
    doubled = [v * 2.0 for v in values]
    net.load_state_dict(dict(zip(net.state_dict(), doubled, strict=True)))
    np.testing.assert_allclose(exe(x, *doubled).numpy(), net(x).numpy(), rtol=1e-4, atol=1e-4)


def test_relax_operators_on_request() -> None:
    net, x = small_mlp(), ndl.Tensor(np.random.randn(3, 16).astype("float32"))
    module = nt.to_tvm_tensor(net, x, te=False)
    assert "R.matmul" in module.script()
    exe = nt.TvmExecutable(module, nt.build(module, nt.target_of("cpu")), "cpu")
    np.testing.assert_allclose(exe(x).numpy(), net(x).numpy(), rtol=1e-4, atol=1e-4)


def test_structure_of_results_and_nested_inputs() -> None:
    def f(pair: tuple, scale: float) -> tuple:
        return pair[0] + pair[1], {"scaled": pair[0] * scale}

    a, b = (ndl.Tensor(np.random.randn(2, 3).astype("float32"), requires_grad=False) for _ in range(2))
    module = nt.to_tvm_tensor(f, (a, b), 3.0)
    exe = nt.TvmExecutable(module, nt.build(module, nt.target_of("cpu")), "cpu")
    total, scaled = exe((a, b))
    np.testing.assert_allclose(total.numpy(), a.numpy() + b.numpy(), rtol=1e-6)
    np.testing.assert_allclose(scaled.numpy(), 3 * a.numpy(), rtol=1e-6)


def test_training_mode_is_an_error() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"\[to_tvm_tensor\] 1 modules are in training mode \(first: 1\)"):
        nt.to_tvm_tensor(net, Spec((2, 4)))


# -- executables ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def exe() -> nt.TvmExecutable:
    return nt.compile(lambda x: ndl.ops.relu(x) * 2.0, (Spec((4, 8)),), "fusion")


def test_results_are_arrays_of_the_inputs_library(exe: Any) -> None:
    x = np.random.randn(4, 8).astype("float32")
    want = np.maximum(x, 0) * 2
    results = [exe(x), exe(torch.tensor(x)), exe(ndl.Tensor(x))]
    assert [type(r) for r in results] == [np.ndarray, torch.Tensor, ndl.Tensor]
    for r in results:
        np.testing.assert_array_equal(r if isinstance(r, np.ndarray) else r.numpy(), want)


def test_inputs_are_not_copied(exe: Any) -> None:
    x = ndl.Tensor(np.zeros((4, 8), "float32"), requires_grad=False)
    entered = exe._enter(x.cached_data)
    x.cached_data.fill(3.0)
    assert (entered.numpy() == 3).all()


def test_inputs_at_any_stride_and_alignment(exe: Any) -> None:
    flat = np.random.randn(4 * 16 + 3).astype("float32")[3:]
    for x in (flat[:32].reshape(4, 8), flat.reshape(4, 16)[:, ::2], flat[:32].reshape(8, 4).T):
        np.testing.assert_array_equal(exe(x), np.maximum(x, 0) * 2)


def test_wrong_inputs_are_errors_of_one_sentence(exe: Any) -> None:
    with pytest.raises(ValueError, match=r"^\[tvm\] an input expects float32 \(4, 8\), got float32 \(3, 8\)\.$"):
        exe(np.zeros((3, 8), "float32"))
    with pytest.raises(ValueError, match=r"^\[tvm\] the model expects 1 inputs, got 2\.$"):
        exe(np.zeros((4, 8), "float32"), np.zeros((4, 8), "float32"))
    with pytest.raises(ValueError, match=r"^\[tvm\] mode expects noopt, fusion, optimized, got fast\.$"):
        nt.compile(small_mlp(), (Spec((1, 16)),), "fast")


def test_compiled_modules_are_kept(cache: Path) -> None:
    net, x = small_mlp(), Spec((3, 16))
    nt.compile(net, (x,), "fusion")
    (kept,) = cache.glob("tvm-*/fusion-*.so")
    before = kept.stat().st_mtime_ns
    nt.compile(net, (x,), "fusion")
    assert kept.stat().st_mtime_ns == before
    nt.compile(net, (x,), "fusion", recompile=True)
    assert kept.stat().st_mtime_ns > before
    nt.compile(small_mlp(), (x,), "fusion")  # other weights: another module with the same records
    assert len(list(cache.glob("tvm-*/fusion-*.so"))) == 2
    assert len(list(cache.glob("tvm-*"))) == 1


def test_a_damaged_library_is_built_anew(cache: Path) -> None:
    net, x = small_mlp(), np.random.randn(3, 16).astype("float32")
    nt.compile(net, (x,), "noopt")
    (kept,) = cache.glob("tvm-*/noopt-*.so")
    kept.write_bytes(b"half a file")
    with pytest.warns(UserWarning, match="is built anew"):
        exe = nt.compile(net, (x,), "noopt")
    np.testing.assert_allclose(exe(x), net(ndl.Tensor(x)).numpy(), rtol=1e-5, atol=1e-5)


# -- tuning --------------------------------------------------------------------------------------------------------------


def test_tuning_keeps_records_and_goes_on_after_an_interruption(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval(), np.random.randn(3, 16).astype("float32")
    module, target = nt.fuse(nt.to_tvm_tensor(net, x)), nt.target_of("cpu")
    moves: list[int] = []

    def interrupt(count: int) -> None:
        moves.append(count)
        raise KeyboardInterrupt

    class Bar:
        def __init__(self, **_: Any) -> None:
            self.update = interrupt

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: None  # noqa: E731

    with monkeypatch.context() as m:
        m.setattr(tuning, "tqdm", Bar)
        with pytest.raises(KeyboardInterrupt):
            nt.tune(module, target, trials=4, cost_model="random")
    folder = tuning.module_folder(module, target)
    kept = tuning.repair(folder)
    assert 0 < kept == moves[0]
    with (folder / tuning.RECORDS).open("a") as f:
        f.write('[0, [[[["GetBlo')  # what a killed process leaves
    exe = nt.compile(net, (x,), "optimized", trials=kept + 2)
    assert kept < tuning.repair(folder) <= kept + 2
    np.testing.assert_allclose(exe(x), net(ndl.Tensor(x)).numpy(), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(tuning.ms.relax_integration, "tune_relax", None)  # enough is on record
    nt.tune(module, target, trials=kept)
    assert list(cache.glob("tvm-*/optimized-*.so"))


@pytest.mark.parametrize("pair", [("0.27.0.post1", "0.1.15.post2"), ("0.28.0", "0.1.14.post1")])
def test_pairs_that_crash_are_refused(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(require, "installed", lambda: pair)
    with pytest.raises(RuntimeError, match=rf"^\[tvm\] tuning is refused: .*got {pair[0]} with {pair[1]}\.$"):
        nt.tune(nt.fuse(nt.to_tvm_tensor(small_mlp(), Spec((1, 16)))), nt.target_of("cpu"), trials=1)
    assert (
        nt.compile(small_mlp(), (Spec((1, 16)),), "fusion") is not None
    )  # what is compiled without tuning is not refused


def test_without_tvm_the_import_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "tvm.py").write_text("raise ImportError('hidden')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import needle; import needle.tvm"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == (
        "ImportError: [tvm] needle.tvm needs Apache TVM, install it in a checkout with `pip install '.[tvm]'`, got: hidden."
    )


# -- GPUs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_cuda_source_of_a_network(name: str) -> None:
    """Every kernel runs in threads, large ones in several groups; an MLP's layers keep their name and share what they read."""
    module = nt.fuse(nt.to_tvm_tensor(network(name), inputs(name, 8)))
    built = nt.build(module, tvm.target.Target(schedules.CUDA, host="llvm"))
    (library,) = (part for host in built.mod.imports for part in (host, *host.imports) if part.kind == "cuda")
    lines = library.inspect_source().split("__global__")[1:]
    definitions = [part for part in lines if part.split("\n")[0].endswith("{")]
    assert len(definitions) >= len(set(nt.functions(module)))
    assert all("threadIdx.x" in k for k in definitions) and any("blockIdx." in k for k in definitions)
    if name == "mlp":
        (layer,) = (k for k in definitions if f"{FUSED}_kernel(" in k)
        assert "__shared__" in layer and "__syncthreads" in layer


@pytest.mark.skipif(tvm.cuda().exist, reason="a CUDA device is here")
def test_cuda_without_a_device_is_one_sentence(capsys: pytest.CaptureFixture) -> None:
    assert evaluation.main(["-m", "mlp", "-d", "cuda"]) == 1
    assert capsys.readouterr().err.startswith("[tvm] device cuda expects an NVIDIA GPU and a TVM built for CUDA")
    with pytest.raises(RuntimeError, match=r"^\[tvm\] device cuda expects .*\.$"):
        nt.compile(small_mlp(), (Spec((1, 16)),), "fusion", device="cuda")


@pytest.mark.skipif(not tvm.cuda().exist, reason="no CUDA device")
def test_network_on_cuda() -> None:
    net, x = network("mlp"), inputs("mlp", 8)
    for mode in ("noopt", "fusion"):
        got = nt.compile(net, (x,), mode, device="cuda")(x).numpy()
        np.testing.assert_allclose(got, net(x).numpy(), rtol=1e-4, atol=1e-4)


# -- the command ---------------------------------------------------------------------------------------------------------


def test_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(NETWORKS, "mlp", (small_mlp, lambda batch: np.random.randn(batch, 16).astype("float32"), 2))
    results, picture = tmp_path / "mlp.json", tmp_path / "mlp.png"
    command = ["-m", "mlp", "--trials", "2", "--rounds", "3", "--show"]
    assert evaluation.main([*command, "--json", str(results), "--chart", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert FUSED in printed
    assert "# scheduled" in printed
    found = json.loads(results.read_text())
    assert list(found["milliseconds"]) == ["noopt", "fusion", "optimized", "needle eager", "needle compiled"]
    assert found["functions"].count(FUSED) == 2
    assert picture.stat().st_size > 1000
    call = nt.TvmExecutable.__call__
    monkeypatch.setattr(nt.TvmExecutable, "__call__", lambda self, x: call(self, x) + 0.01)
    assert evaluation.main(command[:-1]) == 1
    assert "differs" in capsys.readouterr().out
