"""Chains of element-wise steps as one: rules over the plans of any target.

Steps belong together where one reads what another makes, element by element. They run where the last one stood, in their
order; what only they read is never stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from needle import _core
from needle.backend_ndarray import NDArray
from needle.backend_ndarray.kernels import KERNELS
from needle.backend_ndarray.strides import reshaped_strides
from needle.executor.order import Touch, touched
from needle.executor.rewriting import PlanSteps, same_elements
from needle.executor.step import ZERO_HALO, Step
from needle.executor.verify_plan import Memory, region
from needle.graph import Node
from needle.graph.engine import Fusion
from needle.graph.matcher import Match
from needle.graph.steps import Steps

INPUTS, OUTPUTS, SLOTS = "abcdefgh", ("y0", "y1", "y2", "y3"), 8  # of the kernel's row
COPY = -1  # in the place of a map's number: the value itself
MAPS = {name: number for number, name in enumerate(_core.MAPS)}
TRUTHS = {"eq", "ne", "ge", "gt", "le", "lt"}
TRUTHS |= {f"{name}_scalar" for name in TRUTHS} & set(MAPS)  # their results are 0 and 1, in every dtype
OF_BOOLS = {"bitwise_and": "minimum", "bitwise_or": "maximum", "bitwise_xor": "ne"}  # the same of 0 and 1
MOST = 24  # maps in one step
SMALL, FEW = 1 << 14, 4  # larger arrays than these many elements wait for few other steps: their memory is held as long


class Link(NamedTuple):
    """A step as a link of a chain: the map that computes it in float32, of which arrays."""

    step: Step
    map: str  # "copy": the value itself
    operands: list[NDArray]
    is_truth: bool  # 0 or 1
    touches: list[Touch]

    @property
    def out(self) -> NDArray:
        return self.step.outs[0]


def link_of(step: Step, touches: list[Touch]) -> Link | None:
    """None for what is no map, or is not one of float32."""
    name, ins, out = step.kernel, step.ins, step.outs[0]
    if name == "copy":
        (x,) = ins
        if out.dtype != "float32" or not dense_with(x, out):
            return None
        return Link(step, name, ins, x.dtype == "bool", touches)
    if name not in MAPS or "float32" not in KERNELS[name].dtypes:
        if name not in OF_BOOLS or any(a.dtype != "bool" for a in (*ins, out)):
            return None
        return Link(step, OF_BOOLS[name], ins, True, touches)
    if ins[-1].dtype == "bool":  # computed in whole numbers
        whole = name == "eq_scalar" and step.attrs["scalar"] in (0, 1)
        return Link(step, name, ins, True, touches) if whole else None
    if ins[-1].dtype != "float32" or (out.dtype != "float32" and name not in TRUTHS):
        return None
    return Link(step, name, ins, name in TRUTHS, touches)


def dense_with(x: NDArray, out: NDArray) -> bool:
    """Whether x is read without gaps in the order of out's memory; other copies are transpositions, with their own kernel."""
    axes = [d for d, n in enumerate(out.shape) if n > 1]
    inner = min(axes, key=lambda d: abs(out.strides[d]), default=None)
    return inner is None or x.strides[inner] in (0, 1)


def apart(a: NDArray, b: NDArray) -> bool:
    """Whether two arrays of one memory share no byte; False where that is too much to find out."""
    one, other = region(a), region(b)
    if one is None or other is None or one.stop <= other.start or other.stop <= one.start:
        return True
    if one.axes and other.axes and one.axes[-1][1] == other.axes[-1][1]:  # as slices of channels, image by image
        period, ahead = one.axes[-1][1], other.start - one.start
        if ahead % period >= one.reach and -ahead % period >= other.reach:
            return True
    memory = Memory(a._handle.nbytes)
    memory.meet(one)
    memory.meet(other)
    return memory.blank() is not None and not memory.meets(one, other)


