// capacity.h: how much of a copy a GPU holds at once, from which launches choose their shape.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kvnb {

// Of the device that is current when a process first asks. It decides how fast a copy is, never what it writes.
struct Capacity {
  int64_t threads = 0;
  int64_t l2_bytes = 0;

  static const Capacity& of_gpu() {
    static const Capacity gpu;
    return gpu;
  }

 private:
  Capacity() {
    int device = 0, multiprocessors = 0, threads_each = 0, bytes = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&threads_each, cudaDevAttrMaxThreadsPerMultiProcessor, device);
    cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device);
    threads = int64_t{multiprocessors} * threads_each;
    l2_bytes = bytes;
  }
};

}  // namespace kvnb
