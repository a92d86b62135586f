#include "gemm_launch.cuh"

namespace rlk::sm90 {

void launch_statistics(const Params& params, cudaStream_t stream) { launch_overlapped<kStatistics>(params, stream); }

}  // namespace rlk::sm90
