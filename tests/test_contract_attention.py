"""The course's transformer against numpy in float64, written out here, and against torch where torch has the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import needle as ndl
from gpu_devices import everywhere, need_executor
from needle import nn
from needle.autograd import Tensor

# batch, queries, keys, heads, width of a head
pytestmark = everywhere
CORES = [(1, 1, 1, 1, 1), (2, 5, 5, 3, 7), (3, 17, 17, 2, 12), (2, 3, 8, 1, 33)]
# batch, steps, features, heads, width of a head, hidden
LAYERS = [(1, 1, 1, 1, 1, 1), (2, 5, 6, 3, 2, 7), (3, 9, 17, 2, 11, 33)]


def close(ours: Any, want: Any, tolerance: float = 1e-5) -> None:
    want = want.detach().numpy() if isinstance(want, torch.Tensor) else np.asarray(want)
    assert tuple(ours.shape) == want.shape
    assert np.abs(ours.numpy() - want).max() <= tolerance * max(np.abs(want).max(), 1e-2)


def value(p: Any) -> np.ndarray:
    return p.numpy().astype("float64")


def draw(*shape: int) -> np.ndarray:
    return np.random.randn(*shape).astype("float32")


class Written:
    """The layers' formulas in numpy; dropouts are drawn in the order in which they are reached."""

    def __init__(self, p: float, training: bool) -> None:
        self.p, self.training = p, training

    def dropout(self, x: np.ndarray) -> np.ndarray:
        return x * (np.random.rand(*x.shape) <= 1 - self.p) / (1 - self.p) if self.training else x

    def attention(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> tuple[np.ndarray, np.ndarray]:
        scores = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1])
        if causal:
            queries, keys = scores.shape[-2:]
            for i in range(queries):
                scores[..., i, keys - queries + i + 1 :] = -np.inf
        e = np.exp(scores - scores.max(-1, keepdims=True))
        probs = self.dropout(e / e.sum(-1, keepdims=True))
        return np.einsum("bhqk,bhkd->bhqd", probs, v), probs

    @staticmethod
    def norm(layer: Any, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * value(layer.weight) + value(layer.bias)

    def attention_layer(self, m: Any, *qkv: np.ndarray) -> np.ndarray:
        norms = (m.prenorm_q, m.prenorm_k, m.prenorm_v)
        projections = (m.q_projection, m.k_projection, m.v_projection)
        heads = []
        for x, norm, projection in zip(qkv, norms, projections, strict=True):
            assert projection.bias is None
            y = self.norm(norm, x) @ value(projection.weight)
            heads.append(y.reshape(*x.shape[:2], m.num_head, m.dim_head).transpose(0, 2, 1, 3))
        out, _ = self.attention(*heads, m.attn.causal)
        assert m.out_projection.bias is None
        return out.transpose(0, 2, 1, 3).reshape(*qkv[0].shape[:2], -1) @ value(m.out_projection.weight)

    def layer(self, m: Any, x: np.ndarray) -> np.ndarray:
        linear1, _, _, linear2, _ = m.feed_forward.modules
        x = x + self.dropout(self.attention_layer(m.attention, x, x, x))
        y = np.maximum(self.norm(m.norm, x) @ value(linear1.weight) + value(linear1.bias), 0)
        return x + self.dropout(self.dropout(y) @ value(linear2.weight) + value(linear2.bias))

    def transformer(self, m: Any, x: np.ndarray) -> np.ndarray:
        x = x + value(m.positional_embedding.weight)[: x.shape[1]]
        for layer in m.layers:
            x = self.layer(layer, x)
        return x


def shake(model: nn.Module) -> None:
    """Norms that differ from each other and from the identity."""
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data = Tensor(draw(*p.shape))


@pytest.mark.parametrize("p", [0.0, 0.4], ids=["p0", "p0.4"])
@pytest.mark.parametrize("causal", [False, True], ids=["open", "causal"])
@pytest.mark.parametrize("sizes", CORES, ids=lambda s: "x".join(map(str, s)))
def test_multi_head_attention(sizes: tuple[int, ...], causal: bool, p: float) -> None:
    batch, queries, keys, heads, width = sizes
    q, k, v = draw(batch, heads, queries, width), draw(batch, heads, keys, width), draw(batch, heads, keys, width + 1)
    layer = nn.MultiHeadAttention(dropout=p, causal=causal)
    for training in (True, False):
        layer.train(training)
        np.random.seed(9)
        result, probs = layer(Tensor(q), Tensor(k), Tensor(v))
        np.random.seed(9)
        want, want_probs = Written(p, training).attention(*(x.astype("float64") for x in (q, k, v)), causal)
        close(result, want)
        close(probs, want_probs)


@pytest.mark.parametrize("causal", [False, True], ids=["open", "causal"])
@pytest.mark.parametrize("sizes", CORES[:3], ids=lambda s: "x".join(map(str, s)))
def test_multi_head_attention_gradients_are_torchs(sizes: tuple[int, ...], causal: bool) -> None:
    batch, queries, keys, heads, width = sizes
    arrays = [draw(batch, heads, n, width) for n in (queries, keys, keys)]
    ours, theirs = [Tensor(a) for a in arrays], [torch.tensor(a.astype("float64"), requires_grad=True) for a in arrays]
    result, _ = nn.MultiHeadAttention(causal=causal)(*ours)
    want = torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=causal)
    close(result, want)
    weight = draw(*want.shape)
    result.backward(Tensor(weight))
    want.backward(torch.tensor(weight.astype("float64")))
    for a, b in zip(ours, theirs, strict=True):
        close(a.grad, b.grad)


