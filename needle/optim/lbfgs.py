"""L-BFGS, whose steps compute the loss several times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from needle.autograd import Tensor, Unsupported

from .adaptive import both
from .base import Optimizer
from .group import Group

CURVED = 1e-10  # the least curvature along a step that is remembered
SUFFICIENT, FLAT = 1e-4, 0.9  # Wolfe's conditions: of the decrease, and of the slope that is left
TRIALS = 25  # of a line search

LBFGS_OPTIONS = {
    "lr": 1.0,
    "max_iter": 20,
    "max_eval": None,
    "tolerance_grad": 1e-7,
    "tolerance_change": 1e-9,
    "history_size": 100,
    "line_search_fn": None,
}
Point = tuple[
    float, float, np.ndarray, float
]  # the step, the loss there, its gradient, and the slope along the direction


class LBFGS(Optimizer):
    """Quasi-Newton steps from the last `history_size` differences of gradients (Nocedal and Wright, Numerical Optimization, 7.2).

    LBFGS(params, lr, max_iter, max_eval, tolerance_grad, tolerance_change, history_size, line_search_fn). `step(closure)` makes
    up to `max_iter` iterations; `closure` forgets the gradients, computes the loss and calls its backward. line_search_fn:
    "strong_wolfe", or None for steps of `lr`. One group; no compiled steps.
    """

    rules = both(LBFGS_OPTIONS)
    arguments = both(tuple(LBFGS_OPTIONS))

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **options)
        if len(self.param_groups) != 1:
            raise ValueError(f"[LBFGS] expects one group of parameters, got {len(self.param_groups)}.")
        self.forget()

    def forget(self) -> None:
        """Begin anew, without what earlier steps found out."""
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []  # steps with the gradients' differences
        self.direction = self.gradient = np.zeros(0)
        self.scale, self.size, self.iterations = 1.0, 0.0, 0

    def kernel(self, group: Group, step: int, first: bool, *numbers: float) -> Any:
        raise Unsupported("[LBFGS] computes the loss several times in a step: call step(closure), eagerly.")

    def state_dict(self) -> dict[str, Any]:
        """See `Optimizer.state_dict`; "history": what the next step goes on from."""
        names = ("direction", "gradient", "scale", "size", "iterations")
        return super().state_dict() | {"history": {n: getattr(self, n) for n in names} | {"pairs": list(self.pairs)}}

    def load_state_dict(self, state: Any) -> None:
        if "history" not in state:
            raise ValueError("[LBFGS] the state expects the history of needle's LBFGS, got none.")
        super().load_state_dict(state)
        for name, value in state["history"].items():
            setattr(self, name, list(value) if name == "pairs" else value)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Up to `max_iter` iterations; the loss before them, as the closure gave it."""
        if closure is None:
            raise TypeError("[LBFGS] step expects a function that computes the loss and its gradients, got None.")
        group = self.param_groups[0]
        most = group["max_eval"] or int(group["max_iter"]) * 5 // 4
        value = closure()
        evaluations, loss, gradient = 1, float(value.item()), self.flat_gradient()
        if np.abs(gradient).max(initial=0.0) <= group["tolerance_grad"]:
            return value
        self.t += 1
        for iteration in range(1, int(group["max_iter"]) + 1):
            self.turn(gradient, int(group["history_size"]))
            before, self.gradient = loss, gradient
            first = self.iterations == 1
            self.size = group["lr"] * (min(1.0, 1.0 / float(np.abs(gradient).sum())) if first else 1.0)
            slope = float(gradient @ self.direction)
            if slope > -group["tolerance_change"]:
                break
            start = [p.numpy() for p in self.params]
            if group["line_search_fn"] is not None:
                search = Search(partial(self.at, start, closure), group["tolerance_change"])
                self.size, loss, gradient, tried = search.run(self.size, loss, gradient, self.direction)
                self.move(start, self.size)
                evaluations += tried
            else:
                self.move(start, self.size)
                if iteration < group["max_iter"]:
                    loss, gradient = self.evaluate(closure)
                    evaluations += 1
            moved = float(np.abs(self.direction * self.size).max())
            if (
                evaluations >= most
                or np.abs(gradient).max() <= group["tolerance_grad"]
                or moved <= group["tolerance_change"]
                or abs(loss - before) < group["tolerance_change"]
            ):
                break
        return value

    def turn(self, gradient: np.ndarray, history: int) -> None:
        """The direction of the next iteration: minus the gradient times the inverse curvature that is known."""
        self.iterations += 1
        if self.iterations == 1:
            self.direction = -gradient
            return
        step, change = self.direction * self.size, gradient - self.gradient
        curvature = float(step @ change)
        if curvature > CURVED:
            self.pairs = [*self.pairs, (step, change)][-history:]
            self.scale = curvature / float(change @ change)
        q, shares = -gradient, []
        for s, y in reversed(self.pairs):
            share = (s @ q) / (y @ s)
            shares.append(share)
            q = q - share * y
        q = q * self.scale
        for (s, y), share in zip(self.pairs, reversed(shares), strict=True):
            q = q + s * (share - (y @ q) / (y @ s))
        self.direction = q.astype(gradient.dtype)

    def flat_gradient(self) -> np.ndarray:
        self._check_gradients()
        parts = [np.zeros(p.size, p.dtype) if p.grad is None else p.grad.numpy().reshape(-1) for p in self.params]
        return np.concatenate(parts) if parts else np.zeros(0)

    def move(self, start: list[np.ndarray], size: float) -> None:
        """Parameters at a step of this size along the direction from where they were."""
        first = 0
        for p, a in zip(self.params, start, strict=True):
            part = self.direction[first : first + a.size].reshape(a.shape)
            p.data = Tensor((a + a.dtype.type(size) * part).astype(a.dtype), device=p.device, dtype=p.dtype)
            first += a.size

    def evaluate(self, closure: Callable[[], Any]) -> tuple[float, np.ndarray]:
        return float(closure().item()), self.flat_gradient()

    def at(self, start: list[np.ndarray], closure: Callable[[], Any], size: float) -> Point:
        self.move(start, size)
        loss, gradient = self.evaluate(closure)
        return size, loss, gradient, float(gradient @ self.direction)


