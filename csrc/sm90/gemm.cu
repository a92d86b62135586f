// Tensor maps and launches of the matrix-product kernels.
#include "gemm.cuh"
#include "gemm_launch.cuh"

namespace rlk::sm90 {
namespace {

constexpr int kGroup = 8;  // column tiles side by side (in the last group up to 15): 2048 rows of B stay in L2 while A streams

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

Encode encoder() {
  static const Encode found = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &result),
          "cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess) throw std::runtime_error("the CUDA driver has no tensor maps");
    return reinterpret_cast<Encode>(symbol);
  }();
  return found;
}

// Setting the device that is current anyway gives the calling thread a context.
void make_context() {
  int device = 0;
  check(cudaGetDevice(&device), "current device");
  check(cudaSetDevice(device), "context of this thread");
}

}  // namespace

CUtensorMap tensor_map(const Matrix& matrix, int box_cols, int box_rows, int swizzle) {
  CUtensorMap map;
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(matrix.cols), static_cast<cuuint64_t>(matrix.rows)};
  const cuuint64_t stride[1] = {static_cast<cuuint64_t>(matrix.stride) * 2};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_cols), static_cast<cuuint32_t>(box_rows)}, step[2] = {1, 1};
  const CUtensorMapSwizzle swizzled = swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  auto encode = [&] {
    return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, matrix.data, size, stride, box, step,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, swizzled, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = encode();
  // The driver asks for a context of the calling thread. One that has made no CUDA call yet has none, as autograd's may where
  // memory comes from torch's cache and this is its first operator. A context that the caller has made current stays.
  if (status == CUDA_ERROR_INVALID_CONTEXT || status == CUDA_ERROR_NOT_INITIALIZED) {
    make_context();
    status = encode();
  }
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("no tensor map for a matrix of " + std::to_string(matrix.rows) + " x " +
                             std::to_string(matrix.cols) + ", row stride " + std::to_string(matrix.stride) +
                             ": data must be 16-byte aligned and the stride a multiple of 8 (driver error " +
                             std::to_string(static_cast<int>(status)) + ")");
  }
  return map;
}

namespace {

void shape(Problem& problem, int64_t rows, int64_t cols, int64_t depth, Dynamic dynamic) {
  problem.rows = static_cast<int>(rows);
  problem.cols = static_cast<int>(cols);
  problem.depth = static_cast<int>(depth);
  problem.group = kGroup;
  problem.dynamic = dynamic;
}

void output(Problem& problem, const Matrix& out) {
  problem.out = static_cast<__nv_bfloat16*>(out.data);
  problem.out_stride = out.stride;
}

Vocabulary vocabulary(const Rows& rows, int64_t keep) {
  Vocabulary v{};
  v.columns = rows.columns;
  v.leaves = rows.leaves;
  v.keep = static_cast<int>(keep);
  v.start = rows.start;
  v.targets = rows.targets;
  v.temperatures = rows.temperatures;
  v.leaf_max = rows.leaf_max;
  v.leaf_sum = rows.leaf_sum;
  v.leaf_mean = rows.leaf_mean;
  v.target_logit = rows.target_logit;
  v.table = rows.table;
  return v;
}

// statistics: else gradients.
Params logits_params(const Matrix& hidden, const Matrix& weight, const Rows& rows, const Matrix& out, bool statistics,
                     int* counter) {
  Params params{};
  Problem& problem = params.problem[0];
  problem.a = tensor_map(hidden, kTileK, kTileM);
  problem.b = tensor_map(weight, kTileK, kTileN / kCluster);
  params.carried = tensor_map(hidden, kTileK, kCarried / kCluster);
  shape(problem, hidden.rows, weight.rows, hidden.cols, kRows);
  output(problem, out);
  if (out.data != nullptr) {  // whole groups of 8 columns: up to 7 of padding are written
    const Matrix written{out.data, out.rows, ceil_div(out.cols, 8) * 8, out.stride};
    params.stores = tensor_map(written, kLeaf / 2, statistics && may_carry(problem) ? 8 : 16);
  }
  params.problems = 1;
  params.vocabulary = vocabulary(rows, out.data != nullptr ? out.cols : 0);
  params.active = rows.active;
  params.skipped = rows.skipped;
  if (rows.whole.data != nullptr) {
    params.whole = tensor_map(rows.whole, kTileK, kTileM);
    params.whole_carried = tensor_map(rows.whole, kTileK, kCarried / kCluster);
    params.whole_rows = static_cast<int>(rows.whole.rows);
  }
  params.counter = counter;
  return params;
}

}  // namespace

void statistics(Matrix hidden, Matrix weight, Rows rows, Matrix kept, int* counter, cudaStream_t stream) {
  if (hidden.rows == 0 || weight.rows == 0) return;
  launch_statistics(logits_params(hidden, weight, rows, kept, true, counter), stream);
}

