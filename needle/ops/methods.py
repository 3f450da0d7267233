"""torch's methods of tensors that are no functions of this package: places, dtypes, shapes of others, and questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from needle.autograd import Tensor, as_data, tensor_method
from needle.backend_ndarray import FLOATS, Device, cpu, cuda, dtype_name

from .math.elementwise import where
from .nn.sampling import sliding_windows
from .shape.basic import broadcast_to, reshape, transpose
from .shape.creation import full_like
from .shape.join import split_sizes

# -- places and dtypes ---------------------------------------------------------------------------------------------------


def place_and_dtype(
    targets: Sequence[Any], device: Device | None, dtype: str | None
) -> tuple[Device | None, str | None]:
    """What torch's `to` is given: devices, names of dtypes, tensors that have both, in any order."""
    for target in targets:
        if isinstance(target, Tensor):
            device, dtype = target.device, target.dtype
        elif isinstance(target, Device):
            device = target
        elif isinstance(target, str):
            dtype = target
        else:
            raise TypeError(f"[to] expects a device, the name of a dtype or a tensor, got {type(target).__name__}.")
    return device, dtype


@tensor_method()
def to(a: Tensor, *targets: Device | str | Tensor, device: Device | None = None, dtype: str | None = None) -> Tensor:
    """The tensor on a device, in a dtype, or as another tensor has both; itself where it is.

    On another device it is a constant: ValueError for results that a gradient flows through.
    """
    device, dtype = place_and_dtype(targets, device, dtype)
    a = a if dtype in (None, a.dtype) else a.astype(dtype)
    if device in (None, a.device):
        return a
    device.require()
    if a.op is not None:
        raise ValueError(f"[to] gradients stay on {a.device}, got a result that has one; detach() it.")
    return Tensor.make_const(as_data(a, device, a.dtype))


def as_dtype(dtype: str) -> Any:
    return lambda a: a.astype(dtype)


DTYPES = {
    "float": "float32",
    "double": "float64",
    "long": "int64",
    "int": "int32",
    "bool": "bool",
}
for name, dtype in DTYPES.items():
    tensor_method(name)(as_dtype(dtype))
tensor_method("cpu")(lambda a: to(a, cpu()))
tensor_method("cuda")(lambda a: to(a, cuda()))
tensor_method("type_as")(lambda a, b: a.astype(b.dtype))
tensor_method("contiguous")(lambda a: a)


@tensor_method()
def clone(a: Tensor) -> Tensor:
    """A copy that shares no memory, through which gradients flow."""
    if a.recorder is not None:
        return a  # what is recorded is not written to
    return a * 1 if a.requires_grad else Tensor(a, requires_grad=False)


# -- shapes --------------------------------------------------------------------------------------------------------------


tensor_method("expand_as")(lambda a, b: broadcast_to(a, shape=b.shape))
tensor_method("view_as", "reshape_as")(lambda a, b: reshape(a, shape=b.shape))
tensor_method("ravel")(lambda a: reshape(a, (-1,)))
tensor_method("swapaxes", "swapdims")(lambda a, first, second: transpose(a, (first, second)))
tensor_method("split")(split_sizes)
tensor_method("unfold")(sliding_windows)
tensor_method("where")(lambda a, condition, other: where(condition, a, other))


# -- others of its kind --------------------------------------------------------------------------------------------------


def sized(shape: tuple) -> tuple[int, ...]:
    """(2, 3) of f(2, 3) and of f((2, 3))."""
    return tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape


tensor_method("new_zeros", "new_empty")(lambda a, *shape, dtype=None: full_like(a, 0, sized(shape), dtype))
tensor_method("new_ones")(lambda a, *shape, dtype=None: full_like(a, 1, sized(shape), dtype))
tensor_method("new_full")(lambda a, shape, value, dtype=None: full_like(a, value, sized((shape,)), dtype))


@tensor_method()
def new_tensor(a: Tensor, data: Any, dtype: str | None = None) -> Tensor:
    """A constant of the given data, of this tensor's device and dtype."""
    return Tensor(data, device=a.device, dtype=dtype or a.dtype, requires_grad=False)


# -- questions -----------------------------------------------------------------------------------------------------------


tensor_method("numel", "nelement")(lambda a: a.size)
tensor_method("dim", "ndimension")(lambda a: a.ndim)
tensor_method("is_floating_point")(lambda a: dtype_name(a.dtype) in FLOATS)
tensor_method("is_contiguous")(lambda a: True)
tensor_method("is_complex")(lambda a: False)
