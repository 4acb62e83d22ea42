// Products on tensor cores with fp32's accuracy.
//
// Activations are split into parts of 16 bits whose sum is the fp32 value (two of fp16, scaled by a power of two a
// row, to 22 bits or more; three of bf16, exactly), each part is multiplied by the weight, all is added in fp32.
//
// A row of the product is the same bits whatever the other rows and whichever kernel: within a chunk of k rows
// the tensor cores add step by step of 16 rows, part by part; chunks are added in order.
#include "packed.cuh"

// Rows of a chunk.
#define CHUNK 256

// [rows, k] fp32 into `parts` [PARTS, rows, stride] of 16 bits, columns taken in the order `source` (null: as they
// are), 0 where it says NO_ROW and beyond k. A block a row; `inverse` [rows] undoes the scaling of fp16.
template <bool BF, int PARTS>
__device__ void split(const float *x, const u32 *source, u32 rows, u32 k, u32 stride, u16 *parts, float *inverse) {
  __shared__ float largest[256];
  u32 row = blockIdx.x, thread = threadIdx.x;
  x += (u64)row * k;
  float scale = 1.0f;
  if (!BF) {
    float most = 0.0f;
    // A NaN is no maximum, and shows in the parts.
    for (u32 i = thread; i < k; i += 256) most = fmaxf(most, fabsf(x[i]));
    largest[thread] = most;
    __syncthreads();
    for (u32 half = 128; half > 0; half /= 2) {
      if (thread < half) largest[thread] = fmaxf(largest[thread], largest[thread + half]);
      __syncthreads();
    }
    most = largest[0];
    // The largest becomes 2^14 to 2^15: what is 2^-28 of it still has all of its leading part's bits. The exponent
    // is kept where both powers are normal numbers.
    int exponent = (int)(__float_as_uint(most) >> 23);
    int power = most > 0.0f && exponent < 255 ? 127 + 14 - exponent : 0;
    if (power > 126) power = 126;
    if (power < -126) power = -126;
    scale = __uint_as_float((u32)(127 + power) << 23);
    if (thread == 0) inverse[row] = __uint_as_float((u32)(127 - power) << 23);
  }
  for (u32 i = thread; i < stride; i += 256) {
    u32 from = source ? source[i] : i < k ? i : NO_ROW;
    float value = from == NO_ROW ? 0.0f : x[from] * scale;
    // Beyond the finite, the other parts would turn an infinity into NaN.
    bool finite = (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      u16 bits;
      float taken;
      if (BF) {
        u32 word = __float_as_uint(value) & 0xffff0000u;
        // A NaN stays one without its low bits.
        if (value != value) word = 0x7fc00000u;
        bits = (u16)(word >> 16);
        taken = __uint_as_float(word);
      } else {
        bits = to_half(value);
        taken = from_half(bits);
      }
      parts[((u64)part * rows + row) * stride + i] = bits;
      value = finite ? value - taken : 0.0f;
    }
  }
}

extern "C" __global__ void split_f16(const float *x, const u32 *source, u32 rows, u32 k, u32 stride, u16 *parts,
                                     float *inverse) {
  split<false, 2>(x, source, rows, k, stride, parts, inverse);
}

extern "C" __global__ void split_bf16(const float *x, const u32 *source, u32 rows, u32 k, u32 stride, u16 *parts,
                                      float *inverse) {
  split<true, 3>(x, source, rows, k, stride, parts, inverse);
}

// The last of a product: in separate roundings, so that all kernels agree.
__device__ __forceinline__ float finish(float sum, const float *inverse, const float *bias, u32 row, u32 column) {
  if (inverse) sum = __fmul_rn(sum, inverse[row]);
  if (bias) sum = __fadd_rn(sum, bias[column]);
  return sum;
}

