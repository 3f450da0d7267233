"""An ExportedProgram as a captured graph: wrappers inlined, constants folded, layers and training flags found."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from needle.autograd import Unsupported

from ..rules.overloads import is_overload
from ..rules.registry import is_inplace
from ..rules.sampling import dense_strided, dense_strided_copy
from .flags import Changing, follow_modes
from .folding import drop_unread, fold
from .functional import of_tails
from .module_calls import call_modules
from .nodes import owner_path, written
from .steps import PLAIN
from .structure import arguments, classed, input_places, structure
from .tracing import Captured

aten = torch.ops.aten
# Their results are their first arguments, or nothing that a value depends on.
CHECKS = (
    "_assert_tensor_metadata",
    "_assert_scalar",
    "_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)
SAME = ("to", "type_as", "contiguous", "resolve_conj", "resolve_neg")  # which may give their argument itself
STRIDED = {
    aten.as_strided.default: dense_strided,
    aten.as_strided_copy.default: dense_strided_copy,
}


def capture_program(
    program: torch.export.ExportedProgram,
    model: nn.Module | None,
    notes: list[str],
    changing: Changing = dict,
    result: Any = None,
    training: bool = False,
) -> Captured:
    """model: what was exported in evaluation mode, or with `training` in the modes that it is in; None for a program that came
    without, which gets a tree of its names.

    result: what has the dataclasses of the model's results.

    changing: of flags for which that is not plain from torch's own modules.
    """
    flags_of = None if model is None else {p: training and m.training for p, m in model.named_modules()}
    builder = ProgramBuilder(program, skeleton(program) if model is None else model, notes)
    graph = builder.build(result)
    drop_unread(graph)
    fold(graph, builder.constants, builder.fixed_tensors())
    if model is not None:
        note_shared_memory(graph)
        call_modules(graph, model)
    follow_modes(graph, flags_of, changing)
    captured = Captured(graph, builder.model, builder.constants, list(dict.fromkeys(notes)))
    captured.arguments, captured.chooses = builder.arguments, builder.chooses
    if (tails := of_tails(model)) and not captured.chooses:
        captured.chooses = tails
        captured.notes.append("an adaptive softmax computes all clusters; those of no target get zeros for gradients")
    return captured


def skeleton(program: torch.export.ExportedProgram) -> nn.Module:
    """Modules without forwards that hold the program's parameters and buffers under their names."""
    root = nn.Module()
    signature = program.graph_signature
    lasting = set(signature.buffers) - set(signature.non_persistent_buffers)
    owners = {owner_path(n) for n in program.graph.nodes}
    for path in sorted(o for o in owners if o and "@" not in o):
        submodule(root, path.split("."))
    for name, value in {**program.state_dict, **program.constants}.items():
        if name not in (*signature.parameters, *signature.buffers):
            continue
        *parents, last = name.split(".")
        owner = submodule(root, parents)
        if isinstance(value, nn.Parameter):
            owner.register_parameter(last, value)
        else:
            owner.register_buffer(last, value, persistent=name in lasting)
    return root.eval()


def submodule(root: nn.Module, parents: list[str]) -> nn.Module:
    for part in parents:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root


