// Masked moments and the affine map that whitens. Sums in double: one pass is then exact enough.
#include "common.h"

namespace megarl {

constexpr int64_t BLOCK = 4096;

template <class T>
void moments(const T* x, const uint8_t* mask, int64_t n, double* out, int64_t threads) {
  double count = 0, sum = 0, squares = 0;
#pragma omp parallel for reduction(+ : count, sum, squares) schedule(static) num_threads(threads) if (n > 65536)
  for (int64_t b = 0; b < n; b += BLOCK) {
    const int64_t end = std::min(n, b + BLOCK);
    double block_sum = 0, block_squares = 0;
    int64_t block_count = 0;
#pragma omp simd reduction(+ : block_sum, block_squares, block_count)
    for (int64_t i = b; i < end; ++i) {
      const bool live = mask ? mask[i] != 0 : true;
      const double v = live ? (double)load(x + i) : 0.0;  // a select: NaN does not get past the mask
      block_sum += v;
      block_squares += v * v;
      block_count += live;
    }
    sum += block_sum;
    squares += block_squares;
    count += block_count;
  }
  out[0] = count;
  out[1] = sum;
  out[2] = squares;
}

template <class T>
void whiten(const T* x, const uint8_t* mask, int64_t n, double mean, double scale,
            typename Sum<T>::type* out, int64_t threads) {
  using A = typename Sum<T>::type;
#pragma omp parallel for simd schedule(static) num_threads(threads) if (n > 65536)
  for (int64_t i = 0; i < n; ++i)
    out[i] = (mask ? mask[i] != 0 : true) ? A((load(x + i) - mean) * scale) : A(0);
}

}  // namespace megarl

using namespace megarl;

// x [n]; mask [n] bytes or null; out [3] = count, sum, sum of squares over the mask.
MEGARL_EXPORT void megarl_moments(int64_t dtype, const void* x, const uint8_t* mask, int64_t n, double* out,
                                  int64_t threads) {
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    moments((const T*)x, mask, n, out, threads);
  });
}

// out [n] = (x - mean) * scale, 0 where the mask is 0.
MEGARL_EXPORT void megarl_whiten(int64_t dtype, const void* x, const uint8_t* mask, int64_t n, double mean,
                                 double scale, void* out, int64_t threads) {
  with_dtype(dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    whiten((const T*)x, mask, n, mean, scale, (typename Sum<T>::type*)out, threads);
  });
}
