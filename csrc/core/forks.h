// Forks beside threads that run. The child has a copy of every lock, and nobody who would let go what other threads
// held.
#pragma once
#include <mutex>

#include "core/call.h"

namespace needle {

// The lock of an object, one of a few that all share: a fork takes them first, so the child finds them free and what
// they guard whole. For a few lines that take no other lock, give up no memory and call no Python: who forks may hold
// its lock.
NEEDLE_SHARED std::mutex& fork_lock(const void* object);

}  // namespace needle
