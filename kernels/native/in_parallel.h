// Items shared out among threads; what one of them throws ends the call, and not the process.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

constexpr int64_t OUT_OF_MEMORY = -1, FAILED = -2;  // what __init__.py makes errors of

// ``work(next)`` runs once in each thread; ``next()`` is the next item to do, ``items`` or more when none is left.
template <typename Work>
int64_t in_parallel(int64_t threads, Work work) {
  std::atomic<int64_t> begun{0}, failed{0};
#pragma omp parallel num_threads(threads)
  {
    try {
      work([&] { return begun++; });
    } catch (const std::bad_alloc&) {
      failed = OUT_OF_MEMORY;
    } catch (...) {
      failed = FAILED;
    }
  }
  return failed;
}
