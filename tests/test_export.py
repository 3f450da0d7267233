"""Capture by torch.export: models that torch.fx cannot trace, structures of inputs and outputs, free sizes, programs."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import needle as ndl  # noqa: E402
import torch2needle  # noqa: E402
from conversion import close  # noqa: E402
from torch2needle.models import randomize  # noqa: E402
from torch2needle.rules.registry import FUNCTION_RULES  # noqa: E402

T = torch.Tensor


class Net(nn.Module):
    """A small convolutional network around a step given as a function of the module and its features.

    exported: whether it asks something that torch.fx does not follow.
    """

    def __init__(self, step: Callable, exported: bool = False) -> None:
        super().__init__()
        self.exported = exported
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.linear = nn.Dropout(0.25), nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(12).reshape(3, 4), persistent=False)
        self.step = step

    def forward(self, x: T, *args: Any, **kwargs: Any) -> Any:
        assert not self.exported or not x.is_cuda
        return self.step(self, torch.relu(self.norm(self.conv(x))), *args, **kwargs)


def branch_on_shape(m: Net, h: T) -> T:
    if h.shape[2] > 3 and len(h) > 0:
        h = h[:, :, 1:] * 2
    return m.linear(m.drop(h.mean((2, 3))))


def loop_over_size(m: Net, h: T) -> T:
    for i in range(h.shape[1]):
        h = h + h[:, i : i + 1] * 0.1
    return m.linear(h.flatten(2).mean(-1))


def dict_output(m: Net, h: T) -> Any:
    if h.shape[0] < 1:
        raise ValueError
    return {"pooled": m.linear(h.mean((2, 3))), "nothing": None, "pair": (h, [h + 1]), "rows": h.shape[0]}


@dataclasses.dataclass
class Result:
    features: T
    loss: T | None = None


def dataclass_output(m: Net, h: T) -> Result:
    return Result(m.linear(h.mean((2, 3))) if h.shape[1] == 4 else h)


def keywords(m: Net, h: T, *, scale: Any = None, **rest: Any) -> T:
    h = h if scale is None else h * scale
    return h + rest["bias"] if rest else h


def nested(m: Net, h: T, batch: Any, flag: Any = None) -> T:
    for t in batch["more"]:
        h = h + t
    return h * batch["pair"][1] if flag is None else h


def without_gradient(m: Net, h: T) -> T:
    with torch.set_grad_enabled(False):
        mean = h.mean((2, 3), keepdim=True)
    return (h - mean) * (2 if h.shape[0] > 1 else 1)


def autocast_off(m: Net, h: T) -> T:
    with torch.autocast(device_type=h.device.type, enabled=False):
        return m.linear(h.float().mean((2, 3)))


def constant_mask(m: Net, h: T) -> T:
    mask = torch.zeros(4, 4)
    for i in range(len(mask)):
        mask[i, : i + 1] = i
    mask[:, 0].fill_(7)
    picked = m.table.flip(0).cumsum(1)[:, :4].float().diff(dim=0)
    return h + (mask + picked.sum(0) + torch.arange(h.shape[1])).sum(0)[:, None, None] * (1 if h.shape[2] > 0 else 2)


def in_place(m: Net, h: T) -> T:
    assert len(h)
    kept = h.reshape(h.shape[0], -1)
    h[:, 0].mul_(3)
    h.add_(1).clamp_(min=0.5)
    return kept + h.flatten(1) + F.dropout(kept, 0.5, m.training) * (2 if h.shape[1] == 4 else 1)


def mask_in_place(m: Net, h: T) -> T:
    mask = torch.zeros(2, 4) if h.shape[1] == 4 else None
    mask[0] = m.linear.bias
    mask[1].copy_(m.linear.weight[0])
    return h + mask.sum(0)[:, None, None]


IMAGE = (2, 3, 6, 6)
# Name, step, further inputs (positional, by name).
MODELS: list[tuple[str, Callable, tuple, dict[str, Any]]] = [
    ("shape", branch_on_shape, (), {}),
    ("loop", loop_over_size, (), {}),
    ("dict", dict_output, (), {}),
    ("dataclass", dataclass_output, (), {}),
    ("keywords", keywords, (), {"scale": torch.tensor(0.5), "bias": torch.ones(4, 1, 1)}),
    ("nested", nested, ({"more": [torch.ones(4, 1, 1)], "pair": (None, torch.rand(4, 1, 1))}, None), {}),
    ("no_grad", without_gradient, (), {}),
    ("autocast", autocast_off, (), {}),
    ("mask", constant_mask, (), {}),
    ("in_place", in_place, (), {}),
    ("mask_in_place", mask_in_place, (), {}),
]


def plain(value: Any) -> Any:
    return vars(value) if dataclasses.is_dataclass(value) else value


SIZED = {"shape", "dict", "dataclass", "no_grad", "autocast", "mask", "loop"}  # torch.fx answers what they ask of sizes


@pytest.mark.parametrize("exported", [False, True], ids=["", "exported"])
@pytest.mark.parametrize(("name", "step", "more", "named"), MODELS, ids=[m[0] for m in MODELS])
def test_models_that_fx_cannot_trace_alone(
    name: str, step: Callable, more: tuple, named: dict[str, Any], exported: bool
) -> None:
    """Values, structure, another batch and size, gradients and three steps of training, compiled, saved."""
    torch.manual_seed(0)
    model = randomize(Net(step, exported)).eval()
    x = torch.randn(IMAGE)
    with pytest.raises(torch2needle.Unsupported):
        torch2needle.convert(model)
    example = {"x": x, **named} if named else (x, *more)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    net = torch2needle.convert(model, example)
    assert net.report.capture.startswith("torch.fx" if name in SIZED and not exported else "torch.export")
    assert list(net.state_dict()) == list(model.state_dict())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and "forward" not in vars(model)
    for shape in (IMAGE, (3, 3, 6, 6)):
        x = torch.randn(shape)
        got, want = net(x, *more, **named), model(x, *more, **named)
        same_structure(got, want)
        close(plain(got), plain(want))
    exe = ndl.compile(net, tuple(net.bind((torch.randn(IMAGE), *more), named)))
    x = torch.randn(IMAGE)
    got, want = exe(x, *more, **named), model(x, *more, **named)
    same_structure(got, want)
    close(plain(got), plain(want))
    for m in (model, net):
        m.train()
        for layer in (m.drop,):
            layer.eval()
    if name == "in_place":
        return  # its dropout draws random numbers
    steps_agree(model, net, lambda m, x: m(x, *more, **named), torch.randn(3, *IMAGE))


def same_structure(got: Any, want: Any) -> None:
    if dataclasses.is_dataclass(want):
        assert type(got) is type(want)
        same_structure(vars(got), vars(want))
    elif isinstance(want, dict | list | tuple):
        assert type(got) is type(want) and len(got) == len(want)
        for k in want if isinstance(want, dict) else range(len(want)):
            same_structure(got[k], want[k])
    elif not isinstance(want, torch.Tensor):
        assert got == want


def steps_agree(model: nn.Module, net: ndl.nn.Module, call: Callable, inputs: T) -> None:
    """Three steps of SGD from the same state give the same parameters and buffers."""
    twin = copy.deepcopy(model)
    theirs, ours = torch.optim.SGD(twin.parameters(), 0.05), ndl.optim.SGD(net.parameters(), 0.05)
    for x in inputs:
        theirs.zero_grad()
        outs = [o for o in pytree.tree_leaves(plain(call(twin, x))) if isinstance(o, torch.Tensor) and o.requires_grad]
        torch.stack([(o * o).mean() for o in outs]).sum().backward()
        theirs.step()
        ours.reset_grad()
        results = [o for o in pytree.tree_leaves(plain(call(net, ndl.Tensor(x.numpy())))) if isinstance(o, ndl.Tensor)]
        total: Any = 0
        for o in (o for o in results if o.requires_grad):
            total = ndl.ops.mean(o * o) + total
        total.backward()
        ours.step()
    for k, v in twin.state_dict().items():
        close(net.state_dict()[k], v, 1e-4)


def test_free_and_fixed_sizes() -> None:
    """Batch and image stay free; a size that a branch hangs on keeps the example's value, and the net says so."""
    model = randomize(Net(lambda m, h: h + 1 if h.shape[3] == 6 else h, exported=True)).eval()
    net = torch2needle.convert(model, torch.randn(1, 3, 6, 6))
    assert "free sizes: x axis 0, x axis 2" in net.report.notes
    for shape in ((1, 3, 6, 6), (4, 3, 9, 6)):
        x = torch.randn(shape)
        close(net(x), model(x))
    with pytest.raises(ValueError, match=r"input x expects size 6 in axis 3, got 7"):
        net(torch.randn(1, 3, 6, 7))
    fixed = torch2needle.convert(model, torch.randn(2, 3, 6, 6), dynamic=False)
    assert "free sizes: none" in fixed.report.notes
    with pytest.raises(ValueError, match=r"input x expects size 2 in axis 0, got 3"):
        fixed(torch.randn(3, 3, 6, 6))