class ProgramBuilder:
    """Copies the program's graph: inputs by name, parameters and constants as attributes, wrappers' bodies in their place."""

    def __init__(self, program: torch.export.ExportedProgram, model: nn.Module, notes: list[str]) -> None:
        self.program, self.model, self.notes = program, model, notes
        self.graph = fx.Graph(tracer_cls=None)
        self.constants: dict[str, torch.Tensor] = {}
        self.arguments: dict[str, Any] = {}
        self.chooses = False  # whether branches are computed that torch does not
        self.no_grad = False  # whether the body that is copied is one without gradients

    def build(self, like: Any = None) -> fx.Graph:
        values = self.inputs()
        result = self.copy(self.program.graph, self.program.graph_module, values)
        specs = self.program.graph_signature.output_specs
        kinds = [s.kind.name for s in specs]
        given = structure([r for r, k in zip(result, kinds, strict=True) if k == "USER_OUTPUT"], self.out_spec)
        self.graph.output(classed(given, like, self.graph.call_function))  # type: ignore[arg-type]
        self.writes = [(s.target, r) for s, r in zip(specs, result, strict=True) if s.kind.name == "BUFFER_MUTATION"]
        if self.writes:
            raise Unsupported("[convert] expects a program of torch.export.export, got one after run_decompositions().")
        return self.graph

    @property
    def out_spec(self) -> Any:
        return self.program.call_spec.out_spec

    def fixed_tensors(self) -> dict[str, torch.Tensor]:
        """Attributes that no one trains or loads: lifted constants, and buffers that are not saved."""
        buffers = self.program.graph_signature.non_persistent_buffers
        return self.constants | {b: operator.attrgetter(b)(self.model) for b in buffers}

    def inputs(self) -> dict[fx.Node, Any]:
        signature = self.program.graph_signature
        attributes = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        lifted = signature.inputs_to_lifted_tensor_constants
        places = input_places(self.program)
        fixed = {
            n.name: n.meta.get("val") for n in self.program.graph.nodes if n.op == "placeholder" and n.name in places
        }
        self.arguments = arguments(self.program, fixed)
        values: dict[fx.Node, Any] = {}
        for old in self.program.graph.nodes:
            if old.op != "placeholder":
                continue
            if old.name in attributes:
                new = self.graph.get_attr(attributes[old.name])
            elif old.name in lifted:
                self.constants[lifted[old.name]] = self.program.constants[lifted[old.name]]
                new = self.graph.get_attr(lifted[old.name])
            elif old.name in places:
                if not isinstance(old.meta.get("val"), torch.Tensor):
                    values[old] = old.meta.get("val")  # fixed
                    continue
                place = places[old.name]
                new = self.graph.placeholder(".".join(map(str, place)))
                new.meta["place"] = place
            else:
                raise Unsupported(f"[convert] input {old.name} of the program is neither a tensor nor a number.")
            new.meta |= {k: v for k, v in old.meta.items() if k == "val"}
            values[old] = new
        return values

    def copy(self, source: fx.Graph, owner: nn.Module, env: dict[fx.Node, Any]) -> Any:
        """Add the nodes of `source`, whose placeholders `env` has; returns its result."""

        def value(n: fx.Node) -> Any:
            return env[n]

        for old in source.nodes:
            if old in env:
                continue
            if old.op == "output":
                return fx.node.map_arg(old.args[0], value)
            if old.op == "get_attr":
                env[old] = self.attribute(str(old.target), owner)
            elif is_check(old):
                env[old] = None
            elif isinstance(old.target, HigherOrderOperator):
                env[old] = self.wrapped(old, list(fx.node.map_arg(old.args, value)))
            elif old.target is operator.getitem and isinstance(env[old.args[0]], tuple | list):
                env[old] = env[old.args[0]][old.args[1]]
            else:
                env[old] = self.graph.node_copy(old, value)
                env[old].target = PLAIN.get(old.target, old.target)
                env[old].meta["no_grad"] = self.no_grad
                if old.target in STRIDED:
                    follow_memory(env[old])
                if next(iter(env[old].meta.get("nn_module_stack") or {}), "").startswith("_empty"):
                    del env[old].meta["nn_module_stack"], env[old].meta["stack_trace"]  # torch's own, not the user's
        raise AssertionError

    def attribute(self, name: str, owner: nn.Module) -> Any:
        value = operator.attrgetter(name)(owner)
        if not isinstance(value, torch.Tensor):
            return value  # a wrapper's body
        key = f"{name.replace('.', '_')}_of_graph"
        self.constants[key] = value
        return self.graph.get_attr(key)

    def wrapped(self, node: fx.Node, args: list[Any]) -> Any:
        """The body of no_grad and autocast regions, both of a condition; other operators of higher order stay for the report."""
        name = node.target.name()  # type: ignore[union-attr]
        bodies = [i for i, a in enumerate(args) if isinstance(a, fx.GraphModule)]
        if name == "cond":
            return self.chosen(node, args[0], [args[i] for i in bodies], args[3])
        if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            names = [f"<body of {node.name}>" if i in bodies else a for i, a in enumerate(args)]
            made = self.graph.call_function(node.target, tuple(names))  # type: ignore[arg-type]
            made.meta = dict(node.meta)
            return made
        body, operands = args[bodies[0]], args[bodies[0] + 1 :]
        inner = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), operands, strict=True))
        before = self.no_grad
        self.no_grad = not args[0] if name == "wrap_with_set_grad_enabled" else before
        result = self.copy(body.graph, body, inner)
        self.no_grad = before
        if name == "wrap_with_autocast" and args[2]:
            self.notes.append("regions under autocast are computed in float32")
        if name == "wrap_with_set_grad_enabled" and not args[0]:
            refuse_writes(body.graph, operands)
            own = body.graph.output_node().args[0]
            return pytree.tree_map(lambda r, n: r if is_given(n) else self.detached(r), result, own)
        return result

    def chosen(self, node: fx.Node, condition: Any, bodies: list[Any], operands: Any) -> Any:
        """The results of one of two bodies without side effects: both are computed."""
        results = []
        for body in bodies:
            inner = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), operands, strict=True))
            results.append(self.copy(body.graph, body, inner))

        def choose(yes: Any, no: Any) -> Any:
            made = self.graph.call_function(aten.where.self, (condition, yes, no))
            made.meta = {**node.meta, "val": yes.meta["val"]}
            return made

        self.chooses = True
        self.notes.append("both branches of torch.cond are computed, and one is chosen")
        return tuple(choose(*pair) for pair in zip(*results, strict=True))

    def detached(self, value: Any) -> Any:
        if not isinstance(value, fx.Node) or not is_float(value):
            return value
        made = self.graph.call_function(aten.detach.default, (value,))
        made.meta = {k: v for k, v in value.meta.items() if k != "nn_module_stack"}  # no part of the layer before it
        return made


