// Causal attention over packed sequences and over a paged cache (see rl_kernel/ops/attention/reference.py).
//
// Both call sites run the same code on a block of 32 keys at a time, from position 0 of the sequence; where the keys
// come from (packed rows or pages) and which rows share a block cannot change a row's bits.
#include <algorithm>
#include <tuple>
#include <vector>

#include "cpu/primitives.h"

namespace rlk {
namespace {

constexpr int kBlock = 32;      // keys in one step of the online softmax: a field of the contract
constexpr int64_t kQueries = 32;  // queries of one work item: a matter of speed only
constexpr int kWide = 8;        // vectors of eight columns held in registers

inline int64_t padded(int64_t d) { return (d + 15) / 16 * 16; }

std::vector<int64_t> host_index(const Tensor& t_, const char* what) {
  Tensor t = dense(t_);
  std::vector<int64_t> v(size_t(t.numel()));
  if (t.scalar_type() == ScalarType::Int) {
    std::copy_n(data<int32_t>(t), v.size(), v.begin());
  } else {
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long, what, " must be int32 or int64");
    std::copy_n(data<int64_t>(t), v.size(), v.begin());
  }
  return v;
}

void check_offsets(const std::vector<int64_t>& cu, int64_t tokens, const char* what) {
  STD_TORCH_CHECK(!cu.empty() && cu[0] >= 0, "attention: ", what, " must hold B + 1 offsets from 0 on");
  for (size_t i = 1; i < cu.size(); ++i) STD_TORCH_CHECK(cu[i] >= cu[i - 1], "attention: ", what, " must not decrease");
  STD_TORCH_CHECK(cu.back() <= tokens, "attention: ", what, " ends at ", cu.back(), " but there are ", tokens, " tokens");
}

// [T, h, D] with contiguous D and any other strides.
Tensor with_unit_stride(const Tensor& t) { return t.numel() == 0 || t.stride(2) == 1 ? t : dense(t); }

// n values widened to fp32, then +0.0 up to width.
template <class T>
RLK_INLINE void widen(const T* from, int64_t n, int64_t width, float* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(to + i, load8(from + i));
  for (; i < n; ++i) to[i] = to_float(from[i]);
  for (; i < width; ++i) to[i] = 0.0f;
}
template <class T>
RLK_INLINE void narrow(const float* from, int64_t n, T* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(to + i, load8(from + i));
  for (; i < n; ++i) to[i] = from_float<T>(from[i]);
}

// to[j] = dot16(x, rows[j]) for j < n; up to three values more are written.
RLK_INLINE void dots(const float* x, const float* const* rows, int64_t n, int64_t width, float* to) {
  for (int64_t j = 0; j < n; j += 4) {
    const float* r[4];
    for (int64_t i = 0; i < 4; ++i) r[i] = rows[std::min(j + i, n - 1)];
    _mm_storeu_ps(to + j, dots4(x, r, width));
  }
}

// o[0 .. 8 N) = o * scale, then fma of weight[j] * rows[j] for j < n ascending.
template <int N>
RLK_INLINE void mix(float* o, V8 scale, const float* weight, const float* const* rows, int64_t n, int64_t offset) {
  V8 acc[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) acc[i] = load8(o + offset + 8 * i) * scale;
  for (int64_t j = 0; j < n; ++j) {
    const V8 w = splat(weight[j]);
    const float* row = rows[j] + offset;
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) acc[i] = fma(w, load8(row + 8 * i), acc[i]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) store8(o + offset + 8 * i, acc[i]);
}
RLK_INLINE void mix_all(float* o, V8 scale, const float* weight, const float* const* rows, int64_t n, int64_t width) {
  int64_t c = 0;
  for (; c + 8 * kWide <= width; c += 8 * kWide) mix<kWide>(o, scale, weight, rows, n, c);
  for (; c < width; c += 16) mix<2>(o, scale, weight, rows, n, c);
}

// One row takes one block of n keys into its state (m, l, o).
template <class T>
RLK_INLINE void take_block(const float* q, const float* const* k, const float* const* v, int64_t n, int64_t width, float scale,
                           float* m, float* l, float* o) {
  alignas(32) float s[kBlock + 4];
  dots(q, k, n, width, s);
  for (int64_t j = n; j < kBlock; ++j) s[j] = -std::numeric_limits<float>::infinity();
  V8 x[4], top = splat(*m);
  for (int i = 0; i < 4; ++i) {
    x[i] = load8(s + 8 * i) * splat(scale);
    if (8 * i + 8 > n) {  // a negative scale must not turn the padding into +inf
      const V8 none = splat(-std::numeric_limits<float>::infinity());
      const __m256 in = _mm256_castsi256_ps(lanes_below(int(std::max<int64_t>(0, n - 8 * i))));
      x[i] = {_mm256_blendv_ps(none.v, x[i].v, in)};
    }
    top = max(x[i], top);
  }
  alignas(32) float tops[8];
  store8(tops, top);
  float now = tops[0];
  for (int i = 1; i < 8; ++i) now = max(tops[i], now);
  const float a = exp(*m - now);
  V8 sums[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 in = _mm256_castsi256_ps(lanes_below(int(std::max<int64_t>(0, n - 8 * i))));
    V8 p = exp(x[i] - splat(now));
    if (8 * i + 8 > n) p = {_mm256_and_ps(p.v, in)};
    sums[i] = p;
    store8(s + 8 * i, round_to<T>(p));
  }
  *l = *l * a + tree4(trees8(sums[0], sums[1], sums[2], sums[3]));
  *m = now;
  mix_all(o, splat(a), s, v, n, width);
}

// Queries [q_first, q_first + q_count) of one sequence and the `group` query heads of one kv head. Query i of the
// sequence sees keys 0 .. base + i. locate(j, &k, &v) gives the addresses of key j.
template <class T, class Locate>
void attend(const T* q, int64_t q_token, int64_t q_head, int64_t group, int64_t q_first, int64_t q_count, int64_t base,
            int64_t d, float scale, const Locate& locate, T* out, int64_t out_token, float* lse, int64_t lse_token) {
  const int64_t width = padded(d), rows = group * q_count;
  const bool direct = sizeof(T) == 4 && d == width;
  std::vector<float> buffer(size_t(rows * (2 * width + 2) + (direct ? 0 : 2 * kBlock * width)));
  float *qs = buffer.data(), *o = qs + rows * width, *m = o + rows * width, *l = m + rows, *keys = l + rows;
  for (int64_t i = 0; i < q_count; ++i) {
    for (int64_t h = 0; h < group; ++h) {
      widen(q + (q_first + i) * q_token + h * q_head, d, width, qs + (i * group + h) * width);
    }
  }
  std::fill_n(m, rows, -std::numeric_limits<float>::infinity());
  const float *k[kBlock], *v[kBlock];
  const int64_t last = base + q_first + q_count;  // keys that the last query sees
  for (int64_t j0 = 0; j0 < last; j0 += kBlock) {
    const int64_t here = std::min<int64_t>(kBlock, last - j0);
    for (int64_t j = 0; j < here; ++j) {
      const T *pk, *pv;
      locate(j0 + j, &pk, &pv);
      if (direct) {
        k[j] = reinterpret_cast<const float*>(pk), v[j] = reinterpret_cast<const float*>(pv);
      } else {
        float *wk = keys + 2 * j * width, *wv = wk + width;
        widen(pk, d, width, wk), widen(pv, d, width, wv);
        k[j] = wk, v[j] = wv;
      }
    }
    for (int64_t i = std::max<int64_t>(0, j0 - base - q_first); i < q_count; ++i) {
      const int64_t n = std::min<int64_t>(kBlock, base + q_first + i + 1 - j0);
      for (int64_t r = i * group; r < (i + 1) * group; ++r) {
        take_block<T>(qs + r * width, k, v, n, width, scale, m + r, l + r, o + r * width);
      }
    }
  }
  for (int64_t i = 0; i < q_count; ++i) {
    for (int64_t h = 0; h < group; ++h) {
      const int64_t r = i * group + h;
      float* row = o + r * width;
      for (int64_t c = 0; c < width; c += 8) store8(row + c, load8(row + c) / splat(l[r]));
      narrow(row, d, out + (q_first + i) * out_token + h * d);
      if (lse) lse[(q_first + i) * lse_token + h] = m[r] + log(l[r]);
    }
  }
}

struct Item {
  int64_t sequence, first, count;
};

std::vector<Item> work_items(const std::vector<int64_t>& cu_q) {
  std::vector<Item> items;
  for (size_t b = 0; b + 1 < cu_q.size(); ++b) {
    const int64_t n = cu_q[b + 1] - cu_q[b];
    for (int64_t first = 0; first < n; first += kQueries) {
      items.push_back({int64_t(b), first, std::min(kQueries, n - first)});
    }
  }
  return items;
}

// Rows outside every sequence (padding of the call) are zero.
Tensor output_rows(const Tensor& q, std::initializer_list<int64_t> sizes, const std::vector<int64_t>& cu,
                   std::optional<ScalarType> dtype = std::nullopt) {
  const bool whole = cu.front() == 0 && cu.back() == q.size(0);
  return whole ? torch::stable::new_empty(q, sizes, dtype) : torch::stable::new_zeros(q, sizes, dtype);
}

void check_heads(const Tensor& q, const Tensor& k, const Tensor& v, int64_t kv_heads) {
  STD_TORCH_CHECK(kv_heads > 0 && q.size(1) % kv_heads == 0, "attention: ", q.size(1), " query heads are not a multiple of ",
                  kv_heads, " kv heads");
  STD_TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(),
                  "attention: q, k and v must have one dtype");
}