// y[:, first + ..] = a · bᵀ for `a` [A_PARTS, m, stride] and `b` [B_PARTS, count, stride] of 16 bits. Grid: (count /
// 128, m / 128), 256 threads: 2 × 4 warps of 64 × 32. Products of parts that together are beyond the third are
// below fp32's last bit and left out.
template <bool BF, int A_PARTS, int B_PARTS, int STEP>
__device__ void multiply(const u16 *a, const u16 *b, u32 m, u32 count, u32 stride, const float *inverse,
                         const float *bias, float *y, u32 n, u32 first) {
  // 8 more than the step: rows of 16 bytes that load_matrices reads together lie in different banks.
  const int WIDTH = STEP + 8, A_TILE = 128 * WIDTH, STAGE = (A_PARTS + B_PARTS) * A_TILE;
  u16 *memory = (u16 *)launch_memory();
  u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  u32 first_row = blockIdx.y * 128, first_column = blockIdx.x * 128;
  u32 warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;

  float sum[4][4][4], total[4][4][4];
#pragma unroll
  for (int i = 0; i < 64; i++) sum[i / 16][i / 4 % 4][i % 4] = total[i / 16][i / 4 % 4][i % 4] = 0.0f;

  auto load = [&](u32 step) {
    u16 *stage = memory + (step % 2) * STAGE;
    const int PIECES = STEP / 8;
    for (u32 i = thread; i < (A_PARTS + B_PARTS) * 128 * PIECES; i += 256) {
      u32 part = i / (128 * PIECES), line = i / PIECES % 128, piece = i % PIECES;
      bool of_a = part < A_PARTS;
      u32 row = of_a ? first_row + line : first_column + line, rows = of_a ? m : count;
      bool valid = row < rows;
      u64 at = ((u64)(of_a ? part : part - A_PARTS) * rows + (valid ? row : 0)) * stride + step * STEP + piece * 8;
      copy_16(stage + part * A_TILE + line * WIDTH + piece * 8, (of_a ? a : b) + at, valid);
    }
    commit_copies();
  };

  u32 steps = stride / STEP;
  load(0);
  for (u32 step = 0; step < steps; step++) {
    if (step + 1 < steps) {
      load(step + 1);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
    const u16 *stage = memory + (step % 2) * STAGE;
#pragma unroll
    for (int k = 0; k < STEP; k += 16) {
      u32 b_part[B_PARTS][4][2];
#pragma unroll
      for (int part = 0; part < B_PARTS; part++) {
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
          // Matrices: columns 0 to 7 at k and k + 8, then columns 8 to 15.
          u32 column = warp_column + pair * 16 + lane / 16 * 8 + lane % 8, at = k + lane / 8 % 2 * 8;
          u32 four[4];
          load_matrices(four, stage + (A_PARTS + part) * A_TILE + column * WIDTH + at);
#pragma unroll
          for (int i = 0; i < 4; i++) b_part[part][pair * 2 + i / 2][i % 2] = four[i];
        }
      }
#pragma unroll
      for (int part = 0; part < A_PARTS; part++) {
        u32 a_part[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          u32 row = warp_row + i * 16 + lane % 16, at = k + lane / 16 * 8;
          load_matrices(a_part[i], stage + part * A_TILE + row * WIDTH + at);
        }
#pragma unroll
        for (int other = 0; other < B_PARTS; other++) {
          if (part + other >= 3) continue;
#pragma unroll
          for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
              if (BF) multiply_bf16(sum[i][j], a_part[i], b_part[other][j]);
              else multiply_f16(sum[i][j], a_part[i], b_part[other][j]);
            }
          }
        }
      }
    }
    if ((step + 1) % (CHUNK / STEP) == 0 || step + 1 == steps) {
#pragma unroll
      for (int i = 0; i < 64; i++) {
        total[i / 16][i / 4 % 4][i % 4] += sum[i / 16][i / 4 % 4][i % 4];
        sum[i / 16][i / 4 % 4][i % 4] = 0.0f;
      }
    }
    // The next step loads over what this one has read.
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 64; i++) {
    u32 row = first_row + warp_row + i / 16 * 16 + lane / 4 + i % 4 / 2 * 8;
    u32 column = first_column + warp_column + i / 4 % 4 * 8 + lane % 4 * 2 + i % 2;
    if (row < m && column < count)
      y[(u64)row * n + first + column] =
          finish(total[i / 16][i / 4 % 4][i % 4], inverse, bias, row, first + column);
  }
}

