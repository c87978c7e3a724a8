// cuda_runtime.h: as much of CUDA as csrc/kvnb_copy.cu needs to run on the CPU, one thread after another.
//
// HOST_THREADS and HOST_L2 say what the GPU would hold; the functions at the end, of the last launch: its threads, those of
// a block, the bytes of its parameters, whether it may overlap the launch before it, whether slots were loaded to stay in
// L2, and what a thread asked of griddepcontrol, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 blockIdx, threadIdx, gridDim, blockDim;
inline unsigned plan_bytes, overlaps, stays;
inline std::string griddepcontrol;
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration };
enum cudaLaunchAttributeID { cudaLaunchAttributeIgnore, cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxThreadsPerMultiProcessor, cudaDevAttrL2CacheSize };
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrL2CacheSize ? HOST_L2 : attribute == cudaDevAttrMultiProcessorCount ? 1 : HOST_THREADS;
  return cudaSuccess;
}

template <typename Plan>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Plan), const Plan& plan) {
  gridDim = config->gridDim, blockDim = config->blockDim, plan_bytes = sizeof(Plan), overlaps = 0, stays = 0;
  for (const cudaLaunchAttribute* one = config->attrs; one != config->attrs + config->numAttrs; ++one)
    if (one->id == cudaLaunchAttributeProgrammaticStreamSerialization)
      overlaps = one->val.programmaticStreamSerializationAllowed;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
      griddepcontrol.clear();
      kernel(plan);
    }
  return cudaSuccess;
}
extern "C" unsigned last_threads() { return gridDim.x * blockDim.x; }
extern "C" unsigned last_block() { return blockDim.x; }
extern "C" unsigned last_plan() { return plan_bytes; }
extern "C" unsigned last_overlaps() { return overlaps; }
extern "C" unsigned last_stays() { return stays; }
extern "C" const char* last_griddepcontrol() { return griddepcontrol.c_str(); }
