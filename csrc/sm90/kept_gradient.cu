// In front of a product kernel that makes the gradients of kept logits beside its tiles.
#include "dependent.cuh"
#include "gemm_launch.cuh"
#include "kept_gradient.cuh"
#include "row_grad.cuh"

namespace rlk::sm90 {
namespace {

constexpr int kThreadsBefore = 256, kWarpsBefore = kThreadsBefore / 32;

// The first `others` blocks write the table of rows, zeros, and what units lack; the others make the first units.
__global__ void __launch_bounds__(kThreadsBefore)
    before_products_kernel(const __grid_constant__ Params params, const __grid_constant__ Rows rows,
                           const __grid_constant__ Upstream upstream, float* table, int clusters, unsigned others) {
  __shared__ KeptShape shape;
  await_previous();
  const Kept& kept = params.kept;
  const int active = static_cast<int>(max(active_of(rows.active, rows.skipped, INT_MAX), static_cast<int64_t>(0)));
  const bool makes = blockIdx.x >= others;
  set_rows_to_zero(upstream);
  if (threadIdx.x == 0) {
    Shape dh;
    dh.set<kStore, true>(params.problem[0], active, false);
    shape.set(dh, params.problem[0], clusters);
  }
  const unsigned thread = blockIdx.x * kThreadsBefore + threadIdx.x, threads = others * kThreadsBefore;
  if (!makes) {
    set_zeros(upstream, others);
    const int count = min(active, params.problem[0].rows);
    for (int slot = static_cast<int>(thread); slot < count; slot += static_cast<int>(threads)) {
      write_row(table, slot, row_grad(rows, upstream, slot));
    }
  }
  __syncthreads();
  if (!makes) {
    for (int i = static_cast<int>(thread); i < shape.units; i += static_cast<int>(threads)) {
      int group, at;
      shape.place(i, group, at);
      if (at < shape.across) kept.left[at * shape.groups + group] = i < shape.head ? 0 : -shape.count(group, at);
    }
    if (thread == 0) *kept.next = *kept.finished = shape.jobs(shape.head);
    return;
  }
  const int jobs = shape.jobs(shape.head), step = static_cast<int>(gridDim.x - others) * kWarpsBefore;
  for (int i = static_cast<int>(blockIdx.x - others) * kWarpsBefore + static_cast<int>(threadIdx.x) / 32; i < jobs; i += step) {
    const KeptJob job = shape.job(i);
    if (job.row < 0) continue;
    make_gradients<8>(kept, shape, job, threadIdx.x % 32, [&](int row) { return row_grad(rows, upstream, row); });
  }
}

}  // namespace

void before_products(const Params& params, const Rows& rows, const Upstream& upstream, float* table, int clusters,
                     cudaStream_t stream) {
  const Problem& problem = params.problem[0];
  const int64_t tokens = problem.rows;
  const int64_t units = ceil_div(tokens, kUnitRows) * static_cast<int64_t>(ceil_div(problem.depth, kUnitColumns));
  const int64_t slices = ceil_div(std::min<int64_t>(tokens, kUnitRows), kJobRows);
  const int64_t jobs = units / kHead * slices * kUnitAcross;
  const unsigned others = blocks(tokens, kThreadsBefore);
  const unsigned most = static_cast<unsigned>(clusters) * kCluster * 3;  // of three blocks on a processor
  launch_dependent("gradients before products", before_products_kernel,
                   {others + std::min(blocks(jobs, kWarpsBefore), most), kThreadsBefore}, stream, params, rows, upstream, table,
                   clusters, others);
}

}  // namespace rlk::sm90
