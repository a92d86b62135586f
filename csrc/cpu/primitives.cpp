// Elementwise exp and log and the dot, tree of one row: used by tests to compare the primitives with _primitives.py.
#include "cpu/primitives.h"

namespace rlk {
namespace {

Tensor exp_op(const Tensor& x_) {
  Tensor x = dense(x_), y = torch::stable::empty_like(x);
  const float* in = data<float>(x);
  float* out = data<float>(y);
  parallel_for(x.numel(), 16, [=](int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) store8(out + i, exp(load8(in + i)));
    for (; i < end; ++i) out[i] = exp(in[i]);
  });
  return y;
}

Tensor log_op(const Tensor& x_) {
  Tensor x = dense(x_), y = torch::stable::empty_like(x);
  const float* in = data<float>(x);
  float* out = data<float>(y);
  parallel_for(x.numel(), 16, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = log(in[i]);
  });
  return y;
}

// x [R, N] -> [R]
Tensor tree_op(const Tensor& x_) {
  Tensor x = dense(x_);
  int64_t rows = x.size(0), n = x.size(1);
  Tensor y = torch::stable::new_empty(x, {rows});
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = data<float>(x) + i * n;
    data<float>(y)[i] = n == 8 ? tree8(load8(row)) : n == 32 ? tree32(row) : n == 128 ? tree128(row) : tree(row, n);
  }
  return y;
}

}  // namespace
}  // namespace rlk

STABLE_TORCH_LIBRARY_IMPL(rlk, CPU, m) {
  m.impl("exp", TORCH_BOX(&rlk::exp_op));
  m.impl("log", TORCH_BOX(&rlk::log_op));
  m.impl("tree", TORCH_BOX(&rlk::tree_op));
}