@pytest.mark.parametrize("p", [0.0, 0.4], ids=["p0", "p0.4"])
def test_attention_layer_takes_other_keys_and_values(p: float) -> None:
    layer = nn.AttentionLayer(5, 2, 3, k_features=7, v_features=4, out_features=9, dropout=p, causal=False)
    shake(layer)
    q, k, v = draw(2, 3, 5), draw(2, 6, 7), draw(2, 6, 4)
    np.random.seed(9)
    out = layer(Tensor(q), Tensor(k), Tensor(v))
    np.random.seed(9)
    close(out, Written(p, True).attention_layer(layer, *(x.astype("float64") for x in (q, k, v))))
    out.backward()
    assert all(np.abs(t.grad.numpy()).max() > 0 for t in layer.parameters())
    assert nn.AttentionLayer(5, 2, 3).attn.causal and not nn.MultiHeadAttention().causal


def test_norms_run_on_rows() -> None:
    layer, shapes = nn.TransformerLayer(6, 2, 3, 8), []
    for norm in (layer.attention.prenorm_q, layer.attention.prenorm_k, layer.attention.prenorm_v, layer.norm):
        norm.register_forward_pre_hook(lambda m, args: shapes.append(args[0].shape))
    layer(Tensor(draw(4, 5, 6)))
    assert shapes == [(20, 6)] * 4


@pytest.mark.parametrize("p", [0.0, 0.4], ids=["p0", "p0.4"])
@pytest.mark.parametrize("causal", [False, True], ids=["open", "causal"])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("sizes", LAYERS, ids=lambda s: "x".join(map(str, s)))
def test_transformer(sizes: tuple[int, ...], batch_first: bool, causal: bool, p: float) -> None:
    batch, steps, features, heads, width, hidden = sizes
    model = nn.Transformer(
        features,
        hidden,
        2,
        num_head=heads,
        dim_head=width,
        dropout=p,
        causal=causal,
        batch_first=batch_first,
        sequence_len=steps + 3,
    )
    shake(model)
    x = draw(batch, steps, features)
    given = x if batch_first else np.ascontiguousarray(x.swapaxes(0, 1))
    for training in (True, False):
        model.train(training)
        np.random.seed(9)
        out, h = model(Tensor(given))
        np.random.seed(9)
        want = Written(p, training).transformer(model, x.astype("float64"))
        close(out, want if batch_first else want.swapaxes(0, 1))
        assert h.shape == out.shape and not h.numpy().any() and not h.requires_grad


@pytest.mark.parametrize("sizes", LAYERS, ids=lambda s: "x".join(map(str, s)))
def test_transformer_gradients_are_those_of_float64(sizes: tuple[int, ...]) -> None:
    batch, steps, features, heads, width, hidden = sizes

    def run(device: Any, dtype: str) -> list[np.ndarray]:
        np.random.seed(1)
        model = nn.Transformer(
            features,
            hidden,
            2,
            num_head=heads,
            dim_head=width,
            dropout=0.2,
            sequence_len=steps,
            device=device,
            dtype=dtype,
        )
        x = Tensor(draw(steps, batch, features).astype(dtype), device=device)
        out, _ = model(x)
        out.backward(Tensor(draw(*out.shape).astype(dtype), device=device))
        named = dict(model.named_parameters())
        assert all(p.grad is not None for p in named.values())
        return [x.grad.numpy(), *(p.grad.numpy() for p in named.values())]

    default = ndl.Tensor(0.0).device
    wants = run(ndl.cpu_numpy(), "float64")
    top = max(np.abs(b).max() for b in wants)  # the bias of a key's norm has no gradient but rounding
    for a, b in zip(run(default, "float32"), wants, strict=True):
        assert np.abs(a - b).max() <= 1e-4 * max(np.abs(b).max(), 1e-2 * top)


def test_transformer_gradients_are_slopes() -> None:
    """Finite differences in float64 on numpy, through every parameter."""
    where: dict[str, Any] = {"device": ndl.cpu_numpy(), "dtype": "float64"}
    model = nn.Transformer(5, 7, 2, num_head=2, dim_head=3, sequence_len=4, **where)
    x = Tensor(np.random.randn(4, 2, 5), device=ndl.cpu_numpy())
    weight = np.random.randn(4, 2, 5)

    def loss() -> float:
        return float((model(x)[0].numpy() * weight).sum())

    model(x)[0].backward(Tensor(weight, device=ndl.cpu_numpy()))
    for name, p in model.named_parameters():
        direction = np.random.randn(*p.shape)
        before, eps = p.numpy(), 1e-6
        values = []
        for sign in (1, -1):
            p.data = Tensor(before + sign * eps * direction, device=ndl.cpu_numpy())
            values.append(loss())
        p.data = Tensor(before, device=ndl.cpu_numpy())
        slope = (values[0] - values[1]) / (2 * eps)
        assert abs(slope - (p.grad.numpy() * direction).sum()) <= 1e-6 * max(1, abs(slope)), name


