"""torch2needle.bridges.distributed: two gloo processes train as one does that takes the mean of both batches' losses."""

from __future__ import annotations

import datetime
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

import needle as ndl  # noqa: E402
from needle import nn, optim  # noqa: E402

STEPS, TIMEOUT = 5, 5
ce = ndl.ops.cross_entropy


def net_of(seed: int) -> Any:
    np.random.seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


def image_net(seed: int) -> Any:
    np.random.seed(seed)
    layers = [nn.Conv(3, 16, 3, padding=1, layout="torch"), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Conv(16, 32, 3, padding=1, layout="torch"), nn.Flatten(), nn.Linear(32 * 4, 4))


class Tied(nn.Module):
    """Two layers with one weight, and one that never takes part."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.again, self.unused, self.leave = (nn.Linear(6, n) for n in (6, 6, 3, 4))
        self.again.weight = self.enter.weight

    def forward(self, x: Any) -> Any:
        return self.leave(ndl.ops.tanh(self.again(ndl.ops.tanh(self.enter(x)))))


def tied_net(seed: int) -> Any:
    np.random.seed(seed)
    return Tied()


def rows(i: int, count: int = 8, shape: tuple[int, ...] = (6,)) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.RandomState(i)
    return draw.randn(count, *shape).astype("float32"), draw.randint(0, 4, count)


class Case(NamedTuple):
    """sizes: rows of every call in both processes. frozen: by the call from which on the first weight needs no gradient or
    one; bucket: bytes; guard: in plans with zones around their memory.
    """

    net: Callable[[int], Any] = net_of
    sizes: tuple[tuple[int, int], ...] = ((4, 4),) * STEPS
    shape: tuple[int, ...] = (6,)
    options: dict[str, Any] = {"clip_grad_norm": 0.5}
    frozen: dict[int, bool] = {}
    bucket: int = 2**20
    guard: bool = False

    def batches(self) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], ...]]:
        """Both processes' batches of every call."""
        for i, (a, b) in enumerate(self.sizes):
            x, y = rows(i, a + b, self.shape)
            yield (x[:a], y[:a]), (x[a:], y[a:])

    def optimizer(self, net: Any) -> Any:
        return optim.AdamW(net.parameters(), 0.01, eps=0.01, weight_decay=0.1, rule="torch")

    def made(self, net: Any) -> Any:
        return ndl.compile_step(net, ce, self.optimizer(net), rows(0, 4, self.shape), **self.options)

    def freeze(self, net: Any, call: int) -> None:
        if call in self.frozen:
            next(iter(net.parameters())).requires_grad = not self.frozen[call]


CASES = {
    "plain": Case(),
    "buckets": Case(bucket=64),
    "unequal": Case(sizes=((4, 4), (4, 4), (4, 3), (1, 4), (4, 4)), options={}),
    "two plans": Case(sizes=((4, 2), (2, 4), (2, 2), (4, 4), (4, 2)), bucket=128),
    "accumulated": Case(sizes=((4, 4),) * 7, options={"accumulate": 3, "clip_grad_norm": 0.3, "clip_grad_value": 0.1}),
    "frozen": Case(frozen={0: True, 2: False, 4: True}),
    "tied": Case(net=tied_net),
    "images": Case(net=image_net, shape=(3, 4, 4), bucket=4096),
    "guarded": Case(guard=True, bucket=128, options={"accumulate": 2}, sizes=((4, 4),) * 6),
}


def arrays(net: Any) -> dict[str, np.ndarray]:
    return {name: np.array(t.numpy()) for name, t in net.named_tensors()}


def in_one_process(case: Case) -> dict[str, np.ndarray]:
    """Eager steps by the mean of both processes' losses."""
    net = case.net(0)
    opt, every = case.optimizer(net), case.options.get("accumulate", 1)
    for i, batches in enumerate(case.batches()):
        case.freeze(net, i)
        for x, y in batches:
            (ce(net(ndl.Tensor(x, requires_grad=False)), y) * (0.5 / every)).backward()
        if (i + 1) % every == 0:
            if limit := case.options.get("clip_grad_norm"):
                opt.clip_grad_norm(limit)
            if limit := case.options.get("clip_grad_value"):
                optim.clip_grad_value(opt.params, limit)
            opt.step()
            opt.reset_grad()
    return arrays(net)


# -- what the two processes do -------------------------------------------------------------------------------------------


@contextmanager
def settings(case: Case) -> Iterator[None]:
    from torch2needle.bridges import distributed

    before, distributed.BUCKET = distributed.BUCKET, case.bucket
    os.environ["NEEDLE_GUARD"] = str(int(case.guard))
    try:
        yield
    finally:
        distributed.BUCKET = before
        os.environ["NEEDLE_GUARD"] = "0"


