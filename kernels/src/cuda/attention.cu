// Causal attention inside windows, in fp32, with a running softmax.
#include "ptx.cuh"

struct Shape {
  u32 heads, kv_heads, head_dim, window;
  u32 sliding;  // tokens seen, itself included
  float scale;
  float soft_cap; // 0: none
};

// Sixteen queries of a head against KEYS keys at a time. Grid: (blocks of queries in a window, heads, windows), 128
// threads. Thread t has query t / 8: of the scores keys t % 8 + 8 i, of the result columns t % 8 + 8 i.
template <int MAX_DIM, int KEYS>
__device__ void attend(const float *q, const float *k, const float *v, u32 rows, const Shape &shape, float *y) {
  __shared__ float queries[16 * (MAX_DIM + 1)], tile[KEYS * (MAX_DIM + 1)], weights[16 * KEYS];
  u32 d = shape.head_dim, head = blockIdx.y, kv_head = head / (shape.heads / shape.kv_heads);
  u32 columns = shape.heads * d, kv_columns = shape.kv_heads * d;
  u32 start = blockIdx.z * shape.window;
  u32 length = rows - start < shape.window ? rows - start : shape.window;
  u32 first = blockIdx.x * 16;
  // The whole block leaves.
  if (first >= length) return;
  u32 thread = threadIdx.x, mine = thread / 8, part = thread % 8, position = first + mine;
  bool present = position < length;

  for (u32 i = thread; i < 16 * d; i += 128) {
    u32 row = first + i / d;
    queries[i / d * (MAX_DIM + 1) + i % d] =
        row < length ? q[(u64)(start + row) * columns + head * d + i % d] : 0.0f;
  }
  float result[MAX_DIM / 8];
#pragma unroll
  for (int i = 0; i < MAX_DIM / 8; i++) result[i] = 0.0f;
  float largest = NEGATIVE_INFINITY, sum = 0.0f;

  // The first query of the block sees the furthest back, the last one the furthest on.
  u32 oldest = first + 1 > shape.sliding ? first + 1 - shape.sliding : 0;
  u32 last = first + 16 < length ? first + 16 : length;
  u32 from = position + 1 > shape.sliding ? position + 1 - shape.sliding : 0;
  for (u32 base = oldest; base < last; base += KEYS) {
    u32 count = last - base < KEYS ? last - base : KEYS;
    __syncthreads();
    for (u32 i = thread; i < KEYS * d; i += 128) {
      u32 key = i / d;
      tile[key * (MAX_DIM + 1) + i % d] =
          key < count ? k[(u64)(start + base + key) * kv_columns + kv_head * d + i % d] : 0.0f;
    }
    __syncthreads();
    float scores[KEYS / 8];
    float most = NEGATIVE_INFINITY;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) {
      u32 key = part + 8 * i, at = base + key;
      bool seen = present && key < count && at <= position && at >= from;
      float dot = 0.0f;
      for (u32 c = 0; c < d; c++) dot = fmaf(queries[mine * (MAX_DIM + 1) + c], tile[key * (MAX_DIM + 1) + c], dot);
      float score = dot * shape.scale;
      if (shape.soft_cap != 0.0f) score = shape.soft_cap * tanhf(score / shape.soft_cap);
      scores[i] = seen ? score : NEGATIVE_INFINITY;
      // Scores that are NaN are no maximum, and show in the weights.
      most = fmaxf(most, scores[i]);
    }
    weights[mine * KEYS + part] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) most = fmaxf(most, weights[mine * KEYS + i]);
    __syncthreads();
    float next = fmaxf(largest, most);
    // Nothing seen so far: there is no maximum to subtract.
    float shift = next == NEGATIVE_INFINITY ? 0.0f : next;
    float shrink = expf(largest - shift);
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) weights[mine * KEYS + part + 8 * i] = expf(scores[i] - shift);
    largest = next;
    __syncthreads();
    // Values over keys.
    for (u32 i = thread; i < KEYS * d; i += 128) {
      u32 key = i / d;
      tile[key * (MAX_DIM + 1) + i % d] =
          key < count ? v[(u64)(start + base + key) * kv_columns + kv_head * d + i % d] : 0.0f;
    }
    __syncthreads();
    float added = 0.0f;
    for (u32 key = 0; key < count; key++) added += weights[mine * KEYS + key];
    sum = sum * shrink + added;
#pragma unroll
    for (int i = 0; i < MAX_DIM / 8; i++) {
      u32 column = part + 8 * i;
      if (column < d) {
        float value = 0.0f;
        for (u32 key = 0; key < count; key++) {
          float weight = weights[mine * KEYS + key];
          // A key that isn't seen has no say, whatever its value.
          if (weight != 0.0f) value = fmaf(weight, tile[key * (MAX_DIM + 1) + column], value);
        }
        result[i] = result[i] * shrink + value;
      }
    }
  }
  if (!present) return;
#pragma unroll
  for (int i = 0; i < MAX_DIM / 8; i++) {
    u32 column = part + 8 * i;
    if (column < d) y[(u64)(start + position) * columns + head * d + column] = result[i] / sum;
  }
}

#define ATTEND(NAME, MAX_DIM, KEYS)                                                                             \
  extern "C" __global__ void __launch_bounds__(128)                                                             \
      NAME(const float *q, const float *k, const float *v, u32 rows, Shape shape, float *y) {                    \
    attend<MAX_DIM, KEYS>(q, k, v, rows, shape, y);                                                             \
  }

ATTEND(attend_64, 64, 32)
ATTEND(attend_128, 128, 32)
ATTEND(attend_256, 256, 16)
