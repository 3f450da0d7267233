"""Every model type that `transformers` knows, small: how `models_types.json` was made (`python -m zoo.types` from profiling/).

A type is listed if a configuration of its own, narrow and shallow or else only shallow, builds a model that runs on inputs made
from its signature. The list was made from what builds, before any of it was converted, and is never shortened.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .build import TYPES, allow_imports, build, inputs

LARGEST = 200e6
Entry = dict[str, Any]

# Numbers of configurations by name, where they are larger.
SHALLOW = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "depth", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **{"n_group": 1, "topk_group": 1, "vocab_size": 500, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "width", "embedding_size", "model_dim")
INNER = (
    "intermediate_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_dim",
    "d_ff",
    "dim_feedforward",
    "ffn_hidden_size",
)
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
PLACES = ("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions", "max_seq_len")
NARROW = {
    **SHALLOW,
    **dict.fromkeys((*WIDTHS, "encoder_embed_dim", "decoder_embed_dim", "moe_intermediate_size", "query_dim"), 64),
    **dict.fromkeys((*INNER, "hidden_dim", "n_inner", *PLACES), 128),
    **dict.fromkeys(HEADS, 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "patch_size"), 16),
    **dict.fromkeys(("image_size", "img_size"), 64),
    **dict.fromkeys(("sliding_window", "attention_window", "local_window_size", "state_size"), 8),
    **{"num_queries": 10, "max_window_layers": 1, "projection_dim": 32, "time_step_rank": 8},
}
LATENT = ("head_dim", "v_head_dim", "num_key_value_heads")  # what latent attention ties to its other sizes
SIZES = {"narrow": NARROW, "shallow": SHALLOW}


def shrink(config: Any, sizes: dict[str, int]) -> Any:
    """Write smaller numbers into a configuration and those in it; what it does not take stays."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):
            shrink(value, sizes)
            continue
        small: Any = value
        if type(value) is int and name in sizes and not (name in LATENT and hasattr(config, "kv_lora_rank")):
            small = min(value, sizes[name]) if name not in HEADS else sizes[name]
        elif isinstance(value, list) and value and all(type(v) is int for v in value):
            if name in ("depths", "layers"):
                small = [min(v, 2) for v in value]
            elif name in ("hidden_sizes", "embed_dims", "encoder_hidden_sizes") and sizes is NARROW:
                small = [16 * (i + 1) for i in range(len(value))]
        elif name == "layer_types" and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            small = kinds if len(kinds) > 1 else value[:2]
        try:
            setattr(config, name, small)
        except Exception:  # which checks what it is given
            continue
    if isinstance(kinds := getattr(config, "layer_types", None), list) and hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = len(kinds)
    return config


def small(kind: str, size: str) -> nn.Module:
    """The base model of a type, without a cache."""
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = shrink(CONFIG_MAPPING[kind](), SIZES[size])
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModel.from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"[types] a model expects at most {LARGEST:g} parameters, got {count}.")
    model = AutoModel.from_config(config).float()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model


def given(model: Any, n: int, length: int) -> Entry:
    """Inputs for n texts of a length, images or sounds, as the model's signature names them."""
    config, names = model.config, list(inspect.signature(model.forward).parameters)
    made: Entry = {}
    words = {"below": 90, "from": 3}
    if "input_ids" in names:
        made["input_ids"] = {"shape": [n, length], **words}
    if "pixel_values" in names:
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", None) or getattr(vision, "img_size", None) or 64
        sides = [size, size] if isinstance(size, int) else list(size)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        made["pixel_values"] = {"shape": [n, channels, *sides]}
    if "input_features" in names:
        steps = 2 * getattr(config, "max_source_positions", 100)
        made["input_features"] = {"shape": [n, getattr(config, "num_mel_bins", 80) or 80, steps]}
    if "input_values" in names:
        made["input_values"] = {"shape": [n, 4000]}
    if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = {"shape": [n, length - 2], **words}
    return made


def types() -> list[str]:
    """One of those that share a class."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    first: dict[Any, str] = {}
    for kind, name in MODEL_MAPPING_NAMES.items():
        first.setdefault(name if isinstance(name, str) else name[0], kind)
    return sorted(first.values())


def entry(kind: str) -> Entry | None:
    for size in SIZES:
        made: Entry = {"name": f"types/{kind}", "model": {"call": "zoo.types.small", "args": [kind, size]}}
        try:
            model = build(made)
            made["inputs"] = [given(model, 2, 12), given(model, 3, 9)]
            with torch.no_grad():
                for i in range(2):
                    model(**inputs(made)[i])
            return made
        except Exception:
            continue
    return None


def entries() -> Iterator[Entry]:
    for kind in types():
        if (made := entry(kind)) is not None:
            print(kind, flush=True)
            yield made


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    allow_imports()
    found = list(entries())
    TYPES.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    print(f"{len(found)} of {len(types())} types")
