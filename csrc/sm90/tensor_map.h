// Maps of matrices for bulk tensor copies, and checks of the CUDA runtime's answers.
#pragma once
#include "launch.h"

#include <cuda.h>
#include <mutex>
#include <stdexcept>
#include <string>

namespace rlk::sm90 {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// What make(device) returns, called once for each device: the limits of a kernel are set on each one by itself. Every
// caller passes a lambda of its own.
template <typename Make>
int once_a_device(Make make) {
  constexpr int kDevices = 64;
  static std::once_flag once[kDevices];
  static int made[kDevices];
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kDevices) throw std::runtime_error("more than 64 devices");
  std::call_once(once[device], [&] { made[device] = make(device); });
  return made[device];
}

inline int processors_of(int device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
  return count;
}

// Boxes of box_rows x box_cols bf16 with a swizzle of as many bytes; what lies outside the matrix is read as zero.
CUtensorMap tensor_map(const Matrix& matrix, int box_cols, int box_rows, int swizzle = 128);

}  // namespace rlk::sm90
