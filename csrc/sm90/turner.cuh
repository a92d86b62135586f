// fp32 outputs whose rows are columns of memory, on their way there in whole lines.
#pragma once
#include "epilogue.cuh"

namespace rlk::sm90 {

// Outputs of a warpgroup, 64 values of the hidden size of a number of tokens (or columns of the vocabulary), 32 of them at a
// time: a thread has single values of a token, memory has them side by side. They turn in the warpgroup's shared memory (twice
// 8 KiB, 256 bytes a token), where groups of 8 values lie such that neither way meets a bank twice.
struct Turner {
  uint32_t address;
  int lane, warp, barrier;
  float* first;  // fp32 [tokens, cols]: the lane's first value of its first token
  int tokens, cols;

  // Tokens 32 `part` and on; acc[4 j + 2 h + b] is token 8 j + 2 (lane % 4) + b, value 16 warp + lane / 4 + 8 h.
  __device__ __forceinline__ void put(int part, const float* acc) const {
    const int q = lane % 4;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int token = i / 4 * 8 + q * 2 + i % 2, group = 2 * warp + i / 2 % 2;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(address + part % 2 * 8192 + token * 256 + (group ^ q) * 32 + lane / 4 * 4),
                   "f"(acc[i])
                   : "memory");
    }
  }
  // Of token 8 warp + 2 i + lane / 16 values 4 (lane % 16) and three more, as all of the following.
  __device__ __forceinline__ float4 get(int part, int i) const {
    float4 x;
    asm volatile(
        "ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
        : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
        : "r"(address + part % 2 * 8192 + (8 * warp + 2 * i + lane / 16) * 256 + (lane % 16 / 2 ^ i) * 32 + lane % 2 * 16)
        : "memory");
    return x;
  }
  __device__ __forceinline__ bool inside(int part, int i) const { return part * 32 + i * 2 < tokens; }
  __device__ __forceinline__ float4* at(int part, int i) const {  // by asm: the compiler would make all of them first
    float4* to;
    asm volatile("mad.wide.u32 %0, %1, %2, %3;" : "=l"(to) : "r"(cols), "r"(part * 128 + i * 8), "l"(first));
    return to;
  }
  __device__ __forceinline__ void load(int part, float4 (&values)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // else it keeps its registers from tile to tile
      if (inside(part, i)) values[i] = __ldcg(at(part, i));
    }
  }
  // values(part): accumulators of a part; acc[4 j + 2 h + b] is token 8 j + 2 (lane % 4) + b, value 16 warp + lane / 4 + 8 h.
  // Values of the next parts are under way while those of this one are stored: of parts before loaded(part) when it is put.
  template <bool Add, int Parts, typename Values, typename Loaded>
  __device__ __forceinline__ void store(Values values, Loaded loaded) const {
    [[maybe_unused]] float4 before[Parts][4];
    if constexpr (Add) {
#pragma unroll
      for (int next = 0; next < loaded(0); ++next) load(next, before[next]);
    }
#pragma unroll
    for (int part = 0; part < Parts; ++part) {
      put(part, values(part));
      if constexpr (Add) {
#pragma unroll
        for (int next = loaded(part); next < loaded(part + 1); ++next) {
          if (next < Parts) load(next, before[next]);
        }
      }
      named_barrier(barrier, 128);  // also: all have read the part before
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float4 x = get(part, i);
        if constexpr (Add) {
          const float4& y = before[part][i];
          x = make_float4(__fadd_rn(y.x, x.x), __fadd_rn(y.y, x.y), __fadd_rn(y.z, x.z), __fadd_rn(y.w, x.w));
        }
        if (inside(part, i)) __stcg(at(part, i), x);
      }
    }
  }
};

}  // namespace rlk::sm90
