// bf16 and back in loops that a compiler turns into vectors.
#pragma once

#include <ATen/core/ATen_fwd.h>
#include <c10/util/BFloat16.h>
#include <cstdint>
#include <cstring>

using bf16 = c10::BFloat16;

// The upper half of the float, rounded to nearest even; NaN stays NaN.
inline uint32_t round_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return value != value ? 0x7fc0 : rounded;
}

inline void round_row(const float* from, bf16* to, int64_t n) {
  uint16_t* bits = reinterpret_cast<uint16_t*>(to);
  for (int64_t j = 0; j < n; ++j) bits[j] = (uint16_t)round_to_bf16(from[j]);
}

inline void round_row(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }

inline void widen_row(const bf16* from, float* to, int64_t n) {
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t wide = (uint32_t)bits[j] << 16;
    std::memcpy(to + j, &wide, 4);
  }
}

inline void widen_row(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
