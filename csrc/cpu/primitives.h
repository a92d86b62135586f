// Scalar and vector primitives of the cpu arithmetic family. rl_kernel/ops/_primitives.py defines the same functions
// in plain torch, bit for bit.
//
// Rules: every multiply and add rounds separately unless fma is written; no libm; nothing depends on the number of
// threads, on the vector width or on the flush-to-zero mode of the process. The file is compiled with
// -ffp-contract=off -mavx2 -mfma.
#pragma once

#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <cstring>
#include <limits>

#define RLK_INLINE [[maybe_unused]] static inline __attribute__((always_inline))

namespace rlk {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---- bf16 -----------------------------------------------------------------------------------------------------------
struct bf16 {
  uint16_t bits;
};

RLK_INLINE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
RLK_INLINE float from_bits(uint32_t x) { return __builtin_bit_cast(float, x); }

RLK_INLINE float to_float(float x) { return x; }
RLK_INLINE float to_float(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }

// Round to nearest even; every NaN becomes 0x7fc0.
template <class T>
RLK_INLINE T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    uint32_t u = bits_of(x);
    uint16_t rounded = uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    return {x != x ? uint16_t(0x7fc0) : rounded};
  }
}
// x rounded to T and read back as fp32.
template <class T>
RLK_INLINE float round_to(float x) {
  return to_float(from_float<T>(x));
}

// ---- eight fp32 lanes -----------------------------------------------------------------------------------------------
struct V8 {
  __m256 v;
};