class Tokens(nn.Module):
    """Branches on its length, so that torch.export captures it, and has its positions in a table of 40."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(50, 8), nn.Embedding(40, 8)

    def forward(self, ids: T, mask: T | None = None, **more: T) -> T:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        x = x * 2 if ids.shape[1] > 30 else x
        for t in (*([] if mask is None else [mask]), *more.values()):
            x = x * t.unsqueeze(-1)
        return x.reshape(-1, 4, 8) if more else x


SHAPES = ((1, 7), (3, 7), (1, 9), (2, 30), (1, 2), (1, 4), (5, 4), (2, 36))
IDS, ROWS = torch.randint(0, 50, (1, 7)), torch.rand(1, 7)
NAMED: dict[str, tuple[dict[str, Any], dict[str, Any], set[tuple[int, int]]]] = {
    "both": (
        {"ids": IDS, "mask": ROWS},
        {"ids": {0, 1}, "mask": {0: None, -1: "length"}},
        set(SHAPES) - {(2, 36)},
    ),
    "length": ({"ids": IDS, "mask": ROWS}, {"ids": [1], "mask": (1,)}, {(1, 7), (1, 9), (1, 2), (1, 4)}),
    "none": ({"ids": IDS}, {"ids": None}, {(1, 7)}),
    "keyword": ({"ids": IDS[:, :4], "factor": ROWS[:, :4]}, {"ids": {0}, "factor": {0}}, {(1, 4), (5, 4)}),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_sizes_are_free_and_no_others(name: str) -> None:
    example, dynamic, shapes = NAMED[name]
    model = Tokens().eval()
    net = torch2needle.convert(model, example, dynamic=dynamic)
    for shape in SHAPES:
        given = {k: torch.randint(0, 50, shape) if k == "ids" else torch.rand(shape) for k in example}
        if shape in shapes:
            close(net(**given), model(**given))
        else:
            with pytest.raises(ValueError, match="expects size"):
                net(**given)


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        ({"x": {0}}, "dynamic expects inputs of the example, ids, mask, got 'x'"),
        ({"ids": {2}}, "dynamic expects axes of ids, which has 2, got 2"),
        ({"ids": {1}}, "dynamic names axis 1 of ids, which the forward fixes"),  # to the mask's
    ],
)
def test_names_of_sizes_that_cannot_be_free(dynamic: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, torch2needle.ConversionError), match=message):
        torch2needle.convert(Tokens().eval(), {"ids": IDS, "mask": ROWS}, dynamic=dynamic)


def test_a_least_size_is_checked() -> None:
    net = torch2needle.convert(Net(branch_on_shape, exported=True).eval(), torch.randn(IMAGE))
    with pytest.raises(ValueError, match=r"input x expects size at least 4 in axis 2, got 3"):
        net(torch.randn(2, 3, 3, 6))


class Eighths(nn.Module):
    """Branches on sizes that are an eighth of the image's."""

    def __init__(self, branch: Callable) -> None:
        super().__init__()
        self.conv, self.branch = nn.Conv2d(3, 4, 1, stride=8), branch

    def forward(self, x: T) -> T:
        y = self.conv(x)
        assert not x.is_cuda  # which torch.fx does not follow
        return y + 1 if self.branch(y.shape[2], y.shape[3]) else y


