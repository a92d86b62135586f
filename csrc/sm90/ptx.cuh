// PTX of Hopper that CUDA C++ has no name for: mbarriers, bulk tensor copies, warpgroup matrix products.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>

namespace rlk::sm90 {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Asked for where it is needed rather than kept in a register, with all the addresses made of it.
__device__ __forceinline__ int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
__device__ __forceinline__ int lane_now() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// A value that is the same in all lanes, read from shared memory before: it is here when an arrival follows. A shuffle would
// do, but the compiler leaves it out where it knows that the value is the same.
__device__ __forceinline__ int arrived(int value) {
  asm volatile("redux.sync.max.s32 %0, %0, -1;" : "+r"(value));
  return value;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---------------------------------------------------------------- mbarrier
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// The address, in the shared memory of the cluster, of the barrier with the same offset in that of its member `rank`.
__device__ __forceinline__ uint32_t barrier_of(uint32_t barrier, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(barrier), "r"(rank));
  return remote;
}
__device__ __forceinline__ void barrier_arrive_there(uint32_t remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t rank) {
  barrier_arrive_there(barrier_of(barrier, rank));
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra AGAIN;\n"
      "DONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void barrier_expect_remote(uint32_t barrier, uint32_t bytes, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote], %2;\n}" ::"r"(barrier),
      "r"(rank), "r"(bytes)
      : "memory");
}

// Two values that another block of the cluster will replace once told that it has been read. Acquire: what follows, an arrival
// above all, waits until the value is here. A plain load is only under way then, and where stores fill the memory pipe it stays
// so for longer than the replacement takes.
__device__ __forceinline__ int2 read_shared_pair(uint32_t address) {
  uint64_t value;
  asm volatile("ld.acquire.cta.shared::cta.b64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  return make_int2(static_cast<int>(value), static_cast<int>(value >> 32));
}

// Store 4 bytes to the same offset in member `rank`, completing 4 bytes of the transaction count of its `barrier`.
__device__ __forceinline__ void store_remote(uint32_t address, uint32_t value, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 to, bar;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 bar, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [bar];\n}" ::"r"(address),
      "r"(value), "r"(barrier), "r"(rank)
      : "memory");
}

__device__ __forceinline__ void store_remote_pair(uint32_t address, int x, int y, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 to, bar;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 bar, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %1, [bar];\n}" ::"r"(address),
      "l"(static_cast<uint64_t>(static_cast<uint32_t>(x)) | static_cast<uint64_t>(static_cast<uint32_t>(y)) << 32),
      "r"(barrier), "r"(rank)
      : "memory");
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Four 8 x 8 matrices of 16-bit values, as accumulators hold them; lane i has the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&value)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value[0]), "r"(value[1]),
               "r"(value[2]), "r"(value[3])
               : "memory");
}

// The same, turned: lane i has the address of column i % 8 of matrix i / 8, which becomes a row.
__device__ __forceinline__ void store_matrices_turned(uint32_t address, const uint32_t (&value)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}

// ---------------------------------------------------------------- bulk tensor copies
__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

__device__ __forceinline__ void load_tile_multicast(uint32_t to, const CUtensorMap* map, uint32_t barrier, int x, int y,
                                                    uint16_t members) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(members)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Stores by copies: written to shared memory, store_fence by each thread that wrote, a barrier, then store_tile and
// stores_commit by one thread. What lies outside the matrix is not stored.
__device__ __forceinline__ void store_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void store_tile(const CUtensorMap* map, uint32_t from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(x),
               "r"(y)
               : "memory");
}
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// This thread's stores have read the shared memory.
__device__ __forceinline__ void stores_have_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// ---------------------------------------------------------------- warpgroup matrix product
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Shared-memory matrix descriptor, 128- or 64-byte swizzle. `lead` and `stride` in bytes: K-major operands use stride = 8 rows;
// MN-major ones lead = distance of chunks as wide as the swizzle along M or N, stride = 8 rows of k.
template <int Swizzle = 128>
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t lead, uint32_t stride) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(lead >> 4) << 16) |
         (static_cast<uint64_t>(stride >> 4) << 32) | (uint64_t{Swizzle == 128 ? 1 : 2} << 62);
}

// Of memory `bytes` behind that of `first`, less than the memory there is, so that no carry leaves the address.
__device__ __forceinline__ uint64_t descriptor_behind(uint64_t first, uint32_t bytes) {
  return (first & 0xFFFFFFFF00000000ull) | (static_cast<uint32_t>(first) + (bytes >> 4));
}
// Made once: the compiler does not know how, so that it does not make it again at each use.
__device__ __forceinline__ uint64_t descriptor_kept(uint64_t value) {
  return (value & 0xFFFFFFFF00000000ull) | __shfl_sync(~0u, static_cast<uint32_t>(value), 0);
}