RLK_INLINE V8 splat(float x) { return {_mm256_set1_ps(x)}; }
RLK_INLINE V8 zero8() { return {_mm256_setzero_ps()}; }
RLK_INLINE V8 operator+(V8 a, V8 b) { return {_mm256_add_ps(a.v, b.v)}; }
RLK_INLINE V8 operator-(V8 a, V8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
RLK_INLINE V8 operator*(V8 a, V8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
RLK_INLINE V8 operator/(V8 a, V8 b) { return {_mm256_div_ps(a.v, b.v)}; }
RLK_INLINE V8 fma(V8 a, V8 b, V8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
RLK_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// a > b ? a : b (b when either is NaN).
RLK_INLINE V8 max(V8 a, V8 b) { return {_mm256_max_ps(a.v, b.v)}; }
RLK_INLINE float max(float a, float b) { return a > b ? a : b; }
RLK_INLINE V8 min(V8 a, V8 b) { return {_mm256_min_ps(a.v, b.v)}; }
RLK_INLINE float min(float a, float b) { return a < b ? a : b; }

RLK_INLINE __m256i lanes_below(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
RLK_INLINE V8 load8(const float* p) { return {_mm256_loadu_ps(p)}; }
RLK_INLINE V8 load8(const bf16* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
// First n (0..8) lanes from memory, the others +0.0.
RLK_INLINE V8 load8(const float* p, int n) { return {_mm256_maskload_ps(p, lanes_below(n))}; }
RLK_INLINE V8 load8(const bf16* p, int n) {
  alignas(16) bf16 buffer[8] = {};
  for (int i = 0; i < n; ++i) buffer[i] = p[i];
  return load8(buffer);
}
RLK_INLINE __m128i to_bf16(V8 x) {
  __m256i u = _mm256_castps_si256(x.v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
RLK_INLINE void store8(float* p, V8 x) { _mm256_storeu_ps(p, x.v); }
RLK_INLINE void store8(bf16* p, V8 x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(x)); }
RLK_INLINE void store8(float* p, V8 x, int n) { _mm256_maskstore_ps(p, lanes_below(n), x.v); }
RLK_INLINE void store8(bf16* p, V8 x, int n) {
  alignas(16) bf16 buffer[8];
  store8(buffer, x);
  for (int i = 0; i < n; ++i) p[i] = buffer[i];
}

// load8 and store8 with a cheap path for whole vectors.
template <class T>
RLK_INLINE V8 read(const T* p, int lanes) {
  return lanes == 8 ? load8(p) : load8(p, lanes);
}
template <class T>
RLK_INLINE void write(T* p, V8 x, int lanes) {
  if (lanes == 8) {
    store8(p, x);
  } else {
    store8(p, x, lanes);
  }
}

template <class T>
RLK_INLINE V8 round_to(V8 x) {
  if constexpr (sizeof(T) == 4) return x;
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(to_bf16(x)), 16))};
}

// ---- trees: balanced, over adjacent pairs, ((x0+x1)+(x2+x3))+..., padded with +0.0 to a power of two ----------------
RLK_INLINE float tree4(__m128 x) {
  x = _mm_hadd_ps(x, x);
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
RLK_INLINE float tree8(V8 x) {
  __m128 pairs = _mm_hadd_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  return tree4(pairs);
}
RLK_INLINE float tree16(V8 lo, V8 hi) {
  __m256 x = _mm256_hadd_ps(lo.v, hi.v);  // lo01 lo23 hi01 hi23 | lo45 lo67 hi45 hi67
  x = _mm256_hadd_ps(x, x);               // lo0-3 hi0-3 .. | lo4-7 hi4-7 ..
  __m128 sums = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  return _mm_cvtss_f32(_mm_add_ss(sums, _mm_shuffle_ps(sums, sums, 1)));
}
// Four trees of 8 lanes at once: {tree8(a), tree8(b), tree8(c), tree8(d)}.
RLK_INLINE __m128 trees8(V8 a, V8 b, V8 c, V8 d) {
  __m256 ab = _mm256_hadd_ps(a.v, b.v), cd = _mm256_hadd_ps(c.v, d.v);
  __m256 x = _mm256_hadd_ps(ab, cd);
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}
RLK_INLINE float tree32(const float* p) { return tree4(trees8(load8(p), load8(p + 8), load8(p + 16), load8(p + 24))); }
RLK_INLINE float tree128(const float* p) {
  __m128 s[4];
  for (int i = 0; i < 4; ++i, p += 32) s[i] = trees8(load8(p), load8(p + 8), load8(p + 16), load8(p + 24));
  return tree16({_mm256_set_m128(s[1], s[0])}, {_mm256_set_m128(s[3], s[2])});
}
// Any length; n = 0 gives +0.0.
[[maybe_unused]] static float tree(const float* x, int64_t n) {
  if (n <= 0) return 0.0f;
  if (n == 1) return x[0];
  int64_t half = 1;
  while (half * 2 < n) half *= 2;
  return tree(x, half) + [&] {
    float right = tree(x + half, n - half);
    // The right half is padded to `half` elements: every missing level adds +0.0, which only turns -0.0 into +0.0.
    return n - half < half ? right + 0.0f : right;
  }();
}

// ---- dot16: sixteen interleaved accumulators ------------------------------------------------------------------------
// Lane j takes k = j, j+16, ... ascending with fma from +0.0 (K padded with +0.0 to a multiple of 16); lanes merge in a
// tree. Operand types may differ (fp32 or bf16).
template <class A, class B>
RLK_INLINE float dot16(const A* a, const B* b, int64_t n) {
  V8 lo = zero8(), hi = zero8();
  int64_t k = 0;
  for (; k + 16 <= n; k += 16) {
    lo = fma(load8(a + k), load8(b + k), lo);
    hi = fma(load8(a + k + 8), load8(b + k + 8), hi);
  }
  if (k < n) {
    int r = int(n - k), r0 = r < 8 ? r : 8, r1 = r - r0;
    lo = fma(load8(a + k, r0), load8(b + k, r0), lo);
    hi = fma(load8(a + k + r0, r1), load8(b + k + r0, r1), hi);
  }
  return tree16(lo, hi);
}

// Four dot16 of x, one with each of rows[0 .. 3].
template <class A, class B>
RLK_INLINE __m128 dots4(const A* x, const B* const* rows, int64_t n) {
  V8 lo[4], hi[4];
  for (int i = 0; i < 4; ++i) lo[i] = hi[i] = zero8();
  int64_t k = 0;
  for (; k + 16 <= n; k += 16) {
    const V8 x0 = load8(x + k), x1 = load8(x + k + 8);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      lo[i] = fma(x0, load8(rows[i] + k), lo[i]);
      hi[i] = fma(x1, load8(rows[i] + k + 8), hi[i]);
    }
  }
  if (k < n) {
    const int r = int(n - k), r0 = r < 8 ? r : 8, r1 = r - r0;
    const V8 x0 = load8(x + k, r0), x1 = load8(x + k + r0, r1);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      lo[i] = fma(x0, load8(rows[i] + k, r0), lo[i]);
      hi[i] = fma(x1, load8(rows[i] + k + r0, r1), hi[i]);
    }
  }
  // tree16 of four at once: pairs, fours, eights (lo and hi side by side), then lo + hi.
  __m256 ab = _mm256_hadd_ps(_mm256_hadd_ps(lo[0].v, hi[0].v), _mm256_hadd_ps(lo[1].v, hi[1].v));
  __m256 cd = _mm256_hadd_ps(_mm256_hadd_ps(lo[2].v, hi[2].v), _mm256_hadd_ps(lo[3].v, hi[3].v));
  __m128 ab8 = _mm_add_ps(_mm256_castps256_ps128(ab), _mm256_extractf128_ps(ab, 1));
  __m128 cd8 = _mm_add_ps(_mm256_castps256_ps128(cd), _mm256_extractf128_ps(cd, 1));
  return _mm_hadd_ps(ab8, cd8);
}

// ---- exp and log ----------------------------------------------------------------------------------------------------
// The same sequence of operations for one value and for eight.
RLK_INLINE uint32_t as_int(float x) { return bits_of(x); }
RLK_INLINE __m256i as_int(V8 x) { return _mm256_castps_si256(x.v); }
RLK_INLINE float as_float(uint32_t x) { return from_bits(x); }
RLK_INLINE V8 as_float(__m256i x) { return {_mm256_castsi256_ps(x)}; }
RLK_INLINE float like(float, float c) { return c; }
RLK_INLINE V8 like(V8, float c) { return splat(c); }
RLK_INLINE float if_nan(float x, float y) { return x != x ? x : y; }  // x where x is NaN, else y
RLK_INLINE V8 if_nan(V8 x, V8 y) { return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q))}; }

