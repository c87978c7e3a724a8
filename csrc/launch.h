// launch.h: the C signatures between the kernels (no torch headers) and bindings.cpp (no CUDA headers).
//
// Every function returns 0 or a cudaError_t; kvnb_error_string names it. `stream` is a cudaStream_t.
#pragma once

#include <cstdint>

#include "kv_index.h"

namespace kvnb {

// One call's problem, checked by bindings.cpp. num_tokens is the length of slot_mapping, not of key.
struct Problem {
  Rows key;
  Rows value;
  const void* slots;
  bool slots_are_64bit;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t block_size;
  int64_t num_slots;
  int64_t itemsize;
};

KVNB_INLINE int64_t slot_of(const Problem& problem, int64_t token) {
  return problem.slots_are_64bit ? static_cast<const int64_t*>(problem.slots)[token]
                                 : static_cast<const int32_t*>(problem.slots)[token];
}

}  // namespace kvnb

extern "C" {

// kvnb_copy.cu: our kernel; dependent = with programmatic dependent launch (sm_90 and later)
int kvnb_copy_cuda(const kvnb::Problem* problem, bool dependent, void* stream);

// vllm_scalar.cu: vLLM's design of 2024, rewritten
int kvnb_vllm_scalar_cuda(const kvnb::Problem* problem, void* stream);

// limits.cu
int kvnb_empty_cuda(bool dependent, void* stream);
int kvnb_contiguous_copy_cuda(char* key_to, const char* key_from, int64_t key_bytes, char* value_to,
                              const char* value_from, int64_t value_bytes, void* stream);
int kvnb_flush_cuda(const void* buffer, int64_t bytes, void* sink, void* stream);
int kvnb_clock_probe_cuda(int64_t nanoseconds, int64_t* cycles_and_nanoseconds, void* stream);
const char* kvnb_error_string(int error);

// cpu_copy.cpp: tokens [begin, end) of the problem
void kvnb_copy_cpu(const kvnb::Problem* problem, int64_t begin, int64_t end);
}
