// Element types and the exponential shared by the CPU kernels. No intrinsics: plain loops that the
// compiler turns into AVX2, AVX-512 or NEON. Sums are float for float and bfloat16 input, double for
// double.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define MEGARL_EXPORT extern "C" __attribute__((visibility("default")))
#define MEGARL_INLINE static inline __attribute__((always_inline))

namespace megarl {

struct bf16 {
  uint16_t bits;
};

template <class T>
struct Sum {
  using type = T;
};
template <>
struct Sum<bf16> {
  using type = float;
};

MEGARL_INLINE float load(const float* p) { return *p; }
MEGARL_INLINE double load(const double* p) { return *p; }
MEGARL_INLINE float load(const bf16* p) {
  uint32_t u = (uint32_t)p->bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
MEGARL_INLINE void store(float* p, float v) { *p = v; }
MEGARL_INLINE void store(double* p, double v) { *p = v; }
MEGARL_INLINE void store(bf16* p, float v) {  // round to nearest even
  uint32_t u;
  memcpy(&u, &v, 4);
  u += 0x7fff + ((u >> 16) & 1);
  p->bits = v != v ? 0x7fc0 : (uint16_t)(u >> 16);
}

// exp(x) for x <= 0, error about 1 ulp, 0 below -87.3. Branch-free (Cephes polynomial); NaN stays NaN.
MEGARL_INLINE float exp_negative(float x) {
  const bool is_zero = x < -87.3f;
  x = is_zero ? -87.3f : x;
  float n = __builtin_nearbyintf(x * 1.44269504088896341f);
  float r = __builtin_fmaf(n, -0.693359375f, x);
  r = __builtin_fmaf(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(p, r * r, r) + 1.0f;
  int32_t e = (int32_t)(((uint32_t)(int32_t)n + 127u) << 23);
  float s;
  memcpy(&s, &e, 4);
  return is_zero ? 0.0f : p * s;
}
MEGARL_INLINE double exp_negative(double x) { return x < -700.0 ? 0.0 : std::exp(x); }

template <class A>
constexpr A lowest_exponent() {
  return sizeof(A) == 4 ? A(-87.3) : A(-700);
}

// f(T*) for the dtype codes of library.py; the pointer only carries the type.
template <class F>
void with_dtype(int64_t dtype, F f) {
  if (dtype == 0) f((float*)nullptr);
  if (dtype == 1) f((bf16*)nullptr);
  if (dtype == 2) f((double*)nullptr);
}

}  // namespace megarl
