// Generalised advantage estimation over packed sequences: one reverse pass per sequence.
#include "common.h"

namespace megarl {

constexpr int64_t BLOCK = 256;

// State of the scan, coming from the next live token of the sequence.
template <class A>
struct State {
  A advantage, value;
};

// All tokens live. Deltas and returns vectorise; the chain between them is unrolled by four so that
// a[t-4] waits for a[t] through one multiply-add only.
template <class T, bool HAS_VALUES, class A>
MEGARL_INLINE void live_block(const T* __restrict r, const T* __restrict v, int64_t n, A gamma, A decay,
                              A* __restrict advantages, A* __restrict returns, State<A>& state) {
  A d[BLOCK];
  auto value = [&](int64_t j) { return HAS_VALUES ? A(load(v + j)) : A(0); };
  for (int64_t j = 0; j < n - 1; ++j) d[j] = load(r + j) + gamma * value(j + 1) - value(j);
  d[n - 1] = load(r + n - 1) + gamma * state.value - value(n - 1);
  state.value = value(0);
  A a = state.advantage;
  const A k1 = decay, k2 = k1 * k1, k3 = k2 * k1, k4 = k2 * k2;
  int64_t j = n - 1;
  for (; j >= 3; j -= 4) {
    A d0 = d[j], d1 = d[j - 1] + k1 * d0, d2 = d[j - 2] + k1 * d1, d3 = d[j - 3] + k1 * d2;
    advantages[j] = d0 + k1 * a;
    advantages[j - 1] = d1 + k2 * a;
    advantages[j - 2] = d2 + k3 * a;
    a = d3 + k4 * a;
    advantages[j - 3] = a;
  }
  for (; j >= 0; --j) advantages[j] = a = d[j] + k1 * a;
  state.advantage = a;
  if (returns)
    for (int64_t i = 0; i < n; ++i) returns[i] = advantages[i] + value(i);
}

template <class T, bool HAS_VALUES, class A>
void mixed_block(const T* r, const T* v, const uint8_t* mask, int64_t n, A gamma, A decay, A* advantages,
                 A* returns, State<A>& state) {
  for (int64_t j = n - 1; j >= 0; --j) {
    advantages[j] = 0;
    if (returns) returns[j] = 0;
    if (!mask[j]) continue;
    A value = HAS_VALUES ? A(load(v + j)) : A(0);
    state.advantage = load(r + j) + gamma * state.value - value + decay * state.advantage;
    state.value = value;
    advantages[j] = state.advantage;
    if (returns) returns[j] = state.advantage + value;
  }
}

template <class T, bool HAS_VALUES>
void gae(const T* rewards, const T* values, const uint8_t* mask, const int32_t* cu_seqlens, int64_t num_seqs,
         const typename Sum<T>::type* bootstrap, double gamma, double lam, typename Sum<T>::type* advantages,
         typename Sum<T>::type* returns, int64_t threads) {
  using A = typename Sum<T>::type;
  const A g = gamma, decay = gamma * lam;
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
        live_block<T, HAS_VALUES>(rewards + b, v, n, g, decay, advantages + b, out, state);
      else
        mixed_block<T, HAS_VALUES>(rewards + b, v, mask + b, n, g, decay, advantages + b, out, state);
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