std::tuple<Tensor, Tensor> varlen_forward(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& cu_q_,
                                          const Tensor& cu_k_, double scale) {
  Tensor q = with_unit_stride(q_), k = with_unit_stride(k_), v = with_unit_stride(v_);
  const std::vector<int64_t> cu_q = host_index(cu_q_, "cu_seqlens_q"), cu_k = host_index(cu_k_, "cu_seqlens_k");
  const int64_t t = q.size(0), heads = q.size(1), d = q.size(2), kv_heads = k.size(1), group = heads / kv_heads;
  check_heads(q, k, v, kv_heads);
  check_offsets(cu_q, t, "cu_seqlens_q");
  check_offsets(cu_k, k.size(0), "cu_seqlens_k");
  STD_TORCH_CHECK(cu_q.size() == cu_k.size(), "attention: cu_seqlens_q and cu_seqlens_k must have one length");
  for (size_t b = 0; b + 1 < cu_q.size(); ++b) {
    STD_TORCH_CHECK(cu_k[b + 1] - cu_k[b] >= cu_q[b + 1] - cu_q[b], "attention: sequence ", b, " has fewer keys than queries");
  }
  Tensor out = output_rows(q, {t, heads, d}, cu_q), lse = output_rows(q, {t, heads}, cu_q, ScalarType::Float);
  const std::vector<Item> items = work_items(cu_q);
  double pairs = 0;
  for (size_t b = 0; b + 1 < cu_q.size(); ++b) pairs += double(cu_q[b + 1] - cu_q[b]) * double(cu_k[b + 1] - cu_k[b]);
  dispatch(q.scalar_type(), "attention", [&](auto qt) {
    using T = decltype(qt);
    const T *pq = data<T>(q), *pk = data<T>(k), *pv = data<T>(v);
    T* po = data<T>(out);
    float* pl = data<float>(lse);
    const int64_t qs = q.stride(0), qh = q.stride(1), ks = k.stride(0), kh = k.stride(1);
    const int64_t vs = v.stride(0), vh = v.stride(1);
    const double cost = pairs * double(group * (d + 16)) / double(items.size() + 1) / 2.0;
    parallel_for(int64_t(items.size()) * kv_heads, cost, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Item& item = items[size_t(i / kv_heads)];
        const int64_t h = i % kv_heads, b = item.sequence, q0 = cu_q[b], k0 = cu_k[b];
        const int64_t base = (cu_k[b + 1] - k0) - (cu_q[b + 1] - q0);
        attend(
            pq + q0 * qs + h * group * qh, qs, qh, group, item.first, item.count, base, d, float(scale),
            [&](int64_t j, const T** kj, const T** vj) {
              *kj = pk + (k0 + j) * ks + h * kh;
              *vj = pv + (k0 + j) * vs + h * vh;
            },
            po + (q0 * heads + h * group) * d, heads * d, pl + q0 * heads + h * group, heads);
      }
    });
  });
  return {out, lse};
}

