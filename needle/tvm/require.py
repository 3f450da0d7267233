"""TVM if it is installed; else one sentence that says what to install. Everything of `needle.tvm` imports this first."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TVM, FFI = "apache-tvm", "apache-tvm-ffi"
PINNED = ("0.27.0.post1", "0.1.14.post1")  # what the extra installs
TUNES = {  # pairs that tuned when tried; others crash when tuning starts, or TVM does not load
    PINNED,
    ("0.27.0.post1", "0.1.14.post0"),
    ("0.27.0", "0.1.14.post1"),
    ("0.26.0", "0.1.13.post3"),
    ("0.26.0", "0.1.13.post2"),
}
INSTALL = "install it in a checkout with `pip install '.[tvm]'`"

try:
    import tvm
except ImportError as e:
    raise ImportError(f"[tvm] needle.tvm needs Apache TVM, {INSTALL}, got: {e}.") from e


def installed() -> tuple[str, str]:
    """Versions of TVM and of its foreign-function interface."""
    try:
        return version(TVM), version(FFI)
    except PackageNotFoundError:  # a build of one's own
        return str(tvm.__version__), "unknown"


def require_tuning() -> None:
    """Raises RuntimeError where tuning would crash the process or lacks a package."""
    pair = installed()
    if pair not in TUNES:
        raise RuntimeError(
            f"[tvm] tuning is refused: only {TVM} {PINNED[0]} with {FFI} {PINNED[1]} is known to tune without a crash, "
            f"{INSTALL}, got {pair[0]} with {pair[1]}."
        )
    for name in ("psutil", "cloudpickle", "xgboost"):
        try:
            __import__(name)
        except ImportError as e:
            raise RuntimeError(f"[tvm] tuning needs {name}, {INSTALL}, got: {e}.") from e
