// Rows of logits → their cross-entropy and its gradient in their place (kernels/linear_cross_entropy/cpp.py).
//
// A row is read once and stays in cache: widen, largest, exponentials and their sum, gradient. Written with at::vec,
// for whatever vectors the machine has.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "in_parallel.h"
#include "numbers.h"

using Vec = at::vec::Vectorized<float>;

namespace {

constexpr float NAN_ = std::numeric_limits<float>::quiet_NaN();
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float TINY = 1e-30f;  // a product below it may be a denormal number, which costs a hundred cycles; it is zero here

// 20 roundings off are far below what bf16 keeps; fp32 gets the exact one.
inline Vec exponential(Vec x, bf16) { return x.exp_u20(); }
inline Vec exponential(Vec x, float) { return x.exp(); }

template <typename T>
int64_t rows(T* logits, const int64_t* targets, const float* weights, float z_loss, float* terms, float* nll, int64_t N,
             int64_t V, bool gradients, int64_t threads) {
  const int64_t padded = (V + Vec::size() - 1) / Vec::size() * Vec::size();
  std::atomic<int64_t> outside{0};
  const int64_t failed = in_parallel(threads, [&](auto next) {
    std::vector<float> row(padded);
    for (int64_t n; (n = next()) < N;) {
      T* logit = logits + n * V;
      const int64_t target = targets[n];
      const float weight = weights[n];
      terms[n] = nll[n] = 0;
      if (target < 0 || target >= V) {
        ++outside;
        continue;
      }
      if (weight == 0) {
        std::fill(logit, logit + (gradients ? V : 0), T(0));
        continue;
      }
      widen_row(logit, row.data(), V);
      std::fill(row.begin() + V, row.end(), -INF);
      Vec most(-INF);
      for (int64_t j = 0; j < padded; j += Vec::size()) most = at::vec::maximum(most, Vec::loadu(&row[j]));
      const float largest = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, most);
      if (!std::isfinite(largest)) {  // NaN somewhere, or infinity less infinity
        terms[n] = nll[n] = NAN_;
        std::fill(logit, logit + (gradients ? V : 0), T(NAN_));
        continue;
      }
      const float hit = row[target];
      const Vec shift(largest);
      Vec sums(0.f);
      for (int64_t j = 0; j < padded; j += Vec::size()) {
        const Vec e = exponential(Vec::loadu(&row[j]) - shift, T());
        e.store(&row[j]);
        sums = sums + e;
      }
      const float sum = at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, sums);
      const float logsumexp = largest + std::log(sum);
      nll[n] = logsumexp - hit;
      terms[n] = weight * (nll[n] + z_loss * logsumexp * logsumexp);
      if (!gradients) continue;
      const float share = weight * (1 + 2 * z_loss * logsumexp) / sum;
      const float smallest = TINY / std::max(std::abs(share), TINY);
      const Vec by(share), zero(0.f), least(smallest);
      for (int64_t j = 0; j < padded; j += Vec::size()) {
        const Vec e = Vec::loadu(&row[j]);
        Vec::blendv(zero, e * by, e > least).store(&row[j]);
      }
      row[target] -= weight;
      round_row(row.data(), logit, V);
    }
  });
  return failed ? failed : outside.load();
}

}  // namespace

extern "C" int64_t cross_entropy_bf16(bf16* logits, const int64_t* targets, const float* weights, float z_loss,
                                      float* terms, float* nll, int64_t N, int64_t V, int64_t gradients,
                                      int64_t threads) {
  return rows(logits, targets, weights, z_loss, terms, nll, N, V, gradients, threads);
}

extern "C" int64_t cross_entropy_fp32(float* logits, const int64_t* targets, const float* weights, float z_loss,
                                      float* terms, float* nll, int64_t N, int64_t V, int64_t gradients,
                                      int64_t threads) {
  return rows(logits, targets, weights, z_loss, terms, nll, N, V, gradients, threads);
}
