// Causal grouped-query attention within documents, in fp32, and in bf16 on CPUs that multiply it (kernels/attention/cpp.py).
//
// One item of work is a key head of a row. Its keys and values are packed once for these products and stay in cache;
// then blocks of 64 queries of each of its query heads run through: scores in fp32 over the keys that some query of
// the block sees, softmax, products in the inputs' type with sums in fp32. Blocks of other documents are never touched.
// The backward pass computes the softmax again (arXiv 2205.14135, section 3.1).
//
// The right operand of a product consists of 32-bit words [K/PER][N]. In fp32 a word is an element. In bf16 ("VNNI") it
// holds two neighbours of the summed dimension. Packing a matrix that is stored [N][K] is a transpose of words; packing
// one that is stored [K][N] copies its rows, or interleaves two of them.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "in_parallel.h"
#include "numbers.h"

using Vec = at::vec::Vectorized<float>;
namespace blas = at::native::cpublas;

namespace {

constexpr int64_t BLOCK = 64;  // queries
constexpr int64_t LANES = 16;  // rows of scores are padded to it

struct Strided {  // in elements, of [B, T, heads, K] with a dense last dimension
  int64_t b, t, h;
};

template <typename E>
constexpr int64_t PER = 4 / sizeof(E);  // elements of a word

// y [N][M] from x [M][N].
template <typename E>
void transpose(const E* x, int64_t x_stride, int64_t M, int64_t N, E* y, int64_t y_stride) {
  constexpr int64_t TILE = sizeof(E) == 2 ? 32 : 16;  // what at::vec takes at a time
  for (int64_t m = 0; m < M; m += TILE)
    for (int64_t n = 0; n < N; n += TILE)
      at::vec::transpose_mxn<E>(x + m * x_stride + n, x_stride, y + n * y_stride + m, y_stride,
                                (int)std::min(TILE, M - m), (int)std::min(TILE, N - n));
}

// out [K/PER][ld] from x [N][K]: x's transpose as the right operand of a product over K.
template <typename E>
void pack_transposed(const E* x, int64_t stride, int64_t N, int64_t K, int64_t ld, uint32_t* out) {
  const float* words = reinterpret_cast<const float*>(x);  // moves bits
  transpose(words, stride / PER<E>, N, K / PER<E>, reinterpret_cast<float*>(out), ld);
}

// out [K/PER][N] from x [K][N]: x as the right operand of a product over K; an odd last row meets zeros.
void pack_rows(const float* x, int64_t stride, int64_t K, int64_t N, uint32_t* out) {
  for (int64_t k = 0; k < K; ++k) std::memcpy(out + k * N, x + k * stride, N * sizeof(float));
}

void pack_rows(const bf16* x, int64_t stride, int64_t K, int64_t N, uint32_t* out) {
  for (int64_t k = 0; k < K; k += 2) {
    const uint16_t* even = reinterpret_cast<const uint16_t*>(x + k * stride);
    const uint16_t* odd = reinterpret_cast<const uint16_t*>(x + (k + 1) * stride);
    uint32_t* to = out + k / 2 * N;
    if (k + 1 < K)
      for (int64_t n = 0; n < N; ++n) to[n] = even[n] | (uint32_t)odd[n] << 16;
    else
      for (int64_t n = 0; n < N; ++n) to[n] = even[n];
  }
}

// y [N][M] rounded, rows ``y_stride`` apart, from x [M][N].
template <typename E>
void write_transposed(const float* x, int64_t x_stride, int64_t N, int64_t M, E* y, int64_t y_stride) {
  std::vector<float> row(16 * M);
  for (int64_t n0 = 0; n0 < N; n0 += 16) {
    const int64_t n1 = std::min(n0 + 16, N);
    transpose(x + n0, x_stride, M, n1 - n0, row.data(), M);
    for (int64_t n = n0; n < n1; ++n)
      round_row(&row[(n - n0) * M], y + n * y_stride, M);
  }
}

// What a row of the batch may see: query i the keys first[i] … i, or by comparison where documents are scattered.
struct Seen {
  std::vector<int64_t> first;
  const int32_t* document;
  bool scattered = false;

