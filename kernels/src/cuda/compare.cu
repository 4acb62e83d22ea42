// Comparing: differences, and what logits say of the next token. Sums in fp64, in a fixed order.
#include "ptx.cuh"

// Row of the first element that is NaN or infinite, into `row`, which holds the largest number before.
extern "C" __global__ void first_non_finite(const float *x, u64 count, u32 columns, u32 *row) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count && (__float_as_uint(x[i]) & 0x7f800000u) == 0x7f800000u) atomicMin(row, (u32)(i / columns));
}

// Elements of a block of `difference`.
#define PIECE 16384

// Σ (s − c)², Σ s², Σ c², Σ s c, max |s − c| of each piece, into [pieces, 5].
extern "C" __global__ void difference(const float *source, const float *converted, u64 count, double *parts) {
  __shared__ double sums[5][256];
  u32 thread = threadIdx.x;
  u64 start = (u64)blockIdx.x * PIECE, end = start + PIECE < count ? start + PIECE : count;
  double error = 0.0, of_source = 0.0, of_converted = 0.0, product = 0.0, most = 0.0;
  for (u64 i = start + thread; i < end; i += 256) {
    double s = source[i], c = converted[i], off = fabs(s - c);
    error += off * off;
    of_source += s * s;
    of_converted += c * c;
    product += s * c;
    if (off > most) most = off;
  }
  sums[0][thread] = error;
  sums[1][thread] = of_source;
  sums[2][thread] = of_converted;
  sums[3][thread] = product;
  sums[4][thread] = most;
  __syncthreads();
  for (u32 half = 128; half > 0; half /= 2) {
    if (thread < half) {
      for (int i = 0; i < 4; i++) sums[i][thread] += sums[i][thread + half];
      if (sums[4][thread + half] > sums[4][thread]) sums[4][thread] = sums[4][thread + half];
    }
    __syncthreads();
  }
  if (thread < 5) parts[(u64)blockIdx.x * 5 + thread] = sums[thread][0];
}

// The largest logit and where it first stands.
struct Top {
  float value;
  u32 index;
};

__device__ __forceinline__ void raise(Top &top, float value, u32 index) {
  if (value > top.value || (value == top.value && index < top.index)) {
    top.value = value;
    top.index = index;
  }
}

__device__ Top top_of(const float *logits, u32 count, Top *shared) {
  u32 thread = threadIdx.x;
  Top top = {NEGATIVE_INFINITY, 0xffffffffu};
  for (u32 i = thread; i < count; i += 256) raise(top, logits[i], i);
  shared[thread] = top;
  __syncthreads();
  for (u32 half = 128; half > 0; half /= 2) {
    if (thread < half) raise(shared[thread], shared[thread + half].value, shared[thread + half].index);
    __syncthreads();
  }
  top = shared[0];
  __syncthreads();
  return top;
}

__device__ double sum_of(double mine, double *shared) {
  u32 thread = threadIdx.x;
  shared[thread] = mine;
  __syncthreads();
  for (u32 half = 128; half > 0; half /= 2) {
    if (thread < half) shared[thread] += shared[thread + half];
    __syncthreads();
  }
  double sum = shared[0];
  __syncthreads();
  return sum;
}

// Negative log likelihood of the targets. A block of 256 a row.
extern "C" __global__ void negative_log_likelihood(const float *logits, const u32 *targets, u32 vocabulary, float *nll) {
  __shared__ Top tops[256];
  __shared__ double sums[256];
  const float *row = logits + (u64)blockIdx.x * vocabulary;
  Top top = top_of(row, vocabulary, tops);
  double sum = 0.0;
  for (u32 i = threadIdx.x; i < vocabulary; i += 256) sum += (double)expf(row[i] - top.value);
  sum = sum_of(sum, sums);
  if (threadIdx.x == 0) nll[blockIdx.x] = (float)(log(sum) - (double)(row[targets[blockIdx.x]] - top.value));
}

// KL(s ‖ c) = Σ p (s − c) − (ln Σ e^s − ln Σ e^c), which is exactly 0 for equal logits. Into [rows, 5]: both negative log
// likelihoods, both divergences, 1 where both find the same token most likely. A block of 256 a row.
extern "C" __global__ void compare_logits(const float *source, const float *converted, const u32 *targets,
                                          u32 vocabulary, float *scores) {
  __shared__ Top tops[256];
  __shared__ double sums[256];
  const float *s = source + (u64)blockIdx.x * vocabulary, *c = converted + (u64)blockIdx.x * vocabulary;
  Top s_top = top_of(s, vocabulary, tops), c_top = top_of(c, vocabulary, tops);
  // Sums are relative to the maxima, which are taken out of the differences as well.
  float shift = s_top.value - c_top.value;
  double s_sum = 0.0, c_sum = 0.0, forward = 0.0, backward = 0.0;
  for (u32 i = threadIdx.x; i < vocabulary; i += 256) {
    float s_power = expf(s[i] - s_top.value), c_power = expf(c[i] - c_top.value);
    float between = __fadd_rn(__fadd_rn(s[i], -c[i]), -shift);
    s_sum += (double)s_power;
    c_sum += (double)c_power;
    forward += (double)(s_power * between);
    backward -= (double)(c_power * between);
  }
  s_sum = sum_of(s_sum, sums);
  c_sum = sum_of(c_sum, sums);
  forward = sum_of(forward, sums);
  backward = sum_of(backward, sums);
  if (threadIdx.x == 0) {
    u32 target = targets[blockIdx.x];
    double s_log = log(s_sum), c_log = log(c_sum);
    float *out = scores + (u64)blockIdx.x * 5;
    out[0] = (float)(s_log - (double)(s[target] - s_top.value));
    out[1] = (float)(c_log - (double)(c[target] - c_top.value));
    out[2] = (float)(forward / s_sum - (s_log - c_log));
    out[3] = (float)(backward / c_sum + (s_log - c_log));
    out[4] = s_top.index == c_top.index ? 1.0f : 0.0f;
  }
}
