// Choices as JSON, and the C functions by which needle.backend_ndarray.vendor reaches this folder.
#include <cstdio>
#include <cstring>
#include <exception>

#include "gpu/vendor/load.h"
#include "gpu/vendor/report.h"

namespace needle::gpu::vendor {
namespace {

std::string quoted(const std::string& text) {
  std::string s = "\"";
  for (char c : text) {
    unsigned char u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') s += '\\';
    s += u < 32 || u > 126 ? '?' : c;
  }
  return s + "\"";
}

std::string list(const int64_t* v, int n) {
  std::string s = "[";
  for (int i = 0; i < n; i++) s += (i ? ", " : "") + std::to_string(v[i]);
  return s + "]";
}

// "shapes" or "strides" of a, b and out.
std::string sizes(const Problem& p, const int64_t (View::*of)[kMaxRank]) {
  std::string s = "[";
  for (const View* v : {&p.a, &p.b, &p.out}) s += (v == &p.a ? "" : ", ") + list(v->*of, v->rank);
  return s + "]";
}

constexpr const char* kNames[] = {"matmul", "conv2d", "conv_transpose2d", "conv2d_weight_grad"};  // by Kind
constexpr const char* kAfter[] = {"", "activation", "epilogue"};                                  // by After

std::string described(const Choice& c) {
  const Problem& p = c.problem;
  std::string s = "{\"op\": " + quoted(kNames[p.kind]);
  s += ", \"shapes\": " + sizes(p, &View::shape) + ", \"strides\": " + sizes(p, &View::stride);
  if (p.kind != kMatmul) {
    const int64_t window[] = {p.stride_h, p.stride_w, p.pad_top, p.pad_left, p.dilation_h, p.dilation_w, p.groups};
    s += ", \"window\": " + list(window, 7);
  }
  s += ", \"precision\": " + std::to_string(p.precision) + ", \"activation\": " + std::to_string(p.activation);
  auto has = [](const View& v) { return v.data ? "true" : "false"; };
  s +=
      std::string(", \"scale\": ") + has(p.scale) + ", \"bias\": " + has(p.bias) + ", \"residual\": " + has(p.residual);
  s += ", \"taken\": " + quoted(c.library ? c.library->name : "needle") +
       ", \"after\": " + quoted(kAfter[c.taken.after]) + ", \"folded\": " + (c.taken.folded ? "true" : "false") +
       ", \"why\": " + quoted(c.why);
  return s + ", \"ours_us\": " + number(c.ours_us) + ", \"theirs_us\": " + number(c.theirs_us) + "}";
}

}  // namespace

std::string number(double v) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", v);
  return text;
}

std::string report(const char* mode, const Opened (&opened)[2], const std::vector<const Choice*>& choices) {
  std::string s = "{\"mode\": " + quoted(mode) + ", \"libraries\": [";
  for (const Opened& o : opened) {
    s += std::string(&o == opened ? "" : ", ") + "{\"name\": " + quoted(o.name) +
         ", \"open\": " + (o.library ? "true" : "false") + ", \"text\": " + quoted(o.text) + "}";
  }
  s += "], \"choices\": [";
  for (const Choice* c : choices) s += (c == choices[0] ? "" : ", ") + described(*c);
  return s + "]}";
}

}  // namespace needle::gpu::vendor

#define EXPORT extern "C" __attribute__((visibility("default")))

// Bytes of the report with its final zero, of which as many as fit are written; a reason in place of it starts with
// '['.
EXPORT size_t needle_vendor_report(char* out, size_t size) {
  std::string text;
  try {
    text = needle::gpu::vendor::report();
  } catch (const std::exception& e) {
    text = e.what();
  }
  if (size) {
    size_t fits = text.size() < size ? text.size() : size - 1;
    std::memcpy(out, text.data(), fits);
    out[fits] = 0;
  }
  return text.size() + 1;
}

EXPORT void needle_vendor_restart(const char* mode) { needle::gpu::vendor::restart(mode); }

// Where PyPI's wheels may lie, separated by colons; before anything was looked for.
EXPORT void needle_vendor_folders(const char* folders) { needle::gpu::vendor::wheel_folders() = folders; }
