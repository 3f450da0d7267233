"""A traced torch model as a Relax module, by maps that users extend; and torch's functions as packed functions of TVM.

The only module of this package that needs Apache TVM: `pip install torch2needle[tvm]`.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from needle.op import Unsupported
from needle.tvm.vendor import register

import tvm  # isort: skip  (after needle.tvm, which says what to install)
from tvm import relax  # isort: skip

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
    return builder.emit(value) if is_expression(value) else value


def is_expression(value: Any) -> bool:
    return isinstance(value, tvm.ir.Expr)


def constant(tensor: torch.Tensor | None) -> Any:
    return (
        None if tensor is None else relax.const(tensor.detach().cpu().numpy(), str(tensor.dtype).removeprefix("torch."))
    )


def sizes(x: Any) -> tuple[int, ...]:
    return tuple(int(s) for s in x.ty.shape)


def target_name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def pair(value: Any) -> list[int]:
    return [int(v) for v in (value if isinstance(value, tuple | list) else (value, value))]


def binary(number: Callable, tensors: Callable) -> Callable:
    """A function of two values, tensors or numbers; of numbers alone it is Python's."""

    def f(a: Any, b: Any) -> Any:
        if not is_expression(a) and not is_expression(b):
            return number(a, b)
        dtype = (a if is_expression(a) else b).ty.dtype
        a, b = (x if is_expression(x) else relax.const(x, str(dtype)) for x in (a, b))
        return tensors(a, b)

    return f


arithmetic: dict[Callable, tuple[Callable, tuple[Any, ...]]] = {
    operator.add: (op.add, (operator.iadd, torch.add, "add", "add_")),
    operator.sub: (op.subtract, (operator.isub, torch.sub, "sub")),
    operator.mul: (op.multiply, (operator.imul, torch.mul, "mul", "mul_")),
    operator.truediv: (op.divide, (torch.div, "div")),
    operator.floordiv: (op.floor_divide, ()),
    operator.pow: (op.power, (torch.pow, "pow")),
}
for number, (tensors, others) in arithmetic.items():
    function(number, *others)(binary(number, tensors))

unary: dict[Callable, tuple[Any, ...]] = {
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
for expression, targets in unary.items():
    function(*targets)(lambda input, inplace=False, e=expression: e(input))


@function(F.gelu)
def gelu(input: Any, approximate: str = "none") -> Any:
    return op.nn.gelu_tanh(input) if approximate == "tanh" else op.nn.gelu(input)


@function(F.softmax, torch.softmax, "softmax")
def softmax(input: Any, dim: int, dtype: None = None) -> Any:
    return op.nn.softmax(input, dim)


@function(F.log_softmax, torch.log_softmax, "log_softmax")
def log_softmax(input: Any, dim: int, dtype: None = None) -> Any:
    return op.nn.log_softmax(input, dim)


@function(F.dropout)
def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training:
        raise Unsupported("[from_fx] dropout in training draws numbers; call model.eval() before tracing.")
    return input


@function("contiguous", "detach", "clone")
def same(input: Any) -> Any:
    return input


# -- shapes --------------------------------------------------------------------------------------------------------------


@function("size")
def size(input: Any, dim: int | None = None) -> Any:
    return sizes(input) if dim is None else sizes(input)[dim]


@function(getattr)
def attribute(input: Any, name: str) -> Any:
    if name == "shape":
        return sizes(input)
    if name == "dtype":
        return getattr(torch, str(input.ty.dtype))
    raise Unsupported(f"[from_fx] a tensor's {name} is not known here.")


@function(operator.getitem)
def item(input: Any, index: Any) -> Any:
    if not is_expression(input):
        return input[index]
    if isinstance(input.ty, relax.TupleType):
        return relax.TupleGetItem(input, index)
    index = index if isinstance(index, tuple) else (index,)
    rank = len(sizes(input))
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (rank - len(index) + 1), *index[at + 1 :])
    axes, begins, ends, steps, dropped = [], [], [], [], []
    for axis, (i, n) in enumerate(zip(index, sizes(input), strict=False)):
        if not isinstance(i, int | slice):
            raise Unsupported(f"[from_fx] an index is a number or a slice, got {type(i).__name__}.")
        begin, end, step = i.indices(n) if isinstance(i, slice) else (i % n, i % n + 1, 1)
        axes.append(axis), begins.append(begin), ends.append(end), steps.append(step)
        if isinstance(i, int):
            dropped.append(axis)
    part = op.strided_slice(input, axes, begins, ends, steps)
    return op.squeeze(part, dropped) if dropped else part


