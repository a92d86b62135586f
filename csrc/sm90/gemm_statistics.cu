#include "logits_launch.cuh"

namespace rlk::sm90 {

namespace {

// Which rows take part is known on the GPU alone: with fewer of them the kernel that may carry finds that it does not.
template <bool Stores>
void launch(const Params& params, cudaStream_t stream) {
  if (may_carry(params.problem[0])) {
    launch_logits<kStatistics, kLogitsEnd, true, Stores>(params, stream);
  } else {
    launch_logits<kStatistics, Stores>(params, stream);
  }
}

}  // namespace

void launch_statistics(const Params& params, cudaStream_t stream) {
  if (params.vocabulary.keep > 0) {
    launch<true>(params, stream);
  } else {
    launch<false>(params, stream);
  }
}

}  // namespace rlk::sm90
