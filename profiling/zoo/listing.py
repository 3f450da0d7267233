"""How `models.json` was made: `python -m zoo.listing` from profiling/. It is run when the list is extended, never to shorten it.

torchvision: of every classification and segmentation family the model with the fewest parameters. timm: of every module the
first model of at most 60 M parameters. The others are named here. Images are 128 x 128 where the model takes that, else of the
model's own size; further inputs are two other batch sizes with other heights and widths, where the model takes those.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .build import LIST, allow_imports, build, inputs

LARGEST = 60e6
WORDS, DIGITS = r"tiny|small|base|large|[tsblhm]|b\d|\d+|\d+gf|\d+mf|x\d_\d|\d+x\d+d", r"\d+(_\d+)*"
SIZE = rf"(_({WORDS}))+$|(?<=[a-z]){DIGITS}(?=_bn|$|_32|_64|_2)"  # what tells torchvision's models of a family apart
Entry = dict[str, Any]

WIDTHS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {**WIDTHS, "vocab_size": 500, "max_position_embeddings": 64}
VISION = {**WIDTHS, "image_size": 64, "patch_size": 16}
STAGES = {"depths": [2, 2, 2, 2], "hidden_sizes": [16, 32, 64, 96]}

# Model class: its configuration class and arguments. Real structure, small widths.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("BertConfig", TEXT),
    "RobertaModel": ("RobertaConfig", TEXT),
    "DistilBertModel": (
        "DistilBertConfig",
        {"vocab_size": 500, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    ),
    "AlbertModel": ("AlbertConfig", {**TEXT, "embedding_size": 32}),
    "ElectraModel": ("ElectraConfig", {**TEXT, "embedding_size": 32}),
    "MobileBertModel": (
        "MobileBertConfig",
        {**TEXT, "hidden_size": 128, "intra_bottleneck_size": 64, "embedding_size": 32},
    ),
    "DebertaV2Model": (
        "DebertaV2Config",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    ),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 500, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "OPTForCausalLM": (
        "OPTConfig",
        {"vocab_size": 500, "max_position_embeddings": 64, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
        | {"num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**TEXT, "num_key_value_heads": 2}),
    "T5EncoderModel": (
        "T5Config",
        {"vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 500, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    ),
    "BartModel": (
        "BartConfig",
        {"vocab_size": 500, "d_model": 64, "max_position_embeddings": 64, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
    ),
    "ViTForImageClassification": ("ViTConfig", VISION),
    "DeiTForImageClassification": ("DeiTConfig", VISION),
    "BeitForImageClassification": ("BeitConfig", VISION),
    "Dinov2Model": ("Dinov2Config", VISION),
    "CLIPVisionModel": ("CLIPVisionConfig", VISION),
    "SwinForImageClassification": (
        "SwinConfig",
        {"image_size": 64, "patch_size": 4, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
    ),
    "ConvNextForImageClassification": ("ConvNextConfig", STAGES),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 96], "depths": [1, 1, 2, 1]},
    ),
    "SegformerForSemanticSegmentation": (
        "SegformerConfig",
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "num_attention_heads": [1, 2, 3, 4]}
        | {"decoder_hidden_size": 32},
    ),
}
TEXT_INPUTS: dict[str, Entry] = {  # beside input_ids; (N, T) each
    "BertForSequenceClassification": {"attention_mask": {"mask": True}, "token_type_ids": {"below": 2}},
    "DistilBertModel": {"attention_mask": {"mask": True}},
    "RobertaModel": {"attention_mask": {"mask": True}},
    "T5ForConditionalGeneration": {"decoder_input_ids": {"below": 500}},
    "BartModel": {"decoder_input_ids": {"below": 500}},
}
SMP = {  # architecture: encoder
    "Unet": "resnet18",
    "UnetPlusPlus": "mobilenet_v2",
    "FPN": "efficientnet-b0",
    "DeepLabV3Plus": "resnet18",
    "Linknet": "resnet18",
    "MAnet": "resnet18",
    "PSPNet": "resnet18",
}
SMALL_UNET = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
DOWN, UP = ["DownBlock2D", "AttnDownBlock2D"], ["AttnUpBlock2D", "UpBlock2D"]
UNETS: dict[str, dict[str, Any]] = {
    "monai.networks.nets.UNet": {
        **{**SMALL_UNET, "channels": [16, 32, 64, 128], "strides": [2, 2, 2]},
        **{"num_res_units": 2, "norm": "batch"},
    },
    "monai.networks.nets.BasicUNet": {**SMALL_UNET, "features": [16, 16, 32, 64, 128, 16]},
    "monai.networks.nets.AttentionUnet": {**SMALL_UNET, "channels": [16, 32, 64], "strides": [2, 2]},
    "monai.networks.nets.SegResNet": {**SMALL_UNET, "init_filters": 8},
    "monai.networks.nets.DynUNet": {
        **{**SMALL_UNET, "kernel_size": [3, 3, 3], "strides": [1, 2, 2]},
        **{"upsample_kernel_size": [2, 2], "filters": [16, 32, 64]},
    },
    "diffusers.UNet2DModel": {
        **{"sample_size": 32, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "norm_num_groups": 8},
        **{"block_out_channels": [32, 64], "down_block_types": DOWN, "up_block_types": UP, "attention_head_dim": 8},
    },
    "diffusers.UNet2DConditionModel": {
        **{"sample_size": 32, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "norm_num_groups": 8},
        **{"block_out_channels": [32, 64], "cross_attention_dim": 32, "attention_head_dim": 8},
        **{"down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"]},
        **{"up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"]},
    },
}
AUDIO: dict[str, list[list[tuple[int, ...]]]] = {
    "DeepSpeech2": [[(1, 1, 64, 50)], [(2, 1, 64, 70)], [(3, 1, 64, 41)]],
    "CRNN": [[(1, 1, 40, 64)], [(2, 1, 55, 64)], [(3, 1, 20, 64)]],
    "GRUDenoiser": [[(1, 30, 129), (2, 1, 96)], [(2, 20, 129), (2, 2, 96)], [(3, 41, 129), (2, 3, 96)]],
    "WaveLSTM": [[(1, 1, 4000)], [(2, 1, 5000)], [(3, 1, 3000)]],
}


def call(name: str, *args: Any, **kwargs: Any) -> Entry:
    return {"call": name, "args": list(args), "kwargs": kwargs}


def takes(model: nn.Module, given: Entry) -> bool:
    """Whether torch runs the model on the inputs."""
    try:
        with torch.no_grad():
            model(**inputs({"inputs": [given]})[0])
    except Exception:
        return False
    return True


def with_images(entry: Entry, sizes: list[tuple[int, int]], channels: int = 3) -> Entry:
    """The entry with the first image size that the model takes, and two other batches, of other sizes where it takes those."""
    model = build(entry)
    name = next(iter(inspect.signature(model.forward).parameters))

    def given(n: int, h: int, w: int) -> Entry:
        return {name: {"shape": [n, channels, h, w]}}

    h, w = next((s for s in sizes if takes(model, given(1, *s))), sizes[-1])
    entry["inputs"] = [given(1, h, w)]
    for n, height, width in ((2, h, w + 32), (3, h + 64, w)):
        other = given(n, height, width)
        entry["inputs"].append(other if takes(model, other) else given(n, h, w))
    return entry


def torchvision_models() -> Iterator[Entry]:
    from torchvision import models

    def parameters(name: str) -> int:
        weights = models.get_model_weights(name).DEFAULT
        return weights.meta["num_params"]

    families: dict[tuple[Any, str], list[str]] = {}
    for module in (models, models.segmentation):
        for name in models.list_models(module=module):
            families.setdefault((module, re.sub(SIZE, "", name)), []).append(name)
    for (module, _), names in families.items():
        name = min(names, key=parameters)
        extra: Entry = {"weights_backbone": None} if module is models.segmentation else {}
        extra |= {"init_weights": True} if name in ("googlenet", "inception_v3") else {}  # else a warning
        model = call("torchvision.models.get_model", name, weights=None, **extra)
        yield with_images({"name": f"torchvision/{name}", "model": model}, [(128, 128), (224, 224), (299, 299)])


def timm_models() -> Iterator[Entry]:
    import timm

    for module in timm.list_modules():
        for name in timm.list_models(module=module):
            with torch.device("meta"):
                try:
                    model = timm.create_model(name, pretrained=False)
                except Exception:  # some compute tables of numbers while they are made
                    model = None
            model = timm.create_model(name, pretrained=False) if model is None else model
            if sum(p.numel() for p in model.parameters()) > LARGEST:
                continue
            own: Any = model.default_cfg["input_size"]  # type: ignore[index]
            entry = {"name": f"timm/{name}", "model": call("timm.create_model", name, pretrained=False)}
            yield with_images(entry, [*([(128, 128)] if own[1] > 128 else []), tuple(own[1:])], own[0])
            break


def transformers_models() -> Iterator[Entry]:
    for name, (config, arguments) in TRANSFORMERS.items():
        model = call(f"transformers.{name}", call(f"transformers.{config}", **arguments))
        entry: Entry = {"name": f"transformers/{name}", "model": model}
        if "vocab_size" not in arguments:
            size = arguments.get("image_size", 64)
            yield with_images(entry, [(size, size)])
            continue
        named: Entry = {"input_ids": {"below": 500}, **TEXT_INPUTS.get(name, {})}
        lengths = ((1, 16), (2, 11), (3, 24))
        entry["inputs"] = [{k: {"shape": list(s), **v} for k, v in named.items()} for s in lengths]
        yield entry


def unets() -> Iterator[Entry]:
    for name, encoder in SMP.items():
        model = call(f"segmentation_models_pytorch.{name}", encoder, encoder_weights=None, classes=2)
        yield with_images({"name": f"smp/{name}-{encoder}", "model": model}, [(128, 128)])
    for name, arguments in UNETS.items():
        library, _, short = name.partition(".")
        entry: Entry = {"name": f"{library}/{short.rpartition('.')[2]}", "model": call(name, **arguments)}
        if library == "monai":
            yield with_images(entry, [(64, 64)], 1)
            continue
        entry["inputs"] = []
        for n, h, w in ((1, 32, 32), (2, 32, 48), (3, 64, 32)):
            given: Entry = {
                "sample": {"shape": [n, arguments["in_channels"], h, w]},
                "timestep": {"shape": [n], "below": 999},
            }
            if "cross_attention_dim" in arguments:
                given["encoder_hidden_states"] = {"shape": [n, 7, arguments["cross_attention_dim"]]}
            entry["inputs"].append(given)
        yield entry


def audio_models() -> Iterator[Entry]:
    for name, shapes in AUDIO.items():
        given = [{k: {"shape": list(s)} for k, s in zip(("x", "state"), group, strict=False)} for group in shapes]
        yield {"name": f"audio/{name}", "model": call(f"zoo.audio.{name}"), "inputs": given}


def main() -> None:
    allow_imports()
    made = []
    for family in (torchvision_models, timm_models, transformers_models, unets, audio_models):
        for entry in family():
            made.append(entry)
            print(entry["name"], [list(v["shape"]) for v in entry["inputs"][-1].values()], flush=True)
    LIST.write_text("[\n" + ",\n".join(json.dumps(e) for e in made) + "\n]\n")


if __name__ == "__main__":
    main()
