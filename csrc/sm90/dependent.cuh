// Kernels that may start while the kernel in front of them on the stream still runs (programmatic dependent launch).
#pragma once
#include "tensor_map.h"

#include <utility>

namespace rlk::sm90 {

// Waits for the kernel in front to have ended, with its writes. Every thread of a kernel of launch_dependent calls it before
// it reads or writes global memory: so the end of one kernel still means the end of all kernels before it.
__device__ __forceinline__ void await_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel take room on the processors once all blocks have said so; it then waits itself.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

inline unsigned blocks(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

struct Grid {
  unsigned blocks, threads;
};

template <typename... Parameters, typename... Arguments>
void launch_dependent(const char* what, void (*kernel)(Parameters...), Grid grid, cudaStream_t stream,
                      Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), what);
}

}  // namespace rlk::sm90
