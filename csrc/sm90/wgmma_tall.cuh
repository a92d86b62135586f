// The warpgroup product with 160 columns, both operands MN-major.
#pragma once
#include <cstdint>

namespace rlk::sm90 {

// d[64 x 160] = (accumulate ? d : 0) + a[64 x 16] b[160 x 16]^T, bf16 operands, fp32 accumulators, laid out as wgmma_64x128x16
// has them.
__device__ __forceinline__ void wgmma_64x160x16(float (&d)[80], uint64_t a, uint64_t b, int accumulate) {
#define RLK_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define RLK_SIXTEEN(i) RLK_FOUR(i), RLK_FOUR(i + 4), RLK_FOUR(i + 8), RLK_FOUR(i + 12)
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %82, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
      "}, %80, %81, p, 1, 1, 1, 1;\n}"
      : RLK_SIXTEEN(0), RLK_SIXTEEN(16), RLK_SIXTEEN(32), RLK_SIXTEEN(48), RLK_SIXTEEN(64)
      : "l"(a), "l"(b), "r"(accumulate));
#undef RLK_FOUR
#undef RLK_SIXTEEN
}

}  // namespace rlk::sm90
