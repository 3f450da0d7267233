"""torch.compile(backend="needle") against torch: partial graphs, changed weights, modes, sizes, threads, what stays in torch."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch2needle
from conversion import close, leaves
from torch2needle import dynamo
from torch2needle.models import UNet, randomize, resnet18


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    dynamo.SAID.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for every run of a graph by needle: which executable it was."""
    made: list[int] = []
    executable = dynamo.executable

    def counted(*args: Any, **kwargs: Any) -> Any:
        exe = executable(*args, **kwargs)

        def run(*inputs: Any) -> Any:
            made.append(id(exe))
            return exe(*inputs)

        run._pool = exe._pool
        return run

    monkeypatch.setattr(dynamo, "executable", counted)
    return made


def compiled(model: nn.Module | Callable, **kwargs: Any) -> Any:
    return torch.compile(model, backend="needle", **kwargs)


def said(call: Callable[[], Any]) -> str:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(w.message) for w in caught)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).mean(1)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).relu()
        print(end="")
        return self.b(x)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y += 1
        y[:, 1] = 0.5
        return F.relu_(y).mul_(2)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.conv(x)
        return {"y": y, "mean": (y.mean((2, 3)), None, 3)}


pytestmark = pytest.mark.usefixtures("without_rules")


class Missing(nn.Module):
    """A call without a rule between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.renorm(self.a(x), 2, 1, 1.0))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)), (4, 20)),
    "resnet18": (lambda: resnet18(), (2, 3, 64, 64)),
    "unet": (lambda: UNet(3, 2, base=8), (1, 3, 32, 32)),
    "transformer": (Encoder, (2, 7, 32)),
    "graph_break": (Breaks, (4, 6)),
    "in_place": (Writes, (2, 3, 8, 8)),
    "dict": (Named, (2, 3, 8, 8)),
    "missing": (Missing, (2, 3, 12, 12)),
}


@pytest.mark.filterwarnings("ignore:.convert.")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, mode: Callable, runs: list[int]) -> None:
    make, shape = MODELS[name]
    model = make().eval()
    randomize(model)
    x = torch.randn(shape)
    with mode():
        want = model(x.clone())
        ours = compiled(model)
        for _ in range(2):
            close(ours(x.clone()), want)
    assert runs and not dynamo.SAID


def test_lstm() -> None:
    model = nn.LSTM(4, 5, batch_first=True).eval()
    head = nn.Linear(5, 3)
    x = torch.randn(2, 6, 4)

    def f(x: torch.Tensor) -> torch.Tensor:
        return head(model(x)[0]).relu()

    with torch.no_grad():
        close(compiled(f)(x), f(x))


def test_call_without_a_rule_is_named() -> None:
    model = Missing().eval()
    with torch.no_grad():
        text = said(lambda: compiled(model)(torch.randn(2, 3, 12, 12)))
    assert "1 calls run in torch" in text and "renorm" in text and "test_dynamo.py" in text


@pytest.mark.parametrize("dynamic", [True, None])
def test_batch_sizes(dynamic: bool | None, runs: list[int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
    ours = compiled(model, dynamic=dynamic)
    with torch.no_grad():
        for n in (2, 3, 7, 2):
            x = torch.randn(n, 3, 8, 8)
            close(ours(x), model(x))
    assert len(runs) >= 4 and not dynamo.SAID


def test_size_as_an_argument(runs: list[int]) -> None:
    def f(x: torch.Tensor, n: int) -> torch.Tensor:
        return (x * n).reshape(x.shape[0] * 2, -1).sum(1)

    ours = compiled(f, dynamic=True)
    for n, rows in ((3, 2), (5, 4), (3, 6)):
        x = torch.randn(rows, 8)
        close(ours(x, n), f(x, n))
    assert len(runs) >= 3


def trained(model: nn.Module, x: torch.Tensor, **kwargs: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kwargs)
    model(x).square().sum().backward()
    optimizer.step()


def written(model: nn.Module, x: torch.Tensor) -> None:
    """What leaves versions and addresses as they are."""
    model[3].weight.data.add_(1.0)
    model[1].running_mean.data[0] = 3.0


CHANGES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "fused": lambda m, x: trained(m, x, fused=True),
    "foreach": lambda m, x: trained(m, x, foreach=True),
    "through data": written,
    "rows turned": lambda m, x: m[0].weight.data.copy_(m[0].weight.data.flip(0)),
    "signs": lambda m, x: m[0].weight.data.neg_(),
    "numpy": lambda m, x: m[3].bias.detach().numpy().__setitem__(0, 5.0),
    "one element": lambda m, x: m[0].weight.data.view(-1)[100:101].mul_(50),
}


@pytest.mark.parametrize("change", CHANGES)
def test_writes_that_torch_does_not_count_are_seen(change: str, runs: list[int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)).eval()
    randomize(model)
    ours, xs = compiled(model), [torch.randn(2, 3, 9, 9), torch.randn(3, 3, 8, 8)]
    with torch.no_grad():
        before = [model(x) for x in xs]
        for x, y in zip(xs, before, strict=True):
            close(ours(x), y)
    CHANGES[change](model, xs[0])
    count = len(runs)
    with torch.no_grad():
        for x, y in zip(xs, before, strict=True):
            want = model(x)
            assert (want - y).abs().max() > 1e-3
            close(ours(x), want)
    assert len(runs) == count + 2 and not [t for t in dynamo.SAID if "gradients" not in t]


def test_versions_alone() -> None:
    """Asked for, only what torch counts is seen: a large model is then not read at every call."""
    model, x = nn.Linear(64, 64).eval(), torch.randn(16, 64)
    with torch.no_grad():
        ours = compiled(model, options={"watch": "version"})
        close(ours(x), model(x))
        model.weight.add_(1)
        close(ours(x), model(x))
        with pytest.raises(Exception, match="watch expects content or version, got 'never'"):
            compiled(model, options={"watch": "never"})(x)


STRIDES: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda x: (x * 2).t(),
    "a result in torch's order": lambda x: torch.relu(x.t()),
    "slice": lambda x: (x + 1)[:, ::2],
    "row": lambda x: (x + 1)[1],
    "batch norm": lambda x: F.batch_norm((x.t() * 2).view(6, 1, -1), torch.ones(1), torch.ones(1)),
    "batch norm of channels": lambda x: F.batch_norm(x.t()[None, None] * 2, torch.zeros(1), torch.ones(1)),
    "expanded": lambda x: (x[:1] * 2).expand(3, 6),
    "two": lambda x: {"a": (x * 2).t(), "b": (x + 1, (x - 1)[:, 1:])},
}


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("name", STRIDES)
def test_results_have_torchs_strides(name: str, dynamic: bool | None, runs: list[int]) -> None:
    """Dynamo and what comes after a graph break rely on them."""
    f = STRIDES[name]
    ours = compiled(f, dynamic=dynamic)
    for rows in (3, 3, 3 if name == "expanded" else 5):
        x = torch.randn(rows, 6)
        got, want = leaves(ours(x)), leaves(f(x))
        close(got, want)
        assert [t.stride() for t in got] == [t.stride() for t in want]
    assert len(runs) >= 3 or (name == "expanded" and any("share memory" in t for t in dynamo.SAID))


def data_added(x: torch.Tensor) -> Any:
    x.data.add_(1.0)
    return x * 2, x.relu()


def data_replaced(x: torch.Tensor) -> Any:
    y = x * 2
    x.data = y.data + 1
    return x + y


@pytest.mark.parametrize("f", [data_added, data_replaced])
def test_writes_through_the_data_of_an_input(f: Callable) -> None:
    ours = compiled(f)
    for i in range(3):
        x = torch.randn(4, 6) + i
        mine, theirs = x.clone(), x.clone()
        for got, want in zip(leaves(ours(mine)), leaves(f(theirs)), strict=True):
            close(got, want)
        assert torch.equal(mine, theirs)
        mine.data.mul_(3), theirs.data.mul_(3)
        for got, want in zip(leaves(ours(mine)), leaves(f(theirs)), strict=True):
            close(got, want)


def test_views_after_a_graph_break() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).t()
        print(end="")
        return y.t().view(-1) + y.reshape(-1)

    x = torch.randn(4, 6)
    close(compiled(f)(x), f(x))


@pytest.mark.parametrize("change", ["add_", "optimizer", "data", "load", "replace"])
def test_changed_weights_are_seen(change: str, runs: list[int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)).eval()
    ours, x = compiled(model), torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        before = model(x)
        close(ours(x), before)
    if change == "add_":
        with torch.no_grad():
            model[0].weight.add_(0.5)
            model[1].running_mean.mul_(2).add_(1)
    elif change == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).square().sum().backward()
        optimizer.step()
    elif change == "data":
        model[3].weight.data = torch.randn(4, 16, 3, 3)
    elif change == "load":
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    else:
        model[0].weight = nn.Parameter(torch.randn(16, 3, 3, 3))
    count = len(runs)
    with torch.no_grad():
        want = model(x)
        assert (want - before).abs().max() > 1e-3
        close(ours(x), want)
    assert len(runs) > count


def test_blocks_of_one_class_keep_their_own_weights(runs: list[int]) -> None:
    blocks = nn.ModuleList(Breaks() for _ in range(4)).eval()
    for b in blocks:
        b.compile(backend="needle")
    x = torch.randn(3, 6)
    with torch.no_grad():
        for _ in range(2):
            for b in blocks:
                close(b(x), b.forward(x))
    assert len(runs) >= 16 and len(set(runs)) == 8


def test_training_then_evaluation(runs: list[int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    twin, x = copy.deepcopy(model), torch.randn(5, 3, 8, 8)
    ours = compiled(model)
    for m in (ours, twin):
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        close(p.grad, q.grad)
    assert not runs and any("gradients are needed" in t for t in dynamo.SAID)
    with torch.no_grad():  # writes running statistics
        close(ours(x), twin(x))
    assert not runs and any("running statistics" in t for t in dynamo.SAID)
    for key, value in twin.state_dict().items():
        close(model.state_dict()[key], value)
    model.eval(), twin.eval()
    with torch.no_grad():
        close(ours(x), twin(x))
    assert runs


def test_gradient_after_inference() -> None:
    model = nn.Linear(4, 3).eval()
    ours, x = compiled(model), torch.randn(2, 4)
    with torch.inference_mode():
        close(ours(x), model(x))
    y = ours(x)
    assert y.requires_grad
    y.sum().backward()
    close(model.weight.grad, x.sum(0).expand(3, 4))


def test_parameter_that_comes_to_need_a_gradient() -> None:
    model = nn.Linear(4, 3).eval().requires_grad_(False)
    ours, x = compiled(model), torch.randn(2, 4)
    close(ours(x), model(x))
    model.requires_grad_(True)
    assert ours(x).requires_grad


@torch.library.custom_op("torch2needle_tests::scale", mutates_args=())
def scale(x: torch.Tensor, k: float) -> torch.Tensor:
    return x * k


@torch.library.custom_op("torch2needle_tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.add_(1)


scale.register_fake(lambda x, k: torch.empty_like(x))
bump.register_fake(lambda x: None)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def and_views(y: torch.Tensor) -> tuple:
    return y, y.reshape(-1), y[0]


def parts(y: torch.Tensor) -> tuple:
    return y[:2], y[1:]


def halves(x: torch.Tensor) -> tuple:
    a, b = (x * 2).split(2, 1)
    a.add_(1)
    return a, b


def assigned(x: torch.Tensor) -> torch.Tensor:
    x[:, 1] = 5.0
    return x + 1


MEMORY: dict[str, Callable[[torch.Tensor], Any]] = {
    "view of an input": lambda x: (x.relu(), x.reshape(-1)),
    "slice of an input": lambda x: (x.relu(), x[1:, ::2], x[:0]),
    "view of a view": lambda x: (x * 2, x.t()[1:].t()[:, 1]),
    "an input": lambda x: [x.relu(), x],
    "two views": lambda x: and_views(x * 2),
    "transposed": lambda x: and_views((x * 2).t()),
    "parts without the whole": lambda x: parts(x * 2),
    "written parts": halves,
    "one result twice": lambda x: ((y := x * 2), y),
    "result written through a view": lambda x: ((y := x * 2)[0].add_(5), y),
    "write": lambda x: x.add_(1).relu(),
    "write and return": lambda x: x.add_(1),
    "write and view": lambda x: (x.add_(1)[1:], None),
    "write a view": lambda x: (x[0].mul_(3), x.sum(0)),
    "write a view of a view": lambda x: (x[1:].t()[0].fill_(3), x * 2, x[1:]),
    "write at an index": assigned,
    "write all": lambda x: (x.copy_(x.flip(0) * 2), x.relu()),
    "write by a custom op": lambda x: (bump(x), x * 2),
    "custom op": lambda x: scale(x.relu(), 2.0) + 1,
    "function with its own gradient": lambda x: Doubled.apply(x.relu()) + 1,
}


def together(tensors: list[torch.Tensor]) -> list[Any]:
    """Which lie in the same memory, and where there."""
    own = [t.untyped_storage().data_ptr() for t in tensors]

    def distance(i: int, j: int) -> Any:
        a, b = tensors[i], tensors[j]
        return own[i] == own[j] and a.numel() * b.numel() > 0 and a.data_ptr() - b.data_ptr()

    return [[distance(i, j) for i in range(len(own))] for j in range(len(own))]


@pytest.mark.filterwarnings("ignore:.convert.")
@pytest.mark.parametrize("name", MEMORY)
def test_results_lie_in_torchs_memory(name: str, runs: list[int]) -> None:
    """Values, strides, who shares memory with whom, what later writes change, inputs that are written."""
    f = MEMORY[name]
    ours = compiled(f)
    for i in range(3):
        source = torch.randn(4, 6)
        x, mine = ((t[1:, 1:5] if i == 1 else t[:3, :4].contiguous()) for t in (source.clone(), source.clone()))
        with torch.no_grad() if i else torch.inference_mode():
            want, got = leaves(f(x)), leaves(ours(mine))
            close([*got, mine], [*want, x])
            assert [t.stride() for t in got] == [t.stride() for t in want]
            assert together([*got, mine]) == together([*want, x])
            assert [t is mine for t in got] == [t is x for t in want]
            for a, b in zip(got, want, strict=True):
                a.add_(1), b.add_(1)
            close([*got, mine], [*want, x])
    assert len(runs) >= 3, dynamo.SAID


def test_written_inputs_that_share_memory_run_in_torch(runs: list[int]) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple:
        x.add_(1)
        return x + y, y * 2

    ours = compiled(f)
    for rows in (None, 1, 2, None):
        x = torch.randn(4, 4)
        given = [(t, torch.ones(1, 4) if rows is None else t[rows : rows + 1]) for t in (x, x.clone())]
        close(list(ours(*given[0])), list(f(*given[1])))
        close(given[0][0], given[1][0])
    assert len(runs) == 3  # one of which is the first of all, of a new plan


class Cached(nn.Module):
    """A ring that is written where it is, a counter, a parameter that shrinks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("ring", torch.zeros(8, 4))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> tuple:
        self.ring[2 : 2 + x.shape[0]] = self.linear(x)
        self.seen += x.shape[0]
        self.other.weight.mul_(0.5)
        return self.ring.sum(0) + self.seen, self.ring, self.other(x), self.linear.weight.t()


