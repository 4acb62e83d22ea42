// A packed weight, and how a column of 32 rows becomes fp16.
//
// Rows are in packed order, in units of 32. A unit's codes of b bits are b words a column, least significant bit
// first, a code may straddle two words:
//
//   word 0   | ... |c2 |c1 |c0 |      bit 31 ... bit 0
//   word 1   | ...        |c10:1|     3 bits: code 10 has its low 2 bits at the top of word 0
#pragma once
#include "ptx.cuh"

// Kinds of weights.
#define GPTQ_HALF 0  // scales fp16
#define GPTQ_FLOAT 1 // scales fp32, where a checkpoint's don't fit fp16
#define EXL2 2       // scale indices of 4 bits

// Group of a unit whose rows differ, and of a row that only fills up the last unit.
#define MIXED 0xffffffffu
#define NO_ROW 0xffffffffu

struct Packed {
  const u32 *words;     // [word rows, n]
  const uint2 *units;   // [units]: bits + 256 · first word row; group or MIXED
  const u32 *row_group; // [32 · units]: group or NO_ROW
  const u32 *row_of;    // [32 · units]: row of the model or NO_ROW
  const void *scales;   // [groups, n] u16 or float; EXL2: [groups, n / 8] words
  const u16 *extra;     // GPTQ: zeros [groups, n], or null where all are `zero`; EXL2: q_scale_max [groups]
  u32 n;                // columns as stored
  u32 zero;
};

template <int KIND>
__device__ __forceinline__ float scale_at(const Packed &w, u32 group, u32 column) {
  if (KIND == EXL2) {
    u32 word = ((const u32 *)w.scales)[(u64)group * (w.n / 8) + column / 8];
    float step = (float)((word >> (4 * (column % 8)) & 15) + 1);
    // Both roundings to fp16 are the format's (SPEC E4.3, E4.4).
    float ceiling = from_half(to_half(from_half(w.extra[group]) * (1.0f / 256.0f)));
    return from_half(to_half(step * step * ceiling));
  }
  u64 at = (u64)group * w.n + column;
  return KIND == GPTQ_HALF ? from_half(((const u16 *)w.scales)[at]) : ((const float *)w.scales)[at];
}

template <int KIND, int BITS>
__device__ __forceinline__ int zero_at(const Packed &w, u32 group, u32 column) {
  if (KIND == EXL2) return 1 << (BITS - 1);
  return w.extra ? (int)w.extra[(u64)group * w.n + column] : (int)w.zero;
}

template <int KIND, int BITS>
__device__ __forceinline__ void decode_width(const Packed &w, uint2 unit, u32 first_row, u32 column, u32 (&out)[16]) {
  const u32 *from = w.words + (u64)(unit.x >> 8) * w.n + column;
  u32 words[BITS];
#pragma unroll
  for (int i = 0; i < BITS; i++) words[i] = from[(u64)i * w.n];
  float scale = 0.0f;
  int zero = 0;
  if (unit.y != MIXED) {
    scale = scale_at<KIND>(w, unit.y, column);
    zero = zero_at<KIND, BITS>(w, unit.y, column);
  }
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const int bit = i * BITS, word = bit / 32, shift = bit % 32;
    u32 code = words[word] >> shift;
    if (shift + BITS > 32) code |= words[word + 1 < BITS ? word + 1 : word] << ((32 - shift) & 31);
    code &= (1u << BITS) - 1;
    u32 value;
    if (unit.y != MIXED) {
      value = to_half(scale * (float)((int)code - zero));
    } else {
      u32 group = w.row_group[first_row + i];
      value = 0;
      if (group != NO_ROW)
        value = to_half(scale_at<KIND>(w, group, column) *
                        (float)((int)code - zero_at<KIND, BITS>(w, group, column)));
    }
    out[i / 2] = i % 2 ? out[i / 2] | value << 16 : value;
  }
}

// Rows 32 · `unit` and on of a column, decoded to fp16, two a word. The product is exact in fp32 for scales of fp16,
// so that it is rounded once.
template <int KIND>
__device__ __forceinline__ void decode_unit(const Packed &w, u32 unit, u32 column, u32 (&out)[16]) {
  uint2 entry = w.units[unit];
  u32 first_row = unit * 32;
  switch (entry.x & 255) {
  case 2: decode_width<KIND, 2>(w, entry, first_row, column, out); break;
  case 3: decode_width<KIND, 3>(w, entry, first_row, column, out); break;
  case 4: decode_width<KIND, 4>(w, entry, first_row, column, out); break;
  case 8: decode_width<KIND, 8>(w, entry, first_row, column, out); break;
  default:
    if (KIND == EXL2) {
      if ((entry.x & 255) == 5) decode_width<KIND, 5>(w, entry, first_row, column, out);
      else decode_width<KIND, 6>(w, entry, first_row, column, out);
    }
  }
}