@pytest.mark.parametrize(
    ("branch", "sizes"),
    [
        (lambda h, w: h == 1 or w == 1, [(9, None), (9, None)]),
        (lambda h, w: h == 1 or w < 3, [(9, None), (17, None)]),
        (lambda h, w: h == 1 or w == 1 or h * w < 3, [(9, None), (9, None)]),  # the last follows from the others
        (lambda h, w: h > 9, [(1, 72), (1, None)]),
        (lambda h, w: h * w < 10, [(32, 32), (32, 32)]),  # each may be 17, but not both
        (lambda h, w: w % 2 == 1, [(1, None), (25, 32)]),
    ],
)
def test_sizes_that_branches_leave_free(branch: Callable, sizes: list) -> None:
    model = Eighths(branch).eval()
    net = torch2needle.convert(model, (torch.rand(1, 3, 32, 32),))
    assert [s[:2] for s in net.graph.inputs[0].meta["sizes"][2:]] == sizes
    (low, high), (left, right) = ((least, most or least + 31) for least, most in sizes)
    for h, w in ((low, left), (low, right), (high, left)):
        x = torch.rand(2, 3, h, w)
        close(net(x), model(x))
    with pytest.raises(ValueError, match=r"in axis 2, got"):
        net(torch.rand(1, 3, low - 1, 32))


