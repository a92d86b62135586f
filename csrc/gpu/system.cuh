// Memory operations between GPUs of one machine, in one place for CUDA, HIP and the simulation on the host.
#pragma once
#include <cstdint>

#if defined(RLK_SIMULATION)
#include "simulation.h"  // tests/ops/simulation.h: threads instead of a GPU, under a race detector
#else
#if defined(__HIP_PLATFORM_AMD__) || defined(USE_ROCM)
#include <hip/hip_runtime.h>
#define RLK_OUT_OF_LINE __attribute__((noinline))
#define RLK_GRID_CONSTANT
#else
#include <cuda_runtime.h>
#define RLK_OUT_OF_LINE __noinline__
#define RLK_GRID_CONSTANT __grid_constant__  // the argument is indexed where it lies, without a copy in local memory
#endif

namespace rlk::gpu {

struct alignas(16) Wide {
  uint32_t word[4];
};
struct alignas(16) Pair {
  uint64_t low, high;
};

#if defined(__HIP_PLATFORM_AMD__) || defined(USE_ROCM)

__device__ __forceinline__ void signal(uint64_t* flag, uint64_t value) {
  __hip_atomic_store(flag, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ uint64_t poll(const uint64_t* flag) {
  return __hip_atomic_load(flag, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ Wide load_peer(const void* address) {
  Wide value;
  const uint64_t* words = static_cast<const uint64_t*>(address);
  reinterpret_cast<uint64_t*>(&value)[0] = __hip_atomic_load(words, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  reinterpret_cast<uint64_t*>(&value)[1] = __hip_atomic_load(words + 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  return value;
}
__device__ __forceinline__ void send(Pair* address, Pair value) {
  __hip_atomic_store(&address->low, value.low, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  __hip_atomic_store(&address->high, value.high, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ Pair receive(const Pair* address) {
  return {__hip_atomic_load(&address->low, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM),
          __hip_atomic_load(&address->high, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)};
}
__device__ __forceinline__ uint64_t now_ns() { return wall_clock64() * 10; }  // 100 MHz on gfx9
__device__ __forceinline__ void give_up() { __builtin_trap(); }
__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(uint32_t x) { return __uint_as_float(x); }
__device__ __forceinline__ uint16_t round_to_bf16(float x) {  // nearest even, one NaN
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#else

// Everything that this block wrote before the preceding __syncthreads is visible to who reads `value` with poll().
__device__ __forceinline__ void signal(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t poll(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
// Relaxed at system scope rather than weak: never a line of this SM's L1 from an earlier step.
__device__ __forceinline__ Wide load_peer(const void* address) {
  Wide value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(address)
               : "memory");
  return value;
}
// Each half arrives as a whole: eight bytes are one access.
__device__ __forceinline__ void send(Pair* address, Pair value) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(value.low), "l"(value.high) : "memory");
}
__device__ __forceinline__ Pair receive(const Pair* address) {
  Pair value;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.low), "=l"(value.high) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}
__device__ __forceinline__ void give_up() { __trap(); }
__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(uint32_t x) { return __uint_as_float(x); }
__device__ __forceinline__ uint16_t round_to_bf16(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

#endif

}  // namespace rlk::gpu
#endif
