// Packing codes, and decoding packed weights.
#include "packed.cuh"

// Codes [k, n], a byte each, into words. Grid: (columns / 128, units). `source` is the row of `codes` that each packed
// row comes from, NO_ROW for none; null: rows are in packed order.
extern "C" __global__ void pack(const u8 *codes, const uint2 *units, const u32 *source, u32 *words, u32 n) {
  u32 column = blockIdx.x * blockDim.x + threadIdx.x, unit = blockIdx.y;
  if (column >= n) return;
  u32 bits = units[unit].x & 255;
  u32 *to = words + (u64)(units[unit].x >> 8) * n + column;
  u64 pending = 0;
  u32 filled = 0;
  for (u32 i = 0; i < 32; i++) {
    u32 row = unit * 32 + i;
    if (source) row = source[row];
    u64 code = row == NO_ROW ? 0 : codes[(u64)row * n + column];
    pending |= code << filled;
    filled += bits;
    if (filled >= 32) {
      *to = (u32)pending;
      to += n;
      pending >>= 32;
      filled -= 32;
    }
  }
}

// Columns `first` to `first + count` into [count, 32 · units] fp16, rows in packed order. Grid: (count / 128, units).
template <int KIND>
__device__ void decode_panel(const Packed &w, u32 first, u32 count, u32 units, u16 *panel) {
  u32 column = blockIdx.x * blockDim.x + threadIdx.x, unit = blockIdx.y;
  if (column >= count) return;
  u32 out[16];
  decode_unit<KIND>(w, unit, first + column, out);
  uint4 *to = (uint4 *)(panel + ((u64)column * units + unit) * 32);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 four;
    four.x = out[4 * i];
    four.y = out[4 * i + 1];
    four.z = out[4 * i + 2];
    four.w = out[4 * i + 3];
    to[i] = four;
  }
}

// All of the first `columns` columns into [k, columns] fp16, rows in the model's order. Grid: (columns / 128, units).
template <int KIND>
__device__ void decode_all(const Packed &w, u32 columns, u16 *weight) {
  u32 column = blockIdx.x * blockDim.x + threadIdx.x, unit = blockIdx.y;
  if (column >= columns) return;
  u32 out[16];
  decode_unit<KIND>(w, unit, column, out);
#pragma unroll
  for (int i = 0; i < 32; i++) {
    u32 row = w.row_of[unit * 32 + i];
    if (row != NO_ROW) weight[(u64)row * columns + column] = (u16)(out[i / 2] >> (i % 2 * 16));
  }
}

#define OF_KIND(NAME, KIND)                                                                                  \
  extern "C" __global__ void decode_panel_##NAME(Packed w, u32 first, u32 count, u32 units, u16 *panel) {     \
    decode_panel<KIND>(w, first, count, units, panel);                                                       \
  }                                                                                                          \
  extern "C" __global__ void decode_all_##NAME(Packed w, u32 columns, u16 *weight) {                          \
    decode_all<KIND>(w, columns, weight);                                                                    \
  }

OF_KIND(gptq_half, GPTQ_HALF)
OF_KIND(gptq_float, GPTQ_FLOAT)
OF_KIND(exl2, EXL2)

// Element types of a dense weight.
#define F16 0
#define BF16 1
#define F32 2

__device__ __forceinline__ float dense_at(const void *weight, u32 type, u64 at) {
  if (type == F32) return ((const float *)weight)[at];
  u16 bits = ((const u16 *)weight)[at];
  return type == F16 ? from_half(bits) : __uint_as_float((u32)bits << 16);
}

// A dense weight [n, stride] into [k, n] fp16. Grid: (k, n / 256).
extern "C" __global__ void dense_to_half(const void *weight, u32 type, u32 stride, u32 n, u16 *out) {
  u32 column = blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (column < n) out[(u64)row * n + column] = to_half(dense_at(weight, type, (u64)column * stride + row));
}

// Rows of a dense table [n, stride], times `scale`. Grid: (rows, columns / 256).
extern "C" __global__ void embed(const void *table, u32 type, u32 stride, const u32 *tokens, float scale, u32 columns,
                                 float *y) {
  u32 column = blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (column >= columns) return;
  y[(u64)row * columns + column] = dense_at(table, type, (u64)tokens[row] * stride + column) * scale;
}
