"""The main job on real pictures: convert, check, fuse, compile and run ResNet-18 and a UNet; table and HTML report.

`python profiling/demo.py [--out report] [--rounds 3]`
"""

from __future__ import annotations

import argparse
from pathlib import Path

import report
import stages
from pipeline import OptionError, Options

MODELS = (
    Options("resnet18", height=224, width=224, classes=1000, batch=2, pictures=2),
    Options("unet", height=256, width=384, classes=2, batch=2, pictures=2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("report"))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    results, images = [], []
    try:
        for options in MODELS:
            options.rounds = args.rounds
            result, shown = stages.run(options)
            results.append(result)
            images.append(shown)
        document = report.document(results)
        print(report.console(document, limit=5))
        print(f"\nreport: {report.write(args.out, document, images)}")
    except OptionError as e:
        raise SystemExit(str(e)) from None
    except KeyboardInterrupt:
        print("[demo] interrupted; nothing was written.")
        raise SystemExit(130) from None
    report.require_agreement(document)


if __name__ == "__main__":
    main()