  Seen(const int32_t* document, int64_t T) : first(T), document(document) {
    for (int64_t i = 1; i < T; ++i) {
      first[i] = document[i] == document[i - 1] ? first[i - 1] : i;
      scattered |= document[i] < document[i - 1];
    }
    if (scattered) first.assign(T, 0);
  }

  // The first key that queries from … to - 1 see, rounded down to a block: few shapes of products.
  int64_t from(int64_t begin, int64_t end) const {
    return *std::min_element(first.begin() + begin, first.begin() + end) / BLOCK * BLOCK;
  }
};

// 20 roundings off are far below what bf16 keeps; fp32 gets the exact one.
inline Vec exponential(Vec x, bf16) { return x.exp_u20(); }
inline Vec exponential(Vec x, float) { return x.exp(); }

// score [padded] of query i against the keys from begin on → exp(scale (score - its largest)), and their sum.
// A row without a finite largest score becomes NaN, as in softmax.
template <typename E>
float exponentials(float* score, int64_t padded, int64_t begin, int64_t i, const Seen& seen, float scale) {
  const float hidden = -std::numeric_limits<float>::infinity();
  std::fill(score, score + seen.first[i] - begin, hidden);
  std::fill(score + i + 1 - begin, score + padded, hidden);
  if (seen.scattered)
    for (int64_t j = begin; j < i; ++j)
      if (seen.document[j] != seen.document[i]) score[j - begin] = hidden;
  Vec largest(hidden);
  for (int64_t j = 0; j < padded; j += Vec::size()) largest = at::vec::maximum(largest, Vec::loadu(score + j));
  const float most = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, largest);
  if (!std::isfinite(most)) {
    std::fill(score, score + padded, std::numeric_limits<float>::quiet_NaN());
    return std::numeric_limits<float>::quiet_NaN();
  }
  const Vec shift(most * scale), by(scale);
  Vec sum(0.f);
  for (int64_t j = 0; j < padded; j += Vec::size()) {
    const Vec e = exponential(Vec::loadu(score + j) * by - shift, E());
    e.store(score + j);
    sum = sum + e;
  }
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sum);
}

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The length of a row of T words: rows a power of two apart would fall into the same few lines of the cache.
int64_t pad(int64_t T) { return up(T, LANES) + LANES; }

// What a product reads: the fp32 values, or those rounded to bf16 (as a left operand) or packed (as a right one).
template <typename E>
const E* left(const std::vector<float>& wide, const std::vector<bf16>& rounded) {
  if constexpr (PER<E> == 2)
    return rounded.data();
  else
    return wide.data();
}
template <typename E>
const void* right(const std::vector<float>& wide, const std::vector<uint32_t>& pairs) {
  return PER<E> == 2 ? static_cast<const void*>(pairs.data()) : wide.data();
}

// c [M][N] (+)= a [M][K] · b, packed.
template <typename E>
void multiply(int64_t M, int64_t N, int64_t K, const E* a, int64_t a_stride, const void* b, int64_t b_words, float* c,
              int64_t c_stride, bool add = false) {
  blas::brgemm(M, N, K, a_stride, b_words, c_stride, add, a, static_cast<const E*>(b), c);
}

