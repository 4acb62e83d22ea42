// What only PTX can say, and the names of the types. No header of the toolkit: hosts with nothing but NVRTC lack
// them.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

// fp32 to the bits of fp16, to nearest, ties to even, subnormals kept.
__device__ __forceinline__ u16 to_half(float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ float from_half(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

// 16 bytes from global to shared memory, both aligned to 16; zeros if not `valid`. Done when waited for.
__device__ __forceinline__ void copy_16(void *shared, const void *global, bool valid) {
  u32 to = (u32)__cvta_generic_to_shared(shared);
  u32 bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes) : "memory");
}

// Ends a batch of copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most so many batches of this thread are under way.
template <int BATCHES>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(BATCHES) : "memory");
}

// Four 8 × 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8 and gets, of each
// matrix, elements 2 (l % 4) and the next of row l / 4.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const void *row) {
  u32 from = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// c += a · b for a [16, 16], b [16, 8], c [16, 8]. With g = lane / 4 and t = lane % 4, two elements a word:
//   a: (g, 2t) (g + 8, 2t) (g, 2t + 8) (g + 8, 2t + 8)    b: (2t, g) (2t + 8, g)
//   c: (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1), fp32
__device__ __forceinline__ void multiply_f16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The launch's own shared memory.
__device__ __forceinline__ u8 *launch_memory() {
  extern __shared__ __align__(16) u8 memory[];
  return memory;
}
