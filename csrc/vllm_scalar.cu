// vllm_scalar.cu: vLLM's 2024 design, rewritten.
//
// The design of reshape_and_cache_flash_kernel as issue #4698 met it (vllm-project/vllm, csrc/cache_kernels.cu at
// e288df0632d5bdde76c20bed8310b46d35b8e5ac): one block of threads per token, at most 512 of them, each moving single
// elements of K and of V in a strided loop; head and element come from a division per element; a negative slot ends
// the block. Written anew from that description, with strides added so that every layout runs. It is not vLLM's code,
// and no verdict on vLLM rests on it.
#include <cuda_runtime.h>

#include "launch.h"

namespace {

using kvnb::Problem;

template <typename Element>
__global__ void vllm_scalar_kernel(const __grid_constant__ Problem problem, int key_size, int value_size) {
  const int64_t token = blockIdx.x;
  const int64_t slot = kvnb::slot_of(problem, token);
  if (!kvnb::is_written(slot, problem.num_slots)) return;
  const int64_t block = slot / problem.block_size;
  const int64_t offset = slot % problem.block_size;

  const Element* key = reinterpret_cast<const Element*>(kvnb::source_row(problem.key, token, 0));
  const Element* value = reinterpret_cast<const Element*>(kvnb::source_row(problem.value, token, 0));
  Element* key_cache = reinterpret_cast<Element*>(kvnb::cache_row(problem.key, block, offset, 0));
  Element* value_cache = reinterpret_cast<Element*>(kvnb::cache_row(problem.value, block, offset, 0));
  const int64_t key_from = problem.key.source_head_stride / sizeof(Element);
  const int64_t value_from = problem.value.source_head_stride / sizeof(Element);
  const int64_t key_to = problem.key.head_stride / sizeof(Element);
  const int64_t value_to = problem.value.head_stride / sizeof(Element);

  const int head_size = key_size > value_size ? key_size : value_size;
  const int elements = static_cast<int>(problem.num_heads) * head_size;
  for (int i = threadIdx.x; i < elements; i += blockDim.x) {
    const int head = i / head_size;
    const int element = i % head_size;
    Element k, v;
    if (element < key_size) k = key[head * key_from + element];
    if (element < value_size) v = value[head * value_from + element];
    if (element < key_size) key_cache[head * key_to + element] = k;
    if (element < value_size) value_cache[head * value_to + element] = v;
  }
}

template <typename Element>
cudaError_t launch(const Problem& problem, cudaStream_t stream) {
  const int key_size = static_cast<int>(problem.key.head_bytes / sizeof(Element));
  const int value_size = static_cast<int>(problem.value.head_bytes / sizeof(Element));
  const int64_t elements = problem.num_heads * (key_size > value_size ? key_size : value_size);
  const int threads = static_cast<int>(elements < 512 ? elements : 512);
  vllm_scalar_kernel<Element><<<static_cast<unsigned>(problem.num_tokens), threads, 0, stream>>>(problem, key_size, value_size);
  return cudaGetLastError();
}

}  // namespace

extern "C" int kvnb_vllm_scalar_cuda(const Problem* problem, void* stream) {
  auto s = static_cast<cudaStream_t>(stream);
  switch (problem->itemsize) {
    case 1: return launch<uint8_t>(*problem, s);
    case 2: return launch<uint16_t>(*problem, s);
    case 4: return launch<uint32_t>(*problem, s);
    default: return launch<uint64_t>(*problem, s);
  }
}
