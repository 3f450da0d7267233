"""Why a function of the lists does not convert. What is not named here has to be shown to convert, and what is has not to."""

from __future__ import annotations

STRIDES = "strides are those of the call's memory, which a graph does not know"
EIGHT_BITS = "of 8-bit floats, which needle does not have"
REASONS = {
    "aten.sym_is_contiguous.default": STRIDES,
    "aten.sym_storage_offset.default": STRIDES,
    "aten.sym_stride.int": STRIDES,
    "aten.resize_.default": "it gives memory that others may share another size",
    "torch.nn.functional.scaled_mm": EIGHT_BITS,
    "torch.nn.functional.scaled_grouped_mm": EIGHT_BITS,
}
# Of lists that are being filled: functions without a rule.
OPEN = {"torch.linalg": "no rule yet"}


def reason(name: str, has_rule: bool) -> str:
    """Why not, or nothing for what converts."""
    return REASONS.get(name) or ("" if has_rule else OPEN.get(name.rpartition(".")[0], ""))