@pytest.mark.parametrize("watch", ["content", "version"])
def test_buffers_and_parameters_that_a_graph_writes(watch: str, runs: list[int]) -> None:
    model = Cached().eval()
    theirs = copy.deepcopy(model)
    ours = compiled(model, options={"watch": watch})
    with torch.no_grad():
        for i in range(4):
            x = torch.randn(3, 4)
            got, want = ours(x), theirs(x)
            close(list(got), list(want))
            assert got[1] is model.ring and got[3].data_ptr() == model.linear.weight.data_ptr()
            close(list(model.state_dict().values()), list(theirs.state_dict().values()))
            if i == 1:
                for t in (*model.state_dict().values(), *theirs.state_dict().values()):
                    t.add_(1)
    assert len(runs) == 5


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x: x[1:], "views of its inputs"),
        (lambda x: (x * 3, x.view(torch.int32)), "view of another dtype"),
        (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True), "running statistics"),
        (lambda x: x + torch.randn(3, 4), "random"),
        (lambda x: F.dropout(x, 0.5), "random"),
        (lambda x: x.half() * 2, "dtype"),
    ],
    ids=["view", "dtype", "statistics", "random", "dropout", "half"],
)
def test_what_stays_in_torch(f: Callable, reason: str, runs: list[int]) -> None:
    x = torch.randn(3, 4)
    first, second = x.clone(), x.clone()
    torch.manual_seed(3)
    want = f(first)
    torch.manual_seed(3)
    close(compiled(f)(second), want)
    close(second, first)
    assert not runs and reason in "".join(dynamo.SAID)