def shared(case: Case, rank: int, group: Any = None) -> tuple[Any, Any]:
    """A net with weights of its own, of which those of rank 0 count, and its step."""
    from torch2needle.bridges.distributed import data_parallel

    net = case.net(rank)
    return net, data_parallel(case.made(net), group)


def trained(step: Any, case: Case, rank: int, calls: slice = slice(None)) -> None:
    for i, batches in list(enumerate(case.batches()))[calls]:
        case.freeze(step.net, i)
        step(*batches[rank])


def error_of(step: Any, batch: tuple[np.ndarray, np.ndarray]) -> str:
    """What a call raises, with the seconds it took and whether the net stayed as it was."""
    before, start = arrays(step.net), time.monotonic()
    try:
        step(*batch)
    except (RuntimeError, IndexError) as e:
        same = all(np.array_equal(a, b) for a, b in zip(before.values(), arrays(step.net).values(), strict=True))
        return f"{time.monotonic() - start:.1f} {same} {e}"
    return "nothing"


def short_group() -> Any:
    return dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))


def checkpoints(rank: int, folder: Path) -> dict[str, Any]:
    """Two steps; rank 0's checkpoint goes to both, who had trained on, and go on from there."""
    from needle.training import load_checkpoint, save_checkpoint

    case, file = CASES["plain"], folder / "checkpoint.safetensors"
    net, step = shared(case, rank)
    trained(step, case, rank, slice(0, 2))
    if rank == 0:
        save_checkpoint(file, net, step.optimizer, 2)
    dist.barrier()
    trained(step, case, rank)
    load_checkpoint(file, net, step.optimizer)
    trained(step, case, rank, slice(2, None))
    return arrays(net)


def bad_labels(rank: int, folder: Path) -> dict[str, Any]:
    """One process has labels that are no class: the other one waits until the time-out. A new group goes on."""
    from torch2needle.bridges.distributed import data_parallel

    case = CASES["buckets"]
    with settings(case):
        net, step = shared(case, rank, short_group())
        x, y = rows(0, 4)
        found = {"error": error_of(step, (x, y + 9 * rank)), "again": error_of(step, (x, y)) if rank == 0 else ""}
        dist.barrier()
        trained(data_parallel(step, short_group()), case, rank)
    return found | arrays(net)


def other_net(rank: int, folder: Path) -> dict[str, Any]:
    case = Case(net=lambda _: net_of(0) if rank == 0 else nn.Sequential(nn.Linear(6, 4)))
    try:
        shared(case, rank)
    except ValueError as e:
        return {"error": str(e)}
    return {}


def gone(rank: int, folder: Path) -> dict[str, Any]:
    _, step = shared(CASES["plain"], rank, short_group())
    if rank == 1:
        os._exit(0)
    return {"error": error_of(step, rows(0, 4))}


ACTS = {"checkpoints": checkpoints, "bad labels": bad_labels, "other net": other_net, "gone": gone}  # in this order


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    ndl.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    threads = threading.active_count()
    for name, case in CASES.items():
        with settings(case):
            net, step = shared(case, rank)
            trained(step, case, rank)
        found = {"leaves": len({n for p in step._plans.values() for n in p.leaves})}
        np.savez(Path(folder) / f"{name}{rank}.npz", **found, **arrays(net))
    for name, act in ACTS.items():
        found = act(rank, Path(folder))
        np.savez(Path(folder) / f"{name}{rank}.npz", threads=threading.active_count() - threads, **found)
    os._exit(0)  # the other one is gone


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, np.ndarray]]:
    """What a case left in a process."""
    folder = tmp_path_factory.mktemp("processes")
    mp.spawn(work, (str(folder),), nprocs=2)
    return lambda name, rank: dict(np.load(folder / f"{name}{rank}.npz"))


# -- tests ---------------------------------------------------------------------------------------------------------------


