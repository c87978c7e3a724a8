// Stands for the extension of a vLLM wheel in test_releases.py: kernels of the right mangled names that do nothing.
#include <cuda_bf16.h>

#include <cstdint>

namespace vllm {
enum class Fp8KVCacheDataType { kAuto = 0, kFp8E4M3 = 1 };

template <typename T, typename Cache, Fp8KVCacheDataType kind>
__global__ void reshape_and_cache_flash_kernel(const T* key, const T* value, Cache* key_cache, Cache* value_cache,
                                               const int64_t* slots, int64_t block, int64_t page, int64_t head,
                                               int64_t key_stride, int64_t value_stride, int heads, int size,
                                               int block_size, const float* k_scale, const float* v_scale
#ifdef STRIDE
                                               , int scale_stride
#endif
#ifdef UNKNOWN
                                               , double unknown
#endif
) {}

template <typename T, typename Cache, Fp8KVCacheDataType kind>
void* address() { return reinterpret_cast<void*>(&reshape_and_cache_flash_kernel<T, Cache, kind>); }
}  // namespace vllm

extern "C" const void* kernels() {
  using namespace vllm;
  static const void* all[] = {address<__nv_bfloat16, __nv_bfloat16, Fp8KVCacheDataType::kAuto>(),
                              address<uint16_t, uint16_t, Fp8KVCacheDataType::kAuto>(),
                              address<float, float, Fp8KVCacheDataType::kAuto>(),
                              address<__nv_bfloat16, uint8_t, Fp8KVCacheDataType::kFp8E4M3>()};
  return all;
}

// What a stable-ABI library of vLLM registers, as text.
extern "C" const char schema[] = "reshape_and_cache_flash(Tensor key, Tensor value)";