def test_modules_are_found_again() -> None:
    """Layers, their training flags and the user's lines, as torch.fx gives them."""
    model = Net(in_place)
    net = torch2needle.convert(model, torch.randn(IMAGE))
    called = [n.target for n in net.graph if n.kind == "module"]
    assert called[:2] == ["conv", "norm"]
    assert net.training and net.norm.training
    assert any("dropout" in text for text in net.report.follows_mode)
    rows = {r.op: r for r in net.report.rows}
    assert rows["torch.nn.Conv2d"].paths == ["conv"] and "test_export.py:" in rows["torch.nn.Conv2d"].location
    x = torch.randn(IMAGE)
    net(x)
    assert net.state_dict()["norm.num_batches_tracked"].numpy() == 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.lstm = nn.LSTM(5, 5, batch_first=True)

    def forward(self, ids: T, mask: T | None = None) -> T:
        h = self.embed(ids) * (2 if ids.shape[1] < 100 else 1)
        h, (last, _) = self.lstm(h)
        h = h if mask is None or not len(mask) else h * mask[..., None]
        return self.head(h) + last.mean()


def test_ties_and_recurrent_layers() -> None:
    model = Tied().eval()
    ids = torch.randint(0, 7, (2, 4))
    net = torch2needle.convert(model, (ids, torch.ones(2, 4)))
    assert net.embed.weight is net.head.weight and net.input_names == ["ids", "mask"]
    assert "torch.nn.LSTM" in {r.op for r in net.report.rows}
    for batch in (2, 3):
        inputs = torch.randint(0, 7, (batch, 4)), torch.rand(batch, 4)
        close(net(*inputs), model(*inputs))
    bare = torch2needle.convert(model, (ids, None))
    close(bare(ids, None), model(ids))
    with pytest.raises(ValueError, match="mask is fixed to None"):
        bare(ids, torch.ones(2, 4))


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: T) -> T:
        self.calls.add_(1)
        if x.shape[1] == 3:
            self.calls[0] = 5
        return self.linear(x) * self.calls.sum()