def assert_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name, values in wanted.items():
        if "running" not in name and "num_batches" not in name:  # statistics stay each process's own
            np.testing.assert_allclose(found[name], values, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one_with_the_mean_loss(found: Any, name: str) -> None:
    wanted = in_one_process(CASES[name])
    for rank in (0, 1):
        assert_close(found(name, rank), wanted)


def test_two_processes_equal_one_compiled_step_of_both_batches(found: Any) -> None:
    case, net = CASES["plain"], net_of(0)
    step = case.made(net)
    for (x, y), (more, labels) in case.batches():
        step(np.concatenate([x, more]), np.concatenate([y, labels]))
    for rank in (0, 1):
        assert_close(found("plain", rank), arrays(net))


def test_the_number_of_buckets_changes_no_bit(found: Any) -> None:
    one, many = found("plain", 0), found("buckets", 1)
    assert one.pop("leaves") == 1 < many.pop("leaves")  # they leave while the plan runs
    for name, values in one.items():
        np.testing.assert_array_equal(many[name], values, err_msg=name)


def test_statistics_are_each_process_s_own(found: Any) -> None:
    assert np.abs(found("images", 0)["1.running_mean"] - found("images", 1)["1.running_mean"]).max() > 1e-3


def test_a_checkpoint_of_one_goes_on_in_both(found: Any) -> None:
    for rank in (0, 1):
        for name, values in found("plain", 0).items():
            if name != "leaves":
                np.testing.assert_array_equal(found("checkpoints", rank)[name], values, err_msg=name)


def test_a_process_that_raises_ends_the_others_step(found: Any) -> None:
    seconds, same, _ = str(found("bad labels", 0)["error"]).split(" ", 2)
    assert float(seconds) < TIMEOUT + 5 and same == "True"
    assert "True [compile_step] a step before failed" in str(found("bad labels", 0)["again"])
    assert "True [cross_entropy] index expects 0 to 3" in str(found("bad labels", 1)["error"])
    for rank in (0, 1):
        assert_close(found("bad labels", rank), in_one_process(CASES["plain"]))


def test_another_net_is_refused_everywhere(found: Any) -> None:
    for rank in (0, 1):
        assert str(found("other net", rank)["error"]) == (
            "[data_parallel] expects the same model in all processes, got another in process 1."
        )


def test_a_process_that_is_gone_is_an_error_and_no_thread_is_left(found: Any) -> None:
    seconds, same, _ = str(found("gone", 0)["error"]).split(" ", 2)
    assert float(seconds) < TIMEOUT + 5 and same == "True"
    assert found("gone", 0)["threads"] <= 0


def test_a_step_without_a_group_is_refused() -> None:
    from torch2needle.bridges.distributed import data_parallel

    with pytest.raises(RuntimeError, match="init_process_group"):
        data_parallel(CASES["plain"].made(net_of(0)))


def test_waiting_for_another_process_can_be_interrupted() -> None:
    from torch2needle.bridges import distributed

    class Work:
        def is_completed(self) -> bool:
            return False

        def wait(self, limit: datetime.timedelta) -> None:
            time.sleep(limit.total_seconds())
            raise RuntimeError("Operation timed out!")

    done = threading.Event()

    def press() -> None:
        while not done.wait(1):  # Python drops what a handler raises in a destructor: then press again
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    presses = threading.Thread(target=press)
    presses.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            distributed.wait(Work())
    finally:
        done.set()
        presses.join()
        signal.signal(signal.SIGINT, before)


def test_the_package_goes_to_processes_by_name() -> None:
    import torch2needle

    assert pickle.loads(pickle.dumps(torch2needle)) is torch2needle


# -- one process: the step's side alone ----------------------------------------------------------------------------------


def doubled(flat: Any) -> Callable[[], None]:
    """As two processes with the same batch sum up."""
    torch.from_dlpack(flat).mul_(2)
    return lambda: None


@pytest.mark.parametrize("place", ["first", "second", "wait"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_fails_after_gradients_left_moves_nothing(place: str, error: type[BaseException]) -> None:
    case, net, sent = Case(bucket=64), net_of(0), []
    step = case.made(net)
    x, y = rows(0, 4)

    def wait() -> None:
        raise error("no network")

    def send(flat: Any) -> Any:
        sent.append(flat)
        if len(sent) == {"first": 1, "second": 2}.get(place):
            wait()
        return wait if place == "wait" else doubled(flat)

    step.share(send, 2, case.bucket)
    before = arrays(net), step.optimizer.t
    with pytest.raises(error):
        step(x, y)
    assert step.optimizer.t == before[1]
    with pytest.raises(RuntimeError, match=r"\[compile_step\] a step before failed while processes shared"):
        step(x, y)
    for name, values in before[0].items():
        np.testing.assert_array_equal(arrays(net)[name], values)
    step.share(doubled, 2, case.bucket)
    step(x, y)
    other = net_of(0)
    case.made(other)(x, y)
    assert_close(arrays(net), arrays(other))


def test_gradients_of_other_parameters_are_refused() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.few, self.many = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x: Any) -> Any:
            return self.few(x) if x.shape[0] < 4 else self.many(x)

    net = Chooses()
    step = ndl.compile_step(net, ce, optim.SGD(net.parameters(), 0.1), rows(0, 4))
    step.share(doubled, 2, 64)
    step(*rows(0, 4))
    with pytest.raises(ndl.autograd.Unsupported, match="expect them of the same parameters"):
        step(*rows(0, 2))


def test_needs_may_change_between_updates_only() -> None:
    net = net_of(0)
    weight = next(iter(net.parameters()))
    step = ndl.compile_step(net, ce, optim.SGD(net.parameters(), 0.1), rows(0, 4), accumulate=2)
    step.share(doubled, 2, 64)
    step(*rows(0, 4))
    weight.requires_grad = False
    with pytest.raises(RuntimeError, match="until they are applied, got 6 and 5"):
        step(*rows(0, 4))
