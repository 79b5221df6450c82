// silu(gate) · up and its gradients (kernels/swiglu/cpp.py): one pass each, whatever the step between rows.

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <cstdint>

using bf16 = c10::BFloat16;
using Vec = at::vec::Vectorized<float>;

namespace {

// 20 roundings off are far below what bf16 keeps; fp32 gets the exact one.
inline Vec exponential(Vec x, bf16) { return x.exp_u20(); }
inline Vec exponential(Vec x, float) { return x.exp(); }

constexpr int64_t WIDE = 2 * Vec::size();  // elements at a time: one vector of bf16, two of fp32

struct Pair {
  Vec low, high;
};

inline Pair load(const bf16* from) {
  auto [low, high] = at::vec::convert_bfloat16_float(at::vec::Vectorized<bf16>::loadu(from));
  return {low, high};
}
inline Pair load(const float* from) { return {Vec::loadu(from), Vec::loadu(from + Vec::size())}; }
inline void store(Pair pair, bf16* to) { at::vec::convert_float_bfloat16(pair.low, pair.high).store(to); }
inline void store(Pair pair, float* to) { pair.low.store(to), pair.high.store(to + Vec::size()); }

template <typename T>
inline Vec product(Vec gate, Vec up) {
  return gate / (Vec(1.f) + exponential(gate.neg(), T())) * up;
}

template <typename T>
inline void forward(const T* gate, const T* up, T* out) {
  const Pair g = load(gate), u = load(up);
  store({product<T>(g.low, u.low), product<T>(g.high, u.high)}, out);
}

template <typename T>
inline void gradients(Vec upstream, Vec& gate, Vec& up) {
  const Vec one(1.f), sigmoid = one / (one + exponential(gate.neg(), T())), share = upstream * sigmoid;
  const Vec dup = share * gate;
  gate = share * up * (one + gate * (one - sigmoid));
  up = dup;
}

template <typename T>
inline void backward(const T* dout, const T* gate, const T* up, T* dgate, T* dup) {
  const Pair d = load(dout);
  Pair g = load(gate), u = load(up);
  gradients<T>(d.low, g.low, u.low);
  gradients<T>(d.high, g.high, u.high);
  store(g, dgate), store(u, dup);
}

template <typename T>
void forward(const T* gate, const T* up, T* out, int64_t N, int64_t F, int64_t gate_step, int64_t up_step,
             int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t n = 0; n < N; ++n) {
    const T *g = gate + n * gate_step, *u = up + n * up_step;
    int64_t j = 0;
    for (; j + WIDE <= F; j += WIDE) forward(g + j, u + j, out + n * F + j);
    if (const int64_t rest = F - j) {
      T gs[WIDE] = {}, us[WIDE] = {}, outs[WIDE];
      std::copy_n(g + j, rest, gs), std::copy_n(u + j, rest, us);
      forward(gs, us, outs);
      std::copy_n(outs, rest, out + n * F + j);
    }
  }
}

template <typename T>
void backward(const T* dout, const T* gate, const T* up, T* dgate, T* dup, int64_t N, int64_t F, int64_t dout_step,
              int64_t gate_step, int64_t up_step, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t n = 0; n < N; ++n) {
    const T *d = dout + n * dout_step, *g = gate + n * gate_step, *u = up + n * up_step;
    int64_t j = 0;
    for (; j + WIDE <= F; j += WIDE) backward(d + j, g + j, u + j, dgate + n * F + j, dup + n * F + j);
    if (const int64_t rest = F - j) {
      T ds[WIDE] = {}, gs[WIDE] = {}, us[WIDE] = {}, dgs[WIDE], dus[WIDE];
      std::copy_n(d + j, rest, ds), std::copy_n(g + j, rest, gs), std::copy_n(u + j, rest, us);
      backward(ds, gs, us, dgs, dus);
      std::copy_n(dgs, rest, dgate + n * F + j), std::copy_n(dus, rest, dup + n * F + j);
    }
  }
}

}  // namespace

#define EXPORT(NAME, T)                                                                                             \
  extern "C" int64_t swiglu_##NAME(const T* gate, const T* up, T* out, int64_t N, int64_t F, int64_t gate_step,        \
                                int64_t up_step, int64_t threads) {                                                 \
    forward(gate, up, out, N, F, gate_step, up_step, threads);                                                      \
    return 0;                                                                                                       \
  }                                                                                                                 \
  extern "C" int64_t swiglu_backward_##NAME(const T* dout, const T* gate, const T* up, T* dgate, T* dup, int64_t N,    \
                                         int64_t F, int64_t dout_step, int64_t gate_step, int64_t up_step,          \
                                         int64_t threads) {                                                         \
    backward(dout, gate, up, dgate, dup, N, F, dout_step, gate_step, up_step, threads);                             \
    return 0;                                                                                                       \
  }

EXPORT(bf16, bf16)
EXPORT(fp32, float)
