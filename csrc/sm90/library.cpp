// out[M, N] = x[M, K] w[N, K]^T by a named algorithm of cuBLASLt: no split-K, no workspace.
//
// The library is the one torch has loaded already, found by its name and not linked: the extension then builds with nvcc
// alone and loads without the library. Functions, enumerators and structures below are its C interface, the same in 12 and 13.
#include "launch.h"

#include <dlfcn.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

namespace rlk::sm90 {
namespace {

struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
enum { kFloat = 0, kBf16 = 14, kCompute = 68, kTransA = 3 };  // CUDA_R_32F, CUDA_R_16BF, CUBLAS_COMPUTE_32F

struct Library {
  int (*create)(void**);
  int (*desc)(void**, int, int);
  int (*desc_set)(void*, int, const void*, size_t);
  int (*layout)(void**, int, uint64_t, uint64_t, int64_t);
  int (*init)(void*, int, int, int, int, int, int, int, Algorithm*);
  int (*set)(Algorithm*, int, const void*, size_t);
  int (*check)(void*, void*, void*, void*, void*, void*, const Algorithm*, Heuristic*);
  int (*matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*,
                void*, const Algorithm*, void*, size_t, cudaStream_t);

  Library() {
    void* file = nullptr;
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      if (file == nullptr) file = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    }
    if (file == nullptr) throw std::runtime_error("no such algorithm: cuBLASLt 12 or 13 is not loaded in this process");
    const auto find = [&](auto& to, const char* name) {
      void* symbol = dlsym(file, name);
      if (symbol == nullptr) throw std::runtime_error(std::string("no such algorithm: cuBLASLt has no ") + name);
      std::memcpy(&to, &symbol, sizeof symbol);
    };
    find(create, "cublasLtCreate");
    find(desc, "cublasLtMatmulDescCreate");
    find(desc_set, "cublasLtMatmulDescSetAttribute");
    find(layout, "cublasLtMatrixLayoutCreate");
    find(init, "cublasLtMatmulAlgoInit");
    find(set, "cublasLtMatmulAlgoConfigSetAttribute");
    find(check, "cublasLtMatmulAlgoCheck");
    find(matmul, "cublasLtMatmul");
  }
};

// What a call needs besides pointers, made once for each size and algorithm. Never freed: a process meets few.
struct Plan {
  void *handle = nullptr, *desc = nullptr, *w = nullptr, *x = nullptr, *out = nullptr;
  Algorithm algorithm{};
  bool usable = false;
};

void* handle_of(const Library& library, int device) {  // a handle belongs to the device that is current at its creation
  static std::map<int, void*> handles;
  void*& handle = handles[device];
  if (handle == nullptr) {
    const int status = library.create(&handle);
    if (status != 0) throw std::runtime_error("cublasLtCreate: status " + std::to_string(status));
  }
  return handle;
}

// The product of column-major matrices out^T = (w^T)^T x^T.
Plan make(const Library& library, int device, const Matrix& x, const Matrix& w, const LibraryAlgorithm& how) {
  Plan plan;
  plan.handle = handle_of(library, device);
  const int transposed = 1;
  const uint64_t k = x.cols, m = x.rows, n = w.rows;
  if (library.desc(&plan.desc, kCompute, kFloat) != 0 || library.desc_set(plan.desc, kTransA, &transposed, 4) != 0 ||
      library.layout(&plan.w, kBf16, k, n, w.stride) != 0 || library.layout(&plan.x, kBf16, k, m, x.stride) != 0 ||
      library.layout(&plan.out, kBf16, n, m, static_cast<int64_t>(n)) != 0 ||
      library.init(plan.handle, kCompute, kFloat, kBf16, kBf16, kBf16, kBf16, how.id, &plan.algorithm) != 0) {
    return plan;
  }
  // CUBLASLT_ALGO_CONFIG_ TILE_ID 1, SPLITK_NUM 2, REDUCTION_SCHEME 3, CTA_SWIZZLING 4, CUSTOM_OPTION 5, STAGES_ID 6,
  // INNER_SHAPE_ID 7 and CLUSTER_SHAPE_ID 8 (both 16 bits). The check below judges all of them together.
  const uint32_t wide[] = {how.tile, 1, 0, how.swizzle, how.custom, how.stages};
  const uint16_t narrow[] = {static_cast<uint16_t>(how.inner), static_cast<uint16_t>(how.cluster)};
  for (int i = 0; i < 6; ++i) {
    if (library.set(&plan.algorithm, 1 + i, &wide[i], sizeof wide[i]) != 0) return plan;
  }
  for (int i = 0; i < 2; ++i) {
    if (library.set(&plan.algorithm, 7 + i, &narrow[i], sizeof narrow[i]) != 0) return plan;
  }
  Heuristic answer{};
  plan.usable = library.check(plan.handle, plan.desc, plan.w, plan.x, plan.out, plan.out, &plan.algorithm, &answer) == 0 &&
                answer.workspace == 0;
  return plan;
}

}  // namespace

void library_product(Matrix x, Matrix w, void* out, LibraryAlgorithm how, int device, cudaStream_t stream) {
  using Key = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int64_t, std::array<uint32_t, 7>>;
  static std::mutex mutex;
  static std::map<Key, Plan> plans;
  static const Library library;
  Plan plan;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const Key key{device,
                  x.rows,
                  w.rows,
                  x.cols,
                  x.stride,
                  w.stride,
                  {static_cast<uint32_t>(how.id), how.tile, how.swizzle, how.custom, how.stages, how.inner, how.cluster}};
    auto found = plans.find(key);
    if (found == plans.end()) found = plans.emplace(key, make(library, device, x, w, how)).first;
    plan = found->second;
  }
  if (!plan.usable) throw std::runtime_error("no such algorithm: this cuBLASLt does not have it for these sizes");
  const float one = 1.0f, zero = 0.0f;
  const int status = library.matmul(plan.handle, plan.desc, &one, w.data, plan.w, x.data, plan.x, &zero, out, plan.out, out,
                                    plan.out, &plan.algorithm, nullptr, 0, stream);
  if (status != 0) throw std::runtime_error("cublasLtMatmul: status " + std::to_string(status));
}

}  // namespace rlk::sm90
