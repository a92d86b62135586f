// Sum of rank payloads: a balanced binary tree over adjacent ranks in fp32, one rounding.
// Specification: rl_kernel/ops/collectives/reference.py.
#include <algorithm>
#include <vector>

#include "cpu/primitives.h"

namespace rlk {
namespace {

constexpr int64_t kBlock = 2048;  // elements summed at a time: the payloads of 8 ranks stay in the L2 cache

template <class In, class Out>
void reduce_parts(const In* parts, Out* out, int64_t ranks, int64_t numel) {
  int64_t leaves = 1;
  while (leaves < ranks) leaves *= 2;
  parallel_for((numel + kBlock - 1) / kBlock, double(2 * leaves * kBlock), [=](int64_t begin, int64_t end) {
    std::vector<float> buffer(leaves * kBlock);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlock, count = std::min(kBlock, numel - first);
      for (int64_t r = 0; r < leaves; ++r) {
        float* row = buffer.data() + r * kBlock;
        if (r < ranks) {
          for (int64_t i = 0; i < count; ++i) row[i] = to_float(parts[r * numel + first + i]);
        } else {
          std::fill(row, row + count, 0.0f);
        }
      }
      for (int64_t step = 1; step < leaves; step *= 2) {
        for (int64_t r = 0; r < leaves; r += 2 * step) {
          float* left = buffer.data() + r * kBlock;
          const float* right = left + step * kBlock;
          for (int64_t i = 0; i < count; ++i) left[i] = left[i] + right[i];
        }
      }
      for (int64_t i = 0; i < count; ++i) out[first + i] = from_float<Out>(buffer[i]);
    }
  });
}

// parts [R, ...] -> out [...]
void collectives_reduce_parts(const Tensor& parts, Tensor out) {
  STD_TORCH_CHECK(parts.is_contiguous() && out.is_contiguous(), "collectives_reduce_parts: tensors must be contiguous");
  STD_TORCH_CHECK(parts.dim() >= 1 && parts.size(0) >= 1 && parts.numel() == parts.size(0) * out.numel(),
                  "collectives_reduce_parts: parts must be [ranks, *out.shape]");
  dispatch(parts.scalar_type(), "collectives_reduce_parts: parts", [&](auto in) {
    dispatch(out.scalar_type(), "collectives_reduce_parts: out",
             [&](auto to) { reduce_parts(data<decltype(in)>(parts), data<decltype(to)>(out), parts.size(0), out.numel()); });
  });
}

}  // namespace
}  // namespace rlk

STABLE_TORCH_LIBRARY_IMPL(rlk, CPU, m) { m.impl("collectives_reduce_parts", TORCH_BOX(&rlk::collectives_reduce_parts)); }
