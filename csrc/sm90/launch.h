// Host entry points of the Hopper kernels: plain pointers and sizes, no torch types.
#pragma once
#include <cuda_runtime.h>
#include <cstdint>

namespace rlk::sm90 {

struct Matrix {
  void* data = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;  // stride in elements between rows; columns are contiguous
};

// Values by row, [T] or [T, leaves]; null where an operator does not use them.
struct Rows {
  const int64_t* targets = nullptr;  // global columns where `start` is one, else local ones; -1: another rank owns it
  const float* temperatures = nullptr;  // null: 1
  int64_t start = 0;  // column of the first one at hand, global or local as targets are
  int columns = 0;    // columns at hand that are real vocabulary
  int leaves = 0;
  float *leaf_max = nullptr, *leaf_sum = nullptr, *leaf_mean = nullptr, *target_logit = nullptr;
  const float* table = nullptr;  // [T, 8]: what the gradient of a row needs (row_table); others make their own
  // Of the T rows the first `*active - skipped` take part, all without a pointer.
  const int* active = nullptr;
  int skipped = 0;
  Matrix whole;  // hidden states by row: read instead of those by slot where all of its rows take part; null: never
};

// Statistics of the leaves of hidden weight^T / temperature; kept.data != null also writes bf16 exp(z - leaf_max) of its
// columns: all, or a multiple of 256 of the first ones (hidden size above 256).
void statistics(Matrix hidden, Matrix weight, Rows rows, Matrix kept, int* counter, cudaStream_t stream);
// bf16 gradient of the logits, recomputed from hidden and weight.
void recompute(Matrix hidden, Matrix weight, Rows rows, Matrix dlogits, int* counter, cudaStream_t stream);

struct Upstream;
struct Backward {
  Matrix dlogits, weight, hidden;
  int64_t first_column = 0, columns = 0;  // columns of dlogits that dh reduces over
  float* dh = nullptr;                    // [T, H], blocks of 16384 columns added in order
  bool dh_continues = false;              // the first block is added as well
  int* order = nullptr;                   // zeros, 4 for each 256 x 256 of dh
  // Not null, where rounds_directly: dh ends here as bf16, row row_of[i] for row i, and `dh` has sums of the blocks before.
  void* rounded = nullptr;
  const int64_t* row_of = nullptr;
  void* dw = nullptr;  // [V, H]
  int dw_output = 0;   // 0 bf16, 1 fp32, 2 fp32 += sum
  const float* dw_init = nullptr;
  const int* active = nullptr;  // as in Rows
  int skipped = 0;
  Matrix whole;
  // Not null: dlogits are kept bf16 exp(z - leaf_max) of these rows, from the first of their leaves on. They become gradients
  // while the products run, and `table` [T, 8] is written (row_table). For dh, and without upstream gradients of entropy.
  const Rows* kept = nullptr;
  const Upstream* upstream = nullptr;
  float* table = nullptr;
  int* jobs = nullptr;  // kept_jobs of them
};
// Two counters, and one for each unit of kept logits (kept_gradient.cuh).
constexpr int kKeptUnitRows = 1024, kKeptUnitColumns = 512;
constexpr int64_t kept_jobs(int64_t tokens, int64_t columns) {
  return 2 + (tokens + kKeptUnitRows - 1) / kKeptUnitRows * ((columns + kKeptUnitColumns - 1) / kKeptUnitColumns);
}
// Whether the last block of dh may be rounded on its way: there are others, and tokens are rows of the tiles.
bool rounds_directly(int64_t tokens, int64_t columns);
// dh = dlogits weight and dw = dlogits^T hidden, in one launch; with `kept` a kernel in front of it.
void backward(Backward task, int* counter, cudaStream_t stream);

// Rows whose target is not `ignore` are numbered 0 to *active - 1 in order ("slots"), the others follow.
struct Prepare {
  Matrix hidden;
  int64_t tokens = 0, ignore = 0;
  const int64_t* targets = nullptr;
  const float* temperatures = nullptr;
  float absent = 0.0f;             // start of target_logit
  int* active = nullptr;           // number of rows that take part; `counters` - 1 zeros follow
  int counters = 0;
  int64_t *order = nullptr, *picked_targets = nullptr;  // [T] row of a slot; target of a slot
  int* place = nullptr;            // [T] slot of a row, -1 if it does not take part
  float *picked_temperatures = nullptr, *target_logit = nullptr;  // [T] by slot
  void* picked = nullptr;          // [T, H] hidden states by slot
  bool whole = false;              // not written where all rows take part: then the hidden states are as they should be
  float* out = nullptr;            // [5, T], zero in rows that do not take part
};
void prepare(Prepare task, cudaStream_t stream);

// All leaves of the vocabulary are here: (logp, lse, entropy, m, log l) into out [5, total], row order[i] for slot i.
void merge(Rows rows, int64_t tokens, const int64_t* order, float* out, int64_t total, cudaStream_t stream);

// Results of the forward pass and upstream gradients, all by row: what the gradients of logits depend on.
struct Upstream {
  const float *max = nullptr, *log_sum = nullptr, *entropy = nullptr;
  const float* grad[3] = {};       // of logp, lse, entropy; null: zero
  int64_t grad_stride[3] = {};
  const int64_t* order = nullptr;  // row of a slot
  int* zeros = nullptr;            // set to zero as well: counters of the launches that follow
  int64_t zero_count = 0;
  Matrix zero_rows;                // bf16, its rows that take no part as well, of which `place` is -1
  const int* place = nullptr;
};
// Values of rows [T, 8] by slot, for `recompute`.
void row_table(Rows rows, Upstream upstream, int64_t tokens, float* table, cudaStream_t stream);
// out[row] = bf16(values[place[row]]), 0 where place is -1.
void place_rows(const float* values, const int* place, Matrix out, cudaStream_t stream);
// Values of aligned subtrees of the local leaves, given as pairs (begin, end): nodes [slots, 2, T] of (l, u).
void tree_nodes(Rows rows, const float* m, const int* ranges, int count, float* nodes, int64_t tokens, cudaStream_t stream);
// Remaining adds of the tree (pairs of slots, -1 is zero) in nodes [slots + merges, 2, T], then (logp, lse, entropy,
// log l) [4, T] of the last merge, or of slot `root` without merges.
void finish(float* nodes, int slots, const int* merges, int count, int root, const float* m, const float* target_logit,
            float* out, int64_t tokens, cudaStream_t stream);
// Kept bf16 exp(z - leaf_max) becomes the bf16 gradient of the logits, in place.
void gradient_in_place(Rows rows, Upstream upstream, Matrix kept, cudaStream_t stream);
// Statistics of the leaves of fp32 logits.
void logits_statistics(Rows rows, Matrix logits, cudaStream_t stream);
// How few_rows runs: rows of w a tile (32 or 64), blocks a processor (1 or 2), and whether it may start while the kernel in
// front still runs (it then only prefetches w until that one has finished).
struct FewRowsLaunch {
  int rows = 32, per_processor = 1;
  bool dependent = false;
};
// out[M, N] = x[M, K] w[N, K]^T for M up to 128; K in segments of a multiple of 256, merged in a tree (32 rows a tile).
void few_rows(Matrix x, Matrix w, int segments, void* out, bool wide, FewRowsLaunch how, cudaStream_t stream);
// out[M, N] = a[M, K] b[N, K]^T, or a[M, K] b[K, N] when transposed. K has `parts` equal parts; segment s is slice s of
// each part, one chain; 2, 4 or 8 segments merge in a tree. A slice is a multiple of 64, N one of 8.
void segments(Matrix a, Matrix b, bool transposed, int count, int parts, void* out, bool wide, cudaStream_t stream);
// An algorithm of cuBLASLt by its attributes (CUBLASLT_ALGO_CONFIG_).
struct LibraryAlgorithm {
  int id = 0;
  uint32_t tile = 0, swizzle = 0, custom = 0, stages = 0, inner = 0, cluster = 0;
};
// bf16 out[M, N] = x[M, K] w[N, K]^T by that algorithm without split-K; throws where the library does not have it.
void library_product(Matrix x, Matrix w, void* out, LibraryAlgorithm how, int device, cudaStream_t stream);
// left += right, `count` a multiple of 4.
void accumulate(float* left, const float* right, int64_t count, cudaStream_t stream);
// x and y *= *factor in bf16 arithmetic, not touched where the factor is 1.
void scale(void* x, int64_t x_count, void* y, int64_t y_count, const float* factor, cudaStream_t stream);
void elementwise(const float* x, float* y, int64_t count, bool logarithm, cudaStream_t stream);

}  // namespace rlk::sm90