@pytest.mark.parametrize("causal", [False, True], ids=["open", "causal"])
def test_layer_is_torchs_encoder_layer_with_the_norm_first(causal: bool) -> None:
    ours = nn.TransformerLayer(6, 3, 2, 11, causal=causal)
    theirs = torch.nn.TransformerEncoderLayer(6, 3, 11, 0.0, batch_first=True, norm_first=True).double()
    attention, linear1, linear2 = ours.attention, ours.feed_forward.modules[0], ours.feed_forward.modules[3]
    projections = (attention.q_projection, attention.k_projection, attention.v_projection)
    pairs = [
        (theirs.self_attn.in_proj_weight, np.concatenate([value(m.weight).T for m in projections])),
        (theirs.self_attn.in_proj_bias, np.zeros(18)),
        (theirs.self_attn.out_proj.weight, value(attention.out_projection.weight).T),
        (theirs.self_attn.out_proj.bias, np.zeros(6)),
        (theirs.linear1.weight, value(linear1.weight).T),
        (theirs.linear1.bias, value(linear1.bias).reshape(-1)),
        (theirs.linear2.weight, value(linear2.weight).T),
        (theirs.linear2.bias, value(linear2.bias).reshape(-1)),
    ]
    for p, array in pairs:
        p.data = torch.tensor(array)
    a = draw(2, 5, 6)
    x, xt = Tensor(a), torch.tensor(a.astype("float64"), requires_grad=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64) if causal else None
    out, want = ours(x), theirs(xt, mask)
    close(out, want)
    weight = draw(2, 5, 6)
    out.backward(Tensor(weight))
    want.backward(torch.tensor(weight.astype("float64")))
    close(x.grad, xt.grad)
    close(linear1.weight.grad, theirs.linear1.weight.grad.T)
    close(projections[2].weight.grad, theirs.self_attn.in_proj_weight.grad[12:].T)


def test_positions_are_drawn_before_the_layers() -> None:
    np.random.seed(3)
    model = nn.Transformer(4, 5, 1, num_head=2, dim_head=3, sequence_len=6)
    np.random.seed(3)
    want = {"positional_embedding.weight": np.random.randn(6, 4)}
    for name, n_in, n_out in (("q", 4, 6), ("k", 4, 6), ("v", 4, 6), ("out", 6, 4)):
        want[f"layers.0.attention.{name}_projection.weight"] = ndl.init.kaiming_uniform(n_in, n_out).numpy()
    for name, n_in, n_out in (("0", 4, 5), ("3", 5, 4)):
        want[f"layers.0.feed_forward.{name}.weight"] = ndl.init.kaiming_uniform(n_in, n_out).numpy()
        want[f"layers.0.feed_forward.{name}.bias"] = ndl.init.kaiming_uniform(n_out, 1).numpy().reshape(1, n_out)
    drawn = {k: p for k, p in model.named_parameters() if "norm" not in k}
    assert list(drawn) == list(want)
    for name, p in drawn.items():
        np.testing.assert_array_equal(p.numpy(), want[name].astype("float32"), err_msg=name)


def test_transformer_defaults_and_errors() -> None:
    model = nn.Transformer(4, 5, 1)
    assert model.sequence_len == 2048 and not model.batch_first
    attention = model.layers[0].attention
    assert (attention.num_head, attention.dim_head, attention.attn.causal) == (8, 32, True)
    with pytest.raises(ValueError, match=r"\[Transformer\] sequence expects at most 3 steps, got 4\."):
        nn.Transformer(4, 5, 1, sequence_len=3)(Tensor(draw(4, 1, 4)))


@pytest.mark.parametrize("batch_first", [False, True])
def test_compiled_and_saved_transformers(batch_first: bool, tmp_path: Any) -> None:
    need_executor()
    model = nn.Transformer(6, 7, 2, num_head=3, dim_head=5, batch_first=batch_first, dropout=0.3).eval()
    exe = ndl.compile(model, (draw(5, 3, 6),))
    ndl.save(model, tmp_path / "model.st")
    loaded = ndl.load(tmp_path / "model.st")
    for shape in ((5, 3, 6), (8, 2, 6)):
        x = draw(*shape)
        want, h = model(Tensor(x))
        np.testing.assert_allclose(exe(x)[0], want.numpy(), atol=1e-5)
        assert exe(x)[1].shape == h.shape
        np.testing.assert_allclose(loaded(Tensor(x))[0].numpy(), want.numpy(), atol=1e-6)