template <typename E>
int64_t forward(const E* q, const E* k, const E* v, const int32_t* document, E* o, const Strided* strides, int64_t B,
                int64_t T, int64_t H, int64_t G, int64_t K, float scale, int64_t threads) {
  const Strided qs = strides[0], ks = strides[1], vs = strides[2];
  const int64_t R = H / G, wide = pad(T);
  return in_parallel(threads, [&](auto next) {
    std::vector<uint32_t> kt(K / PER<E> * wide), vp(wide / PER<E> * K);
    std::vector<float> score(BLOCK * wide), sum(BLOCK), out(BLOCK * K);
    std::vector<bf16> rounded(PER<E> == 2 ? BLOCK * wide : 0);
    for (int64_t item; (item = next()) < B * G;) {
      const int64_t b = item / G, g = item % G;
      const Seen seen(document + b * T, T);
      std::fill(vp.begin(), vp.end(), 0);
      pack_transposed(k + b * ks.b + g * ks.h, ks.t, T, K, wide, kt.data());
      pack_rows(v + b * vs.b + g * vs.h, vs.t, T, K, vp.data());
      for (int64_t h = g * R; h < (g + 1) * R; ++h)
        for (int64_t i0 = 0; i0 < T; i0 += BLOCK) {
          const int64_t i1 = std::min(i0 + BLOCK, T), M = i1 - i0, begin = seen.from(i0, i1);
          const int64_t L = up(i1 - begin, LANES);
          multiply(M, L, K, q + b * qs.b + i0 * qs.t + h * qs.h, qs.t, &kt[begin], wide, score.data(), L);
          for (int64_t m = 0; m < M; ++m) {
            float* row = score.data() + m * L;
            sum[m] = exponentials<E>(row, L, begin, i0 + m, seen, scale);
            if constexpr (PER<E> == 2) round_row(row, &rounded[m * L], L);
          }
          multiply(M, K, L, left<E>(score, rounded), L, &vp[begin / PER<E> * K], K, out.data(), K);
          for (int64_t m = 0; m < M; ++m) {
            for (int64_t x = 0; x < K; ++x) out[m * K + x] /= sum[m];
            round_row(&out[m * K], o + ((b * T + i0 + m) * H + h) * K, K);
          }
        }
    }
    blas::brgemm_release();
  });
}

template <typename E>
int64_t backward(const E* q, const E* k, const E* v, const int32_t* document, const E* dout, E* dq, E* dk, E* dv,
                 const Strided* strides, int64_t B, int64_t T, int64_t H, int64_t G, int64_t K, float scale,
                 int64_t threads) {
  const Strided qs = strides[0], ks = strides[1], vs = strides[2], os = strides[3];
  const int64_t R = H / G, wide = pad(T), rounds = PER<E> == 2 ? BLOCK * wide : 0;
  return in_parallel(threads, [&](auto next) {
    std::vector<uint32_t> kt(K / PER<E> * wide), vt(K / PER<E> * wide), kp(wide / PER<E> * K);
    std::vector<float> score(BLOCK * wide), dweight(BLOCK * wide), dkt(K * wide), dvt(K * wide), out(BLOCK * K);
    std::vector<E> qt(K * BLOCK), dot(K * BLOCK);
    std::vector<bf16> dscore(rounds);
    std::vector<uint32_t> weight_pairs(rounds / 2), dscore_pairs(rounds / 2);
    for (int64_t item; (item = next()) < B * G;) {
      const int64_t b = item / G, g = item % G;
      const Seen seen(document + b * T, T);
      std::fill(kp.begin(), kp.end(), 0);
      std::fill(dkt.begin(), dkt.end(), 0.f);
      std::fill(dvt.begin(), dvt.end(), 0.f);
      pack_transposed(k + b * ks.b + g * ks.h, ks.t, T, K, wide, kt.data());
      pack_transposed(v + b * vs.b + g * vs.h, vs.t, T, K, wide, vt.data());
      pack_rows(k + b * ks.b + g * ks.h, ks.t, T, K, kp.data());
      for (int64_t h = g * R; h < (g + 1) * R; ++h)
        for (int64_t i0 = 0; i0 < T; i0 += BLOCK) {
          const int64_t i1 = std::min(i0 + BLOCK, T), M = i1 - i0, begin = seen.from(i0, i1);
          const int64_t L = up(i1 - begin, LANES);
          const E* q_block = q + b * qs.b + i0 * qs.t + h * qs.h;
          const E* do_block = dout + b * os.b + i0 * os.t + h * os.h;
          multiply(M, L, K, q_block, qs.t, &kt[begin], wide, score.data(), L);
          multiply(M, L, K, do_block, os.t, &vt[begin], wide, dweight.data(), L);
          for (int64_t m = 0; m < up(M, PER<E>); ++m) {
            float *weights = score.data() + m * L, *dweights = dweight.data() + m * L;
            if (m == M) {  // an odd last row meets zeros
              for (int64_t j = 0; j < L; ++j) weights[j] = dweights[j] = 0;
            } else {
              const Vec share(1 / exponentials<E>(weights, L, begin, i0 + m, seen, scale));
              Vec dots(0.f);
              for (int64_t j = 0; j < L; j += Vec::size()) {
                const Vec w = Vec::loadu(weights + j) * share;
                w.store(weights + j);
                dots = at::vec::fmadd(w, Vec::loadu(dweights + j), dots);
              }
              const Vec mean(at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, dots)), by(scale);
              for (int64_t j = 0; j < L; j += Vec::size())
                (Vec::loadu(weights + j) * (Vec::loadu(dweights + j) - mean) * by).store(dweights + j);
              if constexpr (PER<E> == 2) round_row(dweights, &dscore[m * L], L);
            }
            if (PER<E> == 2 && m % 2) {
              uint32_t *w = weight_pairs.data() + m / 2 * L, *d = dscore_pairs.data() + m / 2 * L;
              for (int64_t j = 0; j < L; ++j) {
                w[j] = round_to_bf16(weights[j - L]) | round_to_bf16(weights[j]) << 16;
                d[j] = round_to_bf16(dweights[j - L]) | round_to_bf16(dweights[j]) << 16;
              }
            }
          }
          multiply(M, K, L, left<E>(dweight, dscore), L, &kp[begin / PER<E> * K], K, out.data(), K);
          for (int64_t m = 0; m < M; ++m) round_row(&out[m * K], dq + ((b * T + i0 + m) * H + h) * K, K);
          const int64_t summed = up(M, PER<E>);
          transpose(q_block, qs.t, M, K, qt.data(), summed);
          transpose(do_block, os.t, M, K, dot.data(), summed);
          if (M < summed)  // zeros for the pair without a second query
            for (int64_t x = 0; x < K; ++x) qt[x * summed + M] = dot[x * summed + M] = E(0.f);
          multiply(K, L, summed, qt.data(), summed, right<E>(dweight, dscore_pairs), L, &dkt[begin], wide, true);
          multiply(K, L, summed, dot.data(), summed, right<E>(score, weight_pairs), L, &dvt[begin], wide, true);
        }
      write_transposed(dkt.data(), wide, T, K, dk + (b * T * G + g) * K, G * K);
      write_transposed(dvt.data(), wide, T, K, dv + (b * T * G + g) * K, G * K);
    }
    blas::brgemm_release();
  });
}

}  // namespace