#define MULTIPLY(NAME, BF, A_PARTS, B_PARTS, STEP)                                                              \
  extern "C" __global__ void __launch_bounds__(256)                                                             \
      NAME(const u16 *a, const u16 *b, u32 m, u32 count, u32 stride, const float *inverse, const float *bias,   \
           float *y, u32 n, u32 first) {                                                                        \
    multiply<BF, A_PARTS, B_PARTS, STEP>(a, b, m, count, stride, inverse, bias, y, n, first);                    \
  }

MULTIPLY(multiply_f16_weight, false, 2, 1, 32)
MULTIPLY(multiply_bf16_weight, true, 3, 1, 32)
MULTIPLY(multiply_f32_weight, true, 3, 3, 16)

// One chunk of a product with a packed weight, for few rows: `partial` [chunks, m, n] from `a` [2, m, 32 · units]. Grid:
// (n / 128, chunks, m / 16), 128 threads: each decodes a column, each warp multiplies 32.
template <int KIND>
__device__ void multiply_packed(const Packed &w, const u16 *a, u32 m, u32 n, u32 units, float *partial) {
  const int WIDTH = 40;
  __shared__ __align__(16) u16 tile[128 * WIDTH];
  u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  u32 column = blockIdx.x * 128 + thread, first_row = blockIdx.z * 16;
  u32 stride = units * 32, unit = blockIdx.y * (CHUNK / 32);
  u32 end = unit + CHUNK / 32 < units ? unit + CHUNK / 32 : units;
  float sum[4][4];
#pragma unroll
  for (int i = 0; i < 16; i++) sum[i / 4][i % 4] = 0.0f;

  for (; unit < end; unit++) {
    u32 decoded[16];
#pragma unroll
    for (int i = 0; i < 16; i++) decoded[i] = 0;
    if (column < n) decode_unit<KIND>(w, unit, column, decoded);
    uint4 *to = (uint4 *)(tile + thread * WIDTH);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint4 four;
      four.x = decoded[4 * i];
      four.y = decoded[4 * i + 1];
      four.z = decoded[4 * i + 2];
      four.w = decoded[4 * i + 3];
      to[i] = four;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 32; k += 16) {
      u32 b[4][2];
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        u32 line = warp * 32 + pair * 16 + lane / 16 * 8 + lane % 8, at = k + lane / 8 % 2 * 8;
        u32 four[4];
        load_matrices(four, tile + line * WIDTH + at);
#pragma unroll
        for (int i = 0; i < 4; i++) b[pair * 2 + i / 2][i % 2] = four[i];
      }
#pragma unroll
      for (int part = 0; part < 2; part++) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          u32 row = first_row + lane / 4 + i % 2 * 8, at = unit * 32 + k + lane % 4 * 2 + i / 2 * 8;
          words[i] = row < m ? *(const u32 *)(a + ((u64)part * m + row) * stride + at) : 0;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) multiply_f16(sum[j], words, b[j]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    u32 row = first_row + lane / 4 + i % 4 / 2 * 8;
    u32 at = blockIdx.x * 128 + warp * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (row < m && at < n) partial[((u64)blockIdx.y * m + row) * n + at] = sum[i / 4][i % 4];
  }
}

#define MULTIPLY_PACKED(NAME, KIND)                                                                            \
  extern "C" __global__ void __launch_bounds__(128)                                                            \
      NAME(Packed w, const u16 *a, u32 m, u32 n, u32 units, float *partial) {                                   \
    multiply_packed<KIND>(w, a, m, n, units, partial);                                                         \
  }

MULTIPLY_PACKED(multiply_gptq_half, GPTQ_HALF)
MULTIPLY_PACKED(multiply_gptq_float, GPTQ_FLOAT)
MULTIPLY_PACKED(multiply_exl2, EXL2)

// Adds the chunks in order. Grid: (m, n / 256).
extern "C" __global__ void add_chunks(const float *partial, u32 chunks, u32 m, u32 n, const float *inverse,
                                      const float *bias, float *y) {
  u32 column = blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (column >= n) return;
  float total = 0.0f;
  for (u32 chunk = 0; chunk < chunks; chunk++) total += partial[((u64)chunk * m + row) * n + column];
  y[(u64)row * n + column] = finish(total, inverse, bias, row, column);
}
