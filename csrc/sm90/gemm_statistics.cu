#include "gemm_launch.cuh"

#include <cstdlib>

namespace rlk::sm90 {

// Tiles of k at either end of a tile whose halves are multiplied one after the other, where k is long enough.
void launch_statistics(const Params& params, cudaStream_t stream) {
  const char* edge = std::getenv("RLK_SM90_EDGE");
  const int longest = edge == nullptr ? 2 : std::atoi(edge), tiles_k = ceil_div(params.problem[0].depth, kTileK);
  if (longest >= 2 && tiles_k > 4) {
    launch<kStatistics, 2>(params, stream);
  } else if (longest >= 1 && tiles_k > 2) {
    launch<kStatistics, 1>(params, stream);
  } else {
    launch<kStatistics, 0>(params, stream);
  }
}

}  // namespace rlk::sm90
