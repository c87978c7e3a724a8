// capacity.h: how much of a copy a GPU holds at once, from which launches choose their shape.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kvnb {

// Of the device that is current when a process first asks. It decides how fast a copy is, never what it writes.
struct Capacity {
  int64_t threads = 0;
  int64_t l2_bytes = 0;
  cudaError_t error = cudaSuccess;  // why the others are not known

  static const Capacity& of_gpu() {
    static const Capacity gpu;
    return gpu;
  }

 private:
  Capacity() {
    int device = 0, multiprocessors = 0, threads_each = 0, bytes = 0;
    auto ask = [&](int& answer, cudaDeviceAttr attribute) {
      if (error == cudaSuccess) error = cudaDeviceGetAttribute(&answer, attribute, device);
    };
    error = cudaGetDevice(&device);
    ask(multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(threads_each, cudaDevAttrMaxThreadsPerMultiProcessor);
    ask(bytes, cudaDevAttrL2CacheSize);
    threads = int64_t{multiprocessors} * threads_each;
    l2_bytes = bytes;
  }
};

}  // namespace kvnb
