// kvnb_copy.cu: write new K and V rows into a paged cache, both in one launch.
//
// How it works. The work is a flat list of (token, head, vector) triples; a thread owns one vector of K and the same
// vector of V. The source does not depend on the slot, so the slot and both vectors are loaded at once and only the
// stores wait for the slot: one memory latency instead of two. The address is block * block_stride + offset *
// slot_stride + head * head_stride, so NHD, HND and packed caches run the same code.
//
// What varies:
//   vector width   16 bytes when every pointer, stride and row allows it, else 8, 4, 2 or 1
//   pairs          vectors of K and of V that a thread has in flight: 1 for few tokens (the latency of one pair is all
//                  there is), 2 once the card is full
//   dependent      programmatic dependent launch: the next kernel's launch overlaps this one; nothing is read before
//                  griddepcontrol.wait, since a producer earlier in the stream may still be writing key, value or slots
//
// Loads bypass L1 (ld.global.cg: each byte is read once). Stores are plain: attention reads the rows next.
// Origin: own design; overlapping slot and data loads, and K and V in one launch, are also in SGLang's store_cache
// (sgl-project/sglang#16273), which skips the former.
#include <cuda_runtime.h>

#include "launch.h"

namespace {

using kvnb::Divisor;
using kvnb::Problem;
using kvnb::Rows;

#ifndef KVNB_THREADS
#define KVNB_THREADS 128
#endif
constexpr int kThreads = KVNB_THREADS;
constexpr int64_t kMostPairsPerLaunch = (int64_t{1} << 31) - 1 - kThreads * 4;

// Loads through L2 only. Volatile, so that the compiler cannot sink one behind the test of the slot.
#define KVNB_LOAD(type, ptx, reg, cast)                                                \
  __device__ __forceinline__ type load(const type* from) {                             \
    cast value;                                                                        \
    asm volatile("ld.global.cg." ptx " %0, [%1];" : "=" reg(value) : "l"(from));       \
    return static_cast<type>(value);                                                   \
  }
KVNB_LOAD(uint8_t, "u8", "h", uint16_t)
KVNB_LOAD(uint16_t, "u16", "h", uint16_t)
KVNB_LOAD(uint32_t, "u32", "r", uint32_t)
KVNB_LOAD(int32_t, "s32", "r", int32_t)
KVNB_LOAD(uint64_t, "u64", "l", uint64_t)
KVNB_LOAD(int64_t, "s64", "l", int64_t)
#undef KVNB_LOAD

__device__ __forceinline__ uint4 load(const uint4* from) {
  uint4 value;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

struct Plan {
  Rows key;
  Rows value;
  const void* slots;
  int64_t num_slots;
  int64_t block_size;
  uint32_t num_pairs;
  uint32_t key_vectors;    // vectors of one head's row
  uint32_t value_vectors;
  bool slots_are_64bit;
  bool slots_fit_31_bits;  // then block and offset come from a 32-bit division
  Divisor pairs_per_token;
  Divisor pairs_per_head;
  Divisor slots_per_block;
};

template <typename Vector, int kPairs, bool kDependent>
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Plan plan) {
  const uint32_t first = blockIdx.x * (kThreads * kPairs) + threadIdx.x;
#if __CUDA_ARCH__ >= 900
  if constexpr (kDependent) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  int64_t slot[kPairs];
  uint32_t head[kPairs], vector[kPairs];
  Vector key[kPairs], value[kPairs];
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    const uint32_t pair = first + j * kThreads;
    slot[j] = -1;
    if (pair >= plan.num_pairs) continue;
    const uint32_t token = plan.pairs_per_token.quotient(pair);
    const uint32_t within = pair - token * plan.pairs_per_token.divisor;
    head[j] = plan.pairs_per_head.quotient(within);
    vector[j] = within - head[j] * plan.pairs_per_head.divisor;
    slot[j] = plan.slots_are_64bit ? load(static_cast<const int64_t*>(plan.slots) + token)
                                   : load(static_cast<const int32_t*>(plan.slots) + token);
    if (vector[j] < plan.key_vectors)
      key[j] = load(reinterpret_cast<const Vector*>(kvnb::source_row(plan.key, token, head[j])) + vector[j]);
    if (vector[j] < plan.value_vectors)
      value[j] = load(reinterpret_cast<const Vector*>(kvnb::source_row(plan.value, token, head[j])) + vector[j]);
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (kDependent) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    if (!kvnb::is_written(slot[j], plan.num_slots)) continue;
    const int64_t block = plan.slots_fit_31_bits ? plan.slots_per_block.quotient(static_cast<uint32_t>(slot[j]))
                                                 : slot[j] / plan.block_size;
    const int64_t offset = slot[j] - block * plan.block_size;
    if (vector[j] < plan.key_vectors)
      reinterpret_cast<Vector*>(kvnb::cache_row(plan.key, block, offset, head[j]))[vector[j]] = key[j];
    if (vector[j] < plan.value_vectors)
      reinterpret_cast<Vector*>(kvnb::cache_row(plan.value, block, offset, head[j]))[vector[j]] = value[j];
  }
}