def test_autocast_stays_in_torch(runs: list[int]) -> None:
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert compiled(model)(x).dtype == torch.bfloat16
    assert not runs


def test_reason_is_said_once() -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    ours = compiled(model)
    assert said(lambda: ours(x)).count("gradients are needed") == 1
    assert "gradients" not in said(lambda: compiled(nn.Linear(4, 3))(x))


def test_two_threads(runs: list[int]) -> None:
    model = resnet18().eval()
    randomize(model)
    xs = [torch.randn(1, 3, 32, 32) for _ in range(2)]
    with torch.no_grad():
        wants = [model(x) for x in xs]
        ours = compiled(model)
        close(ours(xs[0]), wants[0])
    failures: list[Exception] = []

    def work(x: torch.Tensor, want: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                for _ in range(10):
                    close(ours(x), want)
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(xs, wants, strict=True)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and len(runs) >= 20


def test_options() -> None:
    model, x = nn.Conv2d(16, 16, 3).eval(), torch.randn(1, 16, 12, 12)
    with torch.no_grad():
        close(compiled(model, options={"winograd": "off", "fuse": False, "memory": "low"})(x), model(x))
        with pytest.raises(Exception, match="options expects some of"):
            compiled(model, options={"winogard": "off"})(x)
    assert "needle" in torch._dynamo.list_backends() and torch2needle.dynamo.OPTIONS["fuse"]
