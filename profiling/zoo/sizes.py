"""The sweep's models at the sizes people run them: entries as in `models.json` with one input. Imports no torch.

A name of `models.json` takes its model from there; other torchvision and timm names are the libraries' own. Transformers have
widths of published small and base models, random weights and short vocabularies' worth of ids.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
LIST = Path(__file__).with_name("models.json")
BATCH = "N"  # stands in shapes for the batch

# library, names and the size of an image: (C, H, W), (C, T, H, W) of a clip
IMAGES: tuple[tuple[str, tuple[int, ...], str], ...] = (
    (
        "torchvision",
        (3, 224, 224),
        "resnet18 resnet50 mobilenet_v2 efficientnet_b0 vit_b_16 convnext_tiny swin_t densenet121 vgg16 alexnet googlenet "
        "mobilenet_v3_small mobilenet_v3_large mnasnet1_0 shufflenet_v2_x1_0 squeezenet1_1 efficientnet_v2_s regnet_x_400mf "
        "regnet_y_400mf resnext50_32x4d wide_resnet50_2 swin_v2_t maxvit_t",
    ),
    ("torchvision", (3, 299, 299), "inception_v3"),
    (
        "torchvision",
        (3, 256, 256),
        "deeplabv3_mobilenet_v3_large deeplabv3_resnet50 fcn_resnet50 lraspp_mobilenet_v3_large",
    ),
    ("torchvision", (3, 16, 112, 112), "r3d_18 mc3_18 r2plus1d_18"),
    ("torchvision", (3, 16, 224, 224), "s3d mvit_v2_s"),
    ("torchvision", (3, 8, 224, 224), "swin3d_t"),
    (
        "timm",
        (3, 224, 224),
        "tf_efficientnetv2_b0 efficientnet_lite0 convnextv2_nano mobilenetv4_conv_small deit_tiny_patch16_224 "
        "vit_small_patch16_224 beit_base_patch16_224 mixer_b16_224 ghostnet_100 repvgg_a0 hrnet_w18 seresnext26d_32x4d "
        "resnest14d resmlp_12_224 gmixer_12_224 res2net50_14w_8s dla34 dpn48b xception41 legacy_xception eca_nfnet_l0 "
        "rexnet_100 mobileone_s0 repvit_m0_9 efficientformer_l1 fastvit_t8 edgenext_small mobilevit_s levit_128 pvt_v2_b0 "
        "poolformer_s12 coatnet_0_224 convmixer_768_32 cspdarknet53 cs3darknet_focus_l hardcorenas_a tinynet_a lcnet_100 "
        "inception_v4 eva02_tiny_patch14_224 cait_xxs24_224 xcit_nano_12_p8_224 twins_pcpvt_small volo_d1_224 davit_tiny "
        "starnet_s1 eca_vovnet39b selecsls42 fasternet_t0 inception_next_atto regnetz_b16 efficientvit_b0 efficientvit_m0 "
        "pit_s_224 visformer_small skresnet18 tresnet_l mambaout_femto sequencer2d_s "
        "bat_resnext26ts caformer_s18 convnext_zepto_rms_ols cspnext_s cspresnext50 densenetblur121d efficientformerv2_s1 "
        "efficientvit_m3 ese_vovnet19b_dw fbnetv3_b focalnet_tiny_srf gcvit_xxtiny gernet_s ghostnetv3_050 haloregnetz_b "
        "hgnet_small inception_next_tiny mobilevitv2_050 mvitv2_tiny nest_tiny_jx nextvit_small nf_regnet_b0 rdnet_tiny "
        "resnetblur18 resnetv2_34d seresnetaa50d swiftformer_s tiny_vit_5m_224 vitamin_small_224",
    ),
    ("timm", (3, 256, 256), "swinv2_tiny_window8_256 botnet26t_256"),
    ("timm", (3, 240, 240), "crossvit_9_240"),
    ("smp", (3, 256, 256), "Unet-resnet18 UnetPlusPlus-mobilenet_v2 FPN-efficientnet-b0 PSPNet-resnet18"),
    ("monai", (1, 128, 128), "UNet BasicUNet AttentionUnet SegResNet"),
)

BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
WORDS = 8192  # ids; tables of words are no work for a CPU, but memory for every peer
IDS = {"input_ids": {"shape": [BATCH, 128], "below": WORDS}}
MASK = {"attention_mask": {"shape": [BATCH, 128], "mask": True}}
TARGET = {"decoder_input_ids": {"shape": [BATCH, 32], "below": WORDS}}
PIXELS = {"pixel_values": {"shape": [BATCH, 3, 224, 224]}}
T5 = {"vocab_size": WORDS, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
BART = {"vocab_size": WORDS, "d_model": 768, "use_cache": False} | {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in (("layers", 6), ("attention_heads", 12), ("ffn_dim", 3072))
}
WHISPER = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536}
SOUND = {"shape": [BATCH, 16000]}  # a second

# Model class: its configuration class, arguments and inputs by name.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "BertModel": ("BertConfig", {**BASE, "vocab_size": WORDS}, IDS | MASK),
    "DistilBertModel": ("DistilBertConfig", {"vocab_size": WORDS}, IDS | MASK),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": WORDS, "use_cache": False}, IDS),
    "ViTForImageClassification": ("ViTConfig", BASE, PIXELS),
    "T5EncoderModel": ("T5Config", T5, IDS),
    "WhisperEncoder": ("WhisperConfig", WHISPER, {"input_features": {"shape": [BATCH, 80, 3000]}}),
    "Wav2Vec2Model": ("Wav2Vec2Config", BASE, {"input_values": SOUND}),
    "RobertaModel": ("RobertaConfig", {**BASE, "vocab_size": WORDS}, IDS | MASK),
    "LlamaForCausalLM": (
        "LlamaConfig",
        {
            "vocab_size": WORDS,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "use_cache": False,
        }
        | {"num_attention_heads": 9, "num_key_value_heads": 3},
        IDS,
    ),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "use_cache": False}, IDS | TARGET),
    "BartModel": ("BartConfig", BART, IDS | TARGET),
    "AlbertModel": ("AlbertConfig", {**BASE, "vocab_size": WORDS, "embedding_size": 128}, IDS),
    "ElectraModel": (
        "ElectraConfig",
        {"vocab_size": WORDS, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
        IDS,
    ),
    "MobileBertModel": ("MobileBertConfig", {"vocab_size": WORDS}, IDS),
    "DebertaV2Model": (
        "DebertaV2Config",
        {**SMALL, "vocab_size": WORDS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
        | {"position_buckets": 256},
        IDS,
    ),
    "OPTForCausalLM": ("OPTConfig", {"vocab_size": WORDS, "use_cache": False}, IDS),
    "Qwen2ForCausalLM": (
        "Qwen2Config",
        {**SMALL, "vocab_size": WORDS, "num_key_value_heads": 2, "use_cache": False},
        IDS,
    ),
    "Dinov2Model": ("Dinov2Config", {**SMALL, "image_size": 224}, PIXELS),
    "CLIPVisionModel": ("CLIPVisionConfig", {**BASE, "patch_size": 32}, PIXELS),
    "SegformerForSemanticSegmentation": ("SegformerConfig", {}, PIXELS),
    "SwinForImageClassification": ("SwinConfig", {}, PIXELS),
    "HubertModel": ("HubertConfig", SMALL, {"input_values": SOUND}),
    "ASTModel": ("ASTConfig", {**SMALL, "max_length": 256}, {"input_values": {"shape": [BATCH, 256, 128]}}),
}
MODULES = {"WhisperEncoder": "transformers.models.whisper.modeling_whisper"}  # where not in transformers itself
AUDIO: dict[str, list[Any]] = {
    "ConvTasNet": [BATCH, 1, 16000],
    "DeepSpeech2": [BATCH, 1, 64, 200],
    "CRNN": [BATCH, 1, 200, 64],
    "WaveLSTM": [BATCH, 1, 16000],
}
DIFFUSERS: dict[str, dict[str, Any]] = {
    "UNet2DModel": {"sample": {"shape": [BATCH, 3, 64, 64]}, "timestep": {"shape": [BATCH], "below": 999}},
}
SAMPLE = (  # a model of each kind, for a quick look
    *("torchvision/resnet18", "torchvision/mobilenet_v3_small", "torchvision/swin_t", "timm/convnextv2_nano"),
    *("timm/deit_tiny_patch16_224", "transformers/DistilBertModel", "transformers/T5EncoderModel", "audio/ConvTasNet"),
)


def call(name: str, *args: Any, **kwargs: Any) -> Entry:
    return {"call": name, "args": list(args), "kwargs": kwargs}


def library_call(library: str, name: str) -> Entry:
    if library == "timm":
        return call("timm.create_model", name, pretrained=False)
    return call("torchvision.models.get_model", name, weights=None)


@cache
def table() -> dict[str, Entry]:
    """Entries by name; BATCH stands for the batch in their shapes."""
    listed = {e["name"]: e for e in json.loads(LIST.read_text())}
    made: dict[str, Entry] = {}
    for library, size, names in IMAGES:
        for name in (f"{library}/{n}" for n in names.split()):
            known = listed.get(name) or {"model": library_call(library, name.partition("/")[2]), "inputs": ["x"]}
            (argument,) = known["inputs"][0]
            made[name] = {"model": known["model"], "inputs": [{argument: {"shape": [BATCH, *size]}}]}
    for name, (config, arguments, given) in TRANSFORMERS.items():
        model = call(f"{MODULES.get(name, 'transformers')}.{name}", call(f"transformers.{config}", **arguments))
        made[f"transformers/{name}"] = {"model": model, "inputs": [given]}
    for name, shape in AUDIO.items():
        made[f"audio/{name}"] = {"model": call(f"zoo.audio.{name}"), "inputs": [{"x": {"shape": shape}}]}
    for name, given in DIFFUSERS.items():
        made[f"diffusers/{name}"] = {"model": listed[f"diffusers/{name}"]["model"], "inputs": [given]}
    return {name: {"name": name, **entry} for name, entry in made.items()}


def entry(name: str, batch: int) -> Entry:
    """The model's entry at this batch; its last inputs, which batch norms settle on, are of three samples."""
    found = table()[name]
    given = [
        {
            k: {**spec, "shape": [n if d == BATCH else d for d in spec["shape"]]}
            for k, spec in found["inputs"][0].items()
        }
        for n in (batch, 3)
    ]
    return {**found, "inputs": given}