// caches [blocks, block size, kv heads, D], any strides but the last
Tensor paged_forward(const Tensor& q_, const Tensor& k, const Tensor& v, const Tensor& table_, const Tensor& cu_q_,
                     const Tensor& seq_lens_, double scale) {
  Tensor q = with_unit_stride(q_), table = dense(table_);
  const std::vector<int64_t> cu_q = host_index(cu_q_, "cu_seqlens_q"), lens = host_index(seq_lens_, "seq_lens");
  const int64_t t = q.size(0), heads = q.size(1), d = q.size(2), kv_heads = k.size(2), group = heads / kv_heads;
  const int64_t blocks = k.size(0), size = k.size(1), columns = table.size(1);
  check_heads(q, k, v, kv_heads);
  check_offsets(cu_q, t, "cu_seqlens_q");
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Int, "attention: block_table must be int32");
  STD_TORCH_CHECK(k.stride(3) == 1 && v.stride(3) == 1, "attention: the last dimension of the caches must be contiguous");
  STD_TORCH_CHECK(lens.size() + 1 == cu_q.size() && table.size(0) >= int64_t(lens.size()),
                  "attention: seq_lens [B], cu_seqlens_q [B + 1] and block_table [B, pages] must agree");
  const int32_t* pages = data<int32_t>(table);
  double pairs = 0;
  for (size_t b = 0; b < lens.size(); ++b) {
    const int64_t n = cu_q[b + 1] - cu_q[b];
    if (n == 0) continue;  // a padded slot of the call
    STD_TORCH_CHECK(lens[b] >= n, "attention: sequence ", b, " has seq_len ", lens[b], " and ", n, " queries");
    STD_TORCH_CHECK(lens[b] <= columns * size, "attention: sequence ", b, " has seq_len ", lens[b], " and block_table holds ",
                    columns, " pages of ", size);
    for (int64_t p = 0; p * size < lens[b]; ++p) {
      const int32_t page = pages[int64_t(b) * columns + p];
      STD_TORCH_CHECK(page >= 0 && page < blocks, "attention: block_table[", b, ", ", p, "] = ", page, " must lie in [0, ",
                      blocks, ")");
    }
    pairs += double(n) * double(lens[b]);
  }
  Tensor out = output_rows(q, {t, heads, d}, cu_q);
  const std::vector<Item> items = work_items(cu_q);
  dispatch(q.scalar_type(), "attention", [&](auto qt) {
    using T = decltype(qt);
    const T *pq = data<T>(q), *pk = data<T>(k), *pv = data<T>(v);
    T* po = data<T>(out);
    const int64_t qs = q.stride(0), qh = q.stride(1);
    const int64_t kb = k.stride(0), kt = k.stride(1), kh = k.stride(2);
    const int64_t vb = v.stride(0), vt = v.stride(1), vh = v.stride(2);
    const double cost = pairs * double(group * (d + 16)) / double(items.size() + 1) / 2.0;
    parallel_for(int64_t(items.size()) * kv_heads, cost, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Item& item = items[size_t(i / kv_heads)];
        const int64_t h = i % kv_heads, b = item.sequence, q0 = cu_q[b];
        const int32_t* row = pages + b * columns;
        attend(
            pq + q0 * qs + h * group * qh, qs, qh, group, item.first, item.count, lens[b] - (cu_q[b + 1] - q0), d, float(scale),
            [&](int64_t j, const T** kj, const T** vj) {
              const int64_t page = row[j / size], slot = j % size;
              *kj = pk + page * kb + slot * kt + h * kh;
              *vj = pv + page * vb + slot * vt + h * vh;
            },
            po + (q0 * heads + h * group) * d, heads * d, static_cast<float*>(nullptr), 0);
      }
    });
  });
  return out;
}

