"""Rules as rows of tables: arguments by torch's names and defaults, what they refuse, and what reports say of them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import torch2needle  # noqa: E402
from needle import nn as needle_nn  # noqa: E402
from needle.autograd import Unsupported  # noqa: E402
from torch2needle.rules import registry  # noqa: E402
from torch2needle.rules.tables import WITHOUT_EFFECT, functions, layers  # noqa: E402


@pytest.fixture(autouse=True)
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that a test adds are its own."""
    for table in ("FUNCTION_RULES", "MODULE_RULES"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))


def parameters(f: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]


def signature_of(f: Any) -> list[tuple[str, Any, Any]] | None:
    """Of a function written in Python; those that only pass on what they get say nothing."""
    try:
        found = parameters(f)
    except (ValueError, TypeError):
        return None
    return None if any(kind is inspect.Parameter.VAR_POSITIONAL for _, kind, _ in found) else found


PYTHON = {
    name: f
    for name, f in vars(F).items()
    if getattr(f, "__module__", "") == F.__name__ and registry.find_function_rule(f) and signature_of(f)
    if not name.endswith("_with_indices")
}


@pytest.mark.parametrize("name", PYTHON)
def test_rules_have_torchs_own_signature(name: str) -> None:
    rule = registry.find_function_rule(PYTHON[name])
    assert rule is not None and parameters(rule) == signature_of(PYTHON[name])


def echo(*values: Any) -> tuple:
    return values


def made_by(signature: str, *args: Any, refused: dict[str, str] | None = None, **kwargs: Any) -> Any:
    def target() -> None: ...

    functions(signature, {(target,): echo}, refused)
    rule = registry.find_function_rule(target)
    assert rule is not None
    bound = registry.bind(rule, target, args, kwargs)
    return rule(*bound.args, **bound.kwargs)


def test_arguments_are_bound_by_name() -> None:
    assert "inplace" in WITHOUT_EFFECT
    signature = "input, alpha=1.0, *, beta=2, inplace=False"
    assert made_by(signature, "x") == ("x", 1.0, 2)
    assert made_by(signature, "x", beta=3, alpha=4, inplace=True) == ("x", 4, 3)
    assert made_by("input, *size, dtype=None, **_", "x", 1, 2, device="cpu") == ("x", (1, 2), None)
    for args, kwargs in ((("x",), {"gamma": 1}), (("x", 1, 2), {}), ((), {"alpha": 1})):
        with pytest.raises(
            Unsupported, match=r"the rule of .*target takes \(input, alpha=1\.0, \*, beta=2, inplace=False\)"
        ):
            made_by(signature, *args, **kwargs)


def test_what_is_refused_says_why() -> None:
    refused = {"indices": ": pools have none"}
    assert made_by("input, indices=False", "x", refused=refused) == ("x",)
    with pytest.raises(Unsupported, match=r"^indices=True is not supported: pools have none$"):
        made_by("input, indices=False", "x", True, refused=refused)


class Scale(nn.Module):
    def __init__(self, features: int, bias: bool, mode: str = "sum") -> None:
        super().__init__()
        self.features, self.mode = features, mode
        self.register_parameter("bias", nn.Parameter(torch.zeros(features)) if bias else None)


def test_layers_from_attributes() -> None:
    layers("in_features=features bias?", Scale, to=needle_nn.Linear, refused={"mode": ""}, out_features=5)
    rule = registry.find_module_rule(Scale(3, True, ""))
    assert rule is not None and rule.__qualname__ == "Scale" and rule.__module__ == __name__
    for bias in (False, True):
        made = rule(Scale(3, bias, ""))
        assert (made.in_features, made.out_features, made.bias is not None) == (3, 5, bias)
    with pytest.raises(Unsupported, match="mode=sum is not supported"):
        rule(Scale(3, True))


def test_reports_name_rows() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Any) -> Any:
            return F.leaky_relu(self.norm(x), inplace=True)

    net = torch2needle.convert(Model().eval())
    assert "by torch2needle.rules.norms.LayerNorm (node norm)" in torch2needle.explain(net, "norm")
    assert "by torch2needle.rules.activations.leaky_relu" in torch2needle.explain(net, "leaky_relu")
    assert registry.nearest_rule(torch.renorm).endswith("norm")