// ---------------------------------------------------------------------------------------------------- host

// Heads that lie one behind the other, in source and cache, are one long row: fewer divisions, wider vectors.
bool is_one_row(const Rows& rows) {
  return rows.source_head_stride == rows.head_bytes && rows.head_stride == rows.head_bytes;
}

uint64_t alignment_bits(const Rows& rows) {
  return reinterpret_cast<uintptr_t>(rows.source) | reinterpret_cast<uintptr_t>(rows.cache) | rows.source_token_stride |
         rows.source_head_stride | rows.block_stride | rows.slot_stride | rows.head_stride | rows.head_bytes;
}

template <typename Vector, int kPairs, bool kDependent>
cudaError_t launch(const Plan& plan, cudaStream_t stream) {
  const uint32_t blocks = (plan.num_pairs - 1) / (kThreads * kPairs) + 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = kDependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, copy_kernel<Vector, kPairs, kDependent>, plan);
}

template <typename Vector>
cudaError_t launch(const Plan& plan, int pairs, bool dependent, cudaStream_t stream) {
  if (pairs == 1) return dependent ? launch<Vector, 1, true>(plan, stream) : launch<Vector, 1, false>(plan, stream);
  return dependent ? launch<Vector, 2, true>(plan, stream) : launch<Vector, 2, false>(plan, stream);
}

cudaError_t launch(const Plan& plan, int width, int pairs, bool dependent, cudaStream_t stream) {
  switch (width) {
    case 16: return launch<uint4>(plan, pairs, dependent, stream);
    case 8: return launch<uint64_t>(plan, pairs, dependent, stream);
    case 4: return launch<uint32_t>(plan, pairs, dependent, stream);
    case 2: return launch<uint16_t>(plan, pairs, dependent, stream);
    default: return launch<uint8_t>(plan, pairs, dependent, stream);
  }
}

cudaError_t multiprocessors(int* count) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace

extern "C" int kvnb_copy_cuda(const Problem* problem, bool dependent, void* stream) {
  Plan plan = {};
  plan.key = problem->key;
  plan.value = problem->value;
  int64_t heads = problem->num_heads;
  if (is_one_row(plan.key) && is_one_row(plan.value)) {
    plan.key.head_bytes *= heads;
    plan.value.head_bytes *= heads;
    // strides of a single head are never multiplied by anything but 0
    plan.key.source_head_stride = plan.key.head_stride = plan.value.source_head_stride = plan.value.head_stride = 0;
    heads = 1;
  }
  const uint64_t bits = alignment_bits(plan.key) | alignment_bits(plan.value) | 16;
  const int64_t width = static_cast<int64_t>(bits & (~bits + 1));

  plan.key_vectors = static_cast<uint32_t>(plan.key.head_bytes / width);
  plan.value_vectors = static_cast<uint32_t>(plan.value.head_bytes / width);
  const int64_t per_head = plan.key_vectors > plan.value_vectors ? plan.key_vectors : plan.value_vectors;
  const int64_t per_token = per_head * heads;
  if (per_token > kMostPairsPerLaunch) return cudaErrorInvalidConfiguration;
  plan.pairs_per_head = Divisor(static_cast<uint32_t>(per_head));
  plan.pairs_per_token = Divisor(static_cast<uint32_t>(per_token));
  plan.num_slots = problem->num_slots;
  plan.block_size = problem->block_size;
  plan.slots_fit_31_bits = problem->num_slots <= INT32_MAX;
  if (plan.slots_fit_31_bits) plan.slots_per_block = Divisor(static_cast<uint32_t>(problem->block_size));
  plan.slots_are_64bit = problem->slots_are_64bit;

  int sms = 0;
  cudaError_t error = multiprocessors(&sms);
  const int64_t resident_threads = int64_t{sms} * 2048;
  const int pairs = problem->num_tokens * per_token >= 2 * resident_threads ? 2 : 1;

  // indices inside a launch are 32-bit; a longer problem takes several launches
  const int64_t tokens_per_launch = kMostPairsPerLaunch / per_token;
  const int64_t slot_bytes = problem->slots_are_64bit ? 8 : 4;
  for (int64_t token = 0; token < problem->num_tokens && error == cudaSuccess; token += tokens_per_launch) {
    const int64_t left = problem->num_tokens - token;
    const int64_t here = left < tokens_per_launch ? left : tokens_per_launch;
    Plan part = plan;
    part.num_pairs = static_cast<uint32_t>(here * per_token);
    part.slots = static_cast<const char*>(problem->slots) + token * slot_bytes;
    part.key.source += token * plan.key.source_token_stride;
    part.value.source += token * plan.value.source_token_stride;
    error = launch(part, static_cast<int>(width), pairs, dependent, static_cast<cudaStream_t>(stream));
  }
  return error;
}
