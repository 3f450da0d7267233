"""What constructors of layers accept: one check per name of an argument, run before every constructor of needle's own layers.

A check takes a place, such as "[Linear] bias", and a value, and returns the value as the layer keeps it, or raises in one
sentence. A class with another meaning of a name says so in `arguments`.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from needle.backend_ndarray import FLOATS, Device, dtype_name

LARGEST = 1 << 20  # of windows and what goes with them
Check = Callable[[str, Any], Any]


def wrong(place: str, expected: str, value: Any, error: type[Exception] = ValueError) -> Exception:
    text = str(value) or "''"
    return error(f"{place} expects {expected}, got {text if len(text) <= 60 else text[:60] + '...'}.")


def integer(least: int | None = None, most: int = 2**31 - 1) -> Check:
    def check(place: str, value: Any) -> int:
        if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
            raise wrong(place, "a whole number", value, TypeError)
        found = operator.index(value)
        if least is not None and found < least:
            raise wrong(place, f"at least {least}", value)
        if abs(found) > most:
            raise wrong(place, f"at most {most}", value)
        return found

    return check


def integers(least: int | None = None, *words: str, holes: bool = False) -> Check:
    """One whole number or a sequence of them, or one of some words; with `holes` some may be None."""
    one = integer(least, LARGEST)

    def check(place: str, value: Any) -> Any:
        if isinstance(value, str) and value in words:
            return value
        if isinstance(value, tuple | list) and value:
            return tuple(None if v is None and holes else one(place, v) for v in value)
        return one(place, value)

    return check


def number(least: float = -math.inf, most: float = math.inf) -> Check:
    def check(place: str, value: Any) -> float:
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
            raise wrong(place, "a number", value, TypeError)
        found = value.item() if isinstance(value, np.generic) else value
        if not least <= found <= most:
            bounds = f" in [{least:g}, {most:g}]" if most < math.inf else f" of at least {least:g}"
            raise wrong(place, f"a number{bounds * (least > -math.inf)}", value)
        if isinstance(found, int) and abs(found) >= 2**63:
            raise wrong(place, "a number", value)
        return found

    return check


def numbers(place: str, value: Any) -> Any:
    """One factor or a sequence of them."""
    one = number(0.0, float(LARGEST))
    return tuple(one(place, v) for v in value) if isinstance(value, tuple | list) and value else one(place, value)


def listed(one: Check) -> Check:
    """A sequence, of any length, of what `one` takes."""

    def check(place: str, value: Any) -> tuple:
        if not isinstance(value, tuple | list):
            raise wrong(place, "a tuple", value, TypeError)
        return tuple(one(place, v) for v in value)

    return check


def flag(place: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_ | int) or value not in (0, 1):
        raise wrong(place, "True or False", value, TypeError)
    return bool(value)


def choice(*words: str) -> Check:
    listed = f"{', '.join(words[:-1])} or {words[-1]}"

    def check(place: str, value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise wrong(place, listed, value)
        return value

    return check


def instance(kind: type, what: str) -> Check:
    def check(place: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise wrong(place, what, type(value).__name__, TypeError)
        return value

    return check


def floating(place: str, value: Any) -> str:
    try:
        name = dtype_name(value)
    except TypeError:
        name = ""
    if name not in FLOATS:
        raise wrong(place, f"one of {', '.join(FLOATS)}", value)
    return name


def named(checks: Mapping[Check, str]) -> dict[str, Check]:
    return {name: check for check, names in checks.items() for name in names.split()}


SIZE, COUNT = integer(0), integer(1)
CHECKS = named(
    {
        flag: "bias affine track_running_stats unbiased count_batches elementwise_affine ceil_mode count_include_pad batch_first "
        "bidirectional causal grouped add_bias_kv add_zero_attn norm_first align_corners recompute_scale_factor return_indices "
        "scale_grad_by_freq",
        SIZE: "in_features out_features in_channels out_channels num_embeddings embedding_dim dim num_channels input_size "
        "dim_feedforward num_layers proj_size",
        COUNT: "groups num_groups num_heads num_head nhead dim_head embed_dim kdim vdim d_model hidden_size num_parameters rank "
        "size q_features k_features v_features embedding_size sequence_len divisor_override",
        integers(1): "kernel_size stride dilation output_size",
        integers(0): "normalized_shape output_padding",
        integers(0, "same", "valid"): "padding",
        integer(): "axis start_dim end_dim padding_idx",
        number(0.0, 1.0): "p dropout",
        number(0.0): "eps layer_norm_eps",
        number(): "momentum negative_slope alpha beta k min_val max_val threshold value init_slope lower upper scale",
        number(0.0): "lambd",
        numbers: "scale_factor",
        choice("needle", "torch"): "layout",
        choice("zeros", "reflect", "replicate", "circular"): "padding_mode",
        choice("tanh", "relu"): "nonlinearity",
        choice("relu", "gelu"): "activation",
        choice("none", "tanh"): "approximate",
        instance(Device, "a device"): "device",
        floating: "dtype",
    }
)
MODULES = {"self", "modules", "values", "fn", "layer", "norm", "encoder", "decoder"}


def optional(parameter: inspect.Parameter) -> bool:
    return parameter.default is None or "None" in str(parameter.annotation)


def checks_of(cls: Any, signature: inspect.Signature) -> dict[str, tuple[Check, bool]]:
    """Per argument its check and whether None will do, for a constructor of one of needle's own layers."""
    own = {**CHECKS, **cls.arguments}
    return {n: (own[n], optional(p)) for n, p in signature.parameters.items() if n not in MODULES}


def check_arguments(label: str, checks: Mapping[str, tuple[Check, bool]], given: dict[str, Any]) -> None:
    """Replaces the given arguments by what their checks make of them."""
    for name, value in given.items():
        if name in checks and not (value is None and checks[name][1]):
            given[name] = checks[name][0](f"[{label}] {name}", value)


def check_divides(label: str, what: str, parts: str, count: int, *sizes: int) -> None:
    if any(s % count for s in sizes):
        got = " and ".join(map(str, sizes))
        raise ValueError(f"[{label}] {what} expects a multiple of {parts} {count}, got {got}.")


def check_order(label: str, name: str, below: str, value: float, bound: float) -> None:
    if value < bound:
        raise ValueError(f"[{label}] {name} expects a number of at least {below} {bound}, got {value}.")
