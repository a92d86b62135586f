// Arithmetic of one token of the clipped policy-gradient loss and its gradient: the steps of the torch code in
// rl_kernel/ops/linear_logp/policy.py and of its autograd, one rounding each, in their order. Plain C++, so that it can be
// compared with torch on any machine (compile without contraction).
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define RLK_BOTH __host__ __device__ __forceinline__
#else
#define RLK_BOTH inline
#endif

struct CUstream_st;  // what cudaStream_t points to

namespace rlk::sm90 {

struct TokenLoss {
  float low = 0.0f, high = 0.0f;  // the ratio is clipped to this
  float entropy_weight = 0.0f;
  bool with_entropy = false;
  float by = 1.0f;  // what divides the loss
};

struct TokenTerms {
  float loss, weight, clipped, ratio, kl, entropy;  // what is summed
  float by_logp, by_entropy;                        // gradients of the loss
};

RLK_BOTH float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

RLK_BOTH float sum(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

RLK_BOTH float normalized(float x, const TokenLoss& loss) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(x, loss.by);
#else
  return x / loss.by;
#endif
}

// difference = logp - old and ratio = exp(difference); of an ignored token 0 and 1, with weight and advantage 0.
RLK_BOTH TokenTerms token_terms(const TokenLoss& loss, float difference, float ratio, float entropy, float advantage,
                                float weight, bool ignored) {
  const float limited = ratio != ratio ? ratio : fminf(fmaxf(ratio, loss.low), loss.high);
  const float plain = product(ratio, advantage), clipped = product(limited, advantage);
  float objective = plain != plain ? plain : clipped != clipped ? clipped : fminf(plain, clipped);
  if (loss.with_entropy) objective = sum(objective, product(entropy, loss.entropy_weight));
  TokenTerms t;
  t.loss = ignored ? 0.0f : normalized(product(weight, -objective), loss);  // also where the normalizer is 0
  t.weight = weight;
  t.clipped = product(weight, clipped < plain ? 1.0f : 0.0f);
  t.ratio = product(weight, ratio);
  t.kl = -product(weight, difference);
  t.entropy = product(weight, entropy);
  const float upstream = product(normalized(-1.0f, loss), weight);
  t.by_entropy = product(upstream, loss.entropy_weight);
  const float shared = plain == clipped ? product(upstream, 0.5f) : upstream;
  const float by_plain = product(plain > clipped ? 0.0f : shared, advantage);
  const float by_clipped = product(plain < clipped ? 0.0f : shared, advantage);
  const float by_ratio = sum(by_plain, ratio >= loss.low && ratio <= loss.high ? by_clipped : 0.0f);
  t.by_logp = ignored ? 0.0f : product(by_ratio, ratio);
  return t;
}

constexpr int kTokenMetrics = 5;  // weight, clipped, ratio, kl, entropy

struct TokenLosses {
  TokenLoss loss;
  int64_t tokens = 0, ignore = 0;
  const int64_t* targets = nullptr;
  const float *logp = nullptr, *entropy = nullptr, *old_logp = nullptr, *advantages = nullptr;
  const float* mask = nullptr;        // null: 1
  const float* normalizer = nullptr;  // one value on the GPU, else
  const int* active = nullptr;        // the number of rows that take part, at least 1, else loss.by
  float *total = nullptr, *metrics = nullptr;       // sums of all tokens: the loss, and [kTokenMetrics]
  float *by_logp = nullptr, *by_entropy = nullptr;  // [T]
};
void token_losses(TokenLosses task, CUstream_st* stream);

// Weights [T]: 0 of ignored tokens, elsewhere those of the mask, without one 1.
void token_weights(const int64_t* targets, int64_t ignore, const float* mask, float* weights, int64_t tokens,
                   CUstream_st* stream);

}  // namespace rlk::sm90