void recompute(Matrix hidden, Matrix weight, Rows rows, Matrix dlogits, int* counter, cudaStream_t stream) {
  if (hidden.rows == 0 || weight.rows == 0) return;
  launch_gradient(logits_params(hidden, weight, rows, dlogits, false, counter), stream);
}

namespace {

template <bool Tall, bool Columns>
void launch(const Params& params, cudaStream_t stream) {
  once_a_device([](int) {
    check(cudaFuncSetAttribute(gemm_kernel<Tall, Columns>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytesShared),
          "shared memory");
    return 0;
  });
  launch_clusters(gemm_kernel<Tall, Columns>, params, stream);
}

}  // namespace

bool rounds_directly(int64_t tokens, int64_t columns) {
  return columns > static_cast<int64_t>(kBlockTiles) * kTileK && tokens_a_tile(static_cast<int>(tokens), kTileN) == 0;
}

void backward(Backward task, int* counter, cudaStream_t stream) {
  const int64_t tokens = task.hidden.rows, width = task.hidden.cols, vocabulary_size = task.dlogits.cols;
  if (tokens == 0 || width == 0) return;
  // Tiles of dw have tiles of k enough, or take a few of zeros as well because few rows take part. They store 16 bytes at a
  // time.
  const bool tall = task.dw == nullptr || (task.dw_init == nullptr && tokens > (kTallLeast - 1) * kTileK &&
                                           reinterpret_cast<uintptr_t>(task.dw) % 16 == 0);
  Params params{};
  params.counter = counter;
  params.active = task.active;
  params.skipped = task.skipped;
  if (task.dh != nullptr) {
    Problem& problem = params.problem[params.problems++];
    problem.a = tensor_map(task.dlogits, kTileK, kTileM);
    problem.b = tensor_map(task.weight, 64, kTileK);
    // As many as suit all tokens: where fewer take part, the kernel chooses a number up to that, or tokens as rows. Rows that
    // are rounded on their way are always rows, and so are those beside tiles of dw that are not tall (few tokens, or chunks of
    // them).
    const int columns = tokens_a_tile(static_cast<int>(tokens), kTileN);
    problem.most = task.rounded != nullptr || !tall ? 0 : columns > 0 ? columns : kTileN;
    if (problem.most > 0) {
      problem.box = (problem.most / kCluster + 7) / 8 * 8;
      problem.tokens[0] = tensor_map(task.dlogits, kTileK, problem.box);
      problem.tokens[1] = tensor_map(task.dlogits, kTileK, problem.most - problem.box);
    }
    shape(problem, tokens, width, task.columns, kRows);
    problem.k_begin = static_cast<int>(task.first_column);
    problem.output = kBlocks;
    problem.out_float = task.dh;
    problem.continues = task.dh_continues;
    problem.order = task.order;
    problem.rounded = static_cast<__nv_bfloat16*>(task.rounded);
    problem.row_of = task.row_of;
  }
  if (task.kept != nullptr) {
    if (task.dh == nullptr || task.first_column != 0) {
      throw std::runtime_error("kept logits become gradients for dh, from the first column on");
    }
    Kept& kept = params.kept;
    kept.values = static_cast<__nv_bfloat16*>(task.dlogits.data);
    kept.stride = task.dlogits.stride;
    kept.leaf_max = task.kept->leaf_max;
    kept.leaves = task.kept->leaves;
    kept.start = task.kept->start;
    kept.targets = task.kept->targets;
    kept.table = task.table;
    kept.next = task.jobs;
    kept.finished = task.jobs + 1;
    kept.left = task.jobs + 2;
  }
  if (task.dw != nullptr) {
    Problem& problem = params.problem[params.problems++];
    problem.a = tall ? tensor_map(task.dlogits, kTallChunk, kTileK, 64) : tensor_map(task.dlogits, 64, kTileK);
    problem.b = tensor_map(task.hidden, 64, kTileK);
    if (task.whole.data != nullptr) {
      params.whole = tensor_map(task.whole, 64, kTileK);
      params.whole_rows = static_cast<int>(task.whole.rows);
    }
    problem.transposed_a = 1;
    shape(problem, vocabulary_size, width, tokens, kDepth);
    problem.init = task.dw_init;
    problem.output = task.dw_output;
    problem.out_float = static_cast<float*>(task.dw);
    problem.least = tall ? kTallLeast : 0;
    if (problem.output == kBf16) {
      params.stores = tensor_map({task.dw, vocabulary_size, width, width}, 64, tall ? kTallColumns : 16);
    }
  }
  if (task.kept != nullptr) {
    before_products(params, *task.kept, *task.upstream, task.table, clusters_of(params), stream);
  }
  if (!tall) {
    launch<false, false>(params, stream);
  } else if (params.problem[0].most > 0) {
    launch<true, true>(params, stream);
  } else {
    launch<true, false>(params, stream);
  }
}

}  // namespace rlk::sm90