class Chain:
    """Links that may be one step, by their places in the plan.

    since: how many other steps came before the first link
    """

    def __init__(self, place: int, link: Link, since: int) -> None:
        self.begun, self.since, self.out = place, since, link.out
        self.links: dict[int, Link] = {}
        self.touches: dict[int, list[Touch]] = defaultdict(list)  # by memory
        self.made: dict[int, list[int]] = defaultdict(list)  # places of the links that write a memory
        self.read: dict[int, list[NDArray]] = defaultdict(list)  # by memory
        self.add(place, link)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.out.shape

    def fits(self, array: NDArray) -> bool:
        if array.shape == self.shape:
            return True
        return array.size == self.out.size and reshaped_strides(array.shape, array.strides, self.shape) is not None

    def maker(self, array: NDArray, before: float = math.inf) -> int | None:
        """The last link, of those before a place, that makes an array."""
        made = (
            p for p in self.made.get(id(array._handle), ()) if p < before and same_elements(self.links[p].out, array)
        )
        return max(made, default=None)

    def takes(self, link: Link, others: int) -> bool:
        """Whether a step right behind the chain may be its next link; others: steps so far that are none."""
        if len(self.links) >= MOST or (others - self.since > FEW and link.out.size > SMALL):
            return False
        makers = [self.maker(x) for x in link.operands]
        if all(m is None for m in makers) or not all(map(self.fits, (link.out, *link.operands))):
            return False
        sources = (self.links[m] for m in makers if m is not None)
        return all(l.out.dtype == "float32" or l.is_truth for l in sources) and self._element_by_element([link])

    def takes_all(self, other: Chain) -> bool:
        """Whether another chain may be part of this one."""
        links = list(other.links.values())
        fits = all(self.fits(x) for l in links for x in (l.out, *l.operands))
        return fits and len(self.links) + len(links) < MOST and self._element_by_element(links)

    def _element_by_element(self, more: Sequence[Link]) -> bool:
        """Whatever is written is read and written by all links at the same elements: a piece never needs another one."""
        return all(
            same_elements(w, x) or apart(w, x)
            for link in more
            for w, x in (
                *((self.links[p].out, x) for x in (link.out, *link.operands) for p in self.made.get(id(x._handle), ())),
                *((link.out, x) for x in self.read.get(id(link.out._handle), ())),
                *((link.out, x) for x in link.operands if x._handle is link.out._handle),
            )
        )

    def add_all(self, other: Chain) -> None:
        for place, link in other.links.items():
            self.add(place, link)
        self.links = dict(sorted(self.links.items()))
        self.since = min(self.since, other.since)

    def add(self, place: int, link: Link) -> None:
        self.links[place] = link
        self.made[id(link.out._handle)].append(place)
        for x in link.operands:
            self.read[id(x._handle)].append(x)
        for t in link.touches:
            self.touches[t.memory].append(t)

    def blocked_by(self, touches: Sequence[Touch]) -> bool:
        """Whether links cannot move behind a step that touches this."""
        return any(t.clashes(o) for t in touches if t.memory in self.touches for o in self.touches[t.memory])


class Begun:
    """Chains that may get more links, found by the memory that theirs write or touch, the oldest first."""

    def __init__(self) -> None:
        self.chains: set[Chain] = set()
        self.making: dict[int, set[Chain]] = defaultdict(set)
        self.touching: dict[int, set[Chain]] = defaultdict(set)

    def enter(self, chain: Chain) -> None:
        """Take up a chain, or what it got."""
        self.chains.add(chain)
        for index, memories in ((self.making, chain.made), (self.touching, chain.touches)):
            for m in memories:
                index[m].add(chain)

    def remove(self, chain: Chain) -> None:
        self.chains.remove(chain)
        for index, memories in ((self.making, chain.made), (self.touching, chain.touches)):
            for m in memories:
                index[m].remove(chain)

    def makers(self, link: Link) -> list[Chain]:
        return self._in(self.making, {id(x._handle) for x in link.operands})

    def near(self, touches: Sequence[Touch]) -> list[Chain]:
        return self._in(self.touching, {t.memory for t in touches})

    def _in(self, index: dict[int, set[Chain]], memories: Iterable[int]) -> list[Chain]:
        found = set().union(*(index[m] for m in memories if m in index))
        return sorted(found, key=lambda chain: chain.begun)


class Program(NamedTuple):
    rows: list[list[float]]
    inputs: list[NDArray]
    outputs: list[NDArray]
    slots: int

    @property
    def fits(self) -> bool:
        return len(self.inputs) <= len(INPUTS) and len(self.outputs) <= len(OUTPUTS) and self.slots <= SLOTS