def test_buffers_are_written() -> None:
    model = Counter().eval()
    twin = copy.deepcopy(model)
    net = torch2needle.convert(model, torch.randn(2, 3))
    assert float(model.calls.sum()) == 0
    for _ in range(3):
        x = torch.randn(2, 3)
        close(net(x), twin(x))
        close(net.state_dict()["calls"], twin.calls)
    exe = ndl.compile(net, torch.randn(2, 3))
    close(net.state_dict()["calls"], twin.calls)
    for run in (exe, net, exe):
        x = torch.randn(2, 3)
        close(run(x), twin(x))
        close(net.state_dict()["calls"], twin.calls)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_programs(saved: bool, training: bool) -> None:
    """A program without its module: names and flags come from it; also after a way through a file."""
    torch.manual_seed(0)
    model = randomize(Net(branch_on_shape)).train(training)
    twin = copy.deepcopy(model)
    program = torch.export.export(model, (torch.randn(IMAGE),), strict=False)
    if saved:
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    net = torch2needle.convert(program)
    assert {*net.state_dict()} == {*model.state_dict()}
    assert isinstance(net.norm.weight, ndl.nn.Parameter) and not isinstance(net.norm.running_mean, ndl.nn.Parameter)
    x = torch.randn(IMAGE)
    for mode in (False, True):
        twin.train(mode).drop.eval(), net.train(mode)
        for m in net.drop.modules():
            m.eval()
        close(net(x), twin(x))
        close(net.state_dict()["norm.running_var"], twin.norm.running_var)


def test_saved_and_loaded(tmp_path: Any) -> None:
    """A file keeps the structure of the inputs and the sizes that they may have."""
    more = ({"more": [torch.ones(4, 1, 1)], "pair": (None, torch.rand(4, 1, 1))}, None)
    model = Net(nested).eval()
    net = torch2needle.convert(model, (torch.randn(IMAGE), *more))
    ndl.save(net, tmp_path / "net.safetensors")
    again = ndl.load(tmp_path / "net.safetensors")
    x = torch.randn(IMAGE)
    close(again(x, *more), model(x, *more))
    with pytest.raises(ValueError, match="expects size 3 in axis 1"):
        again(torch.randn(2, 4, 6, 6), *more)
    with pytest.raises(TypeError, match=r"input .*more is missing"):
        again(x, {}, None)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(torch2needle.ConversionError, match="pass example="):
        torch2needle.convert(Net(branch_on_shape))
    strange = Net(lambda m, h: torch.nextafter(h, h), exported=True)
    with pytest.raises(torch2needle.ConversionError) as e:
        torch2needle.convert(strange, torch.randn(IMAGE))
    assert "torch.ops.aten.nextafter.default" in str(e.value) and "@torch2needle.rule(" in str(e.value)
    assert "test_export.py" in str(e.value)


def test_rules_of_aten_overloads() -> None:
    """A rule of the user's for an overload; its signature is the schema's."""
    target = torch.ops.aten.special_i1.default

    @torch2needle.rule(target)
    def special_i1(input: Any) -> Any:
        return input * 0.5  # near zero

    try:
        net = torch2needle.convert(
            Net(lambda m, h: torch.special.i1(h * 0.01), exported=True).eval(), torch.randn(IMAGE)
        )
        assert "torch.ops.aten.special_i1.default" in {r.op for r in net.report.rows}
    finally:
        del FUNCTION_RULES[target]


def test_writes_of_decomposed_programs() -> None:
    """run_decompositions writes them as copies and scatters."""

    class Writes(nn.Module):
        def forward(self, x: T) -> T:
            y = x + 0
            y[0], y[:, 1] = 1.0, x[:, 0]
            y[0:1, ::2].mul_(2)
            y[1:].copy_(x[:1])
            return y + torch.empty_like(x).fill_(x.sum())

    x = torch.randn(3, 4)
    program = torch.export.export(Writes(), (x,)).run_decompositions()
    close(torch2needle.convert(program)(x), Writes()(x))
