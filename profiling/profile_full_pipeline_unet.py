"""A torch UNet through every stage: eager, converted, fused, compiled. Writes FOLDER/index.html, profile.json, trace.json.

`python profiling/profile_full_pipeline_unet.py --model unet_bilinear --height 256 --width 384 --rounds 5 --out FOLDER`
"""

from __future__ import annotations

from pipeline import Options, main

if __name__ == "__main__":
    main(["unet", "unet_bilinear"], Options("unet", height=256, width=256, classes=2))
