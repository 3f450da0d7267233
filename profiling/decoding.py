"""Text by a compiled decoder beside torch's own and OpenVINO's stateful model: `python profiling/decoding.py [--threads N]`.

A GPT-2 of 12 layers with random weights writes 256 tokens after 64, greedily, batch 1. Engines take turns; per engine the median
over rounds of all tokens' time, and the share of prompts whose tokens are those of torch with a growing cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from needle import isa, set_num_threads
from needle.profiler import cpu_name
from zoo.build import allow_imports

PROMPT, NEW = 64, 256


def model_of(layers: int) -> Any:
    allow_imports()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # initial weights repeat one token for ever
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    return model


def by_torch(model: Any, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    fixed = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return lambda ids: model.generate(ids, attention_mask=torch.ones_like(ids), **fixed, **options)


def by_needle(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    from torch2needle.bridges.generation import Decoder

    decoder = Decoder(model, PROMPT + NEW)
    fixed = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return lambda ids: decoder.generate(ids, attention_mask=torch.ones_like(ids), **fixed)


def by_loop(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    from torch2needle.bridges.generation import Decoder

    decoder = Decoder(model, PROMPT + NEW)

    def run(ids: torch.Tensor) -> torch.Tensor:
        decoder.reset()
        return greedy(decoder, ids.numpy())

    return run


def greedy(step: Callable[[np.ndarray], np.ndarray], ids: np.ndarray) -> torch.Tensor:
    found = [ids]
    for _ in range(NEW):
        found.append(step(found[-1]).argmax(-1)[:, None])
    return torch.from_numpy(np.concatenate(found, 1))


class Cached(nn.Module):
    """The model with its cache as inputs and outputs, which OpenVINO makes state."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, *past: torch.Tensor) -> Any:
        from transformers import Cache, DynamicCache

        layers = DynamicCache(config=self.model.config).layers
        for layer, layer.keys, layer.values in zip(layers, past[::2], past[1::2], strict=True):
            layer.is_initialized = True
        options = {
            "position_ids": positions,
            "past_key_values": Cache(layers=layers),
            "use_cache": True,
            "logits_to_keep": 1,
        }
        logits = self.model(ids, attention_mask=mask, **options).logits
        return (logits[:, -1], *(t for layer in layers for t in (layer.keys, layer.values)))


def by_openvino(model: Any, threads: int) -> Callable[[torch.Tensor], torch.Tensor]:
    import openvino
    from openvino._offline_transformations import apply_make_stateful_transformation

    c = model.config
    past = [torch.zeros(1, c.n_head, 3, c.n_embd // c.n_head)] * (2 * c.n_layer)
    example = (torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 5, dtype=torch.long), torch.tensor([[3, 4]]), *past)
    converted = openvino.convert_model(Cached(model), example_input=example)
    names = [*(f"past{i}" for i in range(len(past)))]
    for port, name in zip(converted.inputs, ["ids", "mask", "positions", *names], strict=True):
        port.get_tensor().set_names({name})
        shape = [1, -1] if name in ("ids", "mask", "positions") else [1, c.n_head, -1, c.n_embd // c.n_head]
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
    for port, name in zip(converted.outputs[1:], names, strict=True):
        port.get_tensor().set_names({f"present_{name}"})
    converted.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(converted, {n: f"present_{n}" for n in names})
    precision = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", **precision}
    request = openvino.compile_model(converted, "CPU", options).create_infer_request()

    def run(ids: torch.Tensor) -> torch.Tensor:
        request.reset_state()
        seen = 0

        def step(tokens: np.ndarray) -> np.ndarray:
            nonlocal seen
            count = tokens.shape[1]
            mask, positions = np.ones((1, seen + count), "int64"), np.arange(seen, seen + count)[None]
            inputs = {"ids": tokens, "mask": mask, "positions": positions}
            seen += count
            return request.infer(inputs)[0]

        return greedy(step, ids.numpy())

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    set_num_threads(given.threads)
    model = model_of(given.layers)
    engines = {
        "needle compiled, generate": by_needle(model),
        "needle compiled, a loop": by_loop(model),
        "torch eager, static cache": by_torch(model, cache_implementation="static"),
        "torch eager, growing cache": by_torch(model),
        "OpenVINO stateful, a loop": by_openvino(model, given.threads),
    }
    prompts = [torch.randint(0, 50257, (1, PROMPT)) for _ in range(given.rounds)]
    times: dict[str, list[float]] = {name: [] for name in engines}
    equal = dict.fromkeys(engines, 0)
    with torch.no_grad():
        for prompt in (prompts[0], *prompts):  # the first warms up
            tokens = {}
            for name, run in engines.items():
                start = time.perf_counter()
                tokens[name] = run(prompt)
                times[name].append(time.perf_counter() - start)
            for name in engines:
                equal[name] += torch.equal(tokens[name], tokens["torch eager, growing cache"])
    rows = [
        {"engine": n, "ms": 1e3 * statistics.median(t[1:]) / NEW, "rounds_s": t[1:], "exact": (equal[n]) / len(t)}
        for n, t in times.items()
    ]
    for row in rows:
        ratio = row["ms"] / rows[0]["ms"]
        print(
            f"{row['engine']:<28}{row['ms']:8.2f} ms a token   {ratio:5.2f} x ours   {row['exact']:4.0%} of prompts exact"
        )
    if given.json:
        machine = {"cpu": cpu_name(), "isa": isa(), "threads": given.threads}
        given.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
