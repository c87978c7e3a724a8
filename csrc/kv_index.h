// kv_index.h: from a slot to the bytes of its row.
//
// A slot is block * block_size + offset. A row of one head starts at
//
//     cache + block * block_stride + offset * slot_stride + head * head_stride
//
// with all strides in bytes, so NHD, HND and packed caches, and blocks that lie farther apart than they are long, take
// the same code. Everything that can grow with the cache is 64-bit: a 4.3 GB bf16 cache already holds 2^31 elements.
// The header compiles for host and device and includes nothing of CUDA's or torch's; tests/test_kv_index.py runs it on
// the CPU.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVNB_INLINE __host__ __device__ __forceinline__
#else
#define KVNB_INLINE inline
#endif

namespace kvnb {

// n / divisor for 0 <= n < 2^31 as a multiplication and a shift, without a branch.
// Source: Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994.
struct Divisor {
  uint32_t multiplier = uint32_t{1} << 31;  // ceil(2^(31 + shift) / divisor): exact for every n below 2^31
  uint32_t shift = 0;                       // ceil(log2(divisor))
  uint32_t divisor = 1;                     // last, so that where a quotient is enough it is not fetched

  Divisor() = default;
  explicit Divisor(uint32_t d) : divisor(d) {
    while (shift < 31 && (uint32_t{1} << shift) < d) ++shift;
    const uint64_t power = uint64_t{1} << (31 + shift);
    multiplier = static_cast<uint32_t>((power + d - 1) / d);
  }

  KVNB_INLINE uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>((uint64_t{n << 1} * multiplier) >> 32) >> shift;
  }
};

// Where K's rows, or V's, come from and go to. Strides and sizes in bytes.
struct Rows {
  const char* source;
  int64_t source_token_stride;
  int64_t source_head_stride;
  char* cache;
  int64_t block_stride;
  int64_t slot_stride;
  int64_t head_stride;
  int64_t head_bytes;
};

KVNB_INLINE const char* source_row(const Rows& rows, int64_t token, int64_t head) {
  return rows.source + token * rows.source_token_stride + head * rows.source_head_stride;
}

KVNB_INLINE char* cache_row(const Rows& rows, int64_t block, int64_t offset, int64_t head) {
  return rows.cache + block * rows.block_stride + offset * rows.slot_stride + head * rows.head_stride;
}

// Negative slots are padding, slots from num_slots on lie past the end: neither is written. One unsigned comparison.
KVNB_INLINE bool is_written(int64_t slot, int64_t num_slots) {
  return static_cast<uint64_t>(slot) < static_cast<uint64_t>(num_slots);
}

}  // namespace kvnb