// Gradient of one sequence and one kv head. Query heads of the group outside, tokens ascending inside: the order in
// which a key's accumulators take their terms. Four queries at a time share the loads of a key.
template <class T>
void backward_head(const T* q, const T* dout, const T* out, const float* lse, const float* const* k, const float* const* v,
                   int64_t n, int64_t base, int64_t group, int64_t d, int64_t q_token, int64_t q_head, int64_t o_token,
                   int64_t lse_token, float scale, T* dq, float* dk, float* dv) {
  const int64_t width = padded(d), keys = base + n, stride = keys + kBlock;
  constexpr int64_t kTile = 4;
  std::vector<float> buffer(size_t(kTile * (2 * stride + 3 * width) + width));
  float *p = buffer.data(), *ds = p + kTile * stride, *qs = ds + kTile * stride, *dos = qs + kTile * width;
  float *dqs = dos + kTile * width, *o = dqs + kTile * width;
  for (int64_t h = 0; h < group; ++h) {
    for (int64_t i0 = 0; i0 < n; i0 += kTile) {
      const int64_t count = std::min(kTile, n - i0);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t token = i0 + i, seen = base + token + 1;
        float *qi = qs + i * width, *doi = dos + i * width, *pi = p + i * stride, *dsi = ds + i * stride;
        widen(q + token * q_token + h * q_head, d, width, qi);
        widen(dout + token * o_token + h * d, d, width, doi);
        widen(out + token * o_token + h * d, d, width, o);
        const V8 delta = splat(dot16(doi, o, width)), log_sum = splat(lse[token * lse_token + h]);
        dots(qi, k, seen, width, pi);
        dots(doi, v, seen, width, dsi);
        for (int64_t j = 0; j < seen; j += 8) {
          const V8 prob = exp(load8(pi + j) * splat(scale) - log_sum);
          store8(pi + j, prob);
          store8(dsi + j, (prob * (load8(dsi + j) - delta)) * splat(scale));
        }
        float* dqi = dqs + i * width;
        std::fill_n(dqi, width, 0.0f);
        mix_all(dqi, splat(1.0f), dsi, k, seen, width);
        narrow(dqi, d, dq + token * o_token + h * d);
      }
      for (int64_t j = 0; j < base + i0 + count; ++j) {
        const int64_t from = std::max<int64_t>(0, j - base - i0);  // first query of the tile that sees key j
        for (int64_t c = 0; c < width; c += 8) {
          V8 a = load8(dk + j * width + c), b = load8(dv + j * width + c);
          for (int64_t i = from; i < count; ++i) {
            a = fma(splat(ds[i * stride + j]), load8(qs + i * width + c), a);
            b = fma(splat(p[i * stride + j]), load8(dos + i * width + c), b);
          }
          store8(dk + j * width + c, a);
          store8(dv + j * width + c, b);
        }
      }
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> varlen_backward(const Tensor& dout_, const Tensor& q_, const Tensor& k_, const Tensor& v_,
                                                   const Tensor& out_, const Tensor& lse_, const Tensor& cu_q_,
                                                   const Tensor& cu_k_, double scale) {
  Tensor q = with_unit_stride(q_), k = with_unit_stride(k_), v = with_unit_stride(v_);
  Tensor dout = dense(dout_), out = dense(out_), lse = dense(lse_);
  const std::vector<int64_t> cu_q = host_index(cu_q_, "cu_seqlens_q"), cu_k = host_index(cu_k_, "cu_seqlens_k");
  const int64_t t = q.size(0), heads = q.size(1), d = q.size(2), kv_heads = k.size(1), group = heads / kv_heads;
  const int64_t width = padded(d);
  Tensor dq = output_rows(q, {t, heads, d}, cu_q);
  Tensor dk = output_rows(k, {k.size(0), kv_heads, d}, cu_k), dv = output_rows(k, {k.size(0), kv_heads, d}, cu_k);
  const int64_t sequences = int64_t(cu_q.size()) - 1;
  double pairs = 0;
  for (int64_t b = 0; b < sequences; ++b) pairs += double(cu_q[b + 1] - cu_q[b]) * double(cu_k[b + 1] - cu_k[b]);
  dispatch(q.scalar_type(), "attention", [&](auto qt) {
    using T = decltype(qt);
    const T *pq = data<T>(q), *pk = data<T>(k), *pv = data<T>(v), *pdo = data<T>(dout), *po = data<T>(out);
    const float* pl = data<float>(lse);
    T *pdq = data<T>(dq), *pdk = data<T>(dk), *pdv = data<T>(dv);
    const int64_t qs = q.stride(0), qh = q.stride(1), ks = k.stride(0), kh = k.stride(1);
    const int64_t vs = v.stride(0), vh = v.stride(1);
    const double cost = pairs * double(group * (d + 16)) / double(sequences + 1);
    parallel_for(sequences * kv_heads, cost, [&](int64_t begin, int64_t end) {
      std::vector<float> buffer;
      std::vector<const float*> rows;
      for (int64_t item = begin; item < end; ++item) {
        const int64_t b = item / kv_heads, h = item % kv_heads, q0 = cu_q[b], k0 = cu_k[b];
        const int64_t n = cu_q[b + 1] - q0, keys = cu_k[b + 1] - k0;
        buffer.assign(size_t(4 * keys * width), 0.0f);
        rows.resize(size_t(2 * keys));
        float *wk = buffer.data(), *wv = wk + keys * width, *gk = wv + keys * width, *gv = gk + keys * width;
        for (int64_t j = 0; j < keys; ++j) {
          widen(pk + (k0 + j) * ks + h * kh, d, width, wk + j * width);
          widen(pv + (k0 + j) * vs + h * vh, d, width, wv + j * width);
          rows[j] = wk + j * width, rows[keys + j] = wv + j * width;
        }
        const int64_t at = (q0 * heads + h * group) * d;
        backward_head(pq + q0 * qs + h * group * qh, pdo + at, po + at, pl + q0 * heads + h * group, rows.data(),
                      rows.data() + keys, n, keys - n, group, d, qs, qh, heads * d, heads, float(scale), pdq + at, gk, gv);
        for (int64_t j = 0; j < keys; ++j) {
          narrow(gk + j * width, d, pdk + ((k0 + j) * kv_heads + h) * d);
          narrow(gv + j * width, d, pdv + ((k0 + j) * kv_heads + h) * d);
        }
      }
    });
  });
  return {dq, dk, dv};
}

}  // namespace
}  // namespace rlk

STABLE_TORCH_LIBRARY_IMPL(rlk, CPU, m) {
  m.impl("attention_varlen_forward", TORCH_BOX(&rlk::varlen_forward));
  m.impl("attention_varlen_backward", TORCH_BOX(&rlk::varlen_backward));
  m.impl("attention_paged_forward", TORCH_BOX(&rlk::paged_forward));
}
