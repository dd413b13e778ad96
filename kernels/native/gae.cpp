// Generalised advantage estimation over packed sequences: one reverse pass per sequence.
#include "common.h"

namespace megarl {

constexpr int64_t BLOCK = 256;

// State of the scan, coming from the next live token of the sequence.
template <class A>
struct State {
  A advantage, value;
};

// 64 bytes of tokens at once: log2(N) shifts compose a vector's tokens, then one multiply-add brings in
// the state. GCC's vector types; narrower machines split them.
template <class A>
struct Scan {
  static constexpr int N = 64 / sizeof(A), STEPS = sizeof(A) == 4 ? 4 : 3;
  using Index = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;
  typedef A Values __attribute__((vector_size(64)));
  typedef Index Indices __attribute__((vector_size(64)));
  A decay;
  A power[STEPS];          // decay^1, 2, 4, ...
  Indices shift[STEPS];    // lane i takes lane i + 1, 2, 4, ...; beyond the last it takes 0
  Values carry;            // decay^(N - i)

  explicit Scan(A k) : decay(k) {
    A p = k;
    for (int s = 0; s < STEPS; ++s, p *= p) {
      power[s] = p;
      for (int i = 0; i < N; ++i) shift[s][i] = i + (1 << s);
    }
    p = 1;
    for (int i = N - 1; i >= 0; --i) carry[i] = p *= k;
  }

  // a[j] = d[j] + decay a[j + 1] for j = n - 1 .. 0, with a[n] given; returns a[0].
  inline __attribute__((always_inline)) A run(const A* d, int64_t n, A a, A* out) const {
    int64_t j = n - N;
    const Values zero = {};
    for (; j >= 0; j -= N) {
      Values x;
      memcpy(&x, d + j, sizeof x);
      for (int s = 0; s < STEPS; ++s) x += power[s] * __builtin_shuffle(x, zero, shift[s]);
      x += carry * a;
      a = x[0];
      memcpy(out + j, &x, sizeof x);
    }
    for (j += N - 1; j >= 0; --j) out[j] = a = d[j] + decay * a;
    return a;
  }
};

// All tokens live.
template <class T, bool HAS_VALUES, class A>
MEGARL_INLINE void live_block(const T* __restrict r, const T* __restrict v, int64_t n, A gamma,
                              const Scan<A>& scan, A* __restrict advantages, A* __restrict returns,
                              State<A>& state) {
  A d[BLOCK];
  auto value = [&](int64_t j) { return HAS_VALUES ? A(load(v + j)) : A(0); };
  for (int64_t j = 0; j < n - 1; ++j) d[j] = load(r + j) + gamma * value(j + 1) - value(j);
  d[n - 1] = load(r + n - 1) + gamma * state.value - value(n - 1);
  state.value = value(0);
  state.advantage = scan.run(d, n, state.advantage, advantages);
  if (returns)
    for (int64_t i = 0; i < n; ++i) returns[i] = advantages[i] + value(i);
}

// Live tokens are moved together, without branches, and the results moved back.
template <class T, bool HAS_VALUES, class A>
void mixed_block(const T* r, const T* v, const uint8_t* mask, int64_t n, int64_t num_live, A gamma,
                 const Scan<A>& scan, A* advantages, A* returns, State<A>& state) {
  T live_r[BLOCK + 1], live_v[BLOCK + 1];
  A live_advantages[BLOCK + 1], live_returns[BLOCK + 1];
  for (int64_t j = 0, at = 0; j < n; ++j) {
    live_r[at] = r[j];
    if (HAS_VALUES) live_v[at] = v[j];
    at += mask[j] != 0;
  }
  if (num_live)
    live_block<T, HAS_VALUES>(live_r, live_v, num_live, gamma, scan, live_advantages, live_returns, state);
  live_advantages[num_live] = live_returns[num_live] = 0;
  for (int64_t j = 0, at = 0; j < n; ++j) {
    const int64_t live = mask[j] != 0, from = num_live + (at - num_live) * live;  // the 0 behind all
    advantages[j] = live_advantages[from];
    if (returns) returns[j] = live_returns[from];
    at += live;
  }
}

template <class T, bool HAS_VALUES>
void gae(const T* rewards, const T* values, const uint8_t* mask, const int32_t* cu_seqlens, int64_t num_seqs,
         const typename Sum<T>::type* bootstrap, double gamma, double lam, typename Sum<T>::type* advantages,
         typename Sum<T>::type* returns, int64_t threads) {
  using A = typename Sum<T>::type;
  const A g = gamma;
  const Scan<A> scan(gamma * lam);
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads) if (cu_seqlens[num_seqs] > 16384)
  for (int64_t s = 0; s < num_seqs; ++s) {
    State<A> state{0, bootstrap ? bootstrap[s] : A(0)};
    const int64_t first = cu_seqlens[s];
    for (int64_t end = cu_seqlens[s + 1]; end > first; end -= BLOCK) {
      const int64_t b = std::max(first, end - BLOCK), n = end - b;
      const T* v = HAS_VALUES ? values + b : nullptr;
      A* out = returns ? returns + b : nullptr;
      int64_t num_live = n;
      if (mask) {
        num_live = 0;
        for (int64_t j = 0; j < n; ++j) num_live += mask[b + j] != 0;
      }
      if (num_live == n)
        live_block<T, HAS_VALUES>(rewards + b, v, n, g, scan, advantages + b, out, state);
      else
        mixed_block<T, HAS_VALUES>(rewards + b, v, mask + b, n, num_live, g, scan, advantages + b, out,
                                   state);
    }
  }
}

}  // namespace megarl

using namespace megarl;

// rewards, values [T]; mask [T] bytes or null; cu_seqlens [num_seqs + 1]; bootstrap [num_seqs] or null;
// advantages, returns [T] (returns may be null). values null: all zero.
MEGARL_EXPORT void megarl_gae(int64_t dtype, const void* rewards, const void* values, const uint8_t* mask,
                              const int32_t* cu_seqlens, int64_t num_seqs, const void* bootstrap,
                              double gamma, double lam, void* advantages, void* returns, int64_t threads) {
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    using A = typename Sum<T>::type;
    auto run = values ? gae<T, true> : gae<T, false>;
    run((const T*)rewards, (const T*)values, mask, cu_seqlens, num_seqs, (const A*)bootstrap, gamma, lam,
        (A*)advantages, (A*)returns, threads);
  });
}