// Does brgemm multiply bf16 here, and read its right operand as packed above? Asked by a product whose result is known:
// it works on AVX-512 bf16 as on AMX, and torch's could_pack() names only the latter.
extern "C" int attention_usable() {
  constexpr int64_t N = 16, K = 32;
  std::vector<bf16> left(N * K), right(K * N), packed(K * N);
  std::vector<float> product(N * N, -1.f);
  for (int64_t i = 0; i < N * K; ++i) {  // small whole numbers: every sum is exact
    left[i] = bf16((float)(i * 7 % 5 - 2));
    right[i] = bf16((float)(i * 11 % 7 - 3));
  }
  pack_rows(right.data(), N, K, N, reinterpret_cast<uint32_t*>(packed.data()));
  try {
    blas::brgemm(N, N, K, K, N, N, false, left.data(), packed.data(), product.data());
    blas::brgemm_release();
  } catch (const std::exception&) {
    return false;
  }
  for (int64_t m = 0; m < N; ++m)
    for (int64_t n = 0; n < N; ++n) {
      float sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += (float)left[m * K + k] * (float)right[k * N + n];
      if (product[m * N + n] != sum) return false;
    }
  return true;
}

#define EXPORT(E, NAME)                                                                                                \
  extern "C" int64_t attention_forward_##NAME(                                                                         \
      const E* q, const E* k, const E* v, const int32_t* document, E* o, const Strided* strides, int64_t B, int64_t T, \
      int64_t H, int64_t G, int64_t K, float scale, int64_t threads) {                                                 \
    return forward(q, k, v, document, o, strides, B, T, H, G, K, scale, threads);                                      \
  }                                                                                                                    \
  extern "C" int64_t attention_backward_##NAME(                                                                        \
      const E* q, const E* k, const E* v, const int32_t* document, const E* dout, E* dq, E* dk, E* dv,                 \
      const Strided* strides, int64_t B, int64_t T, int64_t H, int64_t G, int64_t K, float scale, int64_t threads) {   \
    return backward(q, k, v, document, dout, dq, dk, dv, strides, B, T, H, G, K, scale, threads);                      \
  }

EXPORT(bf16, bf16)
EXPORT(float, fp32)
