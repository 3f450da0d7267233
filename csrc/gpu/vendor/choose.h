// The one door to vendors' libraries: a kernel describes its call and says how it would do it itself.
#pragma once
#include "gpu/vendor/problem.h"

namespace needle::gpu::vendor {

// Whether a library for such problems is open and may be used; without one a call costs no more than this.
bool wanted(Kind kind);

// Does `p` by the library of its kind or by ours(context), whichever was faster when such a problem came first.
void choose(const Problem& p, const Exec* exec, void (*ours)(const void*), const void* context);

template <class F>
void choose(const Problem& p, const Exec* exec, const F& ours) {
  choose(p, exec, [](const void* f) { (*static_cast<const F*>(f))(); }, &ours);
}

}  // namespace needle::gpu::vendor
