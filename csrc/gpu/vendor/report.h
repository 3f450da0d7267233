// What was chosen, and why, as text.
#pragma once
#include <string>
#include <vector>

#include "gpu/vendor/problem.h"

namespace needle::gpu::vendor {

// The library for one kind of problem; `text` is its version and place, or why it is not open.
struct Opened {
  const Library* library = nullptr;
  const char* name = "";
  std::string text;
};

// What of a problem's epilogue our own kernel does in place behind a library's.
enum After : int32_t { kNothing, kActivation, kAll };

// A library's way and what we do for it.
struct Attempt {
  Way way;
  After after;
  bool folded;  // its image and weights are made first (fold.h)
};

struct Choice {
  const Library* library = nullptr;  // null: our own kernel
  Attempt taken = {};
  double ours_us = 0, theirs_us = 0;  // 0: not timed
  int error = 0;                      // the library's, which ended its use here
  int again = 0;                      // calls until it is tried once more; 0: this choice is kept
  std::string why;                    // our own kernel
  Problem problem = {};
};

std::string number(double v);

// {"mode": .., "libraries": [..], "choices": [..]}
std::string report(const char* mode, const Opened (&opened)[2], const std::vector<const Choice*>& choices);

std::string report();            // of this process
void restart(const char* mode);  // forgets all choices and looks for libraries anew; "" is NEEDLE_GPU_VENDOR's mode

}  // namespace needle::gpu::vendor
