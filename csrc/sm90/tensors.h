// Torch tensors as the kernels' pointers and matrices, with checks (stable ABI).
#pragma once
#include "launch.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

namespace rlk::sm90 {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

inline void expect(const Tensor& tensor, const char* name, ScalarType type) {
  STD_TORCH_CHECK(tensor.is_cuda(), name, " must be a CUDA tensor");
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " has the wrong dtype");
}

template <typename T>
T* data(const Tensor& tensor, const char* name, ScalarType type) {
  expect(tensor, name, type);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  return static_cast<T*>(tensor.data_ptr());
}

template <typename T>
T* data(const Maybe& tensor, const char* name, ScalarType type) {
  return tensor.has_value() ? data<T>(*tensor, name, type) : nullptr;
}

inline float* floats(const Tensor& tensor, const char* name) { return data<float>(tensor, name, ScalarType::Float); }
inline float* floats(const Maybe& tensor, const char* name) { return data<float>(tensor, name, ScalarType::Float); }

inline Matrix matrix(const Tensor& tensor, const char* name, ScalarType type = ScalarType::BFloat16) {
  expect(tensor, name, type);
  STD_TORCH_CHECK(tensor.dim() == 2 && (tensor.size(1) <= 1 || tensor.stride(1) == 1), name,
                  " must be a matrix with contiguous rows");
  return {tensor.data_ptr(), tensor.size(0), tensor.size(1),
          tensor.size(0) > 1 ? tensor.stride(0) : (tensor.size(1) + 7) / 8 * 8};
}

inline cudaStream_t stream_of(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline int* counter_of(const Tensor& counter) { return data<int>(counter, "counter", ScalarType::Int); }

inline Rows rows_of(const Maybe& targets, const Maybe& temperatures, int64_t start, int64_t columns, int64_t tokens) {
  Rows rows;
  rows.targets = data<int64_t>(targets, "targets", ScalarType::Long);
  rows.temperatures = floats(temperatures, "temperatures");
  rows.start = start;
  rows.columns = static_cast<int>(columns);
  STD_TORCH_CHECK(!targets.has_value() || targets->numel() == tokens, "targets must have one value a row");
  STD_TORCH_CHECK(!temperatures.has_value() || temperatures->numel() == tokens, "temperatures: one value a row");
  return rows;
}

// stats: [3, T, L] as (m, s, u)
inline void leaves_of(Rows& rows, const Tensor& stats, int64_t tokens) {
  STD_TORCH_CHECK(stats.dim() == 3 && stats.size(0) == 3 && stats.size(1) == tokens, "stats must be [3, T, L]");
  rows.leaves = static_cast<int>(stats.size(2));
  rows.leaf_max = floats(stats, "stats");
  rows.leaf_sum = rows.leaf_max + tokens * rows.leaves;
  rows.leaf_mean = rows.leaf_sum + tokens * rows.leaves;
}

inline void active_of(Rows& rows, const Maybe& active, int64_t skipped) {
  rows.active = data<int>(active, "active", ScalarType::Int);
  rows.skipped = static_cast<int>(skipped);
}

// out: [5, T] (logp, lse, entropy, m, log l)
inline Upstream upstream_of(const Tensor& out, const Maybe& logp, const Maybe& lse, const Maybe& entropy) {
  STD_TORCH_CHECK(out.dim() == 2 && out.size(0) == 5, "out must be [5, T]");
  const int64_t rows = out.size(1);
  const float* results = floats(out, "out");
  Upstream upstream;
  upstream.entropy = results + 2 * rows;
  upstream.max = results + 3 * rows;
  upstream.log_sum = results + 4 * rows;
  const Maybe* grads[3] = {&logp, &lse, &entropy};
  for (int i = 0; i < 3; ++i) {
    if (!grads[i]->has_value()) continue;
    const Tensor& grad = **grads[i];
    expect(grad, "upstream gradient", ScalarType::Float);
    STD_TORCH_CHECK(grad.dim() == 1 && grad.size(0) == rows, "an upstream gradient must have one value a row");
    upstream.grad[i] = static_cast<const float*>(grad.data_ptr());
    upstream.grad_stride[i] = rows > 1 ? grad.stride(0) : 0;
  }
  return upstream;
}

// Uninitialised contiguous memory beside `like`.
inline Tensor new_tensor(const Tensor& like, int32_t type, std::initializer_list<int64_t> sizes) {
  int64_t strides[4] = {}, step = 1;
  for (int i = static_cast<int>(sizes.size()) - 1; i >= 0; --i) {
    strides[i] = step;
    step *= sizes.begin()[i];
  }
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, type,
                                                  aoti_torch_device_type_cuda(), like.get_device_index(), &made));
  return Tensor(made);
}

}  // namespace rlk::sm90
