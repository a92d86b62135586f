// What the two kernels for segments of K share: the task, the order of tiles, stores.
#pragma once
#include "epilogue.cuh"
#include "tensor_map.h"

#include <algorithm>
#include <type_traits>

namespace rlk::sm90 {

struct Segments {
  CUtensorMap a, b;
  void* out;
  int rows, cols;
  int parts, part_depth, part_tiles;  // a segment is slice s of each part of K: tiles of k of a slice
  int wide;                           // fp32 output
};

// Without the map of b, whose boxes are the kernel's.
template <typename Task>
Task segments_task(const Matrix& a, const Matrix& b, bool transposed, int count, int parts, void* out, bool wide) {
  Task task{};
  task.out = out;
  task.rows = static_cast<int>(a.rows);
  task.cols = static_cast<int>(transposed ? b.cols : b.rows);
  task.parts = parts;
  task.part_depth = static_cast<int>(a.cols / parts);
  task.part_tiles = task.part_depth / count / kTileK;
  task.wide = wide;
  return task;
}

// go(count, transposed) with both known to the compiler.
template <typename Go>
void by_segments(int count, bool transposed, Go go) {
  const auto with = [&](auto number) {
    transposed ? go(number, std::integral_constant<int, 1>{}) : go(number, std::integral_constant<int, 0>{});
  };
  if (count == 2) {
    with(std::integral_constant<int, 2>{});
  } else if (count == 4) {
    with(std::integral_constant<int, 4>{});
  } else {
    with(std::integral_constant<int, 8>{});
  }
}

struct SegmentsPlace {
  int m, n;
  bool odd;
};

// Tiles of a cluster, 256 rows x 256 columns; the last 128 rows of an odd number x 512. Groups of columns come one after
// the other, so that B stays in the L2.
struct SegmentsRaster {
  static constexpr int kGroupColumns = 8;
  int pairs, odd, columns, count;

  __host__ __device__ SegmentsRaster(int rows, int cols) {
    const int tiles_m = (rows + 127) / 128;
    pairs = tiles_m / 2;
    odd = tiles_m % 2;
    columns = (cols + 255) / 256;
    count = pairs * columns + odd * ((columns + 1) / 2);
  }

  // Blocks of 128 rows: `Across` of them make 256 columns.
  template <int Across>
  __device__ __forceinline__ SegmentsPlace at(int id, int rank) const {
    constexpr int kColumns = 256 / Across;
    const int per_group = pairs * kGroupColumns + odd * (kGroupColumns / 2);
    const int group = id / per_group, inside = id % per_group, first = group * kGroupColumns;
    const int width = min(kGroupColumns, columns - first), beyond = inside - pairs * width;
    if (beyond >= 0) return {pairs * 256, (first + beyond * 2) * 256 + rank * kColumns, true};
    return {(inside / width * 2 + rank / Across) * 128, ((first + inside % width) * Across + rank % Across) * kColumns, false};
  }
};

template <int Deep>
struct RingStage {
  int index = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++index == Deep) {
      index = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ int before() const { return (index == 0 ? Deep : index) - 1; }
};

// Keeps the compiler from moving uses of the accumulators across the asynchronous products.
__device__ __forceinline__ void pin_values(float (&acc)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

__device__ __forceinline__ void put_shared(uint32_t at, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

__device__ __forceinline__ float4 get_shared(uint32_t at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}

// x = v + x
__device__ __forceinline__ void add_to(float4 v, float* x) {
  x[0] = __fadd_rn(v.x, x[0]);
  x[1] = __fadd_rn(v.y, x[1]);
  x[2] = __fadd_rn(v.z, x[2]);
  x[3] = __fadd_rn(v.w, x[3]);
}

// x = what waits there + x
__device__ __forceinline__ void add_shared(uint32_t at, float* x) { add_to(get_shared(at), x); }

// fp32 of one thread's 64 x 128 accumulators: row and column of its first value.
__device__ __forceinline__ void store_floats(const float (&acc)[64], const Segments& task, int row, int column) {
  float* out = static_cast<float*>(task.out) + static_cast<int64_t>(row) * task.cols + column;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      if (row + 8 * h < task.rows && column + 8 * j < task.cols) {
        *reinterpret_cast<float2*>(out + static_cast<int64_t>(8 * h) * task.cols + 8 * j) =
            make_float2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
      }
    }
  }
}

}  // namespace rlk::sm90