// 2^(n >> 1) and 2^(n - (n >> 1)), n an integer in [-152, 128] held in a float.
RLK_INLINE void two_powers(float n, float* a, float* b) {
  int32_t i = int32_t(n), half = i >> 1;
  *a = from_bits(uint32_t(half + 127) << 23);
  *b = from_bits(uint32_t(i - half + 127) << 23);
}
RLK_INLINE void two_powers(V8 n, V8* a, V8* b) {
  __m256i i = _mm256_cvttps_epi32(n.v), half = _mm256_srai_epi32(i, 1), bias = _mm256_set1_epi32(127);
  *a = as_float(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  *b = as_float(_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(i, half), bias), 23));
}

// exp(x): x = n ln2 + r, |r| <= ln2/2, exp(r) = 1 + r + r^2 q(r), times 2^n in two exact steps. Below 1.1 ulp in the
// normal range (checked against float64 in tests/ops/test_primitives.py); exp(-inf) = 0, exp(inf) = inf.
template <class V>
RLK_INLINE V exp(V x) {
  V c = min(max(x, like(x, -104.0f)), like(x, 89.0f));  // NaN becomes a bound here and is put back at the end
  V magic = like(x, 12582912.0f);                       // 1.5 * 2^23: adding and subtracting rounds to an integer
  V n = fma(c, like(x, 0x1.715476p+0f), magic) - magic;
  V r = fma(n, like(x, -0x1.62e430p-1f), c);
  r = fma(n, like(x, 0x1.05c610p-29f), r);
  V q = fma(like(x, 0x1.6db47ep-10f), r, like(x, 0x1.123b92p-7f));
  q = fma(q, r, like(x, 0x1.55545ep-5f));
  q = fma(q, r, like(x, 0x1.55548ep-3f));
  q = fma(q, r, like(x, 0.5f));
  V p = fma(q, r * r, r) + like(x, 1.0f);
  V a, b;
  two_powers(n, &a, &b);
  return if_nan(x, (p * a) * b);
}

// log(x): x = 2^e m, m in [2/3, 4/3), f = m - 1, log m = f + f^2 (f P(f) - 1/2). Below 1.0 ulp (checked as above);
// log(0) = -inf, log(inf) = inf, log of a negative number is NaN.
RLK_INLINE float log(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  if (x == std::numeric_limits<float>::infinity()) return x;
  float scale = x < 0x1p-126f ? 8388608.0f : 1.0f, shift = x < 0x1p-126f ? -23.0f : 0.0f;
  int32_t i = int32_t(bits_of(x * scale));
  int32_t e = (i - 0x3f2aaaab) >> 23;
  float f = from_bits(uint32_t(i - e * 8388608)) - 1.0f;
  float n = float(e) + shift;
  float p = fma(-0x1.0e36bcp-3f, f, 0x1.1dfdbap-3f);
  p = fma(p, f, -0x1.f036a6p-4f);
  p = fma(p, f, 0x1.1eefb2p-3f);
  p = fma(p, f, -0x1.55b818p-3f);
  p = fma(p, f, 0x1.99ce5cp-3f);
  p = fma(p, f, -0x1.fffe5ep-3f);
  p = fma(p, f, 0x1.55550cp-2f);
  float r = fma(fma(p, f, -0.5f), f * f, f);
  r = fma(n, -0x1.05c610p-29f, r);
  return fma(n, 0x1.62e430p-1f, r);
}

// ---- threads --------------------------------------------------------------------------------------------------------
// Kernels compute subnormals whatever mode the process is in: other libraries may have set flush-to-zero.
struct IeeeMode {
  unsigned saved = _mm_getcsr();
  IeeeMode() { _mm_setcsr(saved & ~0x8040u); }
  ~IeeeMode() { _mm_setcsr(saved); }
};

// f(begin, end) over [0, n) in chunks. `cost` is the rough number of fp32 operations of one item: work below about
// 2^16 operations a thread stays on the calling thread.
template <class F>
inline void parallel_for(int64_t n, double cost, const F& f) {
  if (n <= 0) return;
  double per = cost < 1.0 ? 1.0 : cost;
  int64_t grain = int64_t(65536.0 / per) + 1;
  auto body = [&f](int64_t begin, int64_t end) {
    IeeeMode mode;
    f(begin, end);
  };
  if (n <= grain) {
    body(int64_t(0), n);
  } else {
    torch::stable::parallel_for(0, n, grain, body);
  }
}

// ---- tensors --------------------------------------------------------------------------------------------------------
template <class T>
inline T* data(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// Calls f(T{}) with T = float or bf16 according to the dtype of `t`.
template <class F>
inline auto dispatch(ScalarType dtype, const char* what, const F& f) {
  if (dtype == ScalarType::Float) return f(float{});
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16, what, ": dtype must be float32 or bfloat16");
  return f(bf16{});
}

}  // namespace rlk
