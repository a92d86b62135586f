// RMSNorm with an optional residual sum (see rl_kernel/ops/rms_norm/reference.py).
#include <cmath>
#include <tuple>
#include <vector>

#include "cpu/primitives.h"

namespace rlk {
namespace {

// f(i, lanes) for eight columns at a time; lanes < 8 in the last step only.
template <class F>
RLK_INLINE void columns(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) f(i, 8);
  if (i < n) f(i, int(n - i));
}
template <class T, class W>
void forward_rows(const T* x, const T* residual, const W* weight, float eps, int64_t h, T* y, T* z, float* rstd, int64_t begin,
                  int64_t end) {
  const float width = float(h);
  for (int64_t t = begin; t < end; ++t) {
    const T* row = x + t * h;
    if (residual) {
      T* sum = z + t * h;
      columns(h, [&](int64_t i, int n) { write(sum + i, read(row + i, n) + read(residual + t * h + i, n), n); });
      row = sum;
    }
    const float r = 1.0f / __builtin_sqrtf(dot16(row, row, h) / width + eps);
    rstd[t] = r;
    V8 scale = splat(r);
    columns(h, [&](int64_t i, int n) { write(y + t * h + i, (read(row + i, n) * scale) * read(weight + i, n), n); });
  }
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_forward(const Tensor& x_, const Tensor& weight_, double eps,
                                                    std::optional<Tensor> residual_) {
  Tensor x = dense(x_), weight = dense(weight_);
  Tensor residual = residual_ ? dense(*residual_) : x;
  const int64_t t = x.size(0), h = x.size(1);
  Tensor y = torch::stable::empty_like(x);
  Tensor z = residual_ ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0});
  Tensor rstd = torch::stable::new_empty(x, {t}, ScalarType::Float);
  dispatch(x.scalar_type(), "rms_norm x", [&](auto xt) {
    using T = decltype(xt);
    dispatch(weight.scalar_type(), "rms_norm weight", [&](auto wt) {
      using W = decltype(wt);
      const T *px = data<T>(x), *pr = residual_ ? data<T>(residual) : nullptr;
      const W* pw = data<W>(weight);
      T *py = data<T>(y), *pz = data<T>(z);
      float* ps = data<float>(rstd);
      parallel_for(t, double(h),
                   [=](int64_t begin, int64_t end) { forward_rows(px, pr, pw, float(eps), h, py, pz, ps, begin, end); });
    });
  });
  return {y, z, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy_, std::optional<Tensor> dres_, const Tensor& x_,
                                             const Tensor& weight_, const Tensor& rstd_) {
  Tensor dy = dense(dy_), x = dense(x_), weight = dense(weight_), rstd = dense(rstd_);
  Tensor dres = dres_ ? dense(*dres_) : x;
  const int64_t rows = x.size(0), h = x.size(1);
  Tensor dx = torch::stable::empty_like(x), dw = torch::stable::empty_like(weight);
  dispatch(x.scalar_type(), "rms_norm x", [&](auto xt) {
    using T = decltype(xt);
    dispatch(weight.scalar_type(), "rms_norm weight", [&](auto wt) {
      using W = decltype(wt);
      const T *pdy = data<T>(dy), *px = data<T>(x), *pr = dres_ ? data<T>(dres) : nullptr;
      const W* pw = data<W>(weight);
      const float* ps = data<float>(rstd);
      T* pdx = data<T>(dx);
      W* pdw = data<W>(dw);
      parallel_for(rows, 3.0 * double(h), [=](int64_t begin, int64_t end) {
        std::vector<float> g(h), n(h);
        for (int64_t t = begin; t < end; ++t) {
          const V8 r = splat(ps[t]);
          columns(h, [&](int64_t i, int lanes) {
            write(n.data() + i, read(px + t * h + i, lanes) * r, lanes);
            write(g.data() + i, read(pdy + t * h + i, lanes) * read(pw + i, lanes), lanes);
          });
          const V8 c = splat(dot16(g.data(), n.data(), h) / float(h));
          columns(h, [&](int64_t i, int lanes) {
            V8 d = (read(g.data() + i, lanes) - read(n.data() + i, lanes) * c) * r;
            if (pr) d = d + read(pr + t * h + i, lanes);
            write(pdx + t * h + i, d, lanes);
          });
        }
      });
      // dweight: tokens ascending, one accumulator a column.
      const int64_t blocks = (h + 31) / 32;
      parallel_for(blocks, 32.0 * double(rows), [=](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
          const int64_t i0 = b * 32, width = h - i0 < 32 ? h - i0 : 32;
          alignas(32) float acc[32] = {};
          for (int64_t t = 0; t < rows; ++t) {
            const V8 r = splat(ps[t]);
            columns(width, [&](int64_t i, int lanes) {
              V8 normed = read(px + t * h + i0 + i, lanes) * r;
              store8(acc + i, fma(read(pdy + t * h + i0 + i, lanes), normed, load8(acc + i)));
            });
          }
          columns(width, [&](int64_t i, int lanes) { write(pdw + i0 + i, load8(acc + i), lanes); });
        }
      });
    });
  });
  return {dx, dw};
}

}  // namespace
}  // namespace rlk

STABLE_TORCH_LIBRARY_IMPL(rlk, CPU, m) {
  m.impl("rms_norm_forward", TORCH_BOX(&rlk::rms_norm_forward));
  m.impl("rms_norm_backward", TORCH_BOX(&rlk::rms_norm_backward));
}
