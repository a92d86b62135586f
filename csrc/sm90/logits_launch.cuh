// Launches of the logits kernels. Kinds are compiled in files of their own, side by side.
#pragma once
#include "gemm_launch.cuh"
#include "logits.cuh"

namespace rlk::sm90 {

template <int Kind, int End, bool Carry, bool Stores>
void launch_logits(const Params& params, cudaStream_t stream) {
  once_a_device([](int) {
    check(cudaFuncSetAttribute(logits_kernel<Kind, End, Carry, Stores>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kBytesShared),
          "shared memory");
    return 0;
  });
  launch_clusters(logits_kernel<Kind, End, Carry, Stores>, params, stream);
}

template <int Kind, bool Stores>
void launch_logits(const Params& params, cudaStream_t stream) {
  if (logits_apart(params.problem[0])) {
    launch_logits<Kind, kLogitsEnd, false, Stores>(params, stream);
  } else {
    launch_logits<Kind, 0, false, Stores>(params, stream);
  }
}

}  // namespace rlk::sm90