class Search:
    """A step that fulfils the strong Wolfe conditions (Nocedal and Wright, 3.5): a bracket that grows, then narrows by cubics."""

    def __init__(self, at: Callable[[float], Point], tolerance: float) -> None:
        self.at, self.tolerance, self.tried = at, tolerance, 0

    def run(
        self, size: float, loss: float, gradient: np.ndarray, direction: np.ndarray
    ) -> tuple[float, float, np.ndarray, int]:
        """(step, loss, gradient, evaluations) from where the loss and gradient are these; `size` is tried first."""
        self.width = float(np.abs(direction).max())
        start: Point = (0.0, loss, gradient, float(gradient @ direction))
        last, found, ends = start, self.new(size), None
        for trial in range(TRIALS):
            if self.high(found, start) or (trial and found[1] >= last[1]):
                ends = (last, found)
                break
            if abs(found[3]) <= -FLAT * start[3]:
                return self.result(found)
            if found[3] >= 0:
                ends = (found, last)
                break
            least, most = found[0] + 0.01 * (found[0] - last[0]), found[0] * 10
            last, found = found, self.new(lowest(last, found, least, most))
        return self.result(min(start, found, key=lambda p: p[1]) if ends is None else self.narrow(start, *ends))

    def narrow(self, start: Point, low: Point, high: Point) -> Point:
        """The best point between one that is low enough and one that is not, or rises."""
        stuck = False
        while self.tried < TRIALS and abs(high[0] - low[0]) * self.width >= self.tolerance:
            left, right = sorted((low[0], high[0]))
            size, margin = lowest(low, high, left, right), 0.1 * (right - left)
            if min(right - size, size - left) < margin:  # near an end: the second time it moves inwards
                if stuck or size in (left, right):
                    size = right - margin if abs(size - right) < abs(size - left) else left + margin
                stuck = not stuck
            else:
                stuck = False
            found = self.new(size)
            if self.high(found, start) or found[1] >= low[1]:
                high = found
                continue
            if abs(found[3]) <= -FLAT * start[3]:
                return found
            if found[3] * (high[0] - low[0]) >= 0:
                high = low
            low = found
        return low

    def new(self, size: float) -> Point:
        self.tried += 1
        return self.at(size)

    def high(self, point: Point, start: Point) -> bool:
        return not point[1] <= start[1] + SUFFICIENT * point[0] * start[3]  # NaN, too

    def result(self, point: Point) -> tuple[float, float, np.ndarray, int]:
        return *point[:3], self.tried


def lowest(a: Point, b: Point, least: float, most: float) -> float:
    """Where the cubic through two points with these slopes is lowest, within limits; their middle where it has no such place."""
    a, b = sorted((a, b), key=lambda p: p[0])
    (x, f, _, slope), (z, g, _, other) = a, b
    middle = slope + other - 3 * (f - g) / (x - z)
    root = middle * middle - slope * other
    if not root >= 0:
        return (least + most) / 2
    end = z - (z - x) * ((other + root**0.5 - middle) / (other - slope + 2 * root**0.5))
    return min(max(end, least), most) if np.isfinite(end) else (least + most) / 2
