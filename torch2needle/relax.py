"""A traced torch model as a Relax module, by maps that users extend; and torch's functions as packed functions of TVM.

The only module of this package that needs Apache TVM: `pip install ".[tvm]"` in a checkout.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from needle.op import Unsupported
from needle.tvm import operators
from needle.tvm.vendor import register
from torch2needle.registry import INPLACE_OPERATORS

from tvm import relax  # isort: skip  (after needle.tvm, which says what to install)

op = relax.op
FunctionRow = Callable[[Any, dict[fx.Node, Any], fx.Node], Any]
ModuleRow = Callable[[Any, dict[fx.Node, Any], fx.Node, nn.Module], Any]
CALL_FUNCTION_MAP: dict[Any, FunctionRow] = {}  # functions, and names of tensor methods
CALL_MODULE_MAP: dict[type[nn.Module], ModuleRow] = {}

# -- rows ----------------------------------------------------------------------------------------------------------------


def function(*targets: Any) -> Callable[[Callable], Callable]:
    """Decorator: the row of torch functions and tensor methods from f(expressions and numbers) with torch's own signature.

    What f gives is emitted, but for numbers and tuples of them.
    """

    def add(f: Callable) -> Callable:
        signature = inspect.signature(f)

        def row(builder: Any, node_map: dict[fx.Node, Any], node: fx.Node) -> Any:
            args = fx.node.map_arg(node.args, lambda n: node_map[n])
            kwargs = fx.node.map_arg(node.kwargs, lambda n: node_map[n])
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as e:
                raise Unsupported(f"[from_fx] {node.name}, {target_name(node.target)}: {e}.") from None
            return emitted(builder, f(*bound.args, **bound.kwargs))

        CALL_FUNCTION_MAP.update(dict.fromkeys(targets, row))
        return f

    return add


def module(*classes: type[nn.Module]) -> Callable[[Callable], Callable]:
    """Decorator: the row of module classes from f(module, x), which gives an expression."""

    def add(f: Callable) -> Callable:
        def row(builder: Any, node_map: dict[fx.Node, Any], node: fx.Node, layer: nn.Module) -> Any:
            args = [node_map[a] if isinstance(a, fx.Node) else a for a in (*node.args, *node.kwargs.values())]
            if len(args) != 1:
                raise Unsupported(f"[from_fx] {node.name}, {type(layer).__name__} takes one input, got {len(args)}.")
            return emitted(builder, f(layer, args[0]))

        CALL_MODULE_MAP.update(dict.fromkeys(classes, row))
        return f

    return add


def emitted(builder: Any, value: Any) -> Any:
    return builder.emit(value) if operators.is_expression(value) else value


def constant(tensor: torch.Tensor | None) -> Any:
    return (
        None if tensor is None else relax.const(tensor.detach().cpu().numpy(), str(tensor.dtype).removeprefix("torch."))
    )


def target_name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


@function(getattr)
def attribute(input: Any, name: str) -> Any:
    if name == "shape":
        return operators.sizes(input)
    if name == "dtype":
        return getattr(torch, str(input.ty.dtype))
    raise Unsupported(f"[from_fx] a tensor's {name} is not known here.")


ARITHMETIC: dict[Callable, tuple[Callable, tuple[Any, ...]]] = {
    operator.add: (op.add, (operator.iadd, torch.add, "add", "add_")),
    operator.sub: (op.subtract, (operator.isub, torch.sub, "sub", "sub_")),
    operator.mul: (op.multiply, (operator.imul, torch.mul, "mul", "mul_")),
    operator.truediv: (op.divide, (operator.itruediv, torch.div, "div", "div_")),
    operator.floordiv: (op.floor_divide, ()),
    operator.pow: (op.power, (torch.pow, "pow")),
}
for number, (tensors, others) in ARITHMETIC.items():
    function(number, *others)(operators.binary(number, tensors))

UNARY: dict[Callable, tuple[Any, ...]] = {
    op.nn.relu: (F.relu, torch.relu, "relu", "relu_"),
    op.nn.relu6: (F.relu6,),
    op.nn.silu: (F.silu,),
    op.sigmoid: (torch.sigmoid, F.sigmoid, "sigmoid"),
    op.tanh: (torch.tanh, F.tanh, "tanh"),
    op.exp: (torch.exp, "exp"),
    op.sqrt: (torch.sqrt, "sqrt"),
    op.abs: (torch.abs, "abs"),
    op.negative: (torch.neg, operator.neg, "neg"),
}
for expression, targets in UNARY.items():
    function(*targets)(lambda input, inplace=False, e=expression: e(input))

FUNCTIONS: dict[Callable, tuple[Any, ...]] = {
    operators.gelu: (F.gelu,),
    operators.softmax: (F.softmax, torch.softmax, "softmax"),
    operators.log_softmax: (F.log_softmax, torch.log_softmax, "log_softmax"),
    operators.dropout: (F.dropout,),
    operators.same: ("contiguous", "detach", "clone"),
    operators.size: ("size",),
    operators.item: (operator.getitem,),
    operators.flatten: (torch.flatten, "flatten"),
    operators.many(lambda x, shape: op.reshape(x, tuple(shape))): (torch.reshape, "reshape", "view"),
    operators.many(lambda x, axes: op.permute_dims(x, list(axes))): (torch.permute, "permute"),
    operators.many(operators.expand): ("expand",),
    operators.transpose: (torch.transpose, "transpose"),
    lambda input, dim: op.expand_dims(input, dim): (torch.unsqueeze, "unsqueeze"),
    operators.squeeze: (torch.squeeze, "squeeze"),
    operators.cat: (torch.cat,),
    operators.pad: (F.pad,),
    operators.reduction(op.mean): (torch.mean, "mean"),
    operators.reduction(op.sum): (torch.sum, "sum"),
    lambda input, other: op.matmul(input, other): (torch.matmul, torch.bmm, operator.matmul, "matmul"),
    lambda input, weight, bias=None: op.linear(input, weight, bias): (F.linear,),
    operators.conv2d: (F.conv2d, torch.conv2d),
    operators.conv_transpose2d: (F.conv_transpose2d,),
    operators.max_pool2d: (F.max_pool2d,),
    operators.avg_pool2d: (F.avg_pool2d,),
    operators.adaptive_avg_pool2d: (F.adaptive_avg_pool2d,),
    operators.layer_norm: (F.layer_norm,),
    operators.embedding: (F.embedding,),
}
for made, targets in FUNCTIONS.items():
    function(*targets)(made)


MODULES: dict[type[nn.Module], Callable[[Any, Any], Any]] = {
    nn.ReLU: lambda m, x: op.nn.relu(x),
    nn.ReLU6: lambda m, x: op.nn.relu6(x),
    nn.SiLU: lambda m, x: op.nn.silu(x),
    nn.Sigmoid: lambda m, x: op.sigmoid(x),
    nn.Tanh: lambda m, x: op.tanh(x),
    nn.GELU: lambda m, x: operators.gelu(x, m.approximate),
    nn.LeakyReLU: lambda m, x: op.nn.leakyrelu(x, m.negative_slope),
    nn.Softmax: lambda m, x: op.nn.softmax(x, m.dim),
    nn.LogSoftmax: lambda m, x: op.nn.log_softmax(x, m.dim),
    nn.Identity: lambda m, x: x,
    nn.Dropout: lambda m, x: operators.dropout(x, m.p, m.training),
    nn.Flatten: lambda m, x: operators.flatten(x, m.start_dim, m.end_dim),
    nn.Linear: lambda m, x: op.linear(x, constant(m.weight), constant(m.bias)),
    nn.AdaptiveAvgPool2d: lambda m, x: operators.adaptive_avg_pool2d(x, m.output_size),
    nn.LayerNorm: lambda m, x: operators.layer_norm(x, m.normalized_shape, constant(m.weight), constant(m.bias), m.eps),
}
for cls, row in MODULES.items():
    module(cls)(row)


@module(nn.Embedding)
def embedding(m: Any, x: Any) -> Any:
    if m.max_norm is not None:
        raise Unsupported(f"[from_fx] Embedding expects no max_norm, got {m.max_norm}.")
    return operators.embedding(x, constant(m.weight))


@module(nn.Conv2d)
def conv2d_module(m: Any, x: Any) -> Any:
    if m.padding_mode != "zeros":
        raise Unsupported(f"[from_fx] Conv2d expects padding_mode zeros, got {m.padding_mode}.")
    return operators.conv2d(x, constant(m.weight), constant(m.bias), m.stride, m.padding, m.dilation, m.groups)


@module(nn.ConvTranspose2d)
def conv_transpose2d_module(m: Any, x: Any) -> Any:
    weights = (constant(m.weight), constant(m.bias))
    return operators.conv_transpose2d(x, *weights, m.stride, m.padding, m.output_padding, m.groups, m.dilation)


@module(nn.MaxPool2d)
def max_pool2d_module(m: Any, x: Any) -> Any:
    return operators.max_pool2d(x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices)


@module(nn.AvgPool2d)
def avg_pool2d_module(m: Any, x: Any) -> Any:
    if m.divisor_override is not None:
        raise Unsupported("[from_fx] AvgPool2d takes no divisor_override.")
    return operators.avg_pool2d(x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad)


@module(nn.BatchNorm1d, nn.BatchNorm2d)
def batch_norm(m: Any, x: Any) -> Any:
    """From the running statistics, with scale and shift computed here."""
    if m.training or m.running_mean is None:
        raise Unsupported("[from_fx] BatchNorm takes its running statistics only; call model.eval() before tracing.")
    scale = torch.rsqrt(m.running_var.double() + m.eps) * (1.0 if m.weight is None else m.weight.double())
    shift = (0.0 if m.bias is None else m.bias.double()) - m.running_mean.double() * scale
    shape = (1, -1, *[1] * (len(operators.sizes(x)) - 2))
    scale, shift = (constant(v.to(m.running_mean.dtype).reshape(shape)) for v in (scale, shift))
    return op.add(op.multiply(x, scale), shift)


# -- the import ----------------------------------------------------------------------------------------------------------


def from_fx(
    graph_module: fx.GraphModule,
    input_info: Sequence[tuple[Sequence[int], str]],
    call_function_map: Mapping[Any, FunctionRow] | None = None,
    call_module_map: Mapping[type[nn.Module], ModuleRow] | None = None,
) -> Any:
    """IRModule with `main` from a traced model and (shape, dtype) of every input. Weights are constants.

    call_function_map[target](bb, node_map, node): a call of function `target`, or of the tensor method of that name, as an
    expression emitted into BlockBuilder `bb`; `node_map` has the expressions of the nodes before. call_module_map[type](bb,
    node_map, node, module): a call of a module. They come before the rows of CALL_FUNCTION_MAP and CALL_MODULE_MAP.
    """
    functions = {**CALL_FUNCTION_MAP, **(call_function_map or {})}
    modules = {**CALL_MODULE_MAP, **(call_module_map or {})}
    names = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    if len(names) != len(input_info):
        raise ValueError(f"[from_fx] input_info expects {len(names)} inputs, got {len(input_info)}.")
    node_map: dict[fx.Node, Any] = {
        n: relax.Var(n.name, relax.TensorType(tuple(shape), dtype))
        for n, (shape, dtype) in zip(names, input_info, strict=True)
    }
    bb = relax.BlockBuilder()
    with bb.function("main", list(node_map.values())):
        with bb.dataflow():
            for node in graph_module.graph.nodes:
                if node.op == "output":
                    result = bb.emit_output(structured(fx.node.map_arg(node.args[0], lambda n: node_map[n])))
                elif node.op != "placeholder":
                    check_write(node, graph_module)
                    node_map[node] = translated(bb, node_map, node, graph_module, functions, modules)
        bb.emit_func_output(result)
    return bb.get()


def structured(value: Any) -> Any:
    return relax.Tuple([structured(v) for v in value]) if isinstance(value, tuple | list) else value


def check_write(node: fx.Node, graph_module: fx.GraphModule) -> None:
    """Raise Unsupported for a call that writes to its first input where somebody reads that later."""
    if node.op == "call_module":
        writes = getattr(graph_module.get_submodule(str(node.target)), "inplace", False)
    else:
        name = target_name(node.target)
        writes = node.kwargs.get("inplace", name.endswith("_") or name in INPLACE_OPERATORS)
    if not writes or not node.args or not isinstance(node.args[0], fx.Node):
        return
    later = list(graph_module.graph.nodes)
    later = later[later.index(node) + 1 :]
    reader = next((n for n in later if n in node.args[0].users), None)
    if reader is not None:
        raise Unsupported(f"[from_fx] {node.name} writes to {node.args[0].name}, which {reader.name} reads later.")


def translated(
    bb: Any,
    node_map: dict[fx.Node, Any],
    node: fx.Node,
    graph_module: fx.GraphModule,
    functions: Mapping[Any, FunctionRow],
    modules: Mapping[type[nn.Module], ModuleRow],
) -> Any:
    if node.op == "get_attr":
        return constant(operator.attrgetter(str(node.target))(graph_module))
    if node.op == "call_module":
        layer = graph_module.get_submodule(str(node.target))
        if type(layer) not in modules:
            raise unknown(node, "call_module_map", type(layer).__name__, "bb, node_map, node, module")
        return modules[type(layer)](bb, node_map, node, layer)
    if node.target not in functions:
        key = repr(node.target) if isinstance(node.target, str) else target_name(node.target)
        raise unknown(node, "call_function_map", key, "bb, node_map, node")
    return functions[node.target](bb, node_map, node)


def unknown(node: fx.Node, table: str, key: str, arguments: str) -> Unsupported:
    return Unsupported(
        f"[from_fx] {node.name} calls {key}, which {table} does not know; pass {table}={{{key}: f}} with a function "
        f"f({arguments}) that gives its expression."
    )


# -- torch as a vendor ---------------------------------------------------------------------------------------------------


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    torch.addmm(bias, x, weight.T, out=out)


def torch_conv2d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *rest: Any) -> None:
    *numbers, out = rest
    if not numbers:
        out.copy_(torch.conv2d(x, weight, bias))
        return
    (top, left, bottom, right), stride, dilation = numbers[2:6], numbers[:2], numbers[6:8]
    padded = F.pad(x, (left, right, top, bottom))
    out.copy_(torch.conv2d(padded, weight, bias, stride, 0, dilation, numbers[8]))


def torch_relu(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.clamp_min(x, 0, out=out)


def register_torch() -> None:
    """torch's functions as env.torch.linear, env.torch.conv2d and env.torch.relu, called as those of needle.tvm.vendor."""
    for name, f in (("linear", torch_linear), ("conv2d", torch_conv2d), ("relu", torch_relu)):
        register(f"env.torch.{name}", f, torch.from_dlpack)


register_torch()