def is_given(node: Any) -> bool:
    """What a body was given and wrote in place, which needs gradients as before."""
    node = itself(node)
    return isinstance(node, fx.Node) and node.op == "placeholder"


def itself(node: Any) -> Any:
    """The node that made the tensor which a node gives: writes in place, and casts to the dtype that it has, give their own."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if not is_inplace(node.target) and not (
            is_overload(node.target) and node.target._opname in SAME and shares(node)  # type: ignore[union-attr]
        ):
            break
        node = node.args[0]
    return node


def shares(node: fx.Node) -> bool:
    """Whether a result lies in the memory of the first argument, as far as that is known."""
    values = [n.meta.get("val") for n in (node, node.args[0]) if isinstance(n, fx.Node)]
    memory = [v.untyped_storage()._cdata for v in values if isinstance(v, torch.Tensor)]
    return len(memory) == 2 and memory[0] == memory[1]


def refuse_writes(graph: fx.Graph, operands: list[Any]) -> None:
    """A write without gradients into what has some leaves torch's gradient that of the value before."""
    given = dict(zip((n for n in graph.nodes if n.op == "placeholder"), operands, strict=True))
    for node in graph.nodes:
        root = written(node)
        outer = itself(given.get(root))
        if isinstance(outer, fx.Node) and outer.op != "get_attr":
            raise Unsupported(f"{node.name} writes under torch.no_grad what was computed with gradients")


def follow_memory(node: fx.Node) -> None:
    """torch.as_strided and its like of what lies in its memory without gaps."""
    x, size, stride, *offset = node.args
    memory = x.meta.get("val")  # type: ignore[union-attr]
    if memory is None:
        return
    order = sorted(range(memory.ndim), key=lambda d: memory.stride(d), reverse=True)
    if not memory.permute(order).is_contiguous():
        return
    given = next(iter(offset), node.kwargs.get("storage_offset"))
    begin = 0 if given is None else given - memory.storage_offset()
    if begin < 0:  # in what the tensor is a part of
        return
    node.target, node.args, node.kwargs = STRIDED[node.target], (x, order, size, stride, begin), {}  # type: ignore


def is_check(node: fx.Node) -> bool:
    return is_overload(node.target) and node.target._opname in CHECKS  # type: ignore[union-attr]


def is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# -- passes --------------------------------------------------------------------------------------------------------------


def note_shared_memory(graph: fx.Graph) -> None:
    """Whether reshape and its like copied: their results' storages tell, except in a program read from a file."""
    for node in graph.nodes:
        value = node.meta.get("val")
        first = node.args[0].meta.get("val") if node.args and isinstance(node.args[0], fx.Node) else None
        if isinstance(value, torch.Tensor) and isinstance(first, torch.Tensor):
            node.meta["shares"] = value.untyped_storage()._cdata == first.untyped_storage()._cdata
