#include "logits_launch.cuh"

namespace rlk::sm90 {

void launch_gradient(const Params& params, cudaStream_t stream) { launch_logits<kGradient, true>(params, stream); }

}  // namespace rlk::sm90
