// Launches of the exchange between GPUs.
#include "exchange.cuh"

namespace rlk::gpu {
namespace {

#if defined(__HIP_PLATFORM_AMD__) || defined(USE_ROCM)
using Stream = hipStream_t;
int last_error() { return static_cast<int>(hipGetLastError()); }
#else
using Stream = cudaStream_t;
int last_error() { return static_cast<int>(cudaGetLastError()); }
#endif

template <int Size, int Leaves>
void launch(const Exchange& task, int threads, bool small, Stream stream) {
  if (small) {
    exchange_small_kernel<Size, Leaves><<<task.lanes, threads, 0, stream>>>(task);
  } else {
    exchange_kernel<Size, Leaves><<<task.lanes, threads, 0, stream>>>(task);
  }
}

template <int Size>
void launch(const Exchange& task, int threads, bool small, Stream stream) {
  if (task.ranks <= 2) {
    launch<Size, 2>(task, threads, small, stream);
  } else if (task.ranks <= 4) {
    launch<Size, 4>(task, threads, small, stream);
  } else {
    launch<Size, 8>(task, threads, small, stream);
  }
}

int launch(const Exchange& task, int threads, bool small, void* stream) {
  const Stream on = static_cast<Stream>(stream);
  if (task.x_size == 2) {
    launch<2>(task, threads, small, on);
  } else {
    launch<4>(task, threads, small, on);  // all_gather too: bytes are not summed
  }
  return last_error();
}

}  // namespace

int exchange(const Exchange& task, int threads, void* stream) { return launch(task, threads, false, stream); }
int exchange_small(const Exchange& task, int threads, void* stream) { return launch(task, threads, true, stream); }

const char* error_name(int code) {
#if defined(__HIP_PLATFORM_AMD__) || defined(USE_ROCM)
  return hipGetErrorString(static_cast<hipError_t>(code));
#else
  return cudaGetErrorString(static_cast<cudaError_t>(code));
#endif
}

}  // namespace rlk::gpu
