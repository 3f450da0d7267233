"""Locks that a fork takes first: a child has a copy of every lock, and nobody who would let go what other threads held.

So what a lock guards is whole in the child: a fork waits for the training steps, writing runs, plans and conversions of other
threads. The core does the same for locks of its own (csrc/core/forks.h).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

# Who holds one takes only later ones.
GRAPHS, CAPTURES, RUNS, PLANS, KNOWN, MACHINE, TRACES = range(7)
PATIENCE = 10.0  # seconds; who holds a lock may itself wait for the thread that forks
LOG = logging.getLogger("needle.fork")

LOCKS: dict[weakref.ref[Any], int] = {}
FORKING = threading.Lock()  # one fork at a time
HELD: list[Any] = []


def fork_lock(order: int, make: Callable[[], Any] = threading.Lock) -> Any:
    """A lock for what a forked child may use: a Lock, or an RLock."""
    lock = make()
    LOCKS[weakref.ref(lock, LOCKS.pop)] = order
    return lock


def own(lock: Any) -> bool:
    """Whether this thread holds an RLock: then it goes on holding it, in the child, too."""
    return bool(getattr(lock, "_is_owned", bool)())


def known() -> list[Any]:
    """In the order in which threads take them."""
    rows = sorted(LOCKS.copy().items(), key=lambda row: row[1])
    return [lock for lock in (ref() for ref, _ in rows) if lock is not None]


def before() -> None:
    FORKING.acquire()
    end = time.monotonic() + PATIENCE
    for lock in known():
        if own(lock):
            continue
        if lock.acquire(timeout=max(0.0, end - time.monotonic())):
            HELD.append(lock)
        else:
            LOG.warning(
                "[fork] a step, plan or conversion of another thread took over %g s: the child has it half done.",
                PATIENCE,
            )


def after_in_parent() -> None:
    while HELD:
        HELD.pop().release()
    FORKING.release()


def after_in_child() -> None:
    while HELD:  # before `own` is asked: what this thread took for the fork alone is not its own
        HELD.pop().release()
    for lock in (*known(), FORKING):
        if not own(lock):
            lock._at_fork_reinit()


os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)
