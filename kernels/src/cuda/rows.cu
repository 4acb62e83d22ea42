// What is done to the elements of rows.
#include "ptx.cuh"

// y = x / sqrt(mean(x²) + epsilon) · weight over runs of c columns. A block of 128 a run; sums in fp64.
extern "C" __global__ void rms_norm(const float *x, const float *weight, u32 c, float epsilon, float *y) {
  __shared__ double sums[128];
  u32 thread = threadIdx.x;
  u64 start = (u64)blockIdx.x * c;
  double sum = 0.0;
  for (u32 i = thread; i < c; i += 128) sum += (double)x[start + i] * (double)x[start + i];
  sums[thread] = sum;
  __syncthreads();
  for (u32 half = 64; half > 0; half /= 2) {
    if (thread < half) sums[thread] += sums[thread + half];
    __syncthreads();
  }
  float factor = (float)(1.0 / sqrt(sums[0] / c + (double)epsilon));
  for (u32 i = thread; i < c; i += 128) y[start + i] = x[start + i] * factor * weight[i];
}

// Turns column j against column j + pairs of each head. A thread a row and pair.
extern "C" __global__ void rotate(float *x, u32 rows, u32 columns, u32 head_dim, u32 window, const float *frequencies,
                                  u32 pairs, float scale) {
  u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= (u64)rows * pairs) return;
  u32 row = (u32)(at / pairs), j = (u32)(at % pairs);
  // The angle in fp32, as transformers has it; its sine and cosine to full precision.
  double sine, cosine;
  sincos((double)((float)(row % window) * frequencies[j]), &sine, &cosine);
  float s = (float)sine * scale, c = (float)cosine * scale;
  for (u32 head = 0; head < columns; head += head_dim) {
    float *pair = x + (u64)row * columns + head + j;
    float a = pair[0], b = pair[pairs];
    pair[0] = a * c - b * s;
    pair[pairs] = b * c + a * s;
  }
}

// activation(gate) · up; 0: SiLU, 1: GELU by tanh, 2: GELU by erf.
extern "C" __global__ void gate(const float *g, const float *up, u64 count, u32 activation, float *y) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float x = g[i], value;
  if (activation == 0) value = x / (1.0f + expf(-x));
  else if (activation == 1) value = 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
  else value = 0.5f * x * erfcf(-x * 0.7071067812f);
  y[i] = value * up[i];
}

extern "C" __global__ void add(float *x, const float *y, u64 count, float scale) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] += scale * y[i];
}

// x[rows[i]] += weights[i] · y[i]; no row comes twice. Grid: (rows of y, columns / 256).
extern "C" __global__ void add_rows(float *x, const u32 *rows, const float *weights, const float *y, u32 columns) {
  u32 column = blockIdx.y * blockDim.x + threadIdx.x, i = blockIdx.x;
  if (column < columns) x[(u64)rows[i] * columns + column] += weights[i] * y[(u64)i * columns + column];
}

extern "C" __global__ void soft_cap(float *x, u64 count, float cap) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) x[i] = cap * tanhf(x[i] / cap);
}

// y[i] = x[rows[i]], or x[i] where `rows` is null, from column `first` on. Grid: (rows of y, count / 256).
extern "C" __global__ void take(const float *x, const u32 *rows, u32 columns, u32 first, u32 count, float *y) {
  u32 column = blockIdx.y * blockDim.x + threadIdx.x, i = blockIdx.x;
  u32 row = rows ? rows[i] : i;
  if (column < count) y[(u64)i * count + column] = x[(u64)row * columns + first + column];
}
