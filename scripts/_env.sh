# Sourced by the other scripts: `.venv` with the project and its test and report tools installed.
# The wheel is built again only when a source changed, with csrc/torch: torch comes first, so that the build finds it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${NEEDLE_VENV:-$root/.venv}
sources() { git ls-files -z --cached --others --exclude-standard csrc needle torch2needle operator_fusion CMakeLists.txt pyproject.toml README.md | xargs -0 -r sh -c 'for f; do [ -f "$f" ] && printf "%s\0" "$f"; done' sh; }
stamp=$(sources | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)
if [ ! -x "$venv/bin/python" ]; then
  echo "== making $venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q --upgrade pip
fi
if [ "$(cat "$venv/stamp" 2>/dev/null || true)" != "$stamp" ]; then
  echo "== building the wheel (a few minutes the first time)"
  mkdir -p build/wheel
  "$venv/bin/pip" install -q torch==2.13.0 "scikit-build-core>=0.11" "pybind11>=3,<4"
  for tool in cmake ninja; do command -v "$tool" >/dev/null || "$venv/bin/pip" install -q "$tool"; done
  if ! ls build/wheel/"$stamp"/*.whl >/dev/null 2>&1; then
    NEEDLE_TORCH=1 "$venv/bin/pip" wheel -q . --no-deps --no-build-isolation -w build/wheel/"$stamp" -C build-dir=build/cmake -C cmake.define.NEEDLE_GLIBC=
  fi
  wheel=$(ls build/wheel/"$stamp"/*.whl)
  "$venv/bin/pip" install -q "$wheel[report,dev]"
  "$venv/bin/pip" install -q --force-reinstall --no-deps "$wheel"
  echo "$stamp" >"$venv/stamp"
fi
export PATH="$venv/bin:$PATH"
