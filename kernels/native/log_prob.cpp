// Log-probabilities over logits: online softmax partials (forward) and the gradient (in place or not).
#include "common.h"

namespace megarl {

// With z = (x - top) * scale over the columns seen so far, top their largest logit:
template <class A>
struct Partial {
  A top;       // -inf before the first finite column
  A total;     // sum exp(z)
  A weighted;  // sum exp(z) z
};

// One pass over memory: a block of columns is scaled, reduced and exponentiated while in the L1 cache.
template <class T, bool ENTROPY, class A>
MEGARL_INLINE void add_row(const T* __restrict x, int64_t n, A scale, Partial<A>& partial) {
  constexpr int64_t BLOCK = 2048;
  A block[BLOCK];
  for (int64_t c = 0; c < n; c += BLOCK) {
    const int64_t m = std::min(BLOCK, n - c);
    A top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int64_t j = 0; j < m; ++j) {
      A v = load(x + c + j);
      block[j] = v;
      top = top > v ? top : v;
    }
    if (top > partial.top) {
      if (partial.total != 0) {
        const A shift = (partial.top - top) * scale, ratio = std::exp(shift);
        partial.weighted = ratio * (partial.weighted + partial.total * shift);
        partial.total *= ratio;
      }
      partial.top = top;
    }
    A total = 0, weighted = 0;
    // The maximum may miss a NaN, so every block is summed: the sum does not.
    const A row_top = partial.top == -INFINITY ? A(0) : partial.top;
#pragma omp simd reduction(+ : total, weighted)
    for (int64_t j = 0; j < m; ++j) {
      A z = (block[j] - row_top) * scale;
      A p = exp_negative(z);
      total += p;
      if (ENTROPY) weighted += p * (z < lowest_exponent<A>() ? lowest_exponent<A>() : z);
    }
    partial.total += total;
    partial.weighted += weighted;
  }
}

template <class T, bool ENTROPY>
void partials(const T* logits, int64_t stride, int64_t num_tokens, int64_t num_columns, const int64_t* targets,
              int64_t first_column, double scale, typename Sum<T>::type* out, int64_t out_stride,
              int64_t threads) {
  using A = typename Sum<T>::type;
#pragma omp parallel for schedule(static) num_threads(threads) if (num_tokens * num_columns > 32768)
  for (int64_t t = 0; t < num_tokens; ++t) {
    const T* x = logits + t * stride;
    Partial<A> partial{out[t], out[out_stride + t], out[2 * out_stride + t]};
    add_row<T, ENTROPY>(x, num_columns, (A)scale, partial);
    out[t] = partial.top;
    out[out_stride + t] = partial.total;
    out[2 * out_stride + t] = partial.weighted;
    const int64_t target = targets[t] - first_column;
    if (target >= 0 && target < num_columns) out[3 * out_stride + t] = load(x + target);
  }
}

// out may be logits: each element is read before it is written.
template <class T>
void gradient(const T* logits, int64_t stride, T* out, int64_t out_stride, int64_t num_tokens,
              int64_t num_columns, const int64_t* targets, int64_t first_column, double scale_,
              const typename Sum<T>::type* tops, const typename Sum<T>::type* log_totals,
              const typename Sum<T>::type* entropies, const typename Sum<T>::type* grad_log_probs,
              const typename Sum<T>::type* grad_entropies, int64_t threads) {
  using A = typename Sum<T>::type;
  const A scale = scale_, lowest = lowest_exponent<A>();
#pragma omp parallel for schedule(static) num_threads(threads) if (num_tokens * num_columns > 32768)
  for (int64_t t = 0; t < num_tokens; ++t) {
    const T* x = logits + t * stride;
    T* d = out + t * out_stride;
    const A top = tops[t], log_total = log_totals[t], g = grad_log_probs[t] * scale;
    const A e = grad_entropies ? grad_entropies[t] * scale : A(0);
    if (g == 0 && e == 0) {  // a token outside the loss
      memset((void*)d, 0, num_columns * sizeof(T));
      continue;
    }
    const int64_t target = targets[t] - first_column;
    const bool has_target = target >= 0 && target < num_columns;
    const A target_logit = has_target ? A(load(x + target)) : A(0);
    const A entropy = e == 0 ? A(0) : entropies[t];
    auto log_p_of = [=](A logit) { return (logit - top) * scale - log_total; };
    // -gradient without the target's own term. By value: what a store might change stops vectorisation.
    auto slope = [=](A p, A log_p) { return p * (g + e * ((log_p < lowest ? lowest : log_p) + entropy)); };
    if (e == 0) {
#pragma omp simd
      for (int64_t j = 0; j < num_columns; ++j) store(d + j, -g * exp_negative(log_p_of(load(x + j))));
    } else {
#pragma omp simd
      for (int64_t j = 0; j < num_columns; ++j) {
        const A log_p = log_p_of(load(x + j));
        store(d + j, -slope(exp_negative(log_p), log_p));
      }
    }
    if (has_target) {  // from the unrounded gradient, not from what was stored
      const A log_p = log_p_of(target_logit);
      store(d + target, g - slope(exp_negative(log_p), log_p));
    }
  }
}

}  // namespace megarl

using namespace megarl;

// logits [num_tokens, num_columns], rows `stride` apart; targets [num_tokens] global ids; column 0 is
// id first_column. out [4, num_tokens], rows out_stride apart: top, total, weighted (see Partial), the
// target's logit; continued from what it holds.
MEGARL_EXPORT void megarl_log_prob_partials(int64_t dtype, const void* logits, int64_t stride,
                                            int64_t num_tokens, int64_t num_columns, const int64_t* targets,
                                            int64_t first_column, double scale, int64_t with_entropy, void* out,
                                            int64_t out_stride, int64_t threads) {
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    auto run = with_entropy ? partials<T, true> : partials<T, false>;
    run((const T*)logits, stride, num_tokens, num_columns, targets, first_column, scale,
        (typename Sum<T>::type*)out, out_stride, threads);
  });
}

// d loss / d logits into out [num_tokens, num_columns], which may be logits itself. tops, log_totals,
// entropies, grad_log_probs, grad_entropies [num_tokens]; grad_entropies (then entropies too) may be null.
MEGARL_EXPORT void megarl_log_prob_gradient(int64_t dtype, const void* logits, int64_t stride, void* out,
                                            int64_t out_stride, int64_t num_tokens, int64_t num_columns,
                                            const int64_t* targets, int64_t first_column, double scale,
                                            const void* tops, const void* log_totals, const void* entropies,
                                            const void* grad_log_probs, const void* grad_entropies,
                                            int64_t threads) {
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    using A = typename Sum<T>::type;
    gradient((const T*)logits, stride, (T*)out, out_stride, num_tokens, num_columns, targets, first_column,
             scale, (const A*)tops, (const A*)log_totals, (const A*)entropies, (const A*)grad_log_probs,
             (const A*)grad_entropies, threads);
  });
}
