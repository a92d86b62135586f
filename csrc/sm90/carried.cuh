// Rows beyond whole tiles, carried along: 796 = 3 x 256 + 28.
//
// In tiles of their own a few rows take as long as the weights need from the L2. The tiles of the first pair of row tiles have
// the weights in shared memory: there each block of the cluster multiplies the rows of one leaf (64 for a warpgroup; M of the
// product) with up to 32 carried rows (its N), beside its own products. The chains over k are the same, so the bits are. The
// memory through which kept values leave holds the carried rows as well (32 x 64 a stage), so that values leave 8 rows at a
// time instead of 16.
#pragma once
#include "leaf.cuh"
#include "wgmma_narrow.cuh"

namespace rlk::sm90 {

constexpr int kBytesCarriedStaging = kCarried * kLeaf * 4;  // stagers of all eight consumer warps, or carried logits
static_assert(kBytesCarriedStaging == 8 * BulkStager<8>::kBytes);
static_assert(kStages * kBytesCarried + kBytesCarriedStaging <= 2 * kBytesStaging);

// A consumer warpgroup's part of the carried rows' products.
struct Carried {
  float (&acc)[16];  // acc[4 j + 2 h + b]: carried row 8 j + 2 (lane % 4) + b, column 16 warp + lane / 4 + 8 h of the leaf
  uint32_t leaf, rows;  // shared memory: this warpgroup's rows of B and the carried rows, of the first stage
  bool now;             // in this tile

  template <typename Ring>
  __device__ __forceinline__ void operator()(const Ring& at, int k, bool continued) const {
    const uint64_t a = descriptor(leaf + at.stage * kBytesStage, 8192, 1024);
    const uint64_t b = descriptor(rows + at.stage * kBytesCarried, 8192, 1024);
    wgmma_narrow(acc, a + (k * 32 >> 4), b + (k * 32 >> 4), continued);
  }
};

// The leaf of one block: statistics of the carried rows, with the bits of vocabulary_leaf. All eight consumer warps come here;
// logits meet in the memory of their stagers, or where those would be, then each warp has four rows, a lane four adjacent
// columns. A warp's rows lie in its own stager's memory: when it has read them it may stage again.
__device__ __forceinline__ void carried_leaf(const Carried& carried, int tile_n, uint32_t rank, int tiled, int rows,
                                             const Problem& problem, const Vocabulary& v, uint32_t staging, int group,
                                             int thread) {
  const int lane = thread % 32, warp = group * 4 + thread / 32;
  const int first = tile_n + static_cast<int>(rank) * kLeaf, row = tiled + warp * 4;
  // Lane i of four knows row i's target and temperature.
  int target = -1;
  float temperature = 1.0f;
  if (row + lane % 4 < rows) {
    const int64_t column = v.targets[row + lane % 4] - v.start - first;
    if (column >= 0 && column < min(kLeaf, v.columns - first)) target = static_cast<int>(column);
    if (v.temperatures != nullptr) temperature = v.temperatures[row + lane % 4];
  }
  if (lane == 0) stores_have_read();
  named_barrier(1, 256);  // all warps have read what they had there, and so have their stores
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int to = i / 4 * 8 + lane % 4 * 2 + i % 2, column = warp * 16 + lane / 4 + i / 2 % 2 * 8;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(staging + to * (kLeaf * 4) + ((column / 4 ^ (to & 6)) * 16) + column % 4 * 4),
                 "f"(carried.acc[i])
                 : "memory");
  }
  named_barrier(1, 256);
  if (row >= rows) return;  // a whole warp
  float x[4][4], maxima[4], sums[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int from = warp * 4 + i;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[i][0]), "=f"(x[i][1]), "=f"(x[i][2]), "=f"(x[i][3])
                 : "r"(staging + from * (kLeaf * 4) + ((lane ^ (from & 6)) * 16))
                 : "memory");
  }
  if (__any_sync(~0u, temperature != 1.0f)) {  // division by one changes nothing
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {  // each row in turn: few instructions for what is rare
      const float divisor = __shfl_sync(~0u, temperature, i);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float quotient = __fdiv_rn(x[0][c], divisor);
        x[0][c] = x[1][c];
        x[1][c] = x[2][c];
        x[2][c] = x[3][c];
        x[3][c] = quotient;
      }
    }
  }
  const int column = first + lane * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float (&z)[4] = x[i];
    const int hit = __shfl_sync(~0u, target, i) - lane * 4;
    if (column + 4 > v.columns) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (column + c >= v.columns) z[c] = -INFINITY;
      }
    }
    float leaf_max = -INFINITY;
#pragma unroll
    for (int c = 0; c < 4; ++c) leaf_max = fmaxf(leaf_max, z[c]);
#pragma unroll
    for (int across = 1; across < 32; across *= 2) leaf_max = fmaxf(leaf_max, __shfl_xor_sync(~0u, leaf_max, across));
    leaf_max = maxima[i] = __fadd_rn(leaf_max, 0.0f);
    const float shift = shift_of(leaf_max);
    float e[4], product[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (hit == c) v.target_logit[row + i] = z[c];
      const float d = __fsub_rn(z[c], shift);
      e[c] = exp_(d);
      product[c] = __fmul_rn(e[c], fmaxf(d, -200.0f));
    }
    sums[i] = swap_add(__fadd_rn(__fadd_rn(e[0], e[1]), __fadd_rn(e[2], e[3])),
                       __fadd_rn(__fadd_rn(product[0], product[1]), __fadd_rn(product[2], product[3])), lane & 1, 1);
    if (tile_n < v.keep && row + i < rows && column / 8 * 8 < problem.cols) {
      *reinterpret_cast<uint2*>(problem.out + (row + i) * problem.out_stride + column) =
          make_uint2(pack(e[0], e[1]), pack(e[2], e[3]));
    }
  }
  // Over lanes, as over columns before: neighbours first. The row goes by bits 1 and 2 of the lane.
  float sum = swap_add(swap_add(sums[0], sums[1], lane & 2, 2), swap_add(sums[2], sums[3], lane & 2, 2), lane & 4, 4);
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 8));
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 16));
  const float low = lane & 2 ? maxima[1] : maxima[0], high = lane & 2 ? maxima[3] : maxima[2];
  const int own = row + lane / 2, leaf = first / kLeaf;
  if (lane < 8 && own < rows && leaf < v.leaves) {
    const int64_t at = static_cast<int64_t>(own) * v.leaves + leaf;
    (lane & 1 ? v.leaf_mean : v.leaf_sum)[at] = sum;
    if (!(lane & 1)) v.leaf_max[at] = lane & 4 ? high : low;
  }
}

}  // namespace rlk::sm90