@function(torch.flatten, "flatten")
def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape = sizes(input)
    first, last = start_dim % len(shape), end_dim % len(shape)
    return op.reshape(input, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


def many(f: Callable[[Any, tuple], Any]) -> Callable:
    """f(input, numbers), the numbers given one by one or as one tuple."""
    return lambda input, *numbers: f(input, numbers[0] if isinstance(numbers[0], tuple | list) else numbers)


def expand(input: Any, shape: tuple) -> Any:
    own = (1,) * (len(shape) - len(sizes(input))) + sizes(input)
    return op.broadcast_to(input, [o if s == -1 else s for s, o in zip(shape, own, strict=True)])


function(torch.reshape, "reshape", "view")(many(lambda x, shape: op.reshape(x, tuple(shape))))
function(torch.permute, "permute")(many(lambda x, axes: op.permute_dims(x, list(axes))))
function("expand")(many(expand))


@function(torch.transpose, "transpose")
def transpose(input: Any, dim0: int, dim1: int) -> Any:
    axes = list(range(len(sizes(input))))
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return op.permute_dims(input, axes)


@function(torch.unsqueeze, "unsqueeze")
def unsqueeze(input: Any, dim: int) -> Any:
    return op.expand_dims(input, dim)


@function(torch.squeeze, "squeeze")
def squeeze(input: Any, dim: int | None = None) -> Any:
    return op.squeeze(input, dim)


@function(torch.cat)
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    return op.concat(list(tensors), dim)


@function(F.pad)
def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    if mode != "constant":
        raise Unsupported(f"[from_fx] pad expects mode constant, got {mode}.")
    widths = [0] * (2 * len(sizes(input)) - len(pad))
    for before, after in reversed(list(zip(pad[::2], pad[1::2], strict=True))):
        widths += [before, after]
    return op.nn.pad(input, widths, "constant", value or 0.0) if any(widths) else input


def reduction(f: Callable) -> Callable:
    return lambda input, dim=None, keepdim=False: f(input, list(dim) if isinstance(dim, tuple) else dim, keepdim)


function(torch.mean, "mean")(reduction(op.mean))
function(torch.sum, "sum")(reduction(op.sum))


# -- layers --------------------------------------------------------------------------------------------------------------


@function(torch.matmul, torch.bmm, operator.matmul, "matmul")
def matmul(input: Any, other: Any) -> Any:
    return op.matmul(input, other)


@function(F.linear)
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    return op.linear(input, weight, bias)


def with_bias(y: Any, bias: Any) -> Any:
    return y if bias is None else op.add(y, op.reshape(bias, (1, -1, 1, 1)))


@function(F.conv2d, torch.conv2d)
def conv2d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    if isinstance(padding, str):
        if padding == "same" and pair(stride) != [1, 1]:
            raise Unsupported(f"[from_fx] padding same expects stride 1, got {stride}.")
        spare = [d * (k - 1) for d, k in zip(pair(dilation), sizes(weight)[2:], strict=True)]
        padding = [s // 2 for s in spare] + [s - s // 2 for s in spare] if padding == "same" else 0
    pads = list(padding) if isinstance(padding, list) and len(padding) == 4 else pair(padding)
    return with_bias(op.nn.conv2d(input, weight, pair(stride), pads, pair(dilation), groups), bias)


@function(F.conv_transpose2d)
def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    out = op.nn.conv2d_transpose(
        input, weight, pair(stride), pair(padding), pair(output_padding), pair(dilation), groups
    )
    return with_bias(out, bias)


@function(F.max_pool2d)
def max_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    if return_indices:
        raise Unsupported("[from_fx] max_pool2d gives no indices here.")
    steps = pair(kernel_size if stride is None else stride)
    return op.nn.max_pool2d(input, pair(kernel_size), steps, pair(padding), pair(dilation), ceil_mode)


@function(F.avg_pool2d)
def avg_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:
    steps = pair(kernel_size if stride is None else stride)
    return op.nn.avg_pool2d(input, pair(kernel_size), steps, pair(padding), (1, 1), ceil_mode, count_include_pad)


@function(F.adaptive_avg_pool2d)
def adaptive_avg_pool2d(input: Any, output_size: Any) -> Any:
    wanted = output_size if isinstance(output_size, tuple | list) else (output_size, output_size)
    own = sizes(input)[2:]
    return op.nn.adaptive_avg_pool2d(input, [o if w is None else w for w, o in zip(wanted, own, strict=True)])


@function(F.layer_norm)
def layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    shape = tuple(normalized_shape)
    weight, bias = (
        relax.op.full(shape, relax.const(value, "float32"), "float32") if w is None else w
        for w, value in ((weight, 1.0), (bias, 0.0))
    )
    return op.nn.layer_norm(input, weight, bias, list(range(-len(shape), 0)), eps)


@function(F.embedding)
def embedding(input: Any, weight: Any, padding_idx: int | None = None) -> Any:
    shape = sizes(input)
    rows = op.take(weight, op.reshape(op.astype(input, "int32"), (-1,)), 0)
    return op.reshape(rows, (*shape, sizes(weight)[1]))


simple: dict[type[nn.Module], Callable[[Any, Any], Any]] = {
    nn.ReLU: lambda m, x: op.nn.relu(x),
    nn.ReLU6: lambda m, x: op.nn.relu6(x),
    nn.SiLU: lambda m, x: op.nn.silu(x),
    nn.Sigmoid: lambda m, x: op.sigmoid(x),
    nn.Tanh: lambda m, x: op.tanh(x),
    nn.GELU: lambda m, x: gelu(x, m.approximate),
    nn.LeakyReLU: lambda m, x: op.nn.leakyrelu(x, m.negative_slope),
    nn.Softmax: lambda m, x: op.nn.softmax(x, m.dim),
    nn.LogSoftmax: lambda m, x: op.nn.log_softmax(x, m.dim),
    nn.Identity: lambda m, x: x,
    nn.Dropout: lambda m, x: dropout(x, m.p, m.training),
    nn.Flatten: lambda m, x: flatten(x, m.start_dim, m.end_dim),
    nn.Linear: lambda m, x: linear(x, constant(m.weight), constant(m.bias)),
    nn.AdaptiveAvgPool2d: lambda m, x: adaptive_avg_pool2d(x, m.output_size),
    nn.Embedding: lambda m, x: embedding(x, constant(m.weight)),
    nn.LayerNorm: lambda m, x: layer_norm(x, m.normalized_shape, constant(m.weight), constant(m.bias), m.eps),
}
for cls, row in simple.items():
    module(cls)(row)


@module(nn.Conv2d)
def conv2d_module(m: Any, x: Any) -> Any:
    if m.padding_mode != "zeros":
        raise Unsupported(f"[from_fx] Conv2d expects padding_mode zeros, got {m.padding_mode}.")
    return conv2d(x, constant(m.weight), constant(m.bias), m.stride, m.padding, m.dilation, m.groups)


@module(nn.ConvTranspose2d)
def conv_transpose2d_module(m: Any, x: Any) -> Any:
    weights = (constant(m.weight), constant(m.bias))
    return conv_transpose2d(x, *weights, m.stride, m.padding, m.output_padding, m.groups, m.dilation)


@module(nn.MaxPool2d)
def max_pool2d_module(m: Any, x: Any) -> Any:
    return max_pool2d(x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices)


@module(nn.AvgPool2d)
def avg_pool2d_module(m: Any, x: Any) -> Any:
    if m.divisor_override is not None:
        raise Unsupported("[from_fx] AvgPool2d takes no divisor_override.")
    return avg_pool2d(x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad)


@module(nn.BatchNorm1d, nn.BatchNorm2d)
def batch_norm(m: Any, x: Any) -> Any:
    """From the running statistics, with scale and shift computed here."""
    if m.training or m.running_mean is None:
        raise Unsupported("[from_fx] BatchNorm takes its running statistics only; call model.eval() before tracing.")
    scale = torch.rsqrt(m.running_var.double() + m.eps) * (1.0 if m.weight is None else m.weight.double())
    shift = (0.0 if m.bias is None else m.bias.double()) - m.running_mean.double() * scale
    shape = (1, -1, *[1] * (len(sizes(x)) - 2))
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
                    node_map[node] = translated(bb, node_map, node, graph_module, functions, modules)
        bb.emit_func_output(result)
    return bb.get()


def structured(value: Any) -> Any:
    return relax.Tuple([structured(v) for v in value]) if isinstance(value, tuple | list) else value


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
