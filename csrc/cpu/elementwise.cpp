// rope, swiglu and embedding (see reference.py of each operator).
#include "cpu/primitives.h"

namespace rlk {
namespace {

inline int64_t index_at(const Tensor& t, int64_t i) {
  return t.scalar_type() == ScalarType::Long ? data<int64_t>(t)[i] : int64_t(data<int32_t>(t)[i]);
}
inline void check_index(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long || t.scalar_type() == ScalarType::Int, what, " must be int64 or int32");
}

// x [T, h, D] with contiguous heads and any token stride, positions [T], cache [P, D] -> [T, h, D]
Tensor rope(const Tensor& x_, const Tensor& positions_, const Tensor& cache_, bool inverse) {
  const int64_t t = x_.size(0), heads = x_.size(1), d = x_.size(2), half = d / 2;
  const bool rows = t > 0 && heads > 0 && x_.stride(2) == 1 && x_.stride(1) == d;
  Tensor x = rows ? x_ : dense(x_), positions = dense(positions_), cache = dense(cache_);
  const int64_t stride = rows ? x.stride(0) : heads * d;
  check_index(positions, "rope: positions");
  for (int64_t i = 0; i < t; ++i) {
    const int64_t p = index_at(positions, i);
    STD_TORCH_CHECK(p >= 0 && p < cache.size(0), "rope: position ", p, " must lie in [0, ", cache.size(0), ")");
  }
  Tensor y = torch::stable::new_empty(x, {t, heads, d});
  dispatch(x.scalar_type(), "rope x", [&](auto xt) {
    using T = decltype(xt);
    const T* px = data<T>(x);
    T* py = data<T>(y);
    const float* table = data<float>(cache);
    parallel_for(t, double(heads * d), [&, px, py, table](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float *cos = table + index_at(positions, i) * d, *sin = cos + half;
        for (int64_t h = 0; h < heads; ++h) {
          const T *x1 = px + i * stride + h * d, *x2 = x1 + half;
          T *y1 = py + (i * heads + h) * d, *y2 = y1 + half;
          for (int64_t j = 0; j < half; j += 8) {
            const int n = half - j < 8 ? int(half - j) : 8;
            const V8 a = read(x1 + j, n), b = read(x2 + j, n), c = read(cos + j, n), s = read(sin + j, n);
            write(y1 + j, inverse ? (a * c) + (b * s) : (a * c) - (b * s), n);
            write(y2 + j, inverse ? (b * c) - (a * s) : (b * c) + (a * s), n);
          }
        }
      }
    });
  });
  return y;
}

RLK_INLINE V8 negate(V8 x) { return {_mm256_xor_ps(x.v, _mm256_set1_ps(-0.0f))}; }

// gate_up [T, 2 F] -> [T, F]
Tensor swiglu_forward(const Tensor& x_) {
  Tensor x = dense(x_);
  const int64_t t = x.size(0), f = x.size(1) / 2;
  Tensor y = torch::stable::new_empty(x, {t, f});
  dispatch(x.scalar_type(), "swiglu", [&](auto xt) {
    using T = decltype(xt);
    const T* px = data<T>(x);
    T* py = data<T>(y);
    parallel_for(t, 12.0 * double(f), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T *gate = px + i * 2 * f, *up = gate + f;
        for (int64_t j = 0; j < f; j += 8) {
          const int n = f - j < 8 ? int(f - j) : 8;
          const V8 g = read(gate + j, n);
          write(py + i * f + j, (g / (splat(1.0f) + exp(negate(g)))) * read(up + j, n), n);
        }
      }
    });
  });
  return y;
}

Tensor swiglu_backward(const Tensor& dy_, const Tensor& x_) {
  Tensor dy = dense(dy_), x = dense(x_);
  const int64_t t = x.size(0), f = x.size(1) / 2;
  Tensor dx = torch::stable::empty_like(x);
  dispatch(x.scalar_type(), "swiglu", [&](auto xt) {
    using T = decltype(xt);
    const T *px = data<T>(x), *pdy = data<T>(dy);
    T* pdx = data<T>(dx);
    parallel_for(t, 20.0 * double(f), [=](int64_t begin, int64_t end) {
      const V8 one = splat(1.0f);
      for (int64_t i = begin; i < end; ++i) {
        const T *gate = px + i * 2 * f, *up = gate + f;
        for (int64_t j = 0; j < f; j += 8) {
          const int n = f - j < 8 ? int(f - j) : 8;
          const V8 g = read(gate + j, n), u = read(up + j, n), grad = read(pdy + i * f + j, n);
          const V8 d = one + exp(negate(g)), s = one / d;
          write(pdx + i * 2 * f + j, (grad * u) * (s * (one + g * (one - s))), n);
          write(pdx + i * 2 * f + f + j, grad * (g / d), n);
        }
      }
    });
  });
  return dx;
}

