"""Where C and C++ programs find `needle.h` and `libneedle.so`: `cc main.c $(python -m needle.config --cflags --libs)`."""

from __future__ import annotations

import argparse
from pathlib import Path

FOLDER = Path(__file__).parent  # the prefix of include/ and lib/


def main() -> None:
    parser = argparse.ArgumentParser("python -m needle.config", description="Options for C and C++ programs.")
    add = parser.add_argument
    add("--cflags", action="store_true", help="where needle.h is")
    add("--libs", action="store_true", help="to link libneedle.so and find it when the program runs")
    add("--cmake", action="store_true", help="the folder of needle-config.cmake, for -Dneedle_DIR")
    add("--pkgconfig", action="store_true", help="the folder of needle.pc, for PKG_CONFIG_PATH")
    args = parser.parse_args()
    texts = {
        "cflags": f"-I{FOLDER}/include",
        "libs": f"-L{FOLDER}/lib -Wl,-rpath,{FOLDER}/lib -lneedle",
        "cmake": f"{FOLDER}/lib/cmake/needle",
        "pkgconfig": f"{FOLDER}/lib/pkgconfig",
    }
    chosen = [text for name, text in texts.items() if getattr(args, name)]
    if not chosen:
        parser.error("expects what to tell")
    print(" ".join(chosen))


if __name__ == "__main__":
    main()
