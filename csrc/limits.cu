// limits.cu: what bounds a copy, and what the timers need.
//
//   empty             a launch and nothing else; also as a programmatic dependent launch
//   contiguous_copy   the same bytes of K and V without a slot: one launch, 16 bytes a load; vectors per thread and threads
//                     per block as were fastest on an H200 (us for 8 heads x 128 bf16, inputs just produced):
//                                        128 tokens  2,048  4,096  8,192  65,536
//                       1 vector,  256         1.48   4.13    7.9   17.6   126.8   taken from three quarters of L2 on
//                       2 vectors, 128         1.49   3.64    7.8   17.9   127.5   taken for one wave of threads
//                       4 vectors, 256         1.67   3.66    7.1   18.5   133.0   taken between
//   flush             reads a buffer larger than L2, so that no line of a copy stays there, but for those that a load
//                     asked to keep, and none is left dirty
//   clock_probe       one thread counts cycles against the global nanosecond timer, from tick edge to tick edge: the
//                     SM clock at that moment, and a stretch of time in which the host can fill the queue
#include <cuda_runtime.h>

#include "capacity.h"
#include "launch.h"

namespace {

constexpr int kThreads = 256;

template <bool kDependent>
__global__ void empty_kernel() {
#if __CUDA_ARCH__ >= 900
  if constexpr (kDependent) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
#endif
}

struct Part {
  uint4* to;
  const uint4* from;
  int64_t vectors;
};

template <int kEach, int kBlock>
int64_t tiles(const Part& part) {
  return (part.vectors + kEach * kBlock - 1) / (kEach * kBlock);
}

template <int kEach, int kBlock>
__device__ __forceinline__ void copy_tile(const Part& part, int64_t tile) {
  uint4 held[kEach];
  const int64_t first = tile * (kEach * kBlock) + threadIdx.x;
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (first + j * kBlock < part.vectors) held[j] = part.from[first + j * kBlock];
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (first + j * kBlock < part.vectors) part.to[first + j * kBlock] = held[j];
}

template <int kEach, int kBlock>
__global__ void __launch_bounds__(kBlock) contiguous_copy_kernel(Part key, Part value, int64_t key_tiles) {
  if (blockIdx.x < key_tiles)
    copy_tile<kEach, kBlock>(key, blockIdx.x);
  else
    copy_tile<kEach, kBlock>(value, blockIdx.x - key_tiles);
}

template <int kEach, int kBlock>
cudaError_t copy(const Part& key, const Part& value, cudaStream_t stream) {
  const int64_t key_tiles = tiles<kEach, kBlock>(key);
  const auto blocks = static_cast<unsigned>(key_tiles + tiles<kEach, kBlock>(value));
  contiguous_copy_kernel<kEach, kBlock><<<blocks, kBlock, 0, stream>>>(key, value, key_tiles);
  return cudaGetLastError();
}

__global__ void __launch_bounds__(kThreads) flush_kernel(const uint4* buffer, int64_t vectors, uint32_t* sink) {
  uint32_t seen = 0;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < vectors; i += stride) {
    const uint4 v = __ldcg(buffer + i);
    seen |= v.x | v.y | v.z | v.w;
  }
  if (seen) *sink = seen;  // the buffer holds zeros: never taken, but the compiler cannot know
}

__device__ __forceinline__ int64_t global_nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

__global__ void clock_probe_kernel(int64_t nanoseconds, int64_t* cycles_and_nanoseconds) {
  const int64_t entered = global_nanoseconds();
  int64_t begin = entered;
  while (begin == entered) begin = global_nanoseconds();
  const int64_t begin_cycles = clock64();
  int64_t end = begin;
  while (end - begin < nanoseconds) end = global_nanoseconds();
  cycles_and_nanoseconds[0] = clock64() - begin_cycles;
  cycles_and_nanoseconds[1] = end - begin;
}

}  // namespace

extern "C" {

int kvnb_empty_cuda(bool dependent, void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(1);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  return dependent ? cudaLaunchKernelEx(&config, empty_kernel<true>) : cudaLaunchKernelEx(&config, empty_kernel<false>);
}

int kvnb_contiguous_copy_cuda(char* key_to, const char* key_from, int64_t key_bytes, char* value_to,
                              const char* value_from, int64_t value_bytes, void* stream) {
  const Part key = {reinterpret_cast<uint4*>(key_to), reinterpret_cast<const uint4*>(key_from), key_bytes / 16};
  const Part value = {reinterpret_cast<uint4*>(value_to), reinterpret_cast<const uint4*>(value_from), value_bytes / 16};
  const kvnb::Capacity& gpu = kvnb::Capacity::of_gpu();
  if (gpu.error != cudaSuccess) return gpu.error;
  const int64_t vectors = key.vectors + value.vectors, moved = 2 * 16 * vectors;
  const auto on = static_cast<cudaStream_t>(stream);
  if (vectors <= 2 * gpu.threads) return copy<2, 128>(key, value, on);
  return moved <= gpu.l2_bytes / 4 * 3 ? copy<4, 256>(key, value, on) : copy<1, 256>(key, value, on);
}

int kvnb_flush_cuda(const void* buffer, int64_t bytes, void* sink, void* stream) {
  const int64_t vectors = bytes / 16;
  const int64_t blocks = (vectors + kThreads * 16 - 1) / (kThreads * 16);
  flush_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(buffer), vectors, static_cast<uint32_t*>(sink));
  return cudaGetLastError();
}

int kvnb_clock_probe_cuda(int64_t nanoseconds, int64_t* cycles_and_nanoseconds, void* stream) {
  clock_probe_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(nanoseconds, cycles_and_nanoseconds);
  return cudaGetLastError();
}

const char* kvnb_error_string(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
}