// ids [T], weight [V, H] -> [T, H]; +0.0 for ids outside [start, start + V)
Tensor embedding_forward(const Tensor& ids_, const Tensor& weight_, int64_t start) {
  Tensor ids = dense(ids_), weight = dense(weight_);
  check_index(ids, "embedding: ids");
  const int64_t t = ids.numel(), v = weight.size(0), h = weight.size(1);
  Tensor y = torch::stable::new_empty(weight, {t, h});
  dispatch(weight.scalar_type(), "embedding", [&](auto wt) {
    using T = decltype(wt);
    const T* pw = data<T>(weight);
    T* py = data<T>(y);
    parallel_for(t, double(h) / 4, [&, pw, py](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = index_at(ids, i) - start;
        const bool inside = row >= 0 && row < v;
        for (int64_t j = 0; j < h; j += 8) {
          const int n = h - j < 8 ? int(h - j) : 8;
          write(py + i * h + j, inside ? read(pw + row * h + j, n) + zero8() : zero8(), n);
        }
      }
    });
  });
  return y;
}

// dy [T, H], ids [T] -> [num_rows, H]: the tokens of a row ascending in fp32, one rounding. Threads split the columns.
Tensor embedding_backward(const Tensor& dy_, const Tensor& ids_, int64_t num_rows, int64_t start) {
  Tensor dy = dense(dy_), ids = dense(ids_);
  check_index(ids, "embedding: ids");
  const int64_t t = ids.numel(), h = dy.size(1);
  Tensor dw = torch::stable::new_zeros(dy, {num_rows, h});
  Tensor acc = dw;  // fp32 sums: the result itself, or a buffer
  if (dy.scalar_type() != ScalarType::Float) acc = torch::stable::new_zeros(dy, {num_rows, h}, ScalarType::Float);
  dispatch(dy.scalar_type(), "embedding gradient", [&](auto dt) {
    using T = decltype(dt);
    const T* pdy = data<T>(dy);
    T* out = data<T>(dw);
    float* sum = data<float>(acc);
    const int64_t blocks = (h + 63) / 64;
    parallel_for(blocks, 64.0 * double(t), [&, pdy, sum](int64_t begin, int64_t end) {
      const int64_t j0 = begin * 64, j1 = end * 64 < h ? end * 64 : h;
      for (int64_t i = 0; i < t; ++i) {
        const int64_t row = index_at(ids, i) - start;
        if (row < 0 || row >= num_rows) continue;
        for (int64_t j = j0; j < j1; j += 8) {
          const int n = j1 - j < 8 ? int(j1 - j) : 8;
          float* to = sum + row * h + j;
          write(to, read(to, n) + read(pdy + i * h + j, n), n);
        }
      }
    });
    if constexpr (sizeof(T) == 2) {
      parallel_for(num_rows, double(h) / 4, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin * h; i < end * h; i += 8) {
          const int n = end * h - i < 8 ? int(end * h - i) : 8;
          write(out + i, read(static_cast<const float*>(sum) + i, n), n);
        }
      });
    }
  });
  return dw;
}

}  // namespace
}  // namespace rlk

STABLE_TORCH_LIBRARY_IMPL(rlk, CPU, m) {
  m.impl("rope", TORCH_BOX(&rlk::rope));
  m.impl("swiglu_forward", TORCH_BOX(&rlk::swiglu_forward));
  m.impl("swiglu_backward", TORCH_BOX(&rlk::swiglu_backward));
  m.impl("embedding_forward", TORCH_BOX(&rlk::embedding_forward));
  m.impl("embedding_backward", TORCH_BOX(&rlk::embedding_backward));
}
