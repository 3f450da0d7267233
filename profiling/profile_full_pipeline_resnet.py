"""A torch ResNet through every stage: eager, converted, fused, compiled. Writes FOLDER/index.html, profile.json, trace.json.

`python profiling/profile_full_pipeline_resnet.py --model resnet18 --batch 1 --rounds 5 --out FOLDER`
"""

from __future__ import annotations

from pipeline import Options, main

if __name__ == "__main__":
    main(["resnet18", "resnet34", "resnet50", "resnet101"], Options("resnet18", height=224, width=224, classes=1000))
