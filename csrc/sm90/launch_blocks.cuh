// Launches of the small kernels: one dimension of blocks, an error that names the kernel.
#pragma once
#include "tensor_map.h"

#include <utility>

namespace rlk::sm90 {

inline unsigned blocks(int64_t count, int64_t each) { return static_cast<unsigned>((count + each - 1) / each); }

struct Grid {
  unsigned blocks, threads;
};

template <typename... Parameters, typename... Arguments>
void launch_blocks(const char* what, void (*kernel)(Parameters...), Grid grid, cudaStream_t stream,
                   Arguments&&... arguments) {
  kernel<<<grid.blocks, grid.threads, 0, stream>>>(std::forward<Arguments>(arguments)...);
  check(cudaGetLastError(), what);
}

}  // namespace rlk::sm90