def program_of(plan: PlanSteps, chain: Chain, places: Sequence[int]) -> Program:
    """The links at some of a chain's places as data for the kernel, up to one that reads too many arrays."""
    inputs: list[NDArray] = []
    outputs: list[NDArray] = []
    links = {p: chain.links[p] for p in places}
    sources: dict[int, list[int | None]] = {}
    last_use: dict[int, int] = {}
    for p, link in links.items():
        makers = (chain.maker(x, p) for x in link.operands)
        sources[p] = [m if m in links else None for m in makers]
        last_use |= {m: p for m in sources[p] if m is not None}
    rows: list[list[float]] = []
    slot: dict[int, int] = {}
    free: list[int] = []
    slots = 0
    for p, link in links.items():
        operands = []
        for x, m in zip(link.operands, sources[p], strict=True):
            if m is not None:
                operands.append(len(INPUTS) + slot[m])
                continue
            known = next((i for i, y in enumerate(inputs) if y.is_same_view(x)), None)
            if known is None:
                inputs.append(x)
            operands.append(len(inputs) - 1 if known is None else known)
        if len(inputs) > len(INPUTS):
            break
        kept = any(j is None or j not in links for j in plan.read_by[p][0])
        if not free:
            free.append(slots)
            slots += 1
        slot[p] = free.pop()
        free += [slot[m] for m, at in last_use.items() if at == p]
        if p not in last_use:
            free.append(slot[p])
        outputs += [link.out] if kept else []
        number = COPY if link.map == "copy" else MAPS[link.map]
        attributes = list(link.step.attrs.values())
        rows.append(
            [
                number,
                *operands,
                *[0] * (3 - len(operands)),
                slot[p],
                len(outputs) - 1 if kept else -1,
                *attributes,
                *[0] * (2 - len(attributes)),
            ]
        )
    return Program(rows, inputs, outputs, slots)


def find_chains(plan: PlanSteps, pairs: int) -> dict[Node, ChainMatch]:
    """Every chain of at least two links that no other rule has taken, by its last step."""
    places = list(plan.graph.nodes)
    made: dict[Node, ChainMatch] = {}
    begun = Begun()
    others = 0  # steps that are no links

    def close(chain: Chain) -> None:
        left = list(chain.links)
        while len(left) > 1:
            count = len(left)
            while not (program := program_of(plan, chain, left[:count])).fits:
                count = min(count - 1, len(program.rows))
            size = chain.links[left[0]].out.size
            if program.outputs and (count > 2 or (count == 2 and size >= pairs)):
                made[places[left[count - 1]]] = ChainMatch(plan, [places[i] for i in left[:count]], chain, program)
            left = left[count:]

    for i, step in enumerate(plan.steps):
        if step.kernel == ZERO_HALO:
            continue
        touches = list(touched(step))
        link = None if places[i] in plan.taken else link_of(step, touches)
        others += link is None
        chain: Chain | None = None
        if link is not None:
            takers = [c for c in begun.makers(link) if c.takes(link, others)]
            chain = takers.pop() if takers else None
            if chain is not None:
                chain.add(i, link)
            for other in takers:
                if chain is not None and chain.takes_all(other):
                    chain.add_all(other)
                    begun.remove(other)
        for other in begun.near(touches):
            if other is not chain and other.blocked_by(touches):
                begun.remove(other)
                if chain is not None and chain.takes_all(other):
                    chain.add_all(other)
                else:
                    close(other)
        if link is not None and chain is None and link.out.size:
            chain = Chain(i, link, others)
        if chain is not None:
            begun.enter(chain)
    for chain in sorted(begun.chains, key=lambda c: c.begun):
        close(chain)
    return made


class ChainMatch(Match):
    """Links next to each other in what they compute; the chain knows who reads them outside."""

    closed = True

    def __init__(self, plan: PlanSteps, nodes: list[Node], chain: Chain, program: Program) -> None:
        super().__init__({f"{n.name} {plan.order[n]}": plan[n] for n in nodes})
        self.chain, self.program = chain, program

    @property
    def outputs(self) -> list[Node]:
        return self.nodes


@dataclasses.dataclass(frozen=True)
class ChainPattern:
    """Any element-wise steps; shorter than all other patterns, which go first."""

    pairs: int  # elements from which on even two maps gain

    def __len__(self) -> int:
        return 0

    def matches(self, root: Node, steps: Steps) -> Iterator[Match]:
        if not isinstance(steps, PlanSteps):  # a graph of ops
            return
        if steps.chains is None:
            steps.chains = find_chains(steps, self.pairs)
        if root in steps.chains:
            yield steps.chains[root]


def as_one_step(match: Any) -> Step:
    shape, program = match.chain.shape, match.program

    def view(x: NDArray) -> NDArray:
        strides = reshaped_strides(x.shape, x.strides, shape)
        assert strides is not None
        return x.strided(shape, strides)

    outputs = [view(y) for y in program.outputs]
    outputs += [outputs[0]] * (len(OUTPUTS) - len(outputs))
    inputs = {"program": NDArray(np.array(program.rows), dtype="float64")}
    inputs |= dict(zip(INPUTS, map(view, program.inputs), strict=False))
    return Step("chain", outputs, inputs, {"slots": program.slots}, "")


def chains(pairs: int, why: str) -> Fusion:
    """The rule; pairs: elements from which on even two maps gain."""
    return Fusion("ElementwiseChain", ChainPattern(pairs), as_one_step, why=why)
