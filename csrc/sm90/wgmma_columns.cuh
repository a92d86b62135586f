// The warpgroup product with 160 to 248 columns, in steps of 8: A MN-major, B K-major.
#pragma once
#include <cstdint>

namespace rlk::sm90 {

// Every shape has all 128 accumulators as operands and names the first Columns / 2 of them: so the others' numbers stay.
#define RLK_FOUR(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define RLK_SIXTEEN(x, i) RLK_FOUR(x, i), RLK_FOUR(x, i + 4), RLK_FOUR(x, i + 8), RLK_FOUR(x, i + 12)
#define RLK_HALF(x) RLK_SIXTEEN(x, 0), RLK_SIXTEEN(x, 16), RLK_SIXTEEN(x, 32), RLK_SIXTEEN(x, 48)
#define RLK_160                                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define RLK_168 RLK_160 ", %80, %81, %82, %83"
#define RLK_176 RLK_168 ", %84, %85, %86, %87"
#define RLK_184 RLK_176 ", %88, %89, %90, %91"
#define RLK_192 RLK_184 ", %92, %93, %94, %95"
#define RLK_200 RLK_192 ", %96, %97, %98, %99"
#define RLK_208 RLK_200 ", %100, %101, %102, %103"
#define RLK_216 RLK_208 ", %104, %105, %106, %107"
#define RLK_224 RLK_216 ", %108, %109, %110, %111"
#define RLK_232 RLK_224 ", %112, %113, %114, %115"
#define RLK_240 RLK_232 ", %116, %117, %118, %119"
#define RLK_248 RLK_240 ", %120, %121, %122, %123"
#define RLK_COLUMNS(N)                                                                                        \
  if constexpr (Columns == N)                                                                                 \
  asm volatile(                                                                                               \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                           \
      "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" RLK_##N "}, %128, %129, p, 1, 1, 1, 0;\n}" \
      : RLK_HALF(left), RLK_HALF(right)                                                                       \
      : "l"(a), "l"(b), "r"(accumulate))

// d[64 x Columns] = (accumulate ? d : 0) + a[64 x 16] b[Columns x 16]^T; left has columns 0 to 127, right those from 128
// on, both as wgmma_64x128x16 has them.
template <int Columns>
__device__ __forceinline__ void wgmma_columns(float (&left)[64], float (&right)[64], uint64_t a, uint64_t b, int accumulate) {
  static_assert(Columns % 8 == 0 && Columns >= 160 && Columns <= 248);
  RLK_COLUMNS(160);
  RLK_COLUMNS(168);
  RLK_COLUMNS(176);
  RLK_COLUMNS(184);
  RLK_COLUMNS(192);
  RLK_COLUMNS(200);
  RLK_COLUMNS(208);
  RLK_COLUMNS(216);
  RLK_COLUMNS(224);
  RLK_COLUMNS(232);
  RLK_COLUMNS(240);
  RLK_COLUMNS(248);
}

#undef RLK_FOUR
#undef RLK_SIXTEEN
#undef RLK_HALF
#undef RLK_160
#undef RLK_168
#undef RLK_176
#undef RLK_184
#undef RLK_192
#undef RLK_200
#undef RLK_208
#undef RLK_216
#undef RLK_224
#undef RLK_232
#undef RLK_240
#undef RLK_248
#undef RLK_COLUMNS

}  // namespace rlk::sm90
