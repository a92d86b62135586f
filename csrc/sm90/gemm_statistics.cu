#include "gemm_launch.cuh"

namespace rlk::sm90 {

// Which rows take part is known on the GPU alone: with fewer of them the kernel that may carry finds that it does not.
void launch_statistics(const Params& params, cudaStream_t stream) {
  const Problem& problem = params.problem[0];
  const int rest = problem.rows % kTileM;
  if (problem.rows >= kCluster * kTileM && rest > 0 && rest <= kCarried && ceil_div(problem.depth, kTileK) > 2 * kEdge) {
    launch<kStatistics, kEdge, true>(params, stream);
  } else {
    launch_overlapped<kStatistics>(params, stream);
  }
}

}  // namespace rlk::sm90
