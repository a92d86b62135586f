// Maps of matrices for bulk tensor copies, and checks of the CUDA runtime's answers.
#pragma once
#include "launch.h"

#include <cuda.h>
#include <stdexcept>
#include <string>

namespace rlk::sm90 {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// Boxes of box_rows x box_cols bf16 with 128-byte swizzle; what lies outside the matrix is read as zero.
CUtensorMap tensor_map(const Matrix& matrix, int box_cols, int box_rows);

}  // namespace rlk::sm90