template <int Registers>
__device__ __forceinline__ void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Keeps the compiler from moving uses of the accumulators across the asynchronous products.
template <int N>
__device__ __forceinline__ void pin(float (&acc)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

// d[64 x 128] = (accumulate ? d : 0) + a[64 x 16] b[128 x 16]^T, bf16 operands, fp32 accumulators.
// d[4j + 2h + b] of a thread: row 16 * warp + lane / 4 + 8h, column 8j + 2 * (lane % 4) + b.
template <int TransposeA, int TransposeB>
__device__ __forceinline__ void wgmma_64x128x16(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, %67, %68;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
        "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
        "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
        "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]),
        "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),
        "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(accumulate), "n"(TransposeA), "n"(TransposeB));
}

// The same with 256 columns, in two halves: left has columns 0 to 127.
template <int TransposeA, int TransposeB>
__device__ __forceinline__ void wgmma_64x256x16(float (&left)[64], float (&right)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
      "}, %128, %129, p, 1, 1, %131, %132;\n}"
      : "+f"(left[0]), "+f"(left[1]), "+f"(left[2]), "+f"(left[3]), "+f"(left[4]), "+f"(left[5]), "+f"(left[6]), "+f"(left[7]),
        "+f"(left[8]), "+f"(left[9]), "+f"(left[10]), "+f"(left[11]), "+f"(left[12]), "+f"(left[13]), "+f"(left[14]),
        "+f"(left[15]), "+f"(left[16]), "+f"(left[17]), "+f"(left[18]), "+f"(left[19]), "+f"(left[20]), "+f"(left[21]),
        "+f"(left[22]), "+f"(left[23]), "+f"(left[24]), "+f"(left[25]), "+f"(left[26]), "+f"(left[27]), "+f"(left[28]),
        "+f"(left[29]), "+f"(left[30]), "+f"(left[31]), "+f"(left[32]), "+f"(left[33]), "+f"(left[34]), "+f"(left[35]),
        "+f"(left[36]), "+f"(left[37]), "+f"(left[38]), "+f"(left[39]), "+f"(left[40]), "+f"(left[41]), "+f"(left[42]),
        "+f"(left[43]), "+f"(left[44]), "+f"(left[45]), "+f"(left[46]), "+f"(left[47]), "+f"(left[48]), "+f"(left[49]),
        "+f"(left[50]), "+f"(left[51]), "+f"(left[52]), "+f"(left[53]), "+f"(left[54]), "+f"(left[55]), "+f"(left[56]),
        "+f"(left[57]), "+f"(left[58]), "+f"(left[59]), "+f"(left[60]), "+f"(left[61]), "+f"(left[62]), "+f"(left[63]),
        "+f"(right[0]), "+f"(right[1]), "+f"(right[2]), "+f"(right[3]), "+f"(right[4]), "+f"(right[5]), "+f"(right[6]),
        "+f"(right[7]), "+f"(right[8]), "+f"(right[9]), "+f"(right[10]), "+f"(right[11]), "+f"(right[12]), "+f"(right[13]),
        "+f"(right[14]), "+f"(right[15]), "+f"(right[16]), "+f"(right[17]), "+f"(right[18]), "+f"(right[19]), "+f"(right[20]),
        "+f"(right[21]), "+f"(right[22]), "+f"(right[23]), "+f"(right[24]), "+f"(right[25]), "+f"(right[26]), "+f"(right[27]),
        "+f"(right[28]), "+f"(right[29]), "+f"(right[30]), "+f"(right[31]), "+f"(right[32]), "+f"(right[33]), "+f"(right[34]),
        "+f"(right[35]), "+f"(right[36]), "+f"(right[37]), "+f"(right[38]), "+f"(right[39]), "+f"(right[40]), "+f"(right[41]),
        "+f"(right[42]), "+f"(right[43]), "+f"(right[44]), "+f"(right[45]), "+f"(right[46]), "+f"(right[47]), "+f"(right[48]),
        "+f"(right[49]), "+f"(right[50]), "+f"(right[51]), "+f"(right[52]), "+f"(right[53]), "+f"(right[54]), "+f"(right[55]),
        "+f"(right[56]), "+f"(right[57]), "+f"(right[58]), "+f"(right[59]), "+f"(right[60]), "+f"(right[61]), "+f"(right[62]),
        "+f"(right[63])
      : "l"(a), "l"(b), "r"(accumulate), "n"(TransposeA), "n"(TransposeB));
}

}  // namespace rlk::sm90
