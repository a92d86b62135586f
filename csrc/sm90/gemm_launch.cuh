// What launches of the matrix-product kernels share: sizes, and which kernel suits them.
#pragma once
#include "halves.cuh"
#include "tensor_map.h"

#include <algorithm>

namespace rlk::sm90 {

void launch_statistics(const Params& params, cudaStream_t stream);
void launch_gradient(const Params& params, cudaStream_t stream);
// Of params.kept: the first part, `table` of rows, and counts; upstream.zeros.
void before_products(const Params& params, const Rows& rows, const Upstream& upstream, float* table, int clusters,
                     cudaStream_t stream);

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

inline int64_t tiles(const Problem& problem) {
  const int64_t tiles_m = ceil_div(problem.rows, kTileM), tiles_n = ceil_div(problem.cols, kTileN);
  if (problem.output == kBlocks) {  // the most there may be, whether tokens are rows or columns
    return static_cast<int64_t>(ceil_div(ceil_div(problem.depth, kTileK), kBlockTiles)) * ceil_div(tiles_m, kCluster) * tiles_n;
  }
  return tiles_m / kCluster * tiles_n + tiles_m % kCluster * ceil_div(tiles_n, kCluster);
}

// Of a launch.
inline int clusters_of(const Params& params) {
  const int processors = once_a_device([](int device) { return processors_of(device); });
  int64_t count = 0;
  for (int i = 0; i < params.problems; ++i) count += tiles(params.problem[i]);
  return static_cast<int>(std::min<int64_t>(processors / kCluster, count));
}

template <typename Kernel>
void launch_clusters(Kernel kernel, const Params& params, cudaStream_t stream) {
  const int clusters = clusters_of(params);
  if (clusters == 0) return;
  kernel<<<clusters * kCluster, kThreads, kBytesShared, stream>>>(params);
  check(cudaGetLastError(), "matrix product launch");
}

// Tiles of k at the end of a tile whose halves are multiplied one after the other (halves.cuh).
constexpr int kLogitsEnd = 2;

// Whether the halves of tiles of logits end apart.
inline bool logits_apart(const Problem& problem) { return ceil_div(problem.depth, kTileK) > kBegin + kLogitsEnd; }

// Whether the rows of statistics may be carried along (carried.cuh).
inline bool may_carry(const Problem& problem) {
  const int rest = problem.rows % kTileM;
  return problem.rows >= kCluster * kTileM && rest > 0 && rest <= kCarried && logits_apart(problem);
}

}  // namespace rlk::sm90
